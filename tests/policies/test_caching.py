"""Caching policies against a small plain vendor: what they mark, for how long, what they keep alive, and why."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachespec.caching import (
    CacheAsk,
    CachePlan,
    CacheTerms,
    Choice,
    Held,
    KeepAlive,
    Lifetime,
    Outcome,
    Prefix,
    PrefixKind,
    Warm,
)
from cachespec.decision import REASON_CODES
from cachespec.errors import ConfigError, InputError
from cachespec.plugins import create
from cachespec.policies._cache_value import Candidate, Covered, best_marks, keeping, reaching, thinned
from cachespec.policies.caching import Always, Caller, ExpectedCost, LastMessage, Off
from cachespec.reuse import Outlook

M5, H1 = Lifetime(name="5m", seconds=300.0, write=1.25), Lifetime(name="1h", seconds=3600.0, write=2.0)
CLAUDE = CacheTerms(lifetimes=(M5, H1), read=0.1, lookback=20, minimum=1024)
PLAIN = CacheTerms(lifetimes=(M5, H1), read=0.1)
GPT = CacheTerms(
    lifetimes=(Lifetime(name="30m", seconds=1800.0, write=1.25),), read=0.1, lookback=1, implicit="30m", opt_out=True
)
HEAD = b"cachespec expected-cost 1 "
FREE = CacheTerms(lifetimes=(Lifetime(name="24h", seconds=86_400.0, write=1.0),), read=0.1)


def codes(plan: CachePlan) -> list[str]:
    return [reason.code for reason in plan.reasons]


def prefixes(keys: Sequence[Hashable], tokens: Sequence[int], system: int = 0) -> tuple[Prefix, ...]:
    kinds: list[PrefixKind] = ["system" if i < system else "turn" for i in range(len(keys))]
    kinds[-1] = "end"
    return tuple(
        Prefix(key=key, at=f"at[{i}]", kind=kind, tokens=count, position=i + 1)
        for i, (key, kind, count) in enumerate(zip(keys, kinds, tokens, strict=True))
    )


@dataclass
class Vendor:
    """What a policy's requests cost with a vendor that keeps entries at marks. Also the clock, and what was learned."""

    policy: ExpectedCost
    terms: CacheTerms = PLAIN
    now: float = 1_000_000.0
    entries: dict[Hashable, tuple[str, float, float]] = field(default_factory=dict)
    paid: float = 0.0
    asks: list[tuple[CacheAsk, CachePlan]] = field(default_factory=list)
    forgets: bool = False
    """Nothing is ever read, whatever was written."""

    def ask(self, places: tuple[Prefix, ...], session: str | None = None, types: tuple[str, ...] = ("text",)) -> CacheAsk:
        shown = []
        for prefix in places:
            entry = self.entries.get(prefix.key)
            if entry is not None and self.now < entry[2]:
                prefix = replace(prefix, warm=Warm(ttl=entry[0], ready_at=entry[1], expires_at=entry[2]))
            shown.append(prefix)
        total = places[-1].tokens
        return CacheAsk(
            now=self.now, prefixes=tuple(shown), input_tokens=total, terms=self.terms, session=session, input_types=types
        )

    def send(
        self, places: tuple[Prefix, ...], session: str | None = None, *, stop: str = "stop", types: tuple[str, ...] = ("text",)
    ) -> CachePlan:
        """One request that takes a second, and is legal."""
        ask = self.ask(places, session, types)
        plan = self.policy.plan(ask)
        legal(ask, plan)
        self.policy.sent(ask, plan)
        read = self._answer(ask, plan)
        self.asks.append((ask, plan))
        self.policy.ended(ask, Outcome(ended_at=self.now + 1, stop=stop, output_tokens=10, read=read))
        return plan

    def _answer(self, ask: CacheAsk, plan: CachePlan) -> int:
        seconds = {lifetime.name: lifetime for lifetime in self.terms.lifetimes}
        last = plan.marks[-1].index if plan.marks else -1
        live = [p for p in ask.prefixes[: last + 1] if p.warm is not None and p.warm.ready_at <= self.now]
        read = live[-1].tokens if live else 0
        for prefix in live:
            ttl, ready, _ = self.entries[prefix.key]
            self.entries[prefix.key] = ttl, ready, self.now + seconds[ttl].seconds
        at = read
        self.paid += self.terms.read * read
        for mark in plan.marks:
            prefix = ask.prefixes[mark.index]
            if prefix.tokens > at:
                self.paid += seconds[mark.ttl].write * (prefix.tokens - at)
                at = prefix.tokens
                if not self.forgets:
                    self.entries[prefix.key] = mark.ttl, self.now + 2, self.now + seconds[mark.ttl].seconds
        self.paid += ask.input_tokens - at
        return read

    def held(self, pings: int = 0) -> KeepAlive | None:
        """What the policy wants after the latest request's end."""
        ask, _ = self.asks[-1]
        for index in range(len(ask.prefixes) - 1, -1, -1):
            entry = self.entries.get(ask.prefixes[index].key)
            if entry is not None and self.now < entry[2]:
                warm = Warm(ttl=entry[0], ready_at=entry[1], expires_at=entry[2])
                outcome = Outcome(ended_at=self.now + 1)
                return self.policy.held(Held(ask=ask, outcome=outcome, index=index, warm=warm, pings=pings), self.now + 1)
        return None


