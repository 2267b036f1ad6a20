"""What a client learned, as a whole: into quotes, through a restart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cachespec.decision import Ask, Latency, TokenEstimate
from cachespec.learned import Answer, Learned
from cachespec.speeds import FORGOTTEN_S, MEASURED
from cachespec.tokens import Sizes
from cachespec.usage import Usage

ASK = Ask(
    alias="assistant", tenant=None, session_id=None, tags=(), tools=False, max_output_tokens=None, timeout_s=None, now=0.0
)
ASSUMED = Latency(ttft_ms=700.0, total_ms=7_000.0)
TOKENS = TokenEstimate(input=1_000, cache_read=0, cache_write=0, uncached=1_000, output_expected=100, output_max=None)
ANSWER = Answer(
    ask=ASK,
    backend="claude",
    model="anthropic:claude",
    sizes=Sizes(text=4_000, pieces=2),
    usage=Usage(uncached=1_500, cache_read=0, cache_write={}, output=250),
    own=None,
    own_output=None,
    load=0,
    ttft_ms=200.0,
    total_ms=900.0,
)


def taught(*answers: Answer, times: int = 10) -> Learned:
    learned = Learned()
    for i in range(times):
        for answer in answers:
            learned.answered(answer, now=float(i))
    return learned


def test_a_hosted_backend_is_measured_after_a_few_answers() -> None:
    few = taught(ANSWER, times=MEASURED - 1).latency("claude", ASSUMED, TOKENS, local=False, now=10.0)
    assert (few.evidence, few.ttft_high_ms) == ("assumed", None)
    assert "2 of 3" in few.detail
    known = taught(ANSWER, times=30).latency("claude", ASSUMED, TOKENS, local=False, now=30.0)
    assert known.evidence == "measured"
    assert known.ttft_ms is not None
    assert known.ttft_high_ms is not None
    assert 100 < known.ttft_ms < 400
    assert known.ttft_high_ms > known.ttft_ms
    other = taught(ANSWER).latency("gpt", ASSUMED, TOKENS, local=False, now=10.0)
    assert other.evidence == "assumed"


def test_a_local_backend_is_corrected_and_not_invented() -> None:
    local = replace(ANSWER, backend="laptop", sizes=None, own=ASSUMED, ttft_ms=1_400.0, total_ms=14_000.0)
    learned = taught(local, times=20)
    said = learned.latency("laptop", ASSUMED, TOKENS, local=True, now=20.0)
    assert said.ttft_ms == pytest.approx(1_400.0, rel=0.1)
    half = learned.latency("laptop", replace(ASSUMED, ttft_ms=350.0, total_ms=3_500.0), TOKENS, local=True, now=20.0)
    assert half.ttft_ms == pytest.approx(700.0, rel=0.1)
    nothing = Latency(ttft_ms=None, total_ms=None)
    assert learned.latency("laptop", nothing, TOKENS, local=True, now=20.0) == nothing
    assert Learned().latency("laptop", ASSUMED, TOKENS, local=True, now=20.0) == ASSUMED


def test_what_an_engine_only_assumed_is_corrected_once() -> None:
    """Its first answer is 2.5 times as fast as it had assumed. From then on it has timed itself, and says so."""
    first = replace(ANSWER, backend="laptop", sizes=None, own=ASSUMED, ttft_ms=280.0, total_ms=2_800.0)
    learned = taught(first, times=1)
    timed = Latency(ttft_ms=280.0, total_ms=2_800.0, evidence="measured")
    assert learned.latency("laptop", timed, TOKENS, local=True, now=1.0) == timed
    # A slow answer makes the engine's own figure slower; what is learned on top of that counts little.
    learned.answered(replace(first, own=timed, ttft_ms=420.0, total_ms=4_200.0), now=1.0)
    slower = replace(timed, ttft_ms=420.0, total_ms=4_200.0)
    said = learned.latency("laptop", slower, TOKENS, local=True, now=1.0)
    assert said.total_ms is not None
    assert 4_200 < said.total_ms < 4_800
    # What stays wrong is learned all the same, and kept.
    for _ in range(40):
        learned.answered(replace(first, own=timed, ttft_ms=420.0, total_ms=4_200.0), now=1.0)
    again = Learned()
    again.load(learned.dump())
    for known in (learned, again):
        said = known.latency("laptop", timed, TOKENS, local=True, now=2.0)
        assert said.total_ms == pytest.approx(4_200.0, rel=0.1)


def test_a_long_answer_does_not_make_an_engine_slow() -> None:
    """What an engine said was for the expected length; the answers are five times as long, and it keeps its word."""
    usage = Usage(uncached=0, cache_read=0, cache_write={"kv": 1_000}, output=500)
    long = replace(ANSWER, backend="laptop", sizes=None, usage=usage, own=ASSUMED, own_output=100)
    learned = taught(replace(long, ttft_ms=700.0, total_ms=700.0 + 5 * 6_300.0), times=20)
    said = learned.latency("laptop", ASSUMED, TOKENS, local=True, now=20.0)
    assert said.total_ms == pytest.approx(7_000.0, rel=0.05)


def test_tokens_and_lengths_are_learned() -> None:
    learned = taught(ANSWER, times=40)
    assert learned.tokens("anthropic:claude").tokens(Sizes(text=4_000, pieces=2)) == pytest.approx(1_500, rel=0.05)
    assert learned.output_expected(ASK) == 250
    assert Learned().output_expected(ASK) is None


def test_what_was_not_counted_or_timed_teaches_nothing() -> None:
    learned = taught(replace(ANSWER, usage=None))
    assert learned.dump() == Learned().dump()
    uncounted = replace(ANSWER, usage=Usage(uncached=None, cache_read=None, cache_write=None, output=None), ttft_ms=None)
    taught(uncounted)
    assert taught(uncounted).latency("claude", ASSUMED, TOKENS, local=False, now=10.0).evidence == "assumed"


def test_a_restart_forgets_nothing_and_garbage_is_left_aside() -> None:
    local = replace(ANSWER, backend="laptop", sizes=None, own=ASSUMED)
    learned = taught(ANSWER, local)
    again = Learned()
    again.load(learned.dump())
    for name, is_local in (("claude", False), ("laptop", True)):
        said = again.latency(name, ASSUMED, TOKENS, local=is_local, now=11.0)
        assert said == learned.latency(name, ASSUMED, TOKENS, local=is_local, now=11.0)
    assert again.output_expected(ASK) == 250
    assert again.dump() == learned.dump()
    for bad in (b"", b"[]", b"{}", b"[3,2,3,4,5]", b"[9,[],[],[],[]]", b'[3,[["m",3]],[["a",1]],[],[["b",true,{}]]]', b"\xff"):
        fresh = Learned()
        fresh.load(bad)
        assert fresh.output_expected(ASK) is None
        assert fresh.latency("claude", ASSUMED, TOKENS, local=False, now=0.0).evidence == "assumed"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "-1", "1" + "0" * 400, "null", "[]"])
def test_what_was_damaged_is_left_aside_number_by_number(number: str) -> None:
    data = taught(ANSWER).dump().decode()
    numbers = list(re.finditer(r"(?<![\w.\"-])-?\d[\d.e+-]*", data))
    assert len(numbers) > 60
    for found in numbers:
        learned = Learned()
        learned.load((data[: found.start()] + number + data[found.end() :]).encode())
        latency = learned.latency("claude", ASSUMED, TOKENS, local=False, now=100.0)
        assert latency.ttft_ms is not None
        assert latency.total_ms is not None
        assert 0 < latency.ttft_ms < latency.total_ms < 1e12
        expected = learned.output_expected(ASK)
        assert expected is None or expected < 1e9
        learned.answered(ANSWER, now=200.0)
    Learned().load(b"[" * 100_000)


@pytest.mark.parametrize(
    "usage",
    [
        Usage(uncached=1_500, cache_read=0, cache_write={}, output=10**12),
        Usage(uncached=10**12, cache_read=0, cache_write={}, output=250),
        Usage(uncached=1_500, cache_read=2**53 - 1, cache_write={}, output=250),
        Usage(uncached=1_500, cache_read=0, cache_write={}, output=20_000),
    ],
)
@pytest.mark.parametrize("bounded", [False, True])
def test_a_count_that_cannot_be_teaches_nothing(usage: Usage, bounded: bool) -> None:
    """Neither what it is not, nor the right half of it; held against what was asked for, and without that against anything."""
    bounds: dict[str, int | None] = {"most_input": 4_100, "most_output": 400} if bounded else {}
    chat = replace(ASK, session_id="s")
    answer = replace(ANSWER, ask=chat)
    learned = taught(answer, times=5)
    before = learned.dump()
    learned.answered(
        replace(answer, usage=usage, most_input=bounds.get("most_input"), most_output=bounds.get("most_output")), now=5.0
    )
    assert (learned.dump() == before) == (bounded or (usage.output or 0) > 20_000 or (usage.input_tokens or 0) > 2_000)
    learned.answered(replace(answer, ask=replace(chat, previous_backend="claude")), now=6.0)
    assert (learned.turns.outlook(chat).growth or 0.0) < 1_000
    assert learned.tokens("anthropic:claude").tokens(Sizes(text=4_000, pieces=2)) < 5_000


def test_a_measurement_that_is_too_old_is_told_and_what_has_no_prior_is_not_known() -> None:
    learned = taught(ANSWER, times=30)
    later = 30.0 + 2 * FORGOTTEN_S
    said = learned.latency("claude", ASSUMED, TOKENS, local=False, now=later)
    assert (said.evidence, said.ttft_high_ms) == ("assumed", None)
    assert "too long ago" in said.detail
    nothing = Latency(ttft_ms=None, total_ms=None)
    assert learned.latency("claude", nothing, TOKENS, local=True, now=31.0).evidence == "measured"
    assert learned.latency("claude", nothing, TOKENS, local=True, now=later) == nothing


@pytest.mark.parametrize("number", ["1e7", "1e12", "1e308", "-1e308"])
def test_what_was_saved_too_large_overflows_nothing(number: str) -> None:
    data = taught(ANSWER, replace(ANSWER, ask=replace(ASK, session_id="s"))).dump().decode()
    for found in re.finditer(r"(?<![\w.\"-])-?\d[\d.e+-]*", data):
        learned = Learned()
        learned.load((data[: found.start()] + number + data[found.end() :]).encode())
        for now in (10.0, 1_000.0, 1e9):
            said = learned.latency("claude", ASSUMED, TOKENS, local=False, now=now)
            figures = [v for v in (said.ttft_ms, said.total_ms, said.ttft_high_ms, said.total_high_ms) if v is not None]
            assert all(0 < v < 1e18 for v in figures)
        assert 0 <= learned.tokens("anthropic:claude").tokens(Sizes(text=4_000, pieces=2)) < 1e9
        learned.answered(ANSWER, now=11.0)
        again = Learned()
        again.load(learned.dump())
        assert again.dump() == learned.dump()
        assert not re.search("NaN|Infinity", learned.dump().decode())


def test_a_speed_is_that_of_what_a_name_stands_for() -> None:
    slow, fast = (replace(ANSWER, target=name, ttft_ms=ms, total_ms=10 * ms) for name, ms in (("old", 2_000.0), ("new", 20.0)))
    learned = taught(slow, times=30)
    learned.answered(fast, now=31.0)
    for _ in range(2):
        assert learned.latency("claude", ASSUMED, TOKENS, local=False, now=32.0, target="new").evidence == "assumed"
        assert learned.latency("claude", ASSUMED, TOKENS, local=False, now=32.0, target="third").evidence == "assumed"
        said = learned.latency("claude", ASSUMED, TOKENS, local=False, now=32.0, target="old")
        assert said.evidence == "measured"
        assert (said.ttft_ms or 0) > 1_000
        again = Learned()
        again.load(learned.dump())
        learned = again


def test_what_was_heard_of_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.learned._MODELS", 3)
    learned = taught(*(replace(ANSWER, target=str(i)) for i in range(3)), times=MEASURED)
    learned.answered(replace(ANSWER, target="0"), now=20.0)
    learned.answered(replace(ANSWER, target="3"), now=21.0)
    evidence = [learned.latency("claude", ASSUMED, TOKENS, local=False, now=22.0, target=str(i)).evidence for i in range(4)]
    assert evidence == ["measured", "assumed", "measured", "assumed"]
