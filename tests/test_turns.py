"""How conversations go on: counted with those that are still open, by class, through a restart."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from cachespec.decision import Ask
from cachespec.turns import _CLASSES, BESIDE_S, IDLE_S, MOST, PRIOR, Turns

ASK = Ask(
    alias="main",
    tenant=None,
    session_id="s",
    tags=("chat",),
    tools=False,
    max_output_tokens=None,
    timeout_s=None,
    now=0.0,
)


def converse(
    turns: Turns, name: str, count: int, *, at: float = 0.0, gap: float = 10.0, grows: int = 100, tag: str = "chat"
) -> None:
    """A conversation of `count` requests, `gap` seconds apart."""
    for i in range(count):
        ask = replace(ASK, session_id=name, tags=(tag,), now=at + i * gap, previous_backend="a" if i else None)
        turns.learn(ask, backend="a", tokens=1_000 + i * grows)


def saved(turns: Turns) -> Any:
    return json.loads("".join(turns.pieces()))


def test_nothing_known_is_a_guess_for_a_session_and_nothing_without_one() -> None:
    turns = Turns()
    known = turns.outlook(ASK)
    assert (known.turns, known.growth, known.within(1.0)) == (PRIOR, None, 1.0)
    assert turns.outlook(replace(ASK, session_id=None)).turns == 0.0


def test_as_many_follow_as_went_on_for_each_that_ended() -> None:
    turns = Turns()
    for i in range(40):
        converse(turns, f"s{i}", 10, at=i * 10_000.0)
    expected = turns.outlook(replace(ASK, now=1e6)).turns
    assert expected == pytest.approx(9.0, rel=0.15)


def test_an_open_conversation_has_not_ended() -> None:
    """The first long conversation of a day does not look short because it is the only one."""
    turns = Turns()
    converse(turns, "long", 30)
    assert turns.outlook(ASK).turns > 25
    for i in range(20):
        converse(turns, f"other {i}", 1, at=301.0)
    turns.learn(replace(ASK, session_id="last", now=301.0 + IDLE_S), backend="a", tokens=10)
    assert turns.outlook(ASK).turns < 3.5  # twenty-one ended, twenty of them at once


def test_silence_ends_a_conversation_and_its_next_turn_puts_that_right() -> None:
    one, other = Turns(), Turns()
    converse(one, "s", 5, gap=10.0)
    converse(other, "s", 5, gap=2 * IDLE_S)
    assert one.outlook(ASK).turns == pytest.approx(other.outlook(ASK).turns)
    assert one.outlook(ASK).within(300.0) > 0.9
    assert other.outlook(ASK).within(300.0) < 0.6


def test_how_soon_turns_come_and_what_they_add() -> None:
    turns = Turns()
    for i in range(20):
        converse(turns, f"quick {i}", 8, at=i * 1e4, gap=20.0, grows=50, tag="quick")
        converse(turns, f"slow {i}", 8, at=i * 1e4, gap=500.0, grows=400, tag="slow")
    quick, slow = (turns.outlook(replace(ASK, tags=(tag,), now=1e6)) for tag in ("quick", "slow"))
    assert quick.growth == pytest.approx(50, rel=0.2)
    assert slow.growth == pytest.approx(400, rel=0.2)
    assert quick.within(60.0) == pytest.approx(1.0, abs=0.05)
    assert slow.within(60.0) == pytest.approx(0.0, abs=0.05)
    assert slow.within(3_600.0) == pytest.approx(1.0, abs=0.01)
    assert slow.within(math.inf) == 1.0
    chances = [slow.within(s) for s in (0.0, 10.0, 255.0, 300.0, 400.0, 500.0, 511.0, 1e5)]
    assert chances == sorted(chances)


def test_another_backends_count_is_no_growth() -> None:
    turns = Turns()
    turns.learn(ASK, backend="a", tokens=1_000)
    turns.learn(replace(ASK, previous_backend="a"), backend="b", tokens=9_000)
    turns.learn(replace(ASK, previous_backend="b"), backend="b", tokens=None)
    assert turns.outlook(ASK).growth is None
    turns.learn(replace(ASK, previous_backend="b"), backend="b", tokens=9_100)
    turns.learn(replace(ASK, previous_backend="b"), backend="b", tokens=9_150)
    assert turns.outlook(ASK).growth == 50


def test_a_name_used_again_is_another_conversation() -> None:
    turns = Turns()
    for i in range(30):
        turns.learn(replace(ASK, now=i * 2 * BESIDE_S), backend="a", tokens=10)
    assert turns.outlook(ASK).turns < 0.5


def test_a_fan_out_at_the_start_is_one_conversation() -> None:
    turns = Turns()
    for i in range(10):
        turns.learn(replace(ASK, now=i * 0.1), backend="a", tokens=10)
    for i in range(1, 6):
        turns.learn(replace(ASK, now=i * 10.0, previous_backend="a"), backend="a", tokens=10)
    assert turns.outlook(ASK).turns > 5


def test_requests_without_a_session_are_conversations_of_one() -> None:
    turns, single = Turns(), replace(ASK, session_id=None)
    for _ in range(30):
        turns.learn(single, backend="a", tokens=10)
    assert turns.outlook(single).turns == 0.0
    for _ in range(60):
        turns.learn(replace(single, previous_backend="a"), backend="a", tokens=10)
    assert 1.0 < turns.outlook(single).turns < 3.0


def test_memory_and_expectations_are_bounded() -> None:
    turns = Turns()
    for i in range(_CLASSES):
        turns.learn(replace(ASK, tenant=f"t{i}", tags=()), backend="a", tokens=10)
    assert len(saved(turns)) == _CLASSES
    converse(turns, "endless", 500)
    assert turns.outlook(ASK).turns == MOST


def test_a_restart_forgets_nothing_and_ends_what_was_open() -> None:
    turns = Turns()
    for i in range(10):
        converse(turns, f"s{i}", 6, at=i * 1_000.0)
    again = Turns.from_list(saved(turns))
    assert saved(again) == saved(turns)
    assert again.outlook(ASK).turns == pytest.approx(5.0, rel=0.3)
    assert again.outlook(ASK).growth == turns.outlook(ASK).growth
    again.learn(replace(ASK, session_id="s9", now=1e4, previous_backend="a"), backend="a", tokens=9)
    assert again.outlook(ASK).turns > turns.outlook(ASK).turns * 0.9


def test_garbage_is_left_aside() -> None:
    gaps = [0.0] * 16
    rows: list[Any] = [
        None,
        [["a"], 1.0, 1.0, 1.0, 1.0, gaps[:3]],
        [["a"], -1.0, 1.0, 1.0, 1.0, gaps],
        [["a"], float("nan"), 1.0, 1.0, 1.0, gaps],
        [["a"], 1.0, "1", 1.0, 1.0, gaps],
        [[1], 1.0, 1.0, 1.0, 1.0, gaps],
        [[], 1.0, 1.0, 1.0, 1.0, gaps],
        [["main"], 1e10, 1.0, 1.0, 1.0, gaps],
    ]
    every: list[Any] = [None, {}, 3, rows, *([row] for row in rows)]
    for bad in every:
        assert Turns.from_list(bad).outlook(ASK).turns == PRIOR


def test_a_growth_that_no_turn_has_teaches_nothing() -> None:
    turns = Turns()
    converse(turns, "s", 3)
    turns.learn(replace(ASK, now=30.0, previous_backend="a"), backend="a", tokens=10**12)
    assert turns.outlook(ASK).growth == 100
    rows = saved(turns)
    assert Turns.from_list([[*rows[0][:4], 9e8, rows[0][5]]]).outlook(ASK).growth is None
