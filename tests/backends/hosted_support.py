"""What the tests of the hosted backends share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cachespec.backends._profile import Profile
from cachespec.backends._render import Rendered
from cachespec.backends._render_chat import render_chat
from cachespec.backends._render_messages import render_messages
from cachespec.backends._render_responses import render_responses
from cachespec.backends.base import Attempt
from cachespec.decision import Plan
from cachespec.events import Event, Finished, TextDelta, ToolCallDelta, UsageReported
from cachespec.messages import Message, TextPart, Tool
from cachespec.messages_parse import parse_messages
from cachespec.request import Request

RENDER = {"chat": render_chat, "responses": render_responses, "messages": render_messages}
PLAN = Plan(backend="b")


def ask(text: str = "Hello", **fields: Any) -> Request:
    """A request of one user message; or, with `given`, of messages in any vendor's shape."""
    given = fields.pop("given", None)
    if given is not None:
        system, messages = parse_messages(given)
        fields["system"] = (*fields.get("system", ()), *system)
    else:
        messages = (Message(role="user", parts=(TextPart(text=text),)),)
    if isinstance(fields.get("system"), str):
        fields["system"] = (TextPart(text=fields["system"]),)
    return Request(messages=messages, **fields)


def body(profile: Profile, request: Request, plan: Plan = PLAN, model: str = "m") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(rendered(profile, request, plan, model).body)
    return parsed


def rendered(profile: Profile, request: Request, plan: Plan = PLAN, model: str = "m") -> Rendered:
    return RENDER[profile.api](profile, request, plan, model=model)


async def read_all(attempt: Attempt) -> list[Event]:
    """Every event, to the end; the attempt is closed."""
    events: list[Event] = []
    try:
        while batch := await attempt.read():
            events += batch
    finally:
        await attempt.aclose()
    return events


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def finish_of(events: list[Event]) -> Finished:
    (finished,) = (e for e in events if isinstance(e, Finished))
    return finished


def usage_of(events: list[Event]) -> UsageReported:
    return [e for e in events if isinstance(e, UsageReported)][-1]


def calls_of(events: list[Event]) -> list[tuple[str, str, str]]:
    """Tool calls as (id, name, arguments), in order."""
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            call = calls.setdefault(event.index, ["", "", ""])
            call[0], call[1] = call[0] or event.id, call[1] or event.name
            call[2] += event.arguments
    return [(a, b, c) for a, b, c in calls.values()]


WEATHER = Tool(
    name="get_weather",
    description="The weather in a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def schema(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
