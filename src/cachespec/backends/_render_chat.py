"""A request as a Chat Completions body, for OpenAI and the many servers that speak its protocol.

Field names are those of the openai SDK's parameter types (3.57). What the protocol has no place for is left out with a
warning: names of messages in other roles are kept, an ``is_error`` of a tool result is not.
"""

from __future__ import annotations

from typing import Any

from cachespec.backends._profile import Profile
from cachespec.backends._render import Body, Numbering, Rendered, Renderer, data_url, strict_schema
from cachespec.decision import Plan
from cachespec.messages import ImagePart, Message, OpaquePart, ReasoningPart, TextPart, Tool, ToolCallPart, ToolResultPart
from cachespec.request import Request, ResponseFormat


def render_chat(profile: Profile, request: Request, plan: Plan, *, model: str) -> Rendered:
    """The exact body of ``POST /chat/completions``. Raises: InputError where a text cannot be encoded."""
    r = Renderer(profile, request, plan, model=model)
    body: Body = {"model": model, "messages": _messages(r)}
    if request.tools:
        body["tools"] = [_tool(r, tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    _tool_choice(r, body)
    body |= r.limit(profile.names.get("max_output_tokens", "max_tokens"))
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if (value := r.wants(name)) is not None:
            body[profile.names.get(name, name)] = value
    if stop := r.wants("stop"):
        body["stop"] = list(stop)
    if (reasoning := r.wants("reasoning")) is not None:
        if profile.effort == "reasoning":
            named = {"effort": reasoning.effort, "max_tokens": reasoning.budget_tokens}
            body["reasoning"] = {key: value for key, value in named.items() if value is not None}
        elif reasoning.effort is not None:
            body["reasoning_effort"] = reasoning.effort
    if (form := r.wants("response_format")) is not None and form.kind != "text":
        body["response_format"] = _response_format(form)
    options: dict[str, Any] = {"include_usage": True} if profile.stream_usage else {}
    if profile.obfuscation:
        options["include_obfuscation"] = False
    if options:
        body["stream_options"] = options
    return r.finish(body)


def _messages(r: Renderer) -> list[Body]:
    request, out = r.request, []
    if request.system:
        content = _content(r, [(f"system[{i}]", part) for i, part in enumerate(request.system)])
        out.append({"role": r.profile.system_role, "content": content})
    numbering = Numbering(system=len(request.system))
    turn: list[tuple[Message, list[tuple[str, Any]]]] = []  # assistant messages that stand together
    for message in request.messages:
        named = list(zip(numbering.names(message), message.parts, strict=True))
        if message.role == "assistant":
            turn.append((message, named))
            continue
        out += _turn(r, turn)
        turn = []
        _given(r, message, named, out)
    return [*out, *_turn(r, turn)]


def _turn(r: Renderer, turn: list[tuple[Message, list[tuple[str, Any]]]]) -> list[Body]:
    """One message each, but one for all where there are tool calls: their results must follow the message that has them.

    Responses and Messages say a turn in several items; Chat has one message for it.
    """
    if len(turn) > 1 and any(isinstance(part, ToolCallPart) for message, _ in turn for part in message.parts):
        turn = [(turn[0][0], [pair for _, named in turn for pair in named])]
    entries = [(_assistant(r, message, named), named) for message, named in turn]
    # A message of nothing but reasoning that could not be sent back says nothing.
    return [e for e, named in entries if e.keys() != {"role", "content"} or e["content"] or not named or _said(named)]


def _said(named: list[tuple[str, Any]]) -> bool:
    return any(not isinstance(part, ReasoningPart) for _, part in named)


def _given(r: Renderer, message: Message, named: list[tuple[str, Any]], out: list[Body]) -> None:
    """A message of the caller: tool results become messages of their own, the rest stays together, all in order."""
    role = r.profile.system_role if message.role in ("system", "developer") else "user"
    rest: list[tuple[str, Any]] = []
    for at, part in [*named, ("", None)]:
        if part is not None and not isinstance(part, ToolResultPart):
            rest.append((at, part))
            continue
        if rest:
            entry: Body = {"role": role, "content": _content(r, rest)}
            if message.name is not None:
                entry["name"] = message.name
            out.append(entry)
            rest = []
        if part is not None:
            out.append(_result(r, at, part))


def _result(r: Renderer, at: str, part: ToolResultPart) -> Body:
    inner = list(part.content)
    if part.is_error:
        r.warn(f"the tool result at {at} is not marked as an error: Chat Completions has no field for that")
    content: Any = _content(r, [(f"{at}.content[{i}]", item) for i, item in enumerate(inner)])
    mark = r.mark(at, part.mark)
    if mark and inner:  # a mark on the result is a mark on its end
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content[-1] = {**content[-1], **mark}
    return {"role": "tool", "tool_call_id": r.tool_id(part.id), "content": content}


def _assistant(r: Renderer, message: Message, named: list[tuple[str, Any]]) -> Body:
    content: list[tuple[str, Any]] = []
    calls: list[Body] = []
    entry: Body = {"role": "assistant"}
    thoughts: list[str] = []
    for at, part in named:
        if isinstance(part, ToolCallPart):
            r.unmarkable(at, part.mark)
            function = {"name": part.name, "arguments": part.arguments}
            calls.append({"id": r.tool_id(part.id), "type": "function", "function": function})
        elif isinstance(part, ReasoningPart):
            if _replayed(r, part, at):
                thoughts.append(part.text)
        elif isinstance(part, OpaquePart) and part.raw.get("type") == "custom":
            calls.append(r.own_part(at, part.raw))
        else:
            content.append((at, part))
    if thoughts and r.profile.reasoning_field:
        entry[r.profile.reasoning_field] = "".join(thoughts)
    entry["content"] = _content(r, content) if content else None if calls else ""
    if message.name is not None:
        entry["name"] = message.name
    entry.update(r.own_extra(message.extra, r.profile.message_extra))
    if calls:
        entry["tool_calls"] = calls
    return entry


def _replayed(r: Renderer, part: ReasoningPart, at: str) -> bool:
    """Reasoning goes back where the server has a field for it; text that the caller wrote in that field is its own."""
    field = r.profile.reasoning_field
    if field is None:
        r.warn(f"the reasoning at {at} was left out: this backend does not take it back")
        return False
    return (part.provider is None and part.model is None) or r.replays(part, at)


def _content(r: Renderer, named: list[tuple[str, Any]]) -> str | list[Body]:
    """Parts as a plain string where there is nothing but one unmarked text, else as a list."""
    parts = [_part(r, at, part) for at, part in named]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"} and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _part(r: Renderer, at: str, part: TextPart | ImagePart | OpaquePart) -> Body:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text, **r.mark(at, part.mark)}
    if isinstance(part, ImagePart):
        image = {"url": data_url(part)} if part.detail is None else {"url": data_url(part), "detail": part.detail}
        return {"type": "image_url", "image_url": image, **r.mark(at, part.mark)}
    return {**r.own_part(at, part.raw), **r.mark(at, part.mark)}


def _tool(r: Renderer, tool: Tool, at: str) -> Body:
    if tool.raw is not None:
        return {**r.raw(at, tool.raw), **(r.mark(at, tool.mark) if r.profile.marks == "anthropic" else {})}
    function: Body = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    r.unmarkable(at, tool.mark)
    return {"type": "function", "function": function, **r.own_extra(tool.extra, (), at=at)}


def _tool_choice(r: Renderer, body: Body) -> None:
    choice = r.wants("tool_choice")
    if choice is None or (not r.request.tools and choice.mode in ("auto", "none")):
        return  # OpenAI refuses the field where there are no tools
    body["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if choice.mode == "tool" else choice.mode
    if choice.parallel is not None:
        body["parallel_tool_calls"] = choice.parallel


def _response_format(form: ResponseFormat) -> Body:
    if form.kind == "json":
        return {"type": "json_object"}
    schema: Body = {"name": form.name, "schema": form.schema}
    if form.description is not None:
        schema["description"] = form.description
    if form.strict is not None or strict_schema(form.schema):
        schema["strict"] = form.strict is not False
    return {"type": "json_schema", "json_schema": schema}
