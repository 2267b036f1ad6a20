"""Three arguments of a request that several dialects spell differently: tool choice, response format, reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from cachespec.checks import (
    check_bool,
    check_int,
    check_keys,
    check_mapping,
    check_name,
    check_text,
    copy_json,
    kind_of,
    nearest,
)
from cachespec.errors import InputError
from cachespec.messages import Tool

_Mode: TypeAlias = Literal["auto", "none", "required", "tool"]
_Kind: TypeAlias = Literal["text", "json", "schema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`mode` ``"tool"`` forces the tool `name`; ``"required"`` forces some tool. `parallel` None leaves the default."""

    mode: _Mode
    name: str | None = None
    parallel: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """``text``, ``json`` (any object), or ``schema`` with a JSON schema; `model` is the pydantic class it came from.

    `strict` and `description` are what a given ``json_schema`` object says besides (None: it does not).
    """

    kind: _Kind
    name: str = "response"
    schema: Mapping[str, Any] | None = None
    model: Any = None
    strict: bool | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How much to think: `effort` in the vendor's words (``low``, ``high``, ``none``...), or a token budget."""

    effort: str | None = None
    budget_tokens: int | None = None
    summary: str | None = None


_MODES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def parse_tool_choice(value: object, *, where: str = "tool_choice") -> ToolChoice | None:
    """``auto``, ``none``, ``required`` (or ``any``), or an object of either vendor that names a mode or one tool."""
    if value is None:
        return None
    if isinstance(value, ToolChoice):
        return _checked_choice(value, where)
    if isinstance(value, str):
        if value not in _MODES:
            hint = nearest(value, _MODES) or "; to force one tool write {'type': 'tool', 'name': ...}"
            raise InputError(f"must be auto, none or required, not {value!r}{hint}", field=where)
        return ToolChoice(mode=_MODES[value])
    choice = check_mapping(value, where)
    kind = check_name(choice.get("type"), f"{where}.type")
    parallel = None
    if choice.get("disable_parallel_tool_use") is not None:
        parallel = not check_bool(choice["disable_parallel_tool_use"], f"{where}.disable_parallel_tool_use")
    if kind in _MODES:
        check_keys(choice, ("type", "disable_parallel_tool_use"), where)
        return ToolChoice(mode=_MODES[kind], parallel=parallel)
    if kind == "function" and "function" in choice:
        check_keys(choice, ("type", "function"), where)
        inner = check_mapping(choice["function"], f"{where}.function")
        check_keys(inner, ("name",), f"{where}.function")
        return ToolChoice(mode="tool", name=check_name(inner.get("name"), f"{where}.function.name"))
    if kind in ("function", "tool"):
        check_keys(choice, ("type", "name", "disable_parallel_tool_use"), where)
        return ToolChoice(mode="tool", name=check_name(choice.get("name"), f"{where}.name"), parallel=parallel)
    known = (*_MODES, "function", "tool")
    raise InputError(
        f"unknown kind of choice {kind!r}{nearest(kind, known)}; one vendor's own goes in `extra`", field=f"{where}.type"
    )


def _checked_choice(choice: ToolChoice, where: str) -> ToolChoice:
    """One that the caller built: dataclasses check nothing by themselves."""
    if choice.mode not in get_args(_Mode):
        raise InputError(f"must be {', '.join(get_args(_Mode))}, not {choice.mode!r}", field=f"{where}.mode")
    if choice.mode == "tool":
        check_name(choice.name, f"{where}.name")
    if choice.parallel is not None:
        check_bool(choice.parallel, f"{where}.parallel")
    return choice


def check_tool_choice(choice: ToolChoice | None, tools: Sequence[Tool], *, where: str = "tool_choice") -> None:
    """A forced tool must be among the tools."""
    if choice is None or choice.mode not in ("tool", "required"):
        return
    if not tools:
        raise InputError("forces a tool, and there are no tools", field=where)
    names = [tool.name for tool in tools]
    if choice.mode == "tool" and choice.name not in names:
        raise InputError(f"there is no tool {choice.name!r}{nearest(choice.name or '', names)}", field=where)


