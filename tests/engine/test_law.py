"""The law of sampling: whatever is proposed, the emitted tokens follow the target's law, and for a seed are the same.

The exact tests enumerate. Laws are integer weights that add up to `GRAIN`, and the noise of a position is one of `GRAIN`
equally probable numbers, so every run is a case of known weight and sums are exact. Everything else is the product's code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import count, product
from typing import Any

import numpy as np
import pytest
from tests.engine.markov import MarkovRuntime, near, random_logits
from tests.engine.speculate import GuessDrafter, Run, generate, step

from cachespec.engine.drafters.base import Drafter
from cachespec.engine.drafters.hybrid import HybridDrafter
from cachespec.engine.drafters.model import ModelDrafter
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.sampling import Sampling, draw, target
from cachespec.engine.verify import Proposal, verify

VOCAB, GRAIN, LONG = 3, 6, 4
PROMPT = (0, 1, 2, 0, 1)
TOLERANCE = 1e-12
Law = dict[tuple[int, ...], Fraction]


def weights(context: Sequence[int], seed: int) -> list[int]:
    """An integer law after these tokens: of the last two, so that drafts after a wrong one see another law."""
    rng = random.Random(repr((seed, tuple(context[-2:]))))
    cuts = sorted(rng.randrange(GRAIN + 1) for _ in range(VOCAB - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, GRAIN], strict=True)]


class Coins:
    """Chance as a list of choices, so that all of them can be gone through. Keeps the weight of the path taken."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # choice, number of choices
        self._at = 0
        self.weight = Fraction(1)
        self._noise: dict[int, int] = {}

    def choose(self, probabilities: Sequence[Fraction]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p]
        if self._at == len(self._path):
            self._path.append((0, len(possible)))
        choice = possible[self._path[self._at][0]]
        self._at += 1
        self.weight *= probabilities[choice]
        return choice

    def noise(self, position: int) -> int:
        """The noise of a position: whoever asks, and how often, it is the same."""
        if position not in self._noise:
            self._noise[position] = self.choose([Fraction(1, GRAIN)] * GRAIN)
        return self._noise[position]

    def paths(self) -> Iterator[None]:
        while True:
            self._at, self.weight, self._noise = 0, Fraction(1), {}
            yield
            del self._path[self._at :]
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            self._path[-1] = self._path[-1][0] + 1, self._path[-1][1]


def emitted(run: Callable[[Coins], Sequence[int]]) -> Law:
    """The exact law of what `run` emits."""
    coins = Coins()
    law: Law = {}
    for _ in coins.paths():
        tokens = tuple(run(coins))
        law[tokens] = law.get(tokens, Fraction(0)) + coins.weight
    assert sum(law.values()) == 1
    return law


def joint(seed: int) -> Law:
    """The target's law of `LONG` tokens."""
    law: Law = {}
    for tokens in product(range(VOCAB), repeat=LONG):
        text, p = list(PROMPT), Fraction(1)
        for token in tokens:
            p *= Fraction(weights(text, seed)[token], GRAIN)
            text.append(token)
        law[tokens] = p
    return law


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return float(sum(abs(a.get(x, Fraction(0)) - b.get(x, Fraction(0))) for x in a.keys() | b.keys()) / 2)


class ExactRuntime(MarkovRuntime):
    """Draws from integer laws with the noise of the position: the inverse of the distribution function."""

    def __init__(self, seed: int, coins: Coins) -> None:
        super().__init__(lambda tokens: np.zeros(VOCAB, np.float32), VOCAB, sequences=1)
        self._seed, self._coins = seed, coins

    def sample(self, tokens: tuple[int, ...], sampling: Sampling, position: int) -> int:
        noise, law = self._coins.noise(position), weights(tokens, self._seed)
        return next(token for token in range(VOCAB) if noise < sum(law[: token + 1]))


def random_guess(seed: int) -> GuessDrafter:
    """Anything, of its own random numbers: the same for the same committed tokens."""
    return GuessDrafter(lambda tokens, k: random.Random(repr((seed, tokens))).choices(range(VOCAB), k=k))


def spy(coins: Coins, seed: int, *, right: bool) -> GuessDrafter:
    """Knows the noise, and proposes what will be drawn, or what will not."""

    def guess(tokens: list[int], k: int) -> list[int]:
        runtime, text = ExactRuntime(seed, coins), list(tokens)
        for _ in range(min(k, len(PROMPT) + LONG - len(tokens))):
            drawn = runtime.sample(tuple(text), Sampling(seed=0), len(text))
            text.append(drawn if right else (drawn + 1) % VOCAB)
        return text[len(tokens) :]

    return GuessDrafter(guess)


