"""Writes what an evaluation recommends as a configuration file: the one that was evaluated, with the recommendation in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cachespec.config import Config
from cachespec.errors import InputError
from cachespec.evaluation.result import Evaluation
from cachespec.toml_source import parse

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_FLAT = ("client", "policies")
_WIDTH = 110


def policy_file(config: Config, evaluation: Evaluation, draft: Mapping[str, Any] | None, caching: str | None) -> str:
    """TOML that `config check` accepts. `draft` is the table to draft with (None: no drafts), `caching` the policy to cache by
    (None: as it was). Comments of the original are not kept."""
    tree = _tree(config)
    backends = tree.setdefault("backends", {})
    table = backends[evaluation.backend] = dict(backends.get(evaluation.backend, {}))
    if draft is not None:
        table["draft"] = dict(draft)
    else:
        table.pop("draft", None)
        table.pop("require_eval", None)
    if caching is not None:
        policies = tree["policies"] = dict(tree.get("policies", {}))
        if dict(policies.get("caching", {})).get("use", "expected-cost") != caching:
            policies["caching"] = {"use": caching}
    lines = [f"# {line}" for line in _wrapped(evaluation.recommendation)]
    return "\n".join([*lines, *_tables(tree, ())]) + "\n"


def _tree(config: Config) -> dict[str, Any]:
    if config.text is not None:
        return parse(config.text, config.path)
    tree: dict[str, Any] = {"backends": {name: {"use": s.use, **s.options} for name, s in config.backends.items()}}
    if config.models:
        tree["models"] = {alias: {"backends": list(names)} for alias, names in config.models.items()}
    if config.default_model is not None:
        tree["client"] = {"model": config.default_model}
    return tree


def _tables(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """A table's own keys, then its tables. Plug-ins' tables, and what is inside them, are written in line."""
    deeper = not path or (len(path) == 1 and path[0] not in _FLAT)
    own = {key: value for key, value in table.items() if not (deeper and isinstance(value, Mapping))}
    lines: list[str] = []
    if path and (own or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in own.items()]
    for key, value in table.items():
        if key not in own:
            lines += _tables(value, (*path, key))
    return lines


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime):
        return value.isoformat()
    raise InputError(f"cannot be written as TOML: {value!r}")


def _wrapped(text: str) -> list[str]:
    lines, line = list[str](), ""
    for word in re.sub(r"[\x00-\x1f\x7f]", " ", text).split():
        if line and len(line) + len(word) >= _WIDTH:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]
