"""The search for the invariant width, on runtimes that round in ways known beforehand, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.scripted import ScriptedRuntime

from cachespec.engine.costs import CalibrationStore
from cachespec.engine.invariance import invariant_width, kept_width, search
from cachespec.engine.runtimes.base import Span

Rounds = Callable[[Sequence[Span]], bool]


class RoundingRuntime(ScriptedRuntime):
    """Rows are off by a bit in calls for which `rounds` says so. `facts` are as given."""

    def __init__(self, rounds: Rounds, *, told: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__(**{"width": 128, "context": 300, "sequences": 4, **more})
        self.rounds, self.told = rounds, told or {}

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        off = 2.0**-20 if self.rounds(self.spans[-1]) else 0.0
        found: NDArray[np.float32] = super().rows(rows) + np.float32(off)
        return found

    def facts(self) -> Mapping[str, Any]:
        return self.told


def total(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def wider_than(width: int) -> Rounds:
    return lambda spans: total(spans) > width


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(("width", "found"), [(1, 1), (2, 2), (7, 5), (63, 63), (64, 64), (100, 65), (127, 127), (128, 128)])
def test_the_widest_verified_size_is_found(width: int, found: int, forgets: bool) -> None:
    runtime = RoundingRuntime(wider_than(width), forgets=forgets)
    assert search(runtime) == (found, True)
    assert runtime.held == []


def test_all_of_an_odd_width_is_found_too() -> None:
    assert invariant_width(RoundingRuntime(wider_than(1000), width=100)) == 100


def test_a_narrow_call_that_rounds_ends_the_search_whatever_wider_ones_do() -> None:
    assert search(RoundingRuntime(lambda spans: total(spans) in (2, 3))) == (1, True)
    assert search(RoundingRuntime(lambda spans: total(spans) == 9)) == (8, True)


def test_far_positions_count() -> None:
    """A call that is right at the beginning of a sequence and wrong farther on, as attention over many keys may be."""
    runtime = RoundingRuntime(lambda spans: total(spans) > 1 and any(s.start + len(s.tokens) > 70 for s in spans), context=200)
    assert search(runtime) == (33, True)


def reaches(spans: Sequence[Span]) -> int:
    return max(span.start + len(span.tokens) for span in spans)


FAR: dict[str, tuple[Rounds, int, int]] = {  # what rounds behind many tokens, and the least and the most that may be found
    "all but lone rows": (lambda spans: total(spans) > 1 and reaches(spans) > 256, 1, 1),
    "lone rows": (lambda spans: total(spans) == 1 and reaches(spans) > 256, 1, 1),
    "lone rows, farther on": (lambda spans: total(spans) == 1 and reaches(spans) > 512, 1, 1),
    "company": (lambda spans: len(spans) > 1 and reaches(spans) > 512, 1, 1),
    "two at once": (lambda spans: total(spans) == 2 and reaches(spans) > 256, 1, 1),
    "two in company": (lambda spans: len(spans) == 2 and reaches(spans) > 256, 1, 1),
    "more than two": (lambda spans: total(spans) > 2 and reaches(spans) > 512, 2, 2),
    "wide calls": (lambda spans: total(spans) > 20 and reaches(spans) > 512, 5, 20),
    "wide calls in company": (lambda spans: len(spans) > 1 and total(spans) > 20 and reaches(spans) > 256, 5, 20),
    "nothing": (lambda spans: False, 128, 128),
}


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("name", list(FAR))
def test_what_holds_near_the_beginning_must_hold_behind_many_tokens(name: str, forgets: bool) -> None:
    rounds, least, most = FAR[name]
    runtime = RoundingRuntime(rounds, context=600, forgets=forgets)
    found, complete = search(runtime)
    assert complete
    assert least <= found <= most
    assert runtime.held == []
    assert search(runtime, known=33)[0] <= most, "what an earlier search believed is given up"


@pytest.mark.parametrize("forgets", [False, True])
def test_what_an_edge_refuted_is_given_up_even_when_time_is_over(forgets: bool) -> None:
    runtime = RoundingRuntime(lambda spans: total(spans) > 20 and reaches(spans) > 256, context=300, forgets=forgets, width=33)
    for seconds in range(100):
        found, complete = search(runtime, known=33, seconds=seconds, clock=Clock())
        assert (found <= 20) == complete, seconds


def test_the_end_of_the_context_may_be_right_behind_an_edge() -> None:
    for context in (256, 257, 258, 513):
        assert search(RoundingRuntime(lambda spans: False, context=context)) == (128, True)
    assert search(RoundingRuntime(lambda spans: total(spans) > 1 and reaches(spans) > 256, context=257)) == (1, True)


def test_company_counts() -> None:
    crowded = RoundingRuntime(lambda spans: len(spans) > 1 and total(spans) > 20)
    found, complete = search(crowded)
    assert complete
    assert 8 <= found <= 20
    assert search(RoundingRuntime(lambda spans: len(spans) > 1)) == (1, True)
    alone = RoundingRuntime(lambda spans: len(spans) > 1, sequences=1)
    assert search(alone) == (128, True)


class Clock:
    """A second passes with each look."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        self.at += 1
        return self.at


