"""From what a user writes to `Tool` values, and back: function tools of three dialects, and vendors' own tools as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cachespec.built import own_tool
from cachespec.checks import (
    check_bool,
    check_keys,
    check_list,
    check_mapping,
    check_name,
    check_text,
    copy_json,
    kind_of,
    needed,
)
from cachespec.errors import InputError
from cachespec.messages import Tool
from cachespec.parts_parse import MARKS, Dialect, read_mark, read_rest
from cachespec.recall import Recall

_KEYS = ("type", "name", "description", "input_schema", "parameters", "function", "strict")
_DATED = re.compile(r".*_20\d{6}|.*toolset")
"""Anthropic's own tools carry the date of their version in `type`, its MCP and browser toolsets the word."""


def parse_tools(
    value: object, *, where: str = "tools", dialect: Dialect | None = None, recall: Recall[Tool] | None = None
) -> tuple[Tool, ...]:
    """Read a list of tools; what `recall` knows is not read again.

    Names are unique. Raises `InputError` with the exact field, such as ``tools[3].function.name``.
    """
    if value is None:
        return ()
    items = check_list(value, where)

    def read(i: int) -> Tool:
        return _tool(items[i], f"{where}[{i}]", dialect)

    def unique(tools: Sequence[Tool]) -> int:
        seen: dict[str, int] = {}
        for i, tool in enumerate(tools):
            if tool.raw is None and seen.setdefault(tool.name, i) != i:
                field = f"{where}[{i}]"
                raise InputError(f"the tool {tool.name!r} is there already, as {where}[{seen[tool.name]}]", field=field)
        return 0

    if recall is not None and items:
        return recall.whole(items, lambda: recall.read(items, read, unique, salt=dialect)[1], salt=dialect)
    tools = tuple(read(i) for i in range(len(items)))
    unique(tools)
    return tools


def _tool(raw: object, where: str, dialect: Dialect | None) -> Tool:
    if isinstance(raw, Tool):
        return own_tool(raw, where)
    if not isinstance(raw, Mapping):
        raise InputError(f"must be a Tool or an object, not {kind_of(raw)}", field=where)
    kind = raw.get("type")
    if kind == "function" and "function" in raw:
        inner = check_mapping(raw["function"], f"{where}.function")
        check_keys(inner, ("name", "description", "parameters", "strict"), f"{where}.function")
        return _function(inner, f"{where}.function", "parameters", raw, ("type", "function"), where)
    if kind in (None, "custom") and "input_schema" in raw:
        known = ("type", "name", "description", "input_schema", "strict")
        return _function(raw, where, "input_schema", raw, known, where)
    if kind == "function":
        return _function(raw, where, "parameters", raw, ("type", "name", "description", "parameters", "strict"), where)
    if kind is None:
        check_keys(raw, (*_KEYS, *MARKS), where)
        raise InputError("is missing: 'function', or a vendor's own kind of tool", field=f"{where}.type")
    kind = check_name(kind, f"{where}.type")
    if dialect is None:
        dialect = "messages" if _DATED.fullmatch(kind) else ("chat" if kind == "custom" and "custom" in raw else "responses")
    name = raw.get("name")
    return Tool(
        name=kind if name is None else check_name(name, f"{where}.name"),
        mark=read_mark(raw, where),
        dialect=dialect,
        raw=copy_json({key: value for key, value in raw.items() if key not in MARKS}, where),
    )


def _function(
    inner: Mapping[str, Any], field: str, schema_key: str, raw: Mapping[str, Any], known: tuple[str, ...], where: str
) -> Tool:
    schema, description, strict = inner.get(schema_key), inner.get("description"), inner.get("strict")
    schema_field = f"{field}.{schema_key}"
    return Tool(
        name=check_name(needed(inner, "name", field), f"{field}.name"),
        description=None if description is None else check_text(description, f"{field}.description"),
        parameters={} if schema is None else copy_json(check_mapping(schema, schema_field), schema_field),
        strict=None if strict is None else check_bool(strict, f"{field}.strict"),
        mark=read_mark(raw, where),
        extra=read_rest(raw, known, where),
    )
