"""From messages to a prompt: the model's own chat template, rendered in a sandbox, and turned into tokens.

The template comes with the model, so it is run with no way out (Jinja's immutable sandbox). What users write never
becomes a control token: where their text spells one out, alone or together with what stands beside it, that text is
tokenised as the plain characters it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cachespec.engine.runtimes.base import ModelInfo, Runtime
from cachespec.engine.text import overlap
from cachespec.engine.toolcalls import FORMATS, ToolFormat
from cachespec.errors import ConfigError, InputError, MissingDependencyError
from cachespec.messages import (
    ImagePart,
    Message,
    OpaquePart,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"  # private use: stand around the number of a control text while a template runs
_ESCAPE = re.compile(r"\\(?:u(e0f[01])|.)")  # any in JSON; its group: one of those two

_PROBE = Tool(
    name="probe_of_tools",
    description="probe",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "x"},
            "count": {"type": "integer", "description": "x"},
            "deep": {"type": "object", "description": "x"},
        },
        "required": ["text", "count", "deep"],
    },
)
_PROBE_CALL = ToolCallPart(id="probe0000", name=_PROBE.name, arguments='{"text": "12", "count": 3, "deep": {"a": ["b"]}}')
_ANSWER = "\u00a7probe\u00a7"  # begins and ends as nothing that a template writes


class RawObject(dict[str, Any]):
    """A JSON object that a template prints as the text it was given as (arguments of tool calls: verbatim)."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, and what was left out of it, for a person."""

    tokens: tuple[int, ...]
    warnings: tuple[str, ...]