def parse_response_format(value: object, *, where: str = "response_format") -> ResponseFormat | None:
    """``text``, ``json``, a JSON schema, a vendor's format object around one, or a pydantic model class."""
    if value is None:
        return None
    if isinstance(value, ResponseFormat):
        return _own_format(value, where)
    if isinstance(value, type):
        if not callable(getattr(value, "model_json_schema", None)):
            raise InputError(f"the class {value.__name__} is no pydantic model", field=where)
        name = re.sub(r"[^A-Za-z0-9_-]", "_", value.__name__)[:64]
        try:
            schema = copy_json(value.model_json_schema(), where)  # type: ignore[attr-defined]
        except Exception as error:  # a model whose fields JSON cannot express fails in ways of its own
            raise InputError(f"{value.__name__} has no JSON schema: {error}", field=where) from error
        return ResponseFormat(kind="schema", name=name, schema=schema, model=value)
    if isinstance(value, str):
        kinds: dict[str, Literal["text", "json"]] = {"text": "text", "json": "json"}
        if value in kinds:
            return ResponseFormat(kind=kinds[value])
        raise InputError(f"must be 'text', 'json', a JSON schema or a pydantic model, not {value!r}", field=where)
    if not isinstance(value, Mapping):
        raise InputError(f"must be 'text', 'json', a JSON schema or a pydantic model, not {kind_of(value)}", field=where)
    match value.get("type"):
        case "text" | "json_object" as kind:
            check_keys(value, ("type",), where)
            return ResponseFormat(kind="text" if kind == "text" else "json")
        case "json_schema":
            return _schema(value, where)
        case _:
            return ResponseFormat(kind="schema", schema=copy_json(value, where))


def _own_format(form: ResponseFormat, where: str) -> ResponseFormat:
    """One that the caller built: checked, with a schema that later changes do not reach."""
    if form.kind not in get_args(_Kind):
        raise InputError(f"must be {', '.join(get_args(_Kind))}, not {form.kind!r}", field=f"{where}.kind")
    check_name(form.name, f"{where}.name")
    if form.description is not None:
        check_text(form.description, f"{where}.description")
    if form.strict is not None:
        check_bool(form.strict, f"{where}.strict")
    if form.kind != "schema":
        return form
    field = f"{where}.schema"
    return replace(form, schema=copy_json(check_mapping(form.schema, field), field))


def _schema(value: Mapping[str, Any], where: str) -> ResponseFormat:
    """Chat nests the schema under ``json_schema``; Responses and Messages do not."""
    if "json_schema" in value:
        check_keys(value, ("type", "json_schema"), where)
        where = f"{where}.json_schema"
        value = check_mapping(value["json_schema"], where)
    check_keys(value, ("type", "name", "schema", "strict", "description"), where)
    name, strict, description = value.get("name"), value.get("strict"), value.get("description")
    return ResponseFormat(
        kind="schema",
        name="response" if name is None else check_name(name, f"{where}.name"),
        schema=copy_json(check_mapping(value.get("schema"), f"{where}.schema"), f"{where}.schema"),
        strict=None if strict is None else check_bool(strict, f"{where}.strict"),
        description=None if description is None else check_text(description, f"{where}.description"),
    )


def parse_reasoning(value: object, *, where: str = "reasoning") -> Reasoning | None:
    """An effort in the vendor's words, or an object with `effort`, `budget_tokens`, `summary`."""
    if value is None:
        return None
    if isinstance(value, Reasoning):
        value = {"effort": value.effort, "budget_tokens": value.budget_tokens, "summary": value.summary}
    if isinstance(value, str):
        return Reasoning(effort=check_name(value, where))
    fields = check_mapping(value, where)
    check_keys(fields, ("effort", "budget_tokens", "summary"), where)
    effort, budget, summary = fields.get("effort"), fields.get("budget_tokens"), fields.get("summary")
    if effort is None and budget is None and summary is None:
        return None
    return Reasoning(
        effort=None if effort is None else check_name(effort, f"{where}.effort"),
        budget_tokens=None if budget is None else check_int(budget, f"{where}.budget_tokens", low=1),
        summary=None if summary is None else check_name(summary, f"{where}.summary"),
    )
