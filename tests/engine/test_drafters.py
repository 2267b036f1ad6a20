"""Drafters: the contract, the suffix automaton against a naive search, histories, draft models, vocabularies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.markov import MarkovRuntime, near, random_logits, random_tokens
from tests.engine.speculate import GuessDrafter, Run, generate

from cachespec.engine.drafters.automaton import DEPTH, STATE_BYTES, SuffixAutomaton
from cachespec.engine.drafters.base import Draft, Drafter
from cachespec.engine.drafters.contract import check_drafter
from cachespec.engine.drafters.history import TOKEN_BYTES, History
from cachespec.engine.drafters.hybrid import HybridDrafter
from cachespec.engine.drafters.model import ModelDrafter
from cachespec.engine.drafters.suffix import CATCH_UP, SuffixDrafter
from cachespec.engine.drafters.vocabulary import common_vocabulary
from cachespec.engine.runtimes.base import Interrupted, Span
from cachespec.engine.sampling import Sampling
from cachespec.errors import ConfigError, InputError

GREEDY = Sampling(seed=0, temperature=0)
VOCAB = 24
NS = b"n" * 16


def draft_model(vocab: int = VOCAB, **more: Any) -> ModelDrafter:
    row = random_logits(vocab, seed=4)
    return ModelDrafter(MarkovRuntime(near(row, 0.5, vocab), vocab, **more), MarkovRuntime(row, vocab))


@pytest.mark.parametrize(
    "make",
    [
        SuffixDrafter,
        lambda: SuffixDrafter(min_match=2, min_probability=0.0, history_bytes=0),
        draft_model,
        lambda: HybridDrafter(SuffixDrafter(), draft_model()),
        lambda: GuessDrafter(lambda tokens, k: tokens[-k:] if k else []),
    ],
)
def test_the_contract(make: Callable[[], Drafter[Any]]) -> None:
    check_drafter(make, vocab=VOCAB)


class Broken(GuessDrafter):
    """Breaks one rule."""

    def __init__(self, rule: str) -> None:
        super().__init__(lambda tokens, k: tokens[-k:] if k else [])
        self._rule, self._asked = rule, 0

    def propose(self, tracks: Sequence[list[int]], lengths: Sequence[int]) -> list[Draft]:
        drafts = super().propose(tracks, [n + (self._rule == "long") for n in lengths])
        self._asked += 1
        wrong = {
            "source": Draft(source="who"),
            "vocabulary": Draft(source="guess", tokens=(VOCAB,), confidence=(0.5,)),
            "confidence": Draft(source="guess", tokens=(1,), confidence=(1.5,)),
            "pending": Draft(source="guess", pending=True),
            "memory": Draft(source="guess", tokens=(self._asked % VOCAB,), confidence=(0.5,)),
        }.get(self._rule)
        if self._rule == "random":
            random.random()
        return drafts if wrong is None else [wrong if n else d for d, n in zip(drafts, lengths, strict=True)]

    def close(self, track: list[int], *, learn: bool) -> None:
        if self._rule != "close":
            super().close(track, learn=learn)

    def stats(self) -> dict[str, int]:
        return super().stats() | {"bytes": (self._rule == "bytes") << 40}


@pytest.mark.parametrize(
    "rule", ["long", "source", "vocabulary", "confidence", "pending", "memory", "random", "close", "bytes"]
)
def test_the_contract_test_sees_what_is_broken(rule: str) -> None:
    with pytest.raises(AssertionError):
        check_drafter(lambda: Broken(rule), vocab=VOCAB)


def earlier(text: Sequence[int]) -> int:
    """Length of the longest end of the text that was there before, slowly."""
    for size in range(len(text) - 1, 0, -1):
        if any(text[i : i + size] == text[-size:] for i in range(len(text) - size)):
            return size
    return 0


@given(st.lists(st.integers(0, 3), max_size=40))
def test_the_automaton_finds_the_longest_earlier_match_at_every_moment(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.append(token)
        so_far = text[: i + 1]
        state, size = automaton.match()
        assert size == earlier(so_far)
        if size:
            ends = [j for j in range(size, i + 1) if so_far[j - size : j] == so_far[-size:]]
            assert automaton.step(state, text[ends[0]]) > 0
            follow = dict(automaton.following(state))
            assert set(follow) == {so_far[j] for j in ends}
            tokens, confidence = automaton.follow(1, floor=0.0, doubt=1.0)
            assert tokens[0] in follow
            # Up to the depth of counting, these are the exact numbers.
            came = Counter(so_far[j] for j in ends)
            if size < DEPTH and i < DEPTH:
                assert came[tokens[0]] == max(came.values())
                assert confidence[0] == came[tokens[0]] / (len(ends) + 1 / size)
            assert 0 < confidence[0] < 1
    assert len(automaton._length) <= max(2, 2 * len(text))


def test_it_counts_what_followed_and_takes_the_latest_of_equals() -> None:
    automaton = SuffixAutomaton()
    for token in [7, 5, 1, 8, 5, 1, 6, 5, 2, 3, 5]:
        automaton.append(token)
    assert automaton.match()[1] == 1
    assert automaton.follow(1, floor=0, doubt=1) == ([1], [2 / (3 + 1)])
    for token in [2, 4, 5]:
        automaton.append(token)
    assert automaton.follow(1, floor=0, doubt=1) == ([2], [2 / (4 + 1)])
    assert automaton.follow(1, floor=0.5, doubt=1) == ([], [])


def test_its_memory_is_what_it_says_and_its_time_is_linear() -> None:
    import tracemalloc

    text = random_tokens(500, 20_000, 1)
    tracemalloc.start()
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size <= 1.3 * automaton.bytes
    assert automaton.bytes <= 2 * STATE_BYTES * len(text)
    same = SuffixAutomaton()
    for _ in range(20_000):  # every suffix is a context of its own: only the deepest few are counted
        same.append(1)
    assert same.match()[1] == 19_999
    assert sum(same.count) <= DEPTH * 20_000


def drafted(drafter: SuffixDrafter, prompt: Sequence[int], length: int, namespace: bytes | None = NS) -> Draft:
    track = drafter.open(prompt, sampling=GREEDY, namespace=namespace)
    for _ in range(len(prompt) // CATCH_UP):
        drafter.prospects([track], length)
    (draft,) = drafter.propose([track], [length])
    drafter.close(track, learn=False)
    return draft


def test_suffix_copies_what_followed_the_longest_match() -> None:
    drafter = SuffixDrafter()
    text = list(range(100, 160))
    draft = drafted(drafter, [*text, 7, 8, *text[10:20]], 12)
    assert draft.tokens == tuple(text[20:32])
    assert list(draft.confidence) == sorted(draft.confidence)  # the longer the match, the surer
    assert draft.confidence[0] > 0.75
    weak = drafted(drafter, [1, 2, 3, 4, 5, 2], 12)
    assert weak.tokens[0] == 3
    assert weak.confidence[0] < 0.4
    assert len(weak.tokens) < 4  # as long as the match deserves
    assert drafted(drafter, [1, 2, 3], 12).tokens == ()
    assert drafted(SuffixDrafter(min_match=3), [1, 2, 3, 1, 2], 12).tokens == ()
    assert drafted(drafter, text * 2, 0).tokens == ()


@pytest.mark.parametrize("period", [[7], [7, 8], [7, 8, 9, 7, 5]])
def test_a_text_that_repeats_itself_is_drafted_beyond_its_period(period: list[int]) -> None:
    drafter = SuffixDrafter(history_bytes=0)
    track = drafter.open([1, 2, 3, *period * 20], sampling=GREEDY, namespace=None)
    (draft,) = drafter.propose([track], [16])
    assert list(draft.tokens) == (period * 16)[:16]
    assert min(draft.confidence) > 0.7


def test_a_long_prompt_is_learned_bit_by_bit() -> None:
    drafter = SuffixDrafter(max_tokens=3 * CATCH_UP)
    text = random_tokens(1000, CATCH_UP, 3)
    track = drafter.open(text * 2, sampling=GREEDY, namespace=None)
    assert drafter.propose([track], [4])[0].tokens == ()
    assert drafter.propose([track], [4])[0].tokens == tuple(text[:4])
    drafter.accept(track, [*text, 1])
    assert drafter.propose([track], [4])[0].tokens == ()
    before = drafter.stats()["bytes"]
    for _ in range(5):
        drafter.accept(track, text)
        assert drafter.propose([track], [4])[0].tokens == ()  # past its limit it learns no more
    assert drafter.stats()["bytes"] < before + 2 * CATCH_UP * (2 * STATE_BYTES) + 40 * CATCH_UP
    for wrong in ({"min_match": 0}, {"min_probability": 1.5}, {"history_bytes": -1}, {"max_tokens": 0}):
        with pytest.raises(InputError):
            SuffixDrafter(**wrong)


def test_answers_help_later_requests_of_their_namespace_only() -> None:
    drafter = SuffixDrafter()
    question, answer = [1, 2, 3, 4, 5, 6], list(range(50, 90))
    track = drafter.open(question, sampling=GREEDY, namespace=NS)
    drafter.accept(track, answer)
    drafter.close(track, learn=True)
    assert drafted(drafter, question, 8).tokens == tuple(answer[:8])  # the same question again
    assert drafted(drafter, [9, 9, *answer[10:16]], 8).tokens == tuple(answer[16:24])
    assert drafted(drafter, question, 8, b"m" * 16).tokens == ()
    assert drafted(drafter, question, 8, None).tokens == ()
    other = drafter.open(question, sampling=GREEDY, namespace=b"m" * 16)
    drafter.accept(other, [7, 7, 7])
    drafter.close(other, learn=False)
    assert drafted(drafter, question, 8, b"m" * 16).tokens == ()
    drafter.stop()
    assert drafter.stats() == {"tracks": 0, "answers": 0, "bytes": 0}


def test_several_answers_vote_and_the_longest_match_decides() -> None:
    history = History(1 << 20)
    for following in ([10, 11], [20, 21], [20, 22]):
        history.add(NS, [1, 2, 3, 4], following)
    assert history.find(NS, [1, 2, 3, 4], 5) == (4, 2, 3, history._answers[3][1][4:6])
    history.add(NS, [9, 1, 2, 3, 4], [30])
    found = history.find(NS, [9, 1, 2, 3, 4], 5)
    assert found is not None
    assert (found[0], found[1], found[2], list(found[3])) == (5, 1, 1, [30])
    assert history.find(NS, [5, 2, 3, 4], 5) is None
    assert history.find(NS, [1], 5) is None
    assert history.find(b"x", [1, 2, 3, 4], 5) is None


def test_the_history_keeps_its_budget_and_what_is_of_use() -> None:
    import tracemalloc

    rng = random.Random(3)
    answers = [[rng.randrange(10_000) for _ in range(100)] for _ in range(60)]
    tracemalloc.start()
    history = History(40 * 132 * TOKEN_BYTES)
    for i, answer in enumerate(answers):
        history.add(b"%d" % (i % 3), list(range(32)), answer)
        history.used(b"0", answers[0][:50])  # the first is asked for all the time
        assert history.bytes <= 40 * 132 * TOKEN_BYTES
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size <= 1.1 * history.bytes
    assert len(history) == 40
    assert history.find(b"0", answers[0][:50], 3) is not None
    assert history.find(b"1", answers[1][:50], 3) is None
    assert all(history.find(b"%d" % (i % 3), answers[i][:50], 3) is None for i in range(1, 20))
    history.add(NS, [], [])
    History(10).add(NS, [1], [2] * 100)
    tiny = History(100 * TOKEN_BYTES)
    tiny.add(NS, [], list(range(1000)))  # larger than everything: its beginning stays
    assert tiny.bytes <= 100 * TOKEN_BYTES
    assert tiny.find(NS, [0, 1, 2, 3], 1) is not None


def test_a_used_answer_is_noted_by_what_was_accepted() -> None:
    drafter = SuffixDrafter(history_bytes=3 * 40 * TOKEN_BYTES)
    first = drafter.open([1, 2, 3, 4], sampling=GREEDY, namespace=NS)
    drafter.accept(first, list(range(100, 130)))
    drafter.close(first, learn=True)
    for i in range(6):
        track = drafter.open([1, 2, 3, 4], sampling=GREEDY, namespace=NS)
        assert drafter.propose([track], [2])[0].tokens == (100, 101)
        drafter.accept(track, [100])
        drafter.close(track, learn=False)
        other = drafter.open([1000 * i + j for j in range(1000, 1008)], sampling=GREEDY, namespace=NS)
        drafter.accept(other, [5000 * i + j for j in range(9000, 9030)])
        drafter.close(other, learn=True)


# Draft models.


def test_a_draft_model_keeps_its_kv_in_step() -> None:
    """Rejected drafts are cut away, what it missed is caught up with: it evaluates little more than it has to."""
    row = random_logits(VOCAB, seed=4, spread=3.0)
    runtime = MarkovRuntime(near(row, 0.7, VOCAB), VOCAB)
    drafter = ModelDrafter(runtime, MarkovRuntime(row, VOCAB), min_probability=0)
    run = Run(MarkovRuntime(row, VOCAB), random_tokens(VOCAB, 50, 1), Sampling(seed=3), output=100, drafter=drafter)
    generate(run, lambda step: 3)
    assert run.accepted / (run.accepted + run.steps) > 0.45
    assert runtime.evaluated <= 50 + run.drafted + 2 * run.steps
    held = runtime.held[next(i for i, h in enumerate(runtime.held) if h)]
    assert held == run.tokens[: len(held)]  # nothing wrong is left
    again = Run(MarkovRuntime(row, VOCAB), run.tokens[:90], Sampling(seed=3), output=20, drafter=drafter)
    before = runtime.evaluated
    generate(again, lambda step: 3)
    assert runtime.evaluated - before < 90  # a request that shares the beginning takes the sequence over


def test_a_draft_model_that_breaks_at_one_request_drafts_on_for_others() -> None:
    class Broken(MarkovRuntime):
        def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
            if any(how.seed == 666 for how in sampling):
                raise ArithmeticError("no law")
            return super().draw(rows, sampling, positions)

    row = random_logits(VOCAB, seed=4)
    drafter = ModelDrafter(Broken(row, VOCAB), MarkovRuntime(row, VOCAB), min_probability=0)
    bad = drafter.open([1, 2, 3], sampling=Sampling(seed=666), namespace=NS)
    assert drafter.propose([bad], [4])[0].tokens == ()
    assert not drafter.prospects([bad], 4)[0].pending
    drafter.accept(bad, [5])
    good = drafter.open([1, 2, 3], sampling=GREEDY, namespace=NS)
    assert len(drafter.propose([good], [4])[0].tokens) == 4
    for track in (bad, good):
        drafter.close(track, learn=False)
    assert drafter.stats()["tracks"] == 0
    drafter.stop()


def test_the_coldest_temperature_is_a_probability_still() -> None:
    row = random_logits(VOCAB, seed=4)
    drafter = ModelDrafter(MarkovRuntime(row, VOCAB), MarkovRuntime(row, VOCAB))
    track = drafter.open([1, 2, 3], sampling=Sampling(seed=1, temperature=5e-324), namespace=None)
    assert drafter.propose([track], [2])[0].confidence[:1] == (1.0,)
    drafter.close(track, learn=False)
    drafter.stop()


def test_a_long_prompt_is_caught_up_with_one_call_a_step() -> None:
    row = random_logits(VOCAB, seed=4)
    runtime = MarkovRuntime(row, VOCAB, width=32)
    drafter = ModelDrafter(runtime, MarkovRuntime(row, VOCAB))
    track = drafter.open(random_tokens(VOCAB, 90, 1), sampling=GREEDY, namespace=None)
    assert drafter.prospects([track], 4)[0].pending
    for calls in (1, 2):
        assert drafter.propose([track], [4])[0].tokens == ()
        assert len(runtime.calls) == calls
    assert len(drafter.propose([track], [4])[0].tokens) > 0
    two = drafter.open(random_tokens(VOCAB, 20, 2), sampling=GREEDY, namespace=None)
    three = drafter.open(random_tokens(VOCAB, 20, 3), sampling=GREEDY, namespace=None)
    drafts = drafter.propose([track, two, three], [2, 2, 2])
    assert drafts[0].tokens
    assert drafts[1].tokens
    assert not drafts[2].tokens  # no width left for its prompt in this step
    assert max(sum(call) for call in runtime.calls) <= 32


def test_more_requests_than_sequences_and_no_room_are_no_drafts() -> None:
    row = random_logits(VOCAB, seed=4)
    runtime = MarkovRuntime(row, VOCAB, sequences=2, context=60)
    drafter = ModelDrafter(runtime, MarkovRuntime(row, VOCAB))
    tracks = [drafter.open(random_tokens(VOCAB, 25, i), sampling=GREEDY, namespace=NS) for i in range(3)]
    assert [d.pending for d in drafter.prospects(tracks, 4)] == [True, True, False]
    drafts = drafter.propose(tracks, [4, 4, 4])
    assert drafts[2].tokens == ()
    drafter.accept(tracks[2], [1])
    drafter.close(tracks[2], learn=True)
    drafter.close(tracks[1], learn=True)
    long = drafter.open(random_tokens(VOCAB, 34, 9), sampling=GREEDY, namespace=b"other")
    for _ in range(3):
        drafter.propose([tracks[0], long], [8, 8])  # runs out of room, and makes what it can
    assert sum(map(len, runtime.held)) <= 60
    drafter.close(tracks[0], learn=True)
    drafter.close(long, learn=True)
    assert drafter.stats()["free"] == 2
    # KV of another namespace is never taken over.
    mine = drafter.open(random_tokens(VOCAB, 25, 0), sampling=GREEDY, namespace=b"third")
    assert mine.agreed == 0
    drafter.close(mine, learn=False)


def test_an_interrupted_draft_model_knows_what_it_holds() -> None:
    class Stopping(MarkovRuntime):
        stops = True

        def evaluate(self, spans: Sequence[Span]) -> list[int]:
            if self.stops:
                raise Interrupted
            return super().evaluate(spans)

    row = random_logits(VOCAB, seed=4)
    runtime = Stopping(row, VOCAB)
    drafter = ModelDrafter(runtime, MarkovRuntime(row, VOCAB))
    track = drafter.open([1, 2, 3], sampling=GREEDY, namespace=None)
    with pytest.raises(Interrupted):
        drafter.propose([track], [2])
    runtime.stops = False
    assert len(drafter.propose([track], [2])[0].tokens) > 0


def test_a_model_that_cannot_go_back_starts_over() -> None:
    row = random_logits(VOCAB, seed=4, spread=3.0)
    plain = generate(Run(MarkovRuntime(row, VOCAB), [1, 2, 3], Sampling(seed=3), output=40))
    drafter = ModelDrafter(MarkovRuntime(near(row, 0.7, VOCAB), VOCAB, cuts=False), MarkovRuntime(row, VOCAB))
    assert generate(Run(MarkovRuntime(row, VOCAB), [1, 2, 3], Sampling(seed=3), output=40, drafter=drafter)) == plain


def test_drafting_stops_where_the_model_is_unsure_or_ends() -> None:
    row = random_logits(VOCAB, seed=4)
    drafter = draft_model()
    unsure = ModelDrafter(MarkovRuntime(row, VOCAB), MarkovRuntime(row, VOCAB), min_probability=0.9)
    for made, least in ((drafter, 1), (unsure, 0)):
        track = made.open([1, 2, 3], sampling=GREEDY, namespace=None)
        draft = made.propose([track], [12])[0]
        assert len(draft.tokens) >= least
        assert all(c >= (0.9 if made is unsure else 0.2) for c in draft.confidence)
    always = ModelDrafter(
        MarkovRuntime(lambda t: row((1, 1)), VOCAB, ends=range(VOCAB)), MarkovRuntime(row, VOCAB, ends=range(VOCAB))
    )
    track = always.open([1], sampling=GREEDY, namespace=None)
    assert len(always.propose([track], [12])[0].tokens) <= 1
    with pytest.raises(InputError):
        ModelDrafter(MarkovRuntime(row, VOCAB), MarkovRuntime(row, VOCAB), min_probability=2)


def test_hybrid_takes_the_suffix_where_it_is_sure() -> None:
    drafter = HybridDrafter(SuffixDrafter(), draft_model())
    assert drafter.sources == ("suffix", "model")
    copied = list(range(20))
    track = drafter.open([*copied, *copied[:12]], sampling=GREEDY, namespace=NS)
    fresh = drafter.open([1, 5, 9], sampling=GREEDY, namespace=NS)
    hints = drafter.prospects([track, fresh], 6)
    assert [(hint.source, hint.pending) for hint in hints] == [("suffix", False), ("model", True)]
    drafts = drafter.propose([track, fresh], [6, 6])
    assert drafts[0].tokens == tuple(copied[12:18])
    assert drafts[1].source == "model"
    drafter.accept(track, [12])
    drafter.close(track, learn=True)
    drafter.close(fresh, learn=True)
    assert drafter.stats()["answers"] == 1  # the other said nothing
    with pytest.raises(InputError):
        HybridDrafter(SuffixDrafter(), SuffixDrafter())
    with pytest.raises(InputError):
        HybridDrafter(SuffixDrafter(), draft_model(), confidence=2)
    drafter.stop()


def test_hybrid_copies_rather_than_read_a_long_prompt() -> None:
    """A match of one token is not sure, but there at once; the model would have to read the prompt first."""
    drafter = HybridDrafter(SuffixDrafter(), draft_model(), confidence=1.0)
    prompt = [*range(20), 3]
    track = drafter.open(prompt, sampling=GREEDY, namespace=NS)
    (hint,) = drafter.prospects([track], 4)
    assert (hint.source, hint.tokens[:1]) == ("suffix", (4,))
    (draft,) = drafter.propose([track], [4])
    assert draft.source == "suffix"
    short = drafter.open([5, 3, 5], sampling=GREEDY, namespace=NS)
    (near,) = drafter.prospects([short], 4)
    assert (near.source, near.pending) == ("model", True)
    for each in (track, short):
        drafter.close(each, learn=False)
    drafter.stop()


# Vocabularies.

PIECES = [b"a", b"b", b"c", b"", b"e"]


def words(
    pieces: Sequence[bytes] = PIECES, *, ends: Sequence[int] = (4,), controls: dict[str, int] | None = None
) -> MarkovRuntime:
    row = random_logits(max(8, len(pieces)))
    return MarkovRuntime(row, len(pieces), ends=ends, pieces=pieces, controls={"<s>": 3} if controls is None else controls)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (words([b"a", b"b", b"x", b"", b"e"]), "token 2 is b'c' for the target and b'x'"),  # same size, other text
        (words(controls={"<bos>": 3}), "control token '<s>' for the target and the control token '<bos>'"),
        (words(controls={}), "the control token '<s>' for the target and b''"),
        (words([*PIECES, b"word"]), "only one of them has token 5, b'word'"),
        (words([*PIECES, b""], controls={"<s>": 3, "<x>": 5}), "only one of them has token 5"),
        (words(PIECES * 300), "the target has 5 tokens, the draft model 1500"),
    ],
)
def test_vocabularies_that_differ_are_refused_by_name(other: MarkovRuntime, says: str) -> None:
    with pytest.raises(ConfigError, match="model: the draft model's vocabulary is not the target's") as error:
        ModelDrafter(other, words())
    assert says in str(error.value)


def test_what_ends_an_answer_is_the_targets_affair() -> None:
    """Runtimes differ in it for one and the same file; a draft that ends early or late costs time only."""
    assert common_vocabulary(words(), words(ends=(1, 4))) == 5
    eight = [*PIECES, b"f", b"g", b"h"]
    target = words(eight, ends=(2,))
    run = Run(target, [0, 1], GREEDY, output=30, drafter=ModelDrafter(words(eight, ends=(0, 1)), target))
    assert generate(run) == generate(Run(words(eight, ends=(2,)), [0, 1], GREEDY, output=30))
    assert run.drafted > 0


def test_padding_is_no_difference_and_is_never_drafted() -> None:
    assert common_vocabulary(words(), words([*PIECES, b"", b"[PAD6]", b"<unused0>"])) == 5
    assert common_vocabulary(words([*PIECES, b""]), words()) == 5

    def padding(tokens: tuple[int, ...]) -> Any:
        row = random_logits(8)(tokens).copy()
        row[6] = 99.0
        return row

    wide = MarkovRuntime(padding, 8, ends=(4,), pieces=[*PIECES, b"", b"", b""], controls={"<s>": 3})
    drafter = ModelDrafter(wide, words())
    track = drafter.open([0, 1], sampling=GREEDY, namespace=None)
    assert drafter.propose([track], [5])[0].tokens == ()


def test_coupled_noise_agrees_more_than_independent_noise() -> None:
    """At temperature 1 a draft model with the same noise agrees almost as often as the laws allow (arXiv 2408.07978)."""
    vocab = 50
    row = random_logits(vocab, seed=4, spread=2.0)
    agreed: Counter[str] = Counter()
    for name, seed in (("coupled", 0), ("independent", 1000)):
        runtime = MarkovRuntime(near(row, 0.6, vocab), vocab)
        drafter = ModelDrafter(runtime, MarkovRuntime(row, vocab), min_probability=0)
        for i in range(150):
            sampling = Sampling(seed=i)
            track = drafter.open([i % vocab, 3], sampling=Sampling(seed=i + seed), namespace=None)
            (draft,) = drafter.propose([track], [1])
            drafter.close(track, learn=False)
            target = MarkovRuntime(row, vocab).sample((i % vocab, 3), sampling, 2)
            agreed[name] += draft.tokens == (target,)
    assert agreed["coupled"] > 90
    assert agreed["independent"] < 50
