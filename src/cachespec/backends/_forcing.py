"""What an answer has to look like, as a grammar: JSON, a JSON schema, a call of one of the tools."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from cachespec.engine.structured import Grammar, Vocabulary, schema_text
from cachespec.engine.toolcalls import HERMES, ToolFormat
from cachespec.errors import InputError
from cachespec.messages import Tool
from cachespec.request import Request

_REMEMBERED = 32


class Forcing:
    """Grammars of requests, compiled once. From any thread; `form` is how the model writes calls."""

    def __init__(self, vocabulary: Vocabulary, form: ToolFormat | None, controls: Mapping[str, int]) -> None:
        self._vocabulary, self._form, self._controls = vocabulary, form, controls
        self._made: OrderedDict[str, Grammar] = OrderedDict()

    @staticmethod
    def wanted(request: Request) -> str | None:
        """The parameter that asks for a form, if any does."""
        if request.tool_choice is not None and request.tool_choice.mode in ("required", "tool"):
            return "tool_choice"
        form = request.response_format
        return None if form is None or form.kind == "text" else "response_format"

    def grammar(self, request: Request) -> Grammar | None:
        """What the answer has to follow; None: nothing. Raises InputError for what cannot be forced."""
        wanted, form = self.wanted(request), request.response_format
        if wanted == "tool_choice":
            if form is not None and form.kind != "text":
                raise InputError("an answer cannot both be a call and have a form of its own", field="response_format")
            return self._compile("lark", self._call(request), wanted)
        if wanted is None or form is None:
            return None
        if request.tools and (request.tool_choice is None or request.tool_choice.mode != "none"):
            raise InputError("an answer that must have a form leaves no way to call tools", field="response_format")
        source = json.dumps(form.schema, sort_keys=False)
        return self._compile("json" if form.kind == "json" else "schema", source, wanted)

    def _call(self, request: Request) -> str:
        """One call, in Hermes' form: a tool's name, and arguments by its schema."""
        if self._form != HERMES or "<tool_call>" in self._controls:
            raise InputError("the calls of this model cannot be forced", field="tool_choice")
        choice = request.tool_choice
        tools = [t for t in request.tools if choice is None or choice.mode != "tool" or t.name == choice.name]
        return f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema_text(_calls(tools), "tool_choice")}'

    def _compile(self, kind: Any, source: str, field: str) -> Grammar:
        key = f"{kind} {source}"
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._vocabulary.compile(kind, source, field=field)
            if len(self._made) > _REMEMBERED:
                self._made.popitem(last=False)
        return found


def _calls(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of a call: one of these tools, with arguments by its own schema."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": dict(tool.parameters) or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    # Blanks as the templates' own examples have them: a model that may write any number of them sometimes does.
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": {"whitespace_flexible": False}}