def test_a_search_that_time_ends_claims_what_it_verified_and_goes_on_from_there() -> None:
    width, starts = 1, 0
    runtime = RoundingRuntime(wider_than(100))
    complete = False
    while not complete:
        before, calls = width, len(runtime.calls)
        width, complete = search(runtime, known=width, seconds=60, clock=Clock())
        assert len(runtime.calls) - calls < 80
        assert width > before or complete
        starts += 1
    assert width == 65
    assert starts > 1


def test_no_time_at_all_is_no_claim() -> None:
    runtime = RoundingRuntime(wider_than(100))
    assert search(runtime, seconds=0, clock=Clock()) == (1, False)
    assert max(runtime.calls, default=0) <= 11


def test_a_search_without_time_for_any_edge_is_not_complete() -> None:
    """Later edges are tried as far as there is time."""
    runtime = RoundingRuntime(lambda spans: False, context=2000, width=8)
    assert search(runtime, seconds=60, clock=Clock()) == (8, False)
    assert search(runtime, seconds=60, known=8, clock=Clock()) == (8, False), "half of the time is for edges, at most"
    assert search(runtime, seconds=160, known=8, clock=Clock()) == (8, True)
    assert 300 < max(reaches(spans) for spans in runtime.spans) < 1000


def test_what_was_found_is_kept_for_the_same_settings(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    first = RoundingRuntime(wider_than(40), told={"threads": 1})
    assert kept_width(first, store) == 33
    again = RoundingRuntime(wider_than(40), told={"threads": 1})
    assert kept_width(again, store) == 33
    assert again.calls == []
    for told, more in (({"threads": 2}, {}), ({"threads": 1}, {"context": 301}), ({"threads": 1}, {"sequences": 3})):
        other = RoundingRuntime(wider_than(8), told=told, **more)
        assert kept_width(other, store) == 8
    assert kept_width(RoundingRuntime(wider_than(40), told={"threads": 1}), store) == 33


@pytest.mark.parametrize("value", [None, 0, -3, 129, 10**9, True, 33.0, "33", [33]])
def test_what_cannot_be_right_is_measured_anew(tmp_path: Path, value: Any) -> None:
    store = CalibrationStore(tmp_path)
    kept_width(RoundingRuntime(wider_than(40)), store)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"invariant_width": value}))
    assert kept_width(RoundingRuntime(wider_than(40)), store) == 33
    assert json.loads(file.read_text())["invariant_width"] == 33


def test_an_unfinished_search_is_taken_up_again(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    kept_width(RoundingRuntime(wider_than(40)), store)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"invariant_width": 8, "complete": False}))
    runtime = RoundingRuntime(wider_than(40))
    assert kept_width(runtime, store) == 33
    assert all(reaches(spans) > 256 for spans in runtime.spans if total(spans) == 2), "what is known is not tried again"
    assert json.loads(file.read_text())["complete"] is True


def test_a_search_that_gets_no_farther_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CalibrationStore(tmp_path)
    monkeypatch.setattr("cachespec.engine.invariance.search", lambda runtime, known: (max(known, 4), False))
    for complete in (False, True):
        assert kept_width(RoundingRuntime(wider_than(40)), store) == 4
        (file,) = tmp_path.iterdir()
        assert json.loads(file.read_text())["complete"] is complete


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kept_width(RoundingRuntime(wider_than(40)), CalibrationStore(tmp_path / "file")) == 33