def model(coins: Coins, seed: int, draft_seed: int) -> ModelDrafter:
    """A draft model with another law, coupled through the noise. It does not look past the answer's end."""
    drafter = ModelDrafter(ExactRuntime(draft_seed, coins), ExactRuntime(seed, coins), min_probability=0)
    propose = drafter.propose

    def short(tracks: Sequence[Any], lengths: Sequence[int]) -> Any:
        return propose(tracks, [min(k, len(PROMPT) + LONG - len(t.tokens)) for t, k in zip(tracks, lengths, strict=True)])

    drafter.propose = short  # type: ignore[method-assign]
    return drafter


DRAFTERS: dict[str, Callable[[Coins, int], Drafter[Any] | None]] = {
    "none": lambda coins, seed: None,
    "suffix": lambda coins, seed: SuffixDrafter(min_probability=0),
    "model": lambda coins, seed: model(coins, seed, seed + 1),
    "same model": lambda coins, seed: model(coins, seed, seed),
    "hybrid": lambda coins, seed: HybridDrafter(SuffixDrafter(), model(coins, seed, seed + 1), confidence=0.6),
    "random": lambda coins, seed: random_guess(seed),
    "always right": lambda coins, seed: spy(coins, seed, right=True),
    "always wrong": lambda coins, seed: spy(coins, seed, right=False),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_emitted_law_is_the_targets(name: str, seed: int) -> None:
    def run(coins: Coins) -> list[int]:
        answer = Run(ExactRuntime(seed, coins), PROMPT, Sampling(seed=0), output=LONG, drafter=DRAFTERS[name](coins, seed))
        return generate(answer, lambda step: (3, 1, 2, 0)[step], together=seed == 1)

    assert distance(emitted(run), joint(seed)) <= TOLERANCE


# Verification by a ratio of probabilities, right and wrong, by the same test. The target has none of it.

Fractions = list[Fraction]


def fractions(context: Sequence[int], seed: int) -> Fractions:
    return [Fraction(w, GRAIN) for w in weights(context, seed)]


def normalised(values: Sequence[Fraction], otherwise: Fractions) -> Fractions:
    total = sum(values, Fraction(0))
    return [v / total for v in values] if total else otherwise


def by_ratio(
    drawn_from: Callable[[Fractions], Fractions], in_ratio: Callable[[Fractions], Fractions], *, residual: bool = True
) -> Callable[[Coins], list[int]]:
    """Rejection sampling (Leviathan et al.): `drawn_from` is the law that drafts really come from."""

    def run(coins: Coins) -> list[int]:
        text = list(PROMPT)
        while len(text) < len(PROMPT) + LONG:
            k = min(2, len(PROMPT) + LONG - len(text) - 1)
            drafts: list[int] = []
            for _ in range(k):
                drafts.append(coins.choose(drawn_from(fractions([*text, *drafts], 5))))
            for draft in drafts:
                p, q = fractions(text, 0), in_ratio(fractions(text, 5))
                accept = min(Fraction(1), p[draft] / q[draft]) if q[draft] else Fraction(0)
                if coins.choose([accept, 1 - accept]) == 0:
                    text.append(draft)
                    continue
                left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)] if residual else p
                text.append(coins.choose(normalised(left, p)))
                break
            else:
                text.append(coins.choose(fractions(text, 0)))
        return text[len(PROMPT) :]

    return run


def same(law: Fractions) -> Fractions:
    return law


def top_two(law: Fractions) -> Fractions:
    cut = sorted(law)[-2]
    return normalised([p if p >= cut else Fraction(0) for p in law], law)


def one_hot(law: Fractions) -> Fractions:
    return [Fraction(i == law.index(max(law))) for i in range(VOCAB)]


def test_the_same_test_accepts_right_ratios_and_catches_wrong_ones() -> None:
    assert distance(emitted(by_ratio(same, same)), joint(0)) <= TOLERANCE
    assert distance(emitted(by_ratio(top_two, top_two)), joint(0)) <= TOLERANCE
    assert distance(emitted(by_ratio(one_hot, one_hot)), joint(0)) <= TOLERANCE
    wrong = {
        "top-k drafts, the whole softmax in the ratio": by_ratio(top_two, same),
        "argmax drafts, a softmax in the ratio": by_ratio(one_hot, same),
        "the target drawn again instead of the residual": by_ratio(same, same, residual=False),
    }
    for name, scheme in wrong.items():
        assert distance(emitted(scheme), joint(0)) > 0.02, f"{name}: not caught"


# With the product's own noise.

