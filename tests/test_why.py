"""Where two requests part: to the character, with the kind that says what to do."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachespec.bodies import request_from_body
from cachespec.why import AROUND, Divergence, Why, why

SYSTEM = "You are a careful assistant. It is 2026-11-29T10:15:30Z now. Session 4f9a-77 of user 12. Answer briefly."
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"It can {name}.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for name in ("read", "write", "search")
]
BODY: dict[str, Any] = {
    "model": "claude-sonnet-5-5",
    "max_tokens": 100,
    "system": SYSTEM,
    "tools": TOOLS,
    "messages": [
        {"role": "user", "content": "Look at the file."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.txt"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "alpha beta gamma"}]},
        {"role": "assistant", "content": "It holds three words."},
        {"role": "user", "content": "Which is the last?"},
    ],
}


def compare(change: Callable[[dict[str, Any]], Any], body: dict[str, Any] = BODY) -> Why:
    edited = copy.deepcopy(body)
    change(edited)
    return why(request_from_body(body), request_from_body(edited))


def parted(change: Callable[[dict[str, Any]], Any], body: dict[str, Any] = BODY) -> Divergence:
    found = compare(change, body)
    assert found.divergence is not None
    assert len(found.divergence.before) <= AROUND
    assert len(found.divergence.after) <= AROUND
    return found.divergence


def swap(key: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        assert old in body[key]
        body[key] = body[key].replace(old, new)

    return change


def test_identical_requests_and_those_that_only_grow_lose_nothing() -> None:
    same = compare(lambda body: None)
    assert same.divergence is None
    assert same.lost_tokens == 0
    assert same.shared_tokens > 50
    grown = compare(lambda body: body["messages"].append({"role": "assistant", "content": "Gamma."}))
    assert grown.divergence is not None
    assert grown.divergence.kind == "appended"
    assert grown.divergence.segment == "messages[5][0]"
    assert (grown.lost_tokens, grown.shared_tokens) == (0, same.shared_tokens)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("10:15:30Z", "10:15:31Z", "datetime"),  # a clock of seconds
        ("10:15:30Z", "10:15:30.123Z", "datetime"),
        ("2026-11-29T10", "2026-12-01T08", "datetime"),
        ("2026-11-29T10:15:30Z", "Sunday, 29 November 2026", "datetime"),
        ("4f9a-77", "4f9a-78", "identifier"),
        ("4f9a-77", "c0ffee42-1111-2222-3333-444455556666", "identifier"),
        ("user 12", "user 13", "identifier"),
        ("careful", "careless", "edited"),
        ("Answer briefly.", "Answer at length, in French.", "edited"),
    ],
)
def test_what_changed_in_the_system_prompt(old: str, new: str, kind: str) -> None:
    found = parted(swap("system", old, new))
    edited = SYSTEM.replace(old, new)
    offset = next(i for i, (x, y) in enumerate(zip(SYSTEM + "\0", edited + "\1", strict=False)) if x != y)
    assert (found.segment, found.path, found.offset_chars, found.kind) == ("system[0]", "system[0]", offset, kind)
    assert found.before in SYSTEM
    assert found.after in edited
    assert "system[0]" in found.advice


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("20261130T010203Z", "20261130T010204Z"),
        ("20261130-010203.123", "20261130-010203.977"),
        ("20261130010203", "20261130020203"),
        ("20261130", "20261201"),
        ("2026-W48", "2026-W49"),
        ("2026W481", "2026W492"),
        ("Q3 2026", "Q4 2026"),
        ("Nov 2026", "Dec 2026"),
        ("November 2026", "January 2027"),
        ("2026年11月30日", "2026年12月1日"),
        ("2026年11月30日 09:15", "2026年11月30日 09:16"),
        ("2026년 11월 30일", "2026년 12월 1일"),
        ("30. November 2026", "1. Dezember 2026"),
        ("30 de noviembre de 2026", "1 de diciembre de 2026"),
        ("30 novembre 2026", "1er décembre 2026"),
        ("30 ноября 2026", "1 декабря 2026"),
        ("Januar 2026", "Februar 2026"),
        ("septembre 2026", "octobre 2026"),
        ("novembro de 2026", "janeiro de 2027"),
        ("30Nov 2026", "30Dec 2026"),
        ("30 NOV 2026", "1 DEC 2026"),
        ("30. marraskuuta 2026", "1. joulukuuta 2026"),
        ("30 listopada 2026", "1 grudnia 2026"),
        ("30 d’abril de 2026", "1 de maig de 2026"),
        ("30 Νοεμβρίου 2026", "1 Δεκεμβρίου 2026"),
        ("30 नवंबर 2026", "1 दिसंबर 2026"),
        ("30 نوفمبر 2026", "1 ديسمبر 2026"),
        ("Thurs", "Friday"),
    ],
)
def test_b14_a_date_is_one_in_every_form(old: str, new: str) -> None:
    for before, after in (("Today is ", ". Answer briefly."), ("<", ">"), ("", " is the date")):
        text = f"{before}{old}{after}"
        found = parted(swap("system", text, f"{before}{new}{after}"), {**BODY, "system": text})
        assert (found.segment, found.kind) == ("system[0]", "datetime")


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("order 20269999", "order 20269998", "identifier"),  # no month
        ("part 120261130", "part 120261131", "identifier"),  # in a longer number
        ("item 12 of 40", "item 13 of 40", "identifier"),
        ("12 red apples", "12 green apples", "edited"),
        ("5 apples 2001", "6 pears 2001", "edited"),  # no months
        ("12 items 2024", "13 items 2024", "identifier"),
        ("Octopus 2024", "Octagon 2024", "edited"),
        ("Money", "Monkeys", "edited"),
    ],
)
def test_b14_a_number_is_no_date(old: str, new: str, kind: str) -> None:
    found = parted(swap("system", old, new), {**BODY, "system": f"See {old}."})
    assert found.kind == kind


def test_milliseconds_to_the_character() -> None:
    body = {**BODY, "system": "x" * 4999 + " 1764412530123 " + "y" * 5000}
    found = compare(lambda b: b.update(system=b["system"].replace("1764412530123", "1764412530456")), body)
    assert found.divergence is not None
    assert (found.divergence.offset_chars, found.divergence.kind) == (5010, "datetime")
    assert found.lost_tokens > 1200
    assert found.shared_tokens > 1200


def test_tools_in_another_order() -> None:
    found = parted(lambda body: body["tools"].reverse())
    assert (found.segment, found.kind) == ("tools[0]", "reordered")
    assert "order" in found.advice


def test_keys_in_another_order() -> None:
    def change(body: dict[str, Any]) -> None:
        schema = body["tools"][1]["input_schema"]
        body["tools"][1]["input_schema"] = dict(reversed(schema.items()))

    found = parted(change)
    assert (found.segment, found.kind) == ("tools[1]", "reordered")


def test_an_edited_description_is_named_by_its_path() -> None:
    """A warning that is written into a tool's description: the whole prompt behind it is read anew."""
    found = parted(lambda body: body["tools"][2].update(description="It can search. Careful: slow today!"))
    assert (found.segment, found.path, found.kind) == ("tools[2]", "tools[2].description", "edited")
    canonical = '{"description":"It can search.'
    assert found.offset_chars == len(canonical)
    assert "add" in found.advice or "end" in found.advice


