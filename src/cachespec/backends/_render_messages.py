"""A request as an Anthropic Messages body.

Field names are those of the anthropic SDK's parameter types (2.14; API version 2026-10-21, and 2023-06-01 for servers that
stayed there). Tool input is the model's own text, spliced in as it is.
"""

from __future__ import annotations

from typing import Any

from cachespec.backends._json import Raw, dumps, object_text
from cachespec.backends._profile import Profile
from cachespec.backends._render import Body, Numbering, Rendered, Renderer
from cachespec.decision import Plan
from cachespec.messages import ImagePart, Message, OpaquePart, ReasoningPart, TextPart, Tool, ToolCallPart, ToolResultPart
from cachespec.request import Reasoning, Request

_TEXT_EXTRA = ("citations",)
_CALL_EXTRA = ("caller", "toolset_name")
_RESULT_EXTRA = ("toolset_name",)
_IMAGE_EXTRA = ("transformations",)
_TOOL_EXTRA = ("type", "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")


def render_messages(profile: Profile, request: Request, plan: Plan, *, model: str) -> Rendered:
    """The exact body of ``POST /v1/messages``. Raises: InputError where a text cannot be encoded."""
    r = Renderer(profile, request, plan, model=model)
    body: Body = {"model": model, **r.limit("max_tokens")}
    if request.tools:
        body["tools"] = [_tool(r, tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    _tool_choice(r, body)
    if request.system:
        body["system"] = _lone(_full([_block(r, f"system[{i}]", part) for i, part in enumerate(request.system)]))
    body["messages"] = _messages(r)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if (value := r.wants(name)) is not None:
            body[profile.names.get(name, name)] = value
    if stop := r.wants("stop"):
        body["stop_sequences"] = list(stop)
    if (reasoning := r.wants("reasoning")) is not None:
        _thinking(reasoning, body)
    if (form := r.wants("response_format")) is not None and form.kind == "schema":
        body.setdefault("output_config", {})["format"] = {"type": "json_schema", "schema": form.schema}
    return r.finish(body)


def _messages(r: Renderer) -> list[Body]:
    """The messages; consecutive ones that hold nothing but tool results become one, as the protocol wants it."""
    out: list[Body] = []
    open_results: list[Body] | None = None
    numbering = Numbering(system=len(r.request.system))
    for message in r.request.messages:
        if message.name is not None:
            r.warn("the name of a message was left out: Messages has no field for it")
        blocks = _blocks(r, message, numbering.names(message))
        results = message.role in ("tool", "user") and all(map(_is_result, message.parts))
        if results and open_results is not None:
            open_results.extend(blocks)
            continue
        role = {"developer": "system", "tool": "user"}.get(message.role, message.role)
        if not blocks and role == "assistant":
            continue  # an answer of nothing but another model's reasoning
        out.append({"role": role, "content": blocks if results else _lone(blocks)})
        open_results = blocks if results else None
    return out


def _is_result(part: object) -> bool:
    """Whether a part is a tool's result; one with more in it than text and images is a part of Anthropic's own."""
    return isinstance(part, ToolResultPart) or (isinstance(part, OpaquePart) and part.raw.get("type") == "tool_result")


def _blocks(r: Renderer, message: Message, names: list[str]) -> list[Body]:
    return _full([_block(r, at, part) for at, part in zip(names, message.parts, strict=True)])


def _full(blocks: list[Body | None]) -> list[Body]:
    """The blocks without empty texts, which say nothing, and which the API refuses; one where that is all there is."""
    given = [block for block in blocks if block is not None]
    full = [block for block in given if block.get("text") != "" or block.get("type") != "text" or "cache_control" in block]
    return full or given[:1]


def _lone(blocks: list[Any]) -> str | list[Body]:
    """A plain string where one unmarked text is all there is."""
    if len(blocks) == 1 and blocks[0].keys() == {"type", "text"}:
        text: str = blocks[0]["text"]
        return text
    return blocks


def _block(r: Renderer, at: str, part: object) -> Body | None:
    match part:
        case TextPart():
            extra = r.own_extra(part.extra, _TEXT_EXTRA)
            return {"type": "text", "text": part.text, **extra, **r.mark(at, part.mark)}
        case ImagePart():
            extra = r.own_extra(part.extra, _IMAGE_EXTRA)
            return {"type": "image", "source": _source(part), **extra, **r.mark(at, part.mark)}
        case ToolCallPart():
            extra = r.own_extra(part.extra, _CALL_EXTRA)
            call = {"type": "tool_use", "id": r.tool_id(part.id), "name": part.name, "input": _input(r, at, part)}
            return {**call, **extra, **r.mark(at, part.mark)}
        case ToolResultPart():
            return _result(r, at, part)
        case ReasoningPart():
            return _reasoning(r, at, part)
        case OpaquePart():
            own = {**r.own_part(at, part.raw), **r.mark(at, part.mark)}
            if own.get("type") == "tool_result" and isinstance(own.get("content"), list):
                own["content"] = _full(own["content"])
            return own
    raise TypeError(f"no part: {part!r}")  # pragma: no cover - `Part` has no other members


def _input(r: Renderer, at: str, part: ToolCallPart) -> Raw:
    """The argument text as the object it is; what is no object is wrapped, since the field takes nothing else."""
    if not part.arguments.strip():
        return Raw("{}")  # how a call without arguments arrives from some servers
    raw = object_text(part.arguments)
    if raw is None:
        r.warn(f"the arguments of the tool call at {at} are no JSON object; they were wrapped as its input's `arguments`")
        return Raw(dumps({"arguments": part.arguments}))
    return raw


def _result(r: Renderer, at: str, part: ToolResultPart) -> Body:
    content = _full([_block(r, f"{at}.content[{i}]", item) for i, item in enumerate(part.content)])
    result: Body = {"type": "tool_result", "tool_use_id": r.tool_id(part.id)}
    if content:
        result["content"] = _lone(content)
    if part.is_error:
        result["is_error"] = True
    return {**result, **r.own_extra(part.extra, _RESULT_EXTRA), **r.mark(at, part.mark)}


def _reasoning(r: Renderer, at: str, part: ReasoningPart) -> Body | None:
    if not r.replays(part, at):
        return None
    if part.raw is None or part.raw.get("type") not in ("thinking", "redacted_thinking"):
        r.warn(f"the reasoning at {at} was left out: it is no thinking block")
        return None
    return r.raw(at, part.raw)


def _source(part: ImagePart) -> Body:
    if part.url is not None:
        return {"type": "url", "url": part.url}
    return {"type": "base64", "media_type": part.media_type, "data": part.data}


def _tool(r: Renderer, tool: Tool, at: str) -> Body:
    mark = r.mark(at, tool.mark)
    if tool.raw is not None:
        return {**r.raw(at, tool.raw), **mark}
    entry: Body = {"name": tool.name}
    if tool.description is not None:
        entry["description"] = tool.description
    entry["input_schema"] = tool.parameters or {"type": "object", "properties": {}}
    if tool.strict is not None:
        entry["strict"] = tool.strict
    return {**entry, **r.own_extra(tool.extra, _TOOL_EXTRA, at=at), **mark}


def _tool_choice(r: Renderer, body: Body) -> None:
    choice = r.wants("tool_choice")
    if choice is None or (not r.request.tools and choice.mode in ("auto", "none")):
        return
    entry: Body = {"type": {"required": "any"}.get(choice.mode, choice.mode)}
    if choice.mode == "tool":
        entry["name"] = choice.name
    if choice.parallel is not None and choice.mode != "none":
        entry["disable_parallel_tool_use"] = not choice.parallel
    body["tool_choice"] = entry


def _thinking(reasoning: Reasoning, body: Body) -> None:
    """Effort is a setting of its own beside thinking; asking for any effort asks for thinking as the model sees fit."""
    if reasoning.budget_tokens is not None:
        thinking: Body = {"type": "enabled", "budget_tokens": reasoning.budget_tokens}
    elif reasoning.effort == "none":
        thinking = {"type": "disabled"}
    else:
        thinking = {"type": "adaptive"}
    if reasoning.summary is not None and thinking["type"] != "disabled":
        thinking["display"] = "summarized"
    body["thinking"] = thinking
    if reasoning.effort not in (None, "none"):
        body["output_config"] = {"effort": reasoning.effort}