def legal(ask: CacheAsk, plan: CachePlan) -> None:
    """What holds for every plan."""
    seconds = {lifetime.name: lifetime.seconds for lifetime in ask.terms.lifetimes}
    indexes = [mark.index for mark in plan.marks]
    lengths = [seconds[mark.ttl] for mark in plan.marks]
    assert indexes == sorted(set(indexes))
    assert lengths == sorted(lengths, reverse=True)
    assert len(plan.marks) <= ask.terms.slots
    assert all(ask.prefixes[index].tokens >= ask.terms.minimum for index in indexes)
    assert all(reason.code in REASON_CODES for reason in plan.reasons)
    assert not (plan.opt_out and plan.marks)
    warm = [i for i, p in enumerate(ask.prefixes) if p.warm is not None and p.warm.ready_at <= ask.now < p.warm.expires_at]
    if not warm:
        return
    deepest = ask.prefixes[warm[-1]]
    for mark in plan.marks:
        if mark.index <= warm[-1]:  # nothing is asked for that an entry there does not have: no upgrade is sneaked in
            here = ask.prefixes[mark.index].warm
            assert here is not None
            assert mark.ttl == here.ttl
    reach = ask.terms.lookback
    distances = [ask.prefixes[i].position - deepest.position for i in indexes]
    assert any(d == 0 or (d > 0 and (reach is None or d < reach)) for d in distances), "what is cached is not read"


def chat(session: str, turns: int, step: int = 400, *, system: int = 5000) -> Iterator[tuple[Prefix, ...]]:
    """The prompts of a session: a shared system prompt, then two pieces more with each turn."""
    for turn in range(1, turns + 1):
        keys: list[Hashable] = ["system", *((session, i) for i in range(2 * turn))]
        yield prefixes(keys, [system + step * i for i in range(2 * turn + 1)], system=1)


# What marks are worth.


def test_one_mark_pays_from_the_classic_break_even_on() -> None:
    def pays(lifetime: Lifetime, chance: float) -> bool:
        return bool(
            best_marks([Candidate(0, 1000, [chance])], [], [lifetime], read_tokens=0, read=0.1, trust=1.0, patience=1.0)
        )

    assert not pays(M5, 0.25 / 0.9)
    assert pays(M5, 0.278)
    assert not pays(H1, 1.0)  # one certain re-read is too few: 1.11 are needed
    assert pays(replace(H1, write=1.89), 1.0)
    assert pays(replace(M5, write=1.0), 0.0)  # a free write is taken whatever is expected


def _worth(
    marks: Sequence[tuple[Candidate, int]], covered: Sequence[Covered], lifetimes: Sequence[Lifetime], read_tokens: int
) -> float:
    """What `best_marks` says it maximises, mark by mark."""
    value, at, kept = 0.0, read_tokens, max(read_tokens, sum(part.tokens for part in covered))
    for position, (candidate, number) in enumerate(marks):
        gaps = min(3.0, 1 / max(1 - candidate.chances[-1], 1e-9))
        chances = candidate.chances
        saved = (chances[0] + gaps * (chances[number] - chances[0])) * 0.9
        value += max(candidate.tokens - max(at, kept), 0) * saved - (candidate.tokens - at) * (lifetimes[number].write - 1)
        at = candidate.tokens
        if position == 0:
            longer = [part for part in covered if part.lifetime < number]
            value += sum(0.8 * 0.9 * gaps * part.tokens * (chances[number] - chances[part.lifetime]) for part in longer)
    return value