class ChatTemplate:
    """The chat template of a loaded model. Safe for any number of threads.

    `tools` says how calls look in the answer; None when the template shows no tools, or writes calls in a form that is
    not understood here: none reads them back. A model without a template takes a single user message, as it is.

    Raises ConfigError when the model's template is not valid Jinja, MissingDependencyError without jinja2.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._template = None if info.chat_template is None else _compile(info.chat_template)
        self._controls = _Controls(info.controls)
        self.tools = None if self._template is None else self._format()

    def prompt(
        self, runtime: Runtime, system: Sequence[TextPart], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Prompt:
        """Render and tokenise. Raises InputError for what the template refuses or a text model cannot take."""
        text, guard, warnings = self._text(system, messages, tools, edges=False)
        if guard.met_edge:
            # Pieces of text might make a control token with their neighbours. Where they do, they are kept apart.
            apart = self._text(system, messages, tools, edges=True)
            if self._controls.found(apart[0]) != self._controls.found(text):
                text, guard, warnings = apart
        return Prompt(tuple(self._tokens(runtime, text, guard.spelled)), tuple(warnings))

    def _text(
        self, system: Sequence[TextPart], messages: Sequence[Message], tools: Sequence[Tool], *, edges: bool
    ) -> tuple[str, _Guard, list[str]]:
        guard, warnings = _Guard(self._controls, edges=edges), list[str]()
        turns = _turns(system, messages, warnings, guard)
        if self._template is not None:
            return self._render(turns, [guard.all(_tool_json(tool)) for tool in tools] or None), guard, warnings
        if tools or len(turns) != 1 or turns[0]["role"] != "user":
            raise InputError("without a chat template this model takes one user message and no tools", field="messages")
        return turns[0]["content"], guard, warnings

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        assert self._template is not None  # noqa: S101 - the callers looked
        try:
            return self._template.render(  # type: ignore[no-any-return]
                messages=turns,
                tools=tools,
                add_generation_prompt=True,
                bos_token=self._info.bos,
                eos_token=self._info.eos,
            )
        except Exception as error:  # a program of somebody else's, with values of the user's: it may fail in any way
            raise InputError(f"the model's chat template refuses this request: {error}", field="messages") from error

    def _format(self) -> ToolFormat | None:
        """How the model writes calls: the template is made to write one, and the format is that which reads it back.

        None when there is none such, or no tool is shown.
        """
        for system in ((), (_text_part("x"),)):  # some want a system message
            try:
                if _PROBE.name not in self._probe(system):
                    return None
                texts = self._probe(system, _text_part(_ANSWER)), self._probe(system, _PROBE_CALL)
            except InputError:
                continue
            call = _PROBE_CALL.name, _PROBE_CALL.arguments
            for form in FORMATS:
                # Control tokens are no text of an answer, except those that the format is made of.
                plain, called = (self._controls.left_out(text, form.markers) for text in texts)
                if form.reads(_between(plain, called, form), call, (_PROBE,)):
                    return form
            return None
        return None

    def _probe(self, system: Sequence[TextPart], *answer: Part) -> str:
        """A conversation with a tool, and with this answer if any."""
        turns = [Message(role="user", parts=(_text_part("x"),)), Message(role="assistant", parts=answer)]
        return self._text(system, turns[: 1 + bool(answer)], (_PROBE,), edges=False)[0]

    def _tokens(self, runtime: Runtime, text: str, spelled: Sequence[str]) -> list[int]:
        info = self._info
        tokens: list[int] = []
        if info.add_bos and info.bos and not text.startswith(info.bos):
            tokens.append(info.controls[info.bos])
        pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", text)
        for i, piece in enumerate(pieces):
            if i % 2 == 0:
                tokens += runtime.tokenize(piece, special=True) if piece else []
            elif int(piece) < len(spelled):
                tokens += runtime.tokenize(spelled[int(piece)], special=False)
            else:
                tokens += runtime.tokenize(f"{_OPEN}{piece}{_CLOSE}", special=True)
        return tokens


class _Controls:
    """The control tokens of a model, as texts."""

    def __init__(self, controls: Iterable[str]) -> None:
        self._texts = sorted(filter(None, controls), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        # The placeholder itself is guarded too: nobody may write one.
        self.spelled = re.compile("|".join(map(re.escape, (_OPEN, *self._texts))))
        self._heads = {text[:i] for text in self._texts for i in range(1, len(text))}
        self._tails = {text[i:] for text in self._texts for i in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)

    def found(self, text: str) -> list[str]:
        """Every control token that a rendered text has, in order."""
        return self._pattern.findall(text)

    def left_out(self, text: str, markers: Collection[str]) -> str:
        """A rendered text without its control tokens, these markers aside."""
        return self._pattern.sub(lambda match: match[0] if match[0] in markers else "", text)

    def edges(self, text: str) -> tuple[int, int]:
        """How long a start and how long an end of `text` may be a piece of a control token together with its neighbours."""
        if len(text) < self._longest and any(text in control for control in self._texts):
            return len(text), 0
        sizes = range(min(len(text), self._longest - 1), 0, -1)
        start = next((n for n in sizes if text[:n] in self._tails), 0)
        return start, next((n for n in sizes if n <= len(text) - start and text[-n:] in self._heads), 0)


class _Guard:
    """Puts placeholders where what users or tools wrote spells out a control token; `spelled` is what they stand for.

    With `edges` also where it may be a piece of one; `met_edge` says whether there was such a piece.
    """

    def __init__(self, controls: _Controls, *, edges: bool) -> None:
        self._controls, self._edges = controls, edges
        self.spelled: list[str] = []
        self.met_edge = False

    def text(self, text: str) -> str:
        start, end = self._controls.edges(text)
        self.met_edge |= bool(start or end)
        if not self._edges:
            start = end = 0
        middle = self._controls.spelled.sub(lambda match: self._place(match[0]), text[start : len(text) - end])
        return self._place(text[:start]) + middle + self._place(text[len(text) - end :])

    def all(self, value: Any) -> Any:
        """The same for every text in a JSON value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.all(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.all(item) for item in value]
        return value

    def _place(self, text: str) -> str:
        if not text:
            return ""
        self.spelled.append(text)
        return f"{_OPEN}{len(self.spelled) - 1}{_CLOSE}"


def _text_part(text: str) -> TextPart:
    return TextPart(text=text)