@pytest.mark.parametrize(
    ("change", "segment", "kind"),
    [
        (lambda body: body["tools"].insert(1, {"name": "new", "input_schema": {}}), "tools[1]", "inserted"),
        (lambda body: body["tools"].append({"name": "new", "input_schema": {}}), "tools[3]", "inserted"),
        (lambda body: body["tools"].pop(0), "tools[0]", "removed"),
        (lambda body: body["tools"].pop(), "tools[2]", "removed"),
        (lambda body: body["messages"].pop(), "messages[4][0]", "removed"),
        (lambda body: body["messages"].pop(0), "messages[0][0]", "removed"),
        (lambda body: body["messages"].insert(0, {"role": "user", "content": "Before."}), "messages[0][0]", "inserted"),
        (lambda body: body.pop("system"), "system[0]", "removed"),
        (lambda body: body.update(system=[{"type": "text", "text": t} for t in (SYSTEM, "More.")]), "system[1]", "inserted"),
    ],
)
def test_what_came_and_what_went(change: Callable[[dict[str, Any]], Any], segment: str, kind: str) -> None:
    found = parted(change)
    assert (found.segment, found.kind) == (segment, kind)


def test_a_trimmed_tool_result() -> None:
    def change(body: dict[str, Any]) -> None:
        body["messages"][2]["content"][0]["content"] = "alpha beta"

    found = parted(change)
    assert (found.segment, found.offset_chars, found.kind) == ("messages[2][0]", len("alpha beta"), "edited")