@settings(deadline=None)
@given(st.data())
def test_the_best_set_is_found(data: st.DataObject) -> None:
    lifetimes = [M5, replace(H1, name="30m", seconds=1800, write=1.5), H1][: data.draw(st.integers(1, 3))]
    count = data.draw(st.integers(1, 4))
    chance = st.lists(st.floats(0, 1), min_size=len(lifetimes), max_size=len(lifetimes)).map(sorted)
    tokens = sorted(data.draw(st.sets(st.integers(101, 9000), min_size=count, max_size=count)))
    candidates = [Candidate(i, n, data.draw(chance)) for i, n in enumerate(tokens)]
    covered = data.draw(st.sampled_from([[], [Covered(100, 0)], [Covered(1000, 0)]]))
    found = best_marks(candidates, covered, lifetimes, read_tokens=100, read=0.1, trust=0.8, patience=3.0)
    best = 0.0
    for numbers in product(range(-1, len(lifetimes)), repeat=count):
        marks = [(c, n) for c, n in zip(candidates, numbers, strict=True) if n >= 0]
        order = [n for _, n in marks]
        if order == sorted(order, reverse=True):
            best = max(best, _worth(marks, covered, lifetimes, 100))
    assert _worth(found, covered, lifetimes, 100) == pytest.approx(best, abs=1e-6)


def test_more_marks_than_slots_lose_those_that_matter_least() -> None:
    chances = {1000: 0.9, 1100: 0.5, 5000: 0.5, 9000: 0.48, 9100: 0.3}
    marks = [(Candidate(i, tokens, [chance]), 0) for i, (tokens, chance) in enumerate(chances.items())]
    assert [c.tokens for c, _ in thinned(marks, 5, 0)] == [1000, 1100, 5000, 9000, 9100]
    assert [c.tokens for c, _ in thinned(marks, 4, 0)] == [1000, 5000, 9000, 9100]  # whoever shares 1100 shares 5000
    assert [c.tokens for c, _ in thinned(marks, 3, 0)] == [1000, 9000, 9100]
    assert [c.tokens for c, _ in thinned(marks, 1, 0)] == [9100]
    assert thinned(marks, 0, 0) == []


def test_keeping_alive_goes_on_as_long_as_it_pays() -> None:
    # Nothing for 300 s, then half of what is left within each 5 minutes.
    outlook = Outlook([0, 0, 0, 0, 0.5, 0.75])
    one = keeping(outlook, since=300, seconds=300, cost=10, saved=100, most=1)
    assert one == pytest.approx(0.5 * 100 - 10)
    two = keeping(outlook, since=300, seconds=300, cost=10, saved=100, most=2)
    half = outlook.within(300, after=600)
    assert two == pytest.approx(50 + 0.5 * (half * 100 - 10) - 10)
    assert keeping(outlook, since=300, seconds=300, cost=90, saved=100, most=5) == 0


def test_the_entry_is_reached_by_one_mark_more_or_by_a_lifetime_less() -> None:
    places = prefixes(list(range(60)), [1000 * (i + 1) for i in range(60)])
    warm = Warm(ttl="5m", ready_at=0.0, expires_at=10.0)
    places = (*places[:10], replace(places[10], warm=warm), *places[11:])
    near = [Choice(index=25, ttl="1h")]
    assert reaching(near, places, 10, CLAUDE) == near
    far = reaching([Choice(index=59, ttl="5m")], places, 10, CLAUDE)
    assert [(mark.index, mark.ttl) for mark in far] == [(10, "5m"), (59, "5m")]
    longer = reaching([Choice(index=59, ttl="1h")], places, 10, CLAUDE)
    assert [(mark.index, mark.ttl) for mark in longer] == [(29, "1h"), (59, "1h")]
    exact = reaching([Choice(index=59, ttl="1h")], places, 10, replace(CLAUDE, lookback=1))
    assert [(mark.index, mark.ttl) for mark in exact] == [(10, "5m"), (59, "5m")]


