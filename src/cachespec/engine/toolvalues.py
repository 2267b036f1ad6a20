"""Values that a model wrote without quotes, as the JSON that the tool's schema makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

SPACE: Final = " \t\r\n"


def string(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def value_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON that a value without quotes stands for, of a type that its schema allows if it can be.

    `root` is the schema that references in it point into.
    """
    types = _types(schema, root)
    bare = text.strip(SPACE)
    word = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(bare.lower())
    if word is not None and ("null" if word == "null" else "boolean") in types:
        return word  # some templates write them as Python does
    try:
        kind = _kind(json.loads(bare, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return string(text)
    fits = not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return bare if fits and kind != "string" else string(text)  # a string's quotes are its own


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN is no JSON


def _types(schema: Any, root: Mapping[str, Any], met: frozenset[str] = frozenset()) -> frozenset[str]:
    """The types that a schema allows, references resolved in `root`; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list | tuple):
        return frozenset(map(str, named))
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list | tuple):
        return frozenset(map(_kind, schema["enum"]))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in met:
        found = _types(_referred(reference, root), root, met | {reference})
        if found:
            return found
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list | tuple):
            each = [_types(one, root, met) for one in several]
            return frozenset().union(*each) if all(each) else frozenset()
    every = schema.get("allOf")
    said = [_types(one, root, met) for one in every] if isinstance(every, list | tuple) else []
    # A number may be an integer.
    wide = [one | {"integer"} if "number" in one else one for one in said if one]
    return frozenset.intersection(*wide) if wide else frozenset()


def _referred(reference: str, root: Any) -> Any:
    """What a JSON pointer of a schema to itself points at (RFC 6901); None: nothing."""
    if reference[:1] != "#":
        return None
    for step in unquote(reference[1:]).split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _kind(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")
