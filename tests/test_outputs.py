"""Output lengths by class of traffic: borrowed until known, bounded in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from cachespec.decision import Ask
from cachespec.outputs import _CLASSES, OutputLengths

ASK = Ask(
    alias="assistant",
    tenant="acme",
    session_id=None,
    tags=("b", "a"),
    tools=False,
    max_output_tokens=None,
    timeout_s=None,
    now=0.0,
)


def saved(lengths: OutputLengths) -> Any:
    return json.loads("".join(lengths.pieces()))


def test_nothing_is_known_before_anything_came() -> None:
    assert OutputLengths().expected(ASK) is None


def test_classes_differ_and_borrow_from_the_one_above() -> None:
    lengths = OutputLengths()
    chat, agent = ASK, replace(ASK, tools=True, tenant="other", tags=())
    for _ in range(50):
        lengths.learn(chat, 1_000)
        lengths.learn(agent, 100)
    known_chat, known_agent = lengths.expected(chat), lengths.expected(agent)
    assert known_chat is not None
    assert known_agent is not None
    assert 900 < known_chat <= 1_000
    assert 100 <= known_agent < 170
    new_tenant = lengths.expected(replace(agent, tenant="new"))
    assert new_tenant is not None
    assert new_tenant < 250  # as others with tools
    same_tags = lengths.expected(replace(chat, tags=("a", "b", "a")))
    assert same_tags == known_chat  # neither order nor repetition of tags counts
    assert lengths.expected(replace(ASK, alias="unheard")) is None


def test_old_answers_lose_their_weight() -> None:
    lengths = OutputLengths()
    for _ in range(500):
        lengths.learn(ASK, 2_000)
    for _ in range(200):
        lengths.learn(ASK, 100)
    known = lengths.expected(ASK)
    assert known is not None
    assert known < 300


def test_memory_is_bounded_by_forgetting_the_longest_unused() -> None:
    lengths = OutputLengths()
    lengths.learn(ASK, 10)
    for i in range(_CLASSES):
        lengths.learn(replace(ASK, tenant=f"t{i}", tags=()), 10)
        if i % 100 == 0:
            lengths.learn(ASK, 10)
    assert len(saved(lengths)) == _CLASSES
    assert lengths.expected(ASK) == 10


def test_what_was_learned_survives_a_restart_and_garbage_does_not() -> None:
    lengths = OutputLengths()
    lengths.learn(ASK, 10)
    lengths.learn(replace(ASK, tools=True), 500)
    kept = saved(lengths)
    assert OutputLengths.from_list(kept).expected(ASK) == lengths.expected(ASK)
    rows: list[Any] = [None, {}, 3, [3], [[]], [["a", "x", 1]], [["a", 1, float("nan")]], [[1, 2, 3]], [["a", -1, 5]]]
    garbage: list[Any] = [*rows, *([row, row] for row in rows)]
    for bad in garbage:
        assert OutputLengths.from_list(bad).expected(ASK) is None


def test_a_length_that_no_answer_has_teaches_nothing() -> None:
    lengths = OutputLengths()
    lengths.learn(ASK, 20)
    for absurd in (10**12, 2**53 - 1, -1):
        lengths.learn(ASK, absurd)
    assert lengths.expected(ASK) == 20
    assert OutputLengths.from_list([["assistant", 1.0, 9e8]]).expected(ASK) is None
