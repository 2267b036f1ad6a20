"""Every set of marks that goes out is legal, whatever the caller marked and the policy chose."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cachespec.cache_marks import Places, Spot, legal_marks, reads
from cachespec.cache_terms import prompt_cache
from cachespec.caching import CacheTerms, Prefix, Warm

SECONDS = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0}


def terms_of(model: str) -> CacheTerms:
    cache = prompt_cache("anthropic" if model.startswith("claude") else "openai", "messages", model)
    assert cache is not None
    return cache.terms


CLAUDE, GPT = terms_of("claude-sonnet-5"), terms_of("gpt-5.6-sol")


def places(count: int, *, step: int = 3, readable: int | None = None, anchor: int | None = None, ttl: str = "5m") -> Places:
    """So many places, 400 tokens and `step` blocks apart; the one at `readable` is warm."""
    prefixes = []
    for i in range(count):
        warm = Warm(ttl=ttl, ready_at=0.0, expires_at=9e9) if i == readable else None
        key, tokens = i.to_bytes(16, "big"), 400 * (i + 1)
        prefixes.append(Prefix(key=key, at=f"messages[{i}][0]", kind="turn", tokens=tokens, position=step * (i + 1), warm=warm))
    return Places(prefixes, [2 * i + 1 for i in range(count)], readable, anchor)


@st.composite
def cases(draw: st.DrawFn) -> tuple[CacheTerms, list[Spot], list[Spot], Places, int]:
    terms = draw(st.sampled_from([CLAUDE, GPT]))
    names = [lifetime.name for lifetime in terms.lifetimes]
    count = draw(st.integers(1, 14))
    readable = draw(st.none() | st.integers(0, count - 1))
    anchor = draw(st.none() | st.integers(0, count - 1))
    where = places(count, step=draw(st.integers(0, 9)), readable=readable, anchor=anchor, ttl=draw(st.sampled_from(names)))
    theirs = sorted(draw(st.sets(st.integers(0, 2 * count), max_size=4)))
    lifetimes = sorted((draw(st.sampled_from(names)) for _ in theirs), key=lambda ttl: -SECONDS[ttl])
    callers = [
        Spot(i, f"c{i}", bytes(16), 200 * i, i, ttl, None, callers=True) for i, ttl in zip(theirs, lifetimes, strict=True)
    ]
    chosen = [where.spot(i, draw(st.sampled_from(names))) for i in sorted(draw(st.sets(st.integers(0, count - 1), max_size=6)))]
    return terms, callers, chosen, where, draw(st.integers(0, 1))


@given(cases())
@settings(max_examples=600, deadline=None)
def test_every_set_is_legal(case: tuple[CacheTerms, list[Spot], list[Spot], Places, int]) -> None:
    terms, callers, chosen, where, taken = case
    spots, _ = legal_marks(callers, chosen, where, terms, taken=taken)
    assert [spot for spot in spots if spot.callers] == callers  # law: none moved, dropped or changed
    mine = [spot for spot in spots if not spot.callers]
    assert len(mine) <= max(terms.slots - taken - len(callers), 0)
    assert all(a.index < b.index for a, b in pairwise(spots))
    assert all(SECONDS[a.ttl] >= SECONDS[b.ttl] for a, b in pairwise(spots))
    assert all(spot.tokens >= terms.minimum for spot in mine)
    if not chosen:
        assert mine == []
    index = None if where.readable is None else where.at[where.readable]
    position = 0 if where.readable is None else where.prefixes[where.readable].position
    if (
        index is not None
        and any(spot.index >= index for spot in mine)
        and where.prefixes[where.readable or 0].tokens >= terms.minimum
    ):
        assert any(reads(spot, index, position, terms) for spot in spots)


def test_the_newest_and_the_first_are_kept() -> None:
    where = places(12)
    spots, reasons = legal_marks([], [where.spot(i, "5m") for i in range(3, 10)], where, CLAUDE)
    assert [spot.place for spot in spots] == [3, 7, 8, 9]
    assert [reason.code for reason in reasons] == ["mark_limit"]


def test_without_a_slot_there_is_no_mark() -> None:
    where = places(12)
    callers = [Spot(i, f"c{i}", bytes(16), 5000, i, "5m", None, callers=True) for i in range(4)]
    spots, reasons = legal_marks(callers, [where.spot(9, "5m")], where, CLAUDE)
    assert spots == callers
    assert [reason.code for reason in reasons] == ["mark_limit"]


def test_an_anchor_is_added_where_a_slot_is_free_since_it_costs_nothing() -> None:
    for readable in (None, 8):
        where = places(12, anchor=3, readable=readable)
        assert [spot.place for spot in legal_marks([], [where.spot(9, "5m")], where, CLAUDE)[0]] == [3, 9]
        before = [where.spot(2, "5m"), where.spot(9, "5m")]
        assert [spot.place for spot in legal_marks([], before, where, CLAUDE)[0]] == [2, 9]
        full = [where.spot(i, "5m") for i in (6, 7, 8, 9)]
        assert [spot.place for spot in legal_marks([], full, where, CLAUDE)[0]] == [6, 7, 8, 9]
        assert legal_marks([], [], where, CLAUDE)[0] == []