# What is marked.


def test_a_cold_prompt_is_marked_and_says_why() -> None:
    vendor = Vendor(ExpectedCost())
    (first,) = chat("a", 1)
    plan = vendor.send(first, "a")
    assert plan.marks[-1].index == len(first) - 1
    assert codes(plan) == ["expected_reuse"]
    vendor.now += 30
    *_, second = chat("a", 2)
    plan = vendor.send(second, "a")
    assert codes(plan) == ["warm_prefix", "expected_reuse"]
    assert "5800 tokens" in plan.reasons[0].detail


def test_planning_learns_nothing() -> None:
    policy = ExpectedCost()
    vendor = Vendor(policy)
    for prompt in chat("a", 3):
        vendor.send(prompt, "a")
        vendor.now += 10
    before = policy.dump()
    ask = vendor.ask(next(chat("b", 1)), "b")
    plans = {policy.plan(replace(ask, now=ask.now + i)) for i in range(50)}
    assert len(plans) == 1
    assert policy.dump() == before


def test_one_shot_prompts_stop_paying_for_writes() -> None:
    vendor = Vendor(ExpectedCost())
    for i in range(300):
        plan = vendor.send(prefixes([("job", i)], [8000]), types=("document",))
        vendor.now += 20
    assert plan.marks == ()
    assert codes(plan) == ["no_expected_reuse"]
    assert "pays from 0.28 on" in plan.reasons[0].detail


def test_where_writing_is_free_everything_is_marked() -> None:
    vendor = Vendor(ExpectedCost(), FREE)
    for i in range(100):
        plan = vendor.send(prefixes([("job", i)], [8000]))
        vendor.now += 20
        assert len(plan.marks) == 1


def test_a_model_that_writes_by_itself_is_told_not_to() -> None:
    vendor = Vendor(ExpectedCost(), GPT)
    for i in range(300):
        plan = vendor.send(prefixes([("job", i)], [8000]))
        vendor.now += 60
    assert plan.opt_out
    assert plan.marks == ()
    chatting = Vendor(ExpectedCost(), GPT)
    for prompt in chat("a", 20):
        plan = chatting.send(prompt, "a")
        chatting.now += 30
        assert not plan.opt_out
        assert plan.marks[-1].index == len(prompt) - 1


def test_a_shared_start_of_one_shot_prompts_is_still_marked() -> None:
    vendor = Vendor(ExpectedCost())
    for i in range(300):
        plan = vendor.send(prefixes(["manual", ("question", i)], [30_000, 30_200], system=1))
        vendor.now += 20
    assert [mark.index for mark in plan.marks] == [0]  # it is read; the question is not written
    assert vendor.paid < 300 * 30_200 * 0.13


def test_gaps_beyond_the_short_lifetime_are_bridged_by_the_long_one() -> None:
    vendor = Vendor(ExpectedCost(keep_alives=0))
    for number in range(12):
        for prompt in chat(f"s{number}", 8):
            plan = vendor.send(prompt, f"s{number}")
            vendor.now += 400
        vendor.now += 7200
    assert plan.marks[-1].ttl == "1h"
    assert vendor.asks[-1][0].prefixes[-3].warm is not None


def test_fast_sessions_are_kept_for_the_short_lifetime() -> None:
    vendor = Vendor(ExpectedCost())
    for number in range(12):
        for prompt in chat(f"s{number}", 8):
            plan = vendor.send(prompt, f"s{number}")
            vendor.now += 15
        vendor.now += 7200
        lifetimes = {mark.ttl for mark in plan.marks}
    assert lifetimes == {"5m"}


def mixed_gaps(vendor: Vendor, sessions: int, seed: int = 1) -> None:
    """Sessions whose gaps are 20 s, and now and then 20 minutes; what a turn adds varies much."""
    source = random.Random(seed)
    for number in range(sessions):
        tokens, keys, sizes = 20_000, ["system"], [20_000]
        for turn in range(40):
            tokens += source.choice([60, 100, 200, 6000])
            keys.append(f"{number}.{turn}")
            sizes.append(tokens)
            vendor.send(prefixes(keys, sizes, system=1), f"s{number}")
            vendor.now += source.choices([20, 1200], [0.93, 0.07])[0]
        vendor.now += 20_000


