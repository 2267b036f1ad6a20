"""The JSON schema (draft 2020-12) of the configuration file, derived from what reads it.

The tables come from the dataclasses in `config.py`, each installed plug-in's options from its signature. What a schema
cannot say (that an alias names a configured backend, that a time zone exists) is left to ``config check``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cachespec import registry
from cachespec.annotations import COLLECTIONS, MONEY, EnvRef, PluginOf, Within, is_secret_name, typed_dict_fields
from cachespec.config import ConfigFile
from cachespec.durations import PATTERN
from cachespec.errors import CachespecError
from cachespec.options import Option, options_of

Schema = dict[str, Any]
_REFERENCE: Schema = {"$ref": "#/$defs/env"}
_MONEY: Schema = {"type": "string", "pattern": f"^{MONEY}$", "description": "USD, as text"}


def config_schema() -> Schema:
    """The whole schema. Loads every installed plug-in; one that cannot be loaded is accepted with any options."""
    definitions: Schema = {
        "env": {
            "type": "object",
            "description": "a value that stands in an environment variable",
            "properties": {"env": {"type": "string", "minLength": 1}},
            "required": ["env"],
            "additionalProperties": False,
        }
    }
    for family in registry.FAMILIES:
        definitions[family] = _family(family)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cachespec configuration",
        **_table(ConfigFile),
        "$defs": definitions,
    }


def _family(family: str) -> Schema:
    names = registry.installed(family)
    choices: list[Schema] = []
    for name in names:
        use: Schema = {"const": name}
        try:
            factory = registry.load(family, name)
        except CachespecError:
            choices.append({"type": "object", "properties": {"use": use}, "required": ["use"]})
            continue
        choices.append(_table(factory, use=use, given=registry.GIVEN.get(family, ()), references=True))
    custom = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", "description": "module:attribute"}
    choices.append({"type": "object", "properties": {"use": custom}, "required": ["use"]})
    return {"oneOf": choices}


def _table(
    factory: Callable[..., Any], *, use: Schema | None = None, given: tuple[str, ...] = (), references: bool = False
) -> Schema:
    options, more = options_of(factory)
    properties: Schema = {} if use is None else {"use": use}
    required = [] if use is None else ["use"]
    for name, option in options.items():
        schema = None if name in given else _option(option, references)
        if schema is not None:
            properties[name] = schema
            required += [name] if option.required else []
    table: Schema = {"type": "object", "properties": properties, "additionalProperties": more}
    return {**table, "required": required} if required else table


def _option(option: Option, references: bool) -> Schema | None:
    schema = schema_of(option.annotation, name=option.name, references=references)
    plain = option.default is not None and isinstance(option.default, str | int | float | bool)
    return schema if schema is None or option.required or not plain else {**schema, "default": option.default}


def schema_of(annotation: Any, *, name: str = "", references: bool = False) -> Schema | None:
    """The schema of one annotation, as `options.read` takes it; None for what no file can express."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _annotated(annotation, name, references)
    if origin in (Union, types.UnionType):
        return _union(annotation, name, references)
    if isinstance(annotation, typing.NewType):
        return schema_of(annotation.__supertype__, name=name, references=references)
    if annotation is EnvRef:
        return _REFERENCE
    if annotation in (Any, object):
        return {}
    if annotation is str:
        if not references:
            return {"type": "string"}
        return _REFERENCE if is_secret_name(name) else {"anyOf": [{"type": "string"}, _REFERENCE]}
    simple: Mapping[Any, Schema] = {
        int: {"type": "integer"},
        float: {"type": "number"},
        bool: {"type": "boolean"},
        Decimal: _MONEY,
        Path: {"type": "string"},
    }
    if annotation in simple:
        return dict(simple[annotation])
    if origin is Literal:
        return {"enum": list(get_args(annotation))}
    base = origin or annotation
    if base in COLLECTIONS:
        item = schema_of((get_args(annotation) or (Any,))[0], references=references)
        listed: Schema | None = None if item is None else {"type": "array", "items": item}
        return {"anyOf": [{"type": "string"}, listed]} if listed and base in (set, frozenset) else listed
    if base in (dict, Mapping):
        value = schema_of((get_args(annotation) or (str, Any))[1], references=references)
        return None if value is None else {"type": "object", "additionalProperties": value}
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _table(annotation, references=references)
    return _typed_dict(annotation, references) if typing.is_typeddict(annotation) else None


def _annotated(annotation: Any, name: str, references: bool) -> Schema | None:
    inner, *marks = get_args(annotation)
    for mark in marks:
        if isinstance(mark, PluginOf):
            return {"$ref": f"#/$defs/{mark.family}"}
        if mark == "duration":
            text = {"type": "string", "pattern": f"^{PATTERN}$"}
            return {"anyOf": [text, {"type": "number", "exclusiveMinimum": 0}], "description": "a duration"}
        if mark == "positive":
            return {"type": "integer", "minimum": 1}
        if isinstance(mark, Within):
            bounds = {"minimum": mark.least, "maximum": mark.most}
            plain = schema_of(inner, name=name, references=references) or {}
            return {**plain, **{key: bound for key, bound in bounds.items() if bound is not None}}
    return schema_of(inner, name=name, references=references)


def _union(annotation: Any, name: str, references: bool) -> Schema | None:
    members = [member for member in get_args(annotation) if member is not type(None)]
    found = [schema for member in members if (schema := schema_of(member, name=name, references=references)) is not None]
    if len(found) <= 1:
        return found[0] if found else None
    return {"anyOf": found}


def _typed_dict(annotation: Any, references: bool) -> Schema:
    properties: Schema = {}
    required = []
    for name, (kind, must) in typed_dict_fields(annotation).items():
        schema = schema_of(kind, name=name, references=references)
        if schema is not None:
            properties[name] = schema
            required += [name] if must else []
    table: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**table, "required": required} if required else table