def test_an_edited_argument_of_a_call() -> None:
    def change(body: dict[str, Any]) -> None:
        body["messages"][1]["content"][0]["input"] = {"path": "b.txt"}

    found = parted(change)
    assert (found.segment, found.path, found.kind) == ("messages[1][0]", "messages[1][0].arguments", "edited")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda body: body.update(model="claude-opus-5-5"), "params.model"),
        (lambda body: body.update(thinking={"type": "enabled", "budget_tokens": 2048}), "params.reasoning"),
        (lambda body: body.update(tool_choice={"type": "any"}), "params.tool_choice"),
    ],
)
def test_parameters_that_are_part_of_the_key(change: Callable[[dict[str, Any]], Any], path: str) -> None:
    found = compare(change)
    assert found.divergence is not None
    assert (found.divergence.segment, found.divergence.kind) == ("params", "params_changed")
    assert found.divergence.path.startswith(path)
    assert found.shared_tokens == 0
    assert found.lost_tokens > 50


def test_limits_of_the_output_are_not() -> None:
    assert compare(lambda body: body.update(max_tokens=5, stop_sequences=["x"])).divergence is None


def test_the_form_is_fixed() -> None:
    told = compare(swap("system", "careful", "careless")).to_dict()
    assert set(told) == {"divergence", "shared_tokens", "lost_tokens", "vendor_reason"}
    assert set(told["divergence"]) == {"segment", "path", "offset_chars", "kind", "before", "after"}
    assert json.loads(json.dumps(told)) == told


@pytest.mark.shared
@pytest.mark.parametrize("turn", ["01", "05", "10", "20", "29"])
def test_real_requests_edited(shared_data: Path, turn: str) -> None:
    body = json.loads(gzip.decompress((shared_data / f"agents/agentic_code_{turn}.json.gz").read_bytes()))
    body = {key: value for key, value in body.items() if key in ("messages", "tools", "model")}

    def clock(edited: dict[str, Any], text: str = "12:34:56") -> None:
        first = edited["messages"][0]
        assert first["role"] == "system"
        first["content"] = first["content"][:200] + f" It is {text}. " + first["content"][200:]

    timed = copy.deepcopy(body)
    clock(timed)
    found = parted(
        lambda b: b["messages"][0].update(content=b["messages"][0]["content"].replace("12:34:56", "12:35:02")), timed
    )
    assert (found.segment, found.offset_chars, found.kind) == ("system[0]", 200 + len(" It is 12:3"), "datetime")

    assert parted(lambda b: b["tools"].insert(0, b["tools"].pop()), body).kind == "reordered"
    moved = parted(lambda b: b["tools"].append(b["tools"].pop(3)), body)
    assert (moved.segment, moved.kind) == ("tools[3]", "reordered")
    effort = parted(lambda b: b.update(reasoning_effort="high"), body)
    assert (effort.segment, effort.kind) == ("params", "params_changed")

    results = [i for i, message in enumerate(body["messages"]) if message["role"] == "tool" and len(message["content"]) > 40]
    for i in results[-1:]:
        before = body["messages"][i]["content"]

        def trim(b: dict[str, Any], i: int = i, before: str = before) -> None:
            b["messages"][i]["content"] = before[:20] + "[cut]"

        found = parted(trim, body)
        system = sum(message["role"] == "system" for message in body["messages"][:i])
        assert found.segment == f"messages[{i - system}][0]"
        assert found.offset_chars == 20 + (before[20] == "[")
        assert found.kind == "edited"