def test_a_long_lived_mark_is_moved_on_where_little_is_new() -> None:
    vendor = Vendor(ExpectedCost(keep_alives=0))
    mixed_gaps(vendor, 12)
    half = len(vendor.asks) // 2
    long: list[int] = []
    short: list[int] = []
    for ask, plan in vendor.asks[half:]:
        warm = [p.tokens for p in ask.prefixes if p.warm is not None and p.warm.ready_at <= ask.now]
        if warm and plan.marks[-1].index == len(ask.prefixes) - 1:
            (long if plan.marks[-1].ttl == "1h" else short).append(ask.input_tokens - warm[-1])
    assert long
    assert short
    assert sum(long) / len(long) < 0.5 * sum(short) / len(short)
    fixed = []
    for policy in (Always(ttl="5m"), Always(ttl="1h")):
        other = Vendor(policy)  # type: ignore[arg-type]
        other.send = _unchecked(other)  # type: ignore[method-assign]
        mixed_gaps(other, 12)
        fixed.append(other.paid)
    assert vendor.paid < 0.9 * min(fixed)


def test_what_a_vendor_does_not_keep_is_not_counted_on() -> None:
    """With a vendor where a prefix dies with its short part, long marks on top of short ones are given up."""
    policy = ExpectedCost(keep_alives=0)
    vendor = Vendor(policy)
    mixed_gaps(vendor, 4)
    ask, plan = next((a, p) for a, p in reversed(vendor.asks) if p.marks[-1].ttl == "1h" and len(p.marks) == 1)
    for _ in range(200):
        policy._dropped += 1
    again = policy.plan(ask)
    assert plan.marks[-1].ttl == "1h"
    assert again.marks[-1].ttl == "5m"


def test_reports_say_whether_a_vendor_keeps_what_stands_before_a_mark() -> None:
    for keeps in (True, False):
        policy = ExpectedCost(keep_alives=0)
        vendor = Vendor(policy)
        if not keeps:
            vendor._answer = _dies_with_its_short_part(vendor)  # type: ignore[method-assign]
        mixed_gaps(vendor, 6)
        assert (policy._carried > 4) == keeps
        assert (policy._dropped > 1) != keeps


def test_a_prefix_below_the_minimum_is_not_marked_and_says_so() -> None:
    haiku, sonnet = replace(CLAUDE, minimum=4096), CLAUDE
    prompt = prefixes(["system", "question"], [1400, 1500], system=1)
    assert codes(Vendor(ExpectedCost(), haiku).send(prompt)) == ["below_minimum"]
    plan = Vendor(ExpectedCost(), sonnet).send(prompt)
    assert plan.marks
    assert codes(plan) == ["expected_reuse"]


def test_a_prefix_written_and_never_read_stops_being_marked() -> None:
    vendor = Vendor(ExpectedCost(), forgets=True)
    prompt = prefixes(["report"], [9000])
    written = []
    for _ in range(60):
        plan = vendor.send(prompt)
        written.append(bool(plan.marks))
        vendor.now += 60
    assert written[:3] == [True, True, True]
    assert written[3] is False
    assert sum(written) <= 10  # it is tried again ever more rarely, since it does come back in time
    assert "write_without_read" in codes(plan)


def test_after_thirty_tool_turns_the_marks_are_at_both_ends() -> None:
    vendor = Vendor(ExpectedCost(), CLAUDE)
    for prompt in chat("a", 30):
        plan = vendor.send(prompt, "a", stop="tool_calls", types=("tool_result",))
        assert plan.marks[-1].index >= len(prompt) - 2
        vendor.now += 5
    assert plan.marks[0].index == 0
    assert len(plan.marks) <= 4