def _between(plain: str, other: str, form: ToolFormat) -> str:
    """What stands in `other` where `plain` has its answer. Answers may begin or end alike: the format's tags stay whole."""
    start = _common(plain, other)
    end = len(other) - _common(plain[:start:-1], other[:start:-1])
    begun = overlap(other[:start], form.open)
    if other.startswith(form.open, start - begun):
        start -= begun
    end += next((more for more in range(1, len(form.close)) if other[: end + more].endswith(form.close)), 0)
    return other[start:end]


def _common(one: str, other: str) -> int:
    """How long a beginning they share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _turns(system: Sequence[TextPart], messages: Sequence[Message], warnings: list[str], guard: _Guard) -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Tool results become messages of their own, in place."""
    names: dict[str, str] = {}
    turns: list[dict[str, Any]] = []
    if system:
        turns.append({"role": "system", "content": guard.text("\n".join(p.text for p in system))})
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in message.parts:
            match part:
                case TextPart():
                    texts.append(part.text)
                case ToolCallPart():
                    names[part.id] = part.name
                    calls.append({"id": guard.text(part.id), "type": "function", "function": _call(part, guard)})
                case ToolResultPart():
                    content = "\n".join(_text(p) for p in part.content)
                    about = {"tool_call_id": part.id, "name": names.get(part.id, message.name or ""), "content": content}
                    turns.append({"role": "tool", **{key: guard.text(value) for key, value in about.items()}})
                case ReasoningPart():
                    warnings.append(f"reasoning of {part.provider or 'another model'} was left out of a prompt")
                case _:
                    _text(part)
        if texts or calls or all(isinstance(p, ReasoningPart) for p in message.parts):
            joint = "" if role == "assistant" else "\n"
            turn: dict[str, Any] = {"role": role, "content": guard.text(joint.join(texts))}
            if calls:
                turn["tool_calls"] = calls
            if message.name is not None:
                turn["name"] = guard.text(message.name)
            turns.append(turn)
    return turns


def _call(part: ToolCallPart, guard: _Guard) -> dict[str, Any]:
    try:
        value = json.loads(part.arguments)
    except (ValueError, RecursionError):
        value = None
    text = guard.text(part.arguments)
    arguments = RawObject(guard.all(value), text) if isinstance(value, dict) else text
    return {"name": guard.text(part.name), "arguments": arguments}


def _text(part: Part) -> str:
    if isinstance(part, TextPart):
        return part.text
    kind = {ImagePart: "images", OpaquePart: "parts of another protocol"}.get(type(part), type(part).__name__)
    raise InputError(f"a local text model takes no {kind}", field="messages")


def _tool_json(tool: Tool) -> dict[str, Any]:
    if tool.raw is not None:
        raise InputError(f"{tool.name} is a {tool.dialect} tool, which a local model does not have", field="tools")
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _compile(source: str) -> Any:
    try:
        from jinja2 import TemplateError, TemplateSyntaxError, nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError("chat templates need jinja2", extra="llamacpp") from error

    class Generation(Extension):
        """``{% generation %}`` marks, for training, what a model writes itself. Here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # The settings and helpers that the authors of chat templates rely on.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is not valid: {error} (line {error.lineno})", key="model") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON (Jinja's own filter escapes for HTML), with every `RawObject` as its own text."""
    raw: list[RawObject] = []

    def swap(item: Any) -> Any:
        if isinstance(item, RawObject):
            raw.append(item)
            return f"{_OPEN}raw{len(raw) - 1}{_CLOSE}"
        if isinstance(item, Mapping):
            return {name: swap(x) for name, x in item.items()}
        if isinstance(item, list | tuple):
            return [swap(x) for x in item]
        return item

    text = json.dumps(swap(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # placeholders are no text yet: they must be found again
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else match[0], text)
    for i, item in enumerate(raw):
        text = text.replace(f'"{_OPEN}raw{i}{_CLOSE}"', item.text)
    return text