BIG = 40


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_text_is_the_same_with_any_drafter(temperature: float) -> None:
    """Also in a batch, whether rows are drawn together or not, and whatever the lengths are (vllm#6038, vllm-ascend#13608)."""
    prompt = [1, 2, 3, 1, 2]
    seldom = np.zeros(BIG, np.float32)
    seldom[39] = -7.0  # an end, but not soon
    logits = random_logits(BIG, seed=3, spread=3.0)

    def row(tokens: tuple[int, ...]) -> Any:
        return logits(tokens) + seldom

    how = Sampling(seed=11, temperature=temperature, top_p=0.95)

    def target_runtime(sequences: int = 1) -> MarkovRuntime:
        return MarkovRuntime(row, BIG, sequences=sequences, ends=[39])

    def draft_model(disagreement: float) -> ModelDrafter:
        return ModelDrafter(MarkovRuntime(near(row, disagreement, BIG), BIG, ends=[39]), target_runtime())

    plain = generate(Run(target_runtime(), prompt, how, output=200))
    assert len(plain) > 100
    makers: dict[str, Callable[[], Drafter[Any]]] = {
        "suffix": SuffixDrafter,
        "model": lambda: draft_model(1.0),
        "same model": lambda: draft_model(0.0),
        "hybrid": lambda: HybridDrafter(SuffixDrafter(), draft_model(1.0)),
        "random": lambda: GuessDrafter(lambda tokens, k: random.Random(repr(tokens)).choices(range(BIG), k=k)),
        "right": lambda: GuessDrafter(lambda tokens, k: plain[len(tokens) - 5 :][:k]),
        "wrong": lambda: GuessDrafter(lambda tokens, k: [(t + 1) % 39 for t in plain[len(tokens) - 5 :][:k]]),
    }
    shares, rates = {}, {}
    for name, make in makers.items():
        run = Run(target_runtime(), prompt, how, output=200, drafter=make())
        lengths = random.Random(name)
        assert generate(run, lambda step: lengths.randrange(9), together=len(name) % 2 == 0) == plain, name  # noqa: B023
        shares[name] = run.accepted / max(1, run.drafted)
        rates[name] = run.accepted / (run.accepted + run.steps)
    assert shares["same model"] == shares["right"] == 1.0
    assert shares["wrong"] == 0.0
    assert rates["model"] > 0.4, "coupling keeps acceptance high"
    # Eight at once on one runtime, each with its own seed, each with a different drafter.
    runtime = target_runtime(8)
    seeds = [Sampling(seed=s, temperature=temperature) for s in range(8)]
    alone = [generate(Run(target_runtime(), prompt, s, output=60)) for s in seeds]
    drafters: list[Drafter[Any]] = [*(make() for make in makers.values()), SuffixDrafter()]
    runs = [
        Run(runtime, prompt, seed, output=60, slot=i, drafter=drafter)
        for i, (seed, drafter) in enumerate(zip(seeds, drafters, strict=True))
    ]
    for number in count():
        active = [run for run in runs if run.reason is None]
        if not active:
            break
        step(active, [(number + run.slot) % 5 for run in active], together=number % 2 == 0)
    assert [run.answer for run in runs] == alone


class Rows:
    """A runtime whose rows are known beforehand: its handles are the last token."""

    def __init__(self, laws: Sequence[Any]) -> None:
        self.laws = laws

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        return [draw(self.laws[row], how, at) for row, how, at in zip(rows, sampling, positions, strict=True)]


def test_the_drawn_tokens_follow_the_law_by_the_numbers() -> None:
    """Chi-square with 200,000 draws of the product's own noise, verified behind drafts."""
    vocab, draws = 6, 200_000
    row = random_logits(vocab, order=1, seed=9, spread=1.0)
    how = Sampling(seed=1, temperature=0.8, top_k=5)
    runtime: Any = Rows([row((token,)) for token in range(vocab)])
    tokens = [0]
    while len(tokens) <= draws:
        draft = (tokens[-1] * 5 + len(tokens)) % vocab
        proposal = Proposal(position=len(tokens), drafts=[draft], rows=[tokens[-1], draft], sampling=how)
        tokens += verify(runtime, [proposal])[0]
    seen = np.zeros((vocab, vocab))
    np.add.at(seen, (tokens[:-1], tokens[1:]), 1)
    for context in range(vocab):
        ids, logits = target(row((context,)), how)
        law = np.exp(logits) / np.exp(logits).sum()
        assert seen[context].sum() > 1000
        assert set(np.flatnonzero(seen[context])) <= set(ids.tolist())
        expected = law * seen[context].sum()
        chi = float(((seen[context][ids] - expected) ** 2 / expected).sum())
        assert chi < 30, f"chi-square {chi:.1f} with 4 degrees of freedom: once in 200,000"