def test_a_turn_longer_than_the_look_back_leaves_a_mark_on_the_way() -> None:
    vendor = Vendor(ExpectedCost(), CLAUDE)
    keys: list[Hashable] = ["system"]
    for turn in range(8):
        keys += [(turn, i) for i in range(25)]
        vendor.send(prefixes(keys, [5000 + 300 * i for i in range(len(keys))], system=1), "a")
        vendor.now += 20
    for ask, plan in vendor.asks[1:]:  # `legal` has seen that each reaches what is cached
        assert ask.prefixes[plan.marks[-1].index].tokens > ask.input_tokens - 300 * 10


def test_with_one_slot_a_session_is_still_read_and_moves_on() -> None:
    vendor = Vendor(ExpectedCost(), replace(GPT, slots=1))
    for prompt in chat("a", 40):
        ask = vendor.ask(prompt, "a")
        plan = vendor.policy.plan(ask)
        assert len(plan.marks) == 1
        vendor.policy.sent(ask, plan)
        vendor._answer(ask, plan)
        vendor.now += 20
    assert max(prefix.tokens for prefix in ask.prefixes if prefix.warm is not None) > 10_000


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_plan_is_legal(data: st.DataObject) -> None:
    terms = data.draw(st.sampled_from([PLAIN, CLAUDE, GPT, FREE, replace(CLAUDE, slots=2), replace(GPT, slots=2)]))
    vendor = Vendor(ExpectedCost(places=200), terms)
    source = random.Random(data.draw(st.integers(0, 10_000)))
    histories: list[list[tuple[Hashable, int]]] = []
    for number in range(40):
        if histories and source.random() < 0.7:
            history = list(source.choice(histories))
            if source.random() < 0.2:
                history = history[: source.randint(1, len(history))]
        else:
            history = [("system", 3000)]
        for i in range(source.choice([1, 2, 3, 30])):
            history.append(((number, i), history[-1][1] + source.randint(1, 2000)))
        histories.append(history)
        places = prefixes([key for key, _ in history], [tokens for _, tokens in history], system=1)
        vendor.send(places, source.choice([None, "a", "b"]), stop=source.choice(["stop", "tool_calls"]))
        vendor.held()
        vendor.now += source.choice([0.5, 10, 290, 500, 4000])


def test_what_another_request_is_just_writing_is_not_written_twice_for_little() -> None:
    vendor = Vendor(ExpectedCost())
    for number in range(20):
        for prompt in chat(f"s{number}", 5):
            vendor.send(prompt, f"s{number}")
            vendor.now += 10
    *_, first, second = chat("x", 5, system=50_000)
    vendor.send(first, "x")
    vendor.now += 1  # cannot be read yet
    assert [mark.index for mark in vendor.policy.plan(vendor.ask(second, "x")).marks] == [0]
    vendor.now += 2
    assert vendor.policy.plan(vendor.ask(second, "x")).marks[-1].index == len(second) - 1


# What is kept alive.


def returning(vendor: Vendor, sessions: int) -> None:
    """After an answer people come back 7 minutes later, in a tool loop at once; after a cut answer nobody ever does."""
    for number in range(sessions):
        for turn, prompt in enumerate(chat(f"s{number}", 6, system=60_000)):
            stop = "length" if turn == 5 else "stop" if turn % 2 else "tool_calls"
            vendor.send(prompt, f"s{number}", stop=stop)
            vendor.now += 420 if stop == "stop" else 10
        vendor.now += 40_000


def test_an_entry_is_kept_alive_where_it_will_be_wanted() -> None:
    vendor = Vendor(ExpectedCost(), replace(PLAIN, lifetimes=(M5,)))
    returning(vendor, 40)
    *_, prompt = chat("x", 2, system=60_000)
    vendor.send(prompt, "x", stop="stop")
    wish = vendor.held()
    assert wish is not None
    started = vendor.asks[-1][0].now
    assert started + 280 < wish.at < started + 300
    assert [reason.code for reason in wish.reasons] == ["expected_reuse"]
    # Once more would be for the time from 10 minutes on, when nobody ever came.
    vendor.now = wish.at
    vendor.entries = {key: (ttl, ready, wish.at + 300) for key, (ttl, ready, _) in vendor.entries.items()}
    again = vendor.held(pings=1)
    assert again is None or again.at > wish.at + 280
    for prompt in chat("y", 6, system=60_000):
        vendor.send(prompt, "y", stop="length" if prompt[-1].tokens > 64_000 else "tool_calls")
        vendor.now += 10
    vendor.now -= 10
    assert vendor.held() is None


