"""A request as a Responses body: items in the order in which the parts stand, nothing stored at the vendor.

Field names are those of the openai SDK's parameter types (3.57). ``store`` is false, so reasoning comes back encrypted and is
replayed by us (DESIGN section 7).
"""

from __future__ import annotations

from typing import Any

from cachespec.backends._profile import Profile
from cachespec.backends._render import Body, Numbering, Rendered, Renderer, data_url, strict_schema
from cachespec.decision import Plan
from cachespec.messages import ImagePart, Message, OpaquePart, ReasoningPart, TextPart, Tool, ToolCallPart, ToolResultPart
from cachespec.request import Request, ResponseFormat

_RESULTS = ("function_call_output", "custom_tool_call_output")
_CALL_EXTRA = ("namespace", "caller")
_TEXT_EXTRA = ("annotations",)
_TOOL_EXTRA = ("allowed_callers", "defer_loading", "output_schema")


def render_responses(profile: Profile, request: Request, plan: Plan, *, model: str) -> Rendered:
    """The exact body of ``POST /responses``. Raises: InputError where a text cannot be encoded."""
    r = Renderer(profile, request, plan, model=model)
    items: list[Body] = []
    body: Body = {"model": model}
    _system(r, body, items)
    numbering = Numbering(system=len(request.system))
    for message in request.messages:
        _message(r, message, numbering.names(message), items)
    body["input"] = items
    if request.tools:
        body["tools"] = [_tool(r, tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    _tool_choice(r, body)
    body |= r.limit("max_output_tokens")
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if (value := r.wants(name)) is not None:
            body[profile.names.get(name, name)] = value
    if (reasoning := r.wants("reasoning")) is not None:
        named = {"effort": reasoning.effort, "summary": reasoning.summary}
        body["reasoning"] = {key: value for key, value in named.items() if value is not None}
    if (form := r.wants("response_format")) is not None and form.kind != "text":
        body["text"] = {"format": _format(form)}
    body["store"] = False
    if profile.encrypted_reasoning:
        body["include"] = ["reasoning.encrypted_content"]
    if profile.obfuscation:
        body["stream_options"] = {"include_obfuscation": False}
    return r.finish(body)


def _system(r: Renderer, body: Body, items: list[Body]) -> None:
    """One plain text is `instructions`; several, and any that a mark may come to, are a message of the developer.

    For a model that takes marks it is that from the first request on: a mark that comes or goes moves nothing.
    """
    parts = [_text(r, f"system[{i}]", part, "input_text") for i, part in enumerate(r.request.system)]
    fixed = r.profile.cache is None or r.profile.cache.control != "breakpoints"
    if fixed and len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        body["instructions"] = parts[0]["text"]
    elif parts:
        items.append({"type": "message", "role": "developer", "content": parts})


def _message(r: Renderer, message: Message, names: list[str], items: list[Body]) -> None:
    """The items of one message: neighbouring texts and images stay one message, everything else is an item of its own."""
    if message.name is not None:
        r.warn("the name of a message was left out: Responses has no field for it")
    run: list[Body] = []
    spoken = "output_text" if message.role == "assistant" else "input_text"

    def flush() -> None:
        if run:
            extra = r.own_extra(message.extra, r.profile.message_extra)
            text = _lone(run)
            item = {"type": "message", "role": _role(message), "content": list(run) if text is None else text}
            items.append({**item, **extra})
            run.clear()

    for at, part in zip(names, message.parts, strict=True):
        if isinstance(part, TextPart | ImagePart):
            run.append(_part(r, at, part, spoken))
            continue
        if isinstance(part, OpaquePart) and part.raw.get("type") == "input_file":
            run.append({**r.raw(at, part.raw), **r.mark(at, part.mark)})
            continue
        flush()
        if (item := _item(r, at, part)) is not None:
            items.append(item)
    flush()


def _role(message: Message) -> str:
    return "user" if message.role == "tool" else message.role


def _item(r: Renderer, at: str, part: ToolCallPart | ToolResultPart | ReasoningPart | OpaquePart) -> Body | None:
    if isinstance(part, ToolCallPart):
        r.unmarkable(at, part.mark)
        call = {"type": "function_call", "call_id": r.tool_id(part.id), "name": part.name, "arguments": part.arguments}
        return {**call, **r.own_extra(part.extra, _CALL_EXTRA)}
    if isinstance(part, ToolResultPart):
        return _result(r, at, part)
    if isinstance(part, ReasoningPart):
        return _reasoning(r, at, part)
    return _own_item(r, at, part)


def _own_item(r: Renderer, at: str, part: OpaquePart) -> Body:
    item = r.own_part(at, part.raw)
    output = item.get("output") if item.get("type") in _RESULTS else None
    parts = [{"type": "input_text", "text": output}] if isinstance(output, str) else output or []
    if not parts or not isinstance(parts[-1], dict):
        r.unmarkable(at, part.mark)
    elif mark := r.mark(at, part.mark):  # a mark on the result is a mark on its end, unless that has its own
        item["output"] = [*parts[:-1], {**parts[-1], **mark, **parts[-1]}]
    return item


def _result(r: Renderer, at: str, part: ToolResultPart) -> Body:
    if part.is_error:
        r.warn(f"the tool result at {at} is not marked as an error: Responses has no field for that")
    output = [_part(r, f"{at}.content[{i}]", item, "input_text") for i, item in enumerate(part.content)]
    mark = r.mark(at, part.mark)
    if mark and output:  # a mark on the result is a mark on its end
        output[-1] = {**output[-1], **mark}
    text = "" if not output else _lone(output)
    return {"type": "function_call_output", "call_id": r.tool_id(part.id), "output": output if text is None else text}


def _reasoning(r: Renderer, at: str, part: ReasoningPart) -> Body | None:
    if not r.replays(part, at):
        return None
    if part.raw is None or part.raw.get("type") != "reasoning" or not part.raw.get("encrypted_content"):
        r.warn(f"the reasoning at {at} was left out: it holds no encrypted content, and nothing is stored at the vendor")
        return None
    return r.raw(at, part.raw)


def _lone(parts: list[Body]) -> str | None:
    """The text, where one unmarked text is all there is."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        text: str = parts[0]["text"]
        return text
    return None


def _part(r: Renderer, at: str, part: TextPart | ImagePart, kind: str) -> Body:
    if isinstance(part, TextPart):
        return _text(r, at, part, kind)
    image = {"type": "input_image", "image_url": data_url(part), "detail": part.detail or "auto"}
    return {**image, **r.mark(at, part.mark)}


def _text(r: Renderer, at: str, part: TextPart, kind: str) -> Body:
    text: Body = {"type": kind, "text": part.text}
    if kind == "output_text":
        r.unmarkable(at, part.mark)
        return {**text, **r.own_extra(part.extra, _TEXT_EXTRA)}
    return {**text, **r.mark(at, part.mark)}


def _tool(r: Renderer, tool: Tool, at: str) -> Body:
    r.unmarkable(at, tool.mark)
    if tool.raw is not None:
        return r.raw(at, tool.raw)
    function: Body = {"type": "function", "name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    # Left out, Responses would rewrite the schema to a stricter one; the other two protocols never do.
    function["strict"] = bool(tool.strict)
    return {**function, **r.own_extra(tool.extra, _TOOL_EXTRA, at=at)}


def _tool_choice(r: Renderer, body: Body) -> None:
    choice: Any = r.wants("tool_choice")
    if choice is None or (not r.request.tools and choice.mode in ("auto", "none")):
        return
    body["tool_choice"] = {"type": "function", "name": choice.name} if choice.mode == "tool" else choice.mode
    if choice.parallel is not None:
        body["parallel_tool_calls"] = choice.parallel


def _format(form: ResponseFormat) -> Body:
    if form.kind == "json":
        return {"type": "json_object"}
    strict = strict_schema(form.schema) if form.strict is None else form.strict
    said = {} if form.description is None else {"description": form.description}
    return {"type": "json_schema", "name": form.name, **said, "schema": form.schema, "strict": strict}