def test_nothing_is_kept_alive_without_leave_or_for_a_session_that_went_on() -> None:
    short = replace(PLAIN, lifetimes=(M5,))
    vendor = Vendor(ExpectedCost(keep_alives=0), short)
    returning(vendor, 40)
    *_, last = chat("x", 2, system=60_000)
    vendor.send(last, "x")
    assert vendor.held() is None
    vendor = Vendor(ExpectedCost(), short)
    returning(vendor, 40)
    vendor.send(last, "x")
    first = vendor.asks[-1]
    assert vendor.held() is not None
    vendor.now += 10
    vendor.send(prefixes(["system", "other"], [60_000, 61_000], system=1), "x")
    vendor.asks.append(first)
    assert vendor.held() is None


def test_keep_alives_end_at_their_limit() -> None:
    vendor = Vendor(ExpectedCost(keep_alives=3), replace(PLAIN, lifetimes=(M5,)))
    returning(vendor, 40)
    *_, last = chat("x", 2, system=60_000)
    vendor.send(last, "x")
    assert vendor.held(pings=2) is not None
    assert vendor.held(pings=3) is None


# What is kept of it.


def test_what_was_learned_survives_a_restart() -> None:
    vendor = Vendor(ExpectedCost())
    mixed_gaps(vendor, 6)
    vendor.policy._dropped = 3.0
    heir = ExpectedCost()
    heir.load(vendor.policy.dump())
    ask = vendor.ask(next(chat("new", 1)), "new")
    assert heir.plan(ask) == vendor.policy.plan(ask)
    assert heir.plan(ask) != ExpectedCost().plan(ask)
    assert (heir._carried, heir._dropped) == (vendor.policy._carried, 3.0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"cachespec expected-cost 1 4 1\ngarbage",
        b"cachespec expected-cost 1 nan 1\n",
        b"cachespec expected-cost 1 4\n",
    ],
)
def test_what_cannot_be_read_is_left_aside(data: bytes) -> None:
    policy, fresh = ExpectedCost(), ExpectedCost()
    policy.load(data)
    assert policy.dump() == fresh.dump()


def test_calls_that_fit_no_request_do_no_harm() -> None:
    policy = ExpectedCost()
    vendor = Vendor(policy)
    ask = vendor.ask(next(chat("a", 1)), "a")
    outcome = Outcome(ended_at=ask.now + 1)
    policy.ended(ask, outcome)
    warm = Warm(ttl="5m", ready_at=ask.now, expires_at=ask.now + 300)
    assert policy.held(Held(ask=ask, outcome=outcome, index=0, warm=warm), ask.now + 1) is None
    empty = replace(ask, prefixes=())
    assert policy.plan(empty) == CachePlan()
    policy.sent(empty, CachePlan())
    policy.ended(empty, outcome)
    nothing = replace(ask, terms=CacheTerms(lifetimes=(), read=0.1))
    assert policy.plan(nothing) == CachePlan()
    policy.sent(nothing, CachePlan())


# Fixed policies.


def test_fixed_policies_mark_where_they_say() -> None:
    *_, prompt = chat("a", 3)
    vendor = Vendor(ExpectedCost(), CLAUDE)
    ask = vendor.ask(prompt)
    last = len(prompt) - 1
    assert [(m.index, m.ttl) for m in Always().plan(ask).marks] == [(0, "5m"), (last, "5m")]
    assert [(m.index, m.ttl) for m in Always(ttl="1h").plan(ask).marks] == [(0, "1h"), (last, "1h")]
    assert [(m.index, m.ttl) for m in LastMessage(ttl="1h").plan(ask).marks] == [(last, "1h")]
    gpt = replace(ask, terms=GPT)
    assert [(m.index, m.ttl) for m in LastMessage(ttl="1h").plan(gpt).marks] == [(last, "30m")]
    assert Off().plan(gpt) == replace(CachePlan(opt_out=True), reasons=Off().plan(gpt).reasons)
    assert codes(Off().plan(ask)) == ["cache_off"]
    assert not Off().plan(ask).opt_out
    assert Caller().plan(gpt).marks == ()
    assert codes(Caller().plan(gpt)) == ["caller_marks"]
    assert not Caller().plan(gpt).opt_out
    tiny = replace(ask, terms=replace(CLAUDE, minimum=100_000))
    assert codes(Always().plan(tiny)) == ["below_minimum"]
    assert Always().plan(replace(ask, prefixes=())).marks == ()
    assert Always().plan(replace(ask, terms=replace(CLAUDE, slots=0))).marks == ()


def test_a_fixed_policy_reads_where_only_marks_are_looked_up() -> None:
    *_, prompt = chat("a", 3)
    warm = Warm(ttl="30m", ready_at=0.0, expires_at=2e6)
    prompt = (*prompt[:3], replace(prompt[3], warm=warm), *prompt[4:])
    ask = CacheAsk(now=1e6, prefixes=prompt, input_tokens=prompt[-1].tokens, terms=GPT)
    assert [m.index for m in LastMessage().plan(ask).marks] == [3, len(prompt) - 1]


@pytest.mark.parametrize("policy", [Always(), LastMessage(), Off(), Caller()])
def test_a_fixed_policy_learns_nothing(policy: Always | LastMessage | Off | Caller) -> None:
    ask = Vendor(ExpectedCost()).ask(next(chat("a", 1)))
    outcome = Outcome(ended_at=ask.now + 1)
    policy.sent(ask, policy.plan(ask))
    policy.ended(ask, outcome)
    warm = Warm(ttl="5m", ready_at=ask.now, expires_at=ask.now + 300)
    assert policy.held(Held(ask=ask, outcome=outcome, index=0, warm=warm), ask.now) is None
    policy.load(b"x")
    assert policy.dump() == b""


def test_policies_are_named_in_a_configuration() -> None:
    where = "policies.caching"
    assert isinstance(create("caching", "expected-cost", {"keep_alives": 3}, where=where), ExpectedCost)
    assert create("caching", "always", {"ttl": "1h"}, where=where) == Always(ttl="1h")
    assert create("caching", "last-message", {}, where=where) == LastMessage()
    assert create("caching", "off", {}, where=where) == Off()
    assert create("caching", "caller", {}, where=where) == Caller()
    with pytest.raises(ConfigError, match="keep_alive"):
        create("caching", "expected-cost", {"keepalives": 3}, where=where)


@pytest.mark.parametrize(("option", "value"), [("keep_alives", -1), ("places", 0)])
def test_options_are_checked(option: str, value: int) -> None:
    with pytest.raises(InputError) as caught:
        ExpectedCost(**{option: value})
    assert caught.value.field == option


def _unchecked(vendor: Vendor):  # type: ignore[no-untyped-def]
    """`Vendor.send` for a fixed policy, whose plans need not read what is cached."""

    def send(places: tuple[Prefix, ...], session: str | None = None) -> CachePlan:
        ask = vendor.ask(places, session)
        plan = vendor.policy.plan(ask)
        vendor._answer(ask, plan)
        return plan

    return send


def _dies_with_its_short_part(vendor: Vendor):  # type: ignore[no-untyped-def]
    """A vendor where an entry is gone when what stood before it when it was written is gone."""
    before: dict[Hashable, Hashable] = {}
    answer = vendor._answer

    def answered(ask: CacheAsk, plan: CachePlan) -> int:
        def dead(key: Hashable) -> bool:
            below = before.get(key)
            return below is not None and (vendor.entries.get(below, ("", 0.0, 0.0))[2] <= vendor.now or dead(below))

        gone = {p.key for p in ask.prefixes if p.warm is not None and dead(p.key)}
        shown = tuple(replace(p, warm=None) if p.key in gone else p for p in ask.prefixes)
        for key in gone:
            del vendor.entries[key]
        known = set(vendor.entries)
        read = answer(replace(ask, prefixes=shown), plan)
        below = next((p.key for p in reversed(shown) if p.warm is not None and p.tokens <= read), None)
        for prefix in shown:
            if prefix.key in vendor.entries and prefix.key not in known:
                before.pop(prefix.key, None)
                if below is not None:
                    before[prefix.key] = below
        return read

    return answered
