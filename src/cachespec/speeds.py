"""How long a backend takes, learned from how long it took.

The time to the first token is linear in what must be read: a fixed part, the tokens to prefill, those read from a cache, and
the other requests under way; the time after it is linear in the output. Both are fitted by recursive least squares on
*relative* errors with forgetting, starting from a prior, so that a dozen answers after a change the new speed is known. How
far answers scatter around the line is kept as well, as the spread of the logarithm of actual over expected time (times of
answers are about lognormal), because limits are kept by the slow answers, not by the mean one.

A single answer far off the line says little: one in 20 may be later than the 95% figure. So an answer counts as no farther off
than that figure, or than another one of the last 20 was (winsorising: Huber, Robust Statistics, 1.7): two slow ones are a
change, one is not.

What is known grows old: after `STALE_S` without an answer half of each figure is the prior again (which has no spread: it is
the slow answers' figure as well), and after `FORGOTTEN_S` it no longer counts as measured. So a backend that was slow once
is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cachespec.values import quick

STALE_S = 900.0
"""Seconds after which half of what was learned is doubted."""
FORGOTTEN_S = 4 * STALE_S
"""Seconds after which what was learned is no measurement any more."""
HIGH = 0.95
"""The quantile that latency limits are held against."""
_FORGET = 0.9
_NOISE = 0.25
_STEP = 0.1
_DEVIATIONS = 1.645  # of a normal law, that `HIGH` of it stay below
_LEVEL = 0.3
_STEADY = 0.125  # so that an answer counts a fifth
_FARTHEST = math.log(1e4)
_WITNESSES = round(1 / (1 - HIGH)) - 1  # other answers that may confirm that one which is far off is no accident
_VARIANCE = 0.06  # of the log of actual over expected, when nothing is known: that of answers within a factor of 1.5
_WIDEST = 4.0  # the largest square of such a log that counts
_MOST = 1e9  # milliseconds, or tokens, that count: so that no figure overflows
_MOST_ANSWERS = 10**12
MEASURED = 3
"""Answers after which an estimate counts as measured."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a backend has to do for a request: tokens to prefill, to read from a cache, to produce; and its company.

    `own_first_ms` and `own_rest_ms` are what a backend that knows its speed says itself, for `SpeedModel.own`.
    """

    uncached: int
    cached: int = 0
    output: int = 0
    load: int = 0
    own_first_ms: float = 0.0
    own_rest_ms: float = 0.0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Expected milliseconds, and those that `HIGH` of the answers keep; `answers` is how many taught it.

    `measured`: by enough of them, of which the last is not too long ago.
    """

    ttft_ms: float
    total_ms: float
    ttft_high_ms: float
    total_high_ms: float
    answers: int
    measured: bool


@dataclass(slots=True)
class _Line:
    """A linear form fitted to relative errors, with the spread of what is left over.

    `steady`: what it is applied to follows changes itself, so that only what stays wrong is to be learned, and slowly.
    """

    prior: tuple[float, ...]
    steady: bool = False
    weights: list[float] = field(default_factory=list)
    spread: list[list[float]] = field(default_factory=list)
    level: float = 0.0  # log of how far the last answers lie off the line: a change of speed shows here first
    variance: float = _VARIANCE
    witnesses: list[float] = field(default_factory=list)  # logs of actual over expected of the last answers

    def __post_init__(self) -> None:
        if not self.weights:
            self.weights, self.spread = list(self.prior), self._doubt()

    @property
    def high(self) -> float:
        """The factor over the expected time that `HIGH` of the answers stay below."""
        return math.exp(_DEVIATIONS * math.sqrt(self.variance))

    def value(self, x: Sequence[float], trust: float) -> float:
        """What was learned as far as it is trusted; the prior as far as not."""
        return self.values(x, trust)[0]

    def values(self, x: Sequence[float], trust: float) -> tuple[float, float]:
        """`value`, and the one that `HIGH` of the answers stay below."""
        learned = assumed = 0.0
        for value, weight, prior in zip(x, self.weights, self.prior, strict=True):
            learned += weight * value
            assumed += prior * value
        learned *= trust * math.exp(self.level)
        assumed *= 1 - trust
        return max(learned + assumed, 1e-3), max(learned * self.high + assumed, 1e-3)

    def age(self, trust: float) -> None:
        """Lean back to the prior for good, so that the next answer is held against what `value` gave with this trust."""
        level, doubt = trust * self.level, self._doubt()
        kept, assumed = trust * math.exp(self.level - level), (1 - trust) * math.exp(-level)
        self.weights = [min(kept * w + assumed * p, _MOST) for w, p in zip(self.weights, self.prior, strict=True)]
        pairs = zip(self.spread, doubt, strict=True)
        self.spread = [[trust * a + (1 - trust) * b for a, b in zip(row, new, strict=True)] for row, new in pairs]
        self.level, self.variance = level, trust * self.variance + (1 - trust) * _VARIANCE

    def learn(self, x: Sequence[float], actual: float) -> None:
        n, expected = len(x), self.value(x, 1.0)
        ratio = self._weighed(math.log(min(max(actual, 1e-3), _MOST) / expected))
        actual = min(max(expected * math.exp(ratio), 1e-3), _MOST)
        if not self.steady:
            self.level = max(min(self.level + _LEVEL * ratio, _FARTHEST), -_FARTHEST)
        self.variance += _STEP * (min(ratio * ratio, _WIDEST) - self.variance)
        scaled = [v / actual for v in x]
        gain = [sum(row[j] * scaled[j] for j in range(n)) for row in self.spread]
        total = _NOISE**2 + sum(scaled[i] * gain[i] for i in range(n))
        if not total >= _NOISE**2 / 2:  # no matrix of a spread: rounding, or what was saved was damaged
            self.spread = self._doubt()
            return
        wrong = 1.0 - sum(self.weights[i] * scaled[i] for i in range(n))
        # One answer that hung must not turn the line over.
        wrong = max(min(wrong, 1.0), -4.0)
        for i in range(n):
            self.weights[i] = min(max(self.weights[i] + gain[i] * wrong / total, 0.0), _MOST)
        for i in range(n):
            for j in range(n):
                self.spread[i][j] = (self.spread[i][j] - gain[i] * gain[j] / total) / _FORGET
        for i in range(n):
            most = (self._least_sure * max(self.prior[i], self.weights[i])) ** 2
            if self.spread[i][i] > most:  # directions that nothing excites must not run away
                shrink = math.sqrt(most / self.spread[i][i])
                for j in range(n):
                    self.spread[i][j] *= shrink
                    self.spread[j][i] *= shrink
        if not all(abs(v) <= _MOST**2 for row in self.spread for v in row) or min(self.spread[i][i] for i in range(n)) < 0:
            self.spread = self._doubt()

    def _weighed(self, ratio: float) -> float:
        """How far off an answer counts as, of how far off it was."""
        if len(self.witnesses) < MEASURED:  # the line is a prior yet, and no answer is too far from that
            self.witnesses.append(0.0)
            return ratio
        usual = _DEVIATIONS * math.sqrt(self.variance)
        most, least = max(usual, *self.witnesses), min(-usual, *self.witnesses)
        self.witnesses = [*self.witnesses[1 - _WITNESSES :], max(min(ratio, _FARTHEST), -_FARTHEST)]
        return max(min(ratio, most), least)

    @property
    def _least_sure(self) -> float:
        """The largest standard deviation of a weight, over the weight: how much one answer can teach."""
        return _STEADY if self.steady else 1.0

    def _doubt(self) -> list[list[float]]:
        sure = self._least_sure**2
        return [[(sure * w * w if i == j else 0.0) for j in range(len(self.prior))] for i, w in enumerate(self.prior)]


@dataclass(slots=True)
class SpeedModel:
    """The speed of one backend. Times in milliseconds; not for several threads at once.

    `first` is the prior of the time to the first token: fixed, for each token of prefill, for each token read from a cache,
    for each other request under way. `per_token` is the prior for each token of output. With `own` the backend knows its
    speed and its queue itself (a local engine does), and says on what it rests: then only how far it is off is learned.
    """

    first: tuple[float, float, float, float] = (600.0, 0.03, 0.003, 20.0)
    per_token: float = 15.0
    own: str | None = None
    answers: int = 0
    seen_at: float | None = None
    _first: _Line = field(init=False)
    _rest: _Line = field(init=False)

    def __post_init__(self) -> None:
        steady = self.own == "measured"  # it times its own calls, and each answer has taught it already
        self._first = _Line((1.0,) if self.own else self.first, steady)
        self._rest = _Line((1.0,) if self.own else (self.per_token, self.per_token), steady)

    def speed(self, work: Work, *, now: float) -> Speed:
        """What this work is expected to take at `now` (Unix seconds)."""
        age = self._age(now)
        trust = 0.5 ** (age / STALE_S)
        x, y = self._inputs(work)
        first, first_high = self._first.values(x, trust)
        rest, rest_high = self._rest.values(y, trust)
        return Speed(
            ttft_ms=first,
            total_ms=first + rest,
            ttft_high_ms=first_high,
            total_high_ms=first_high + rest_high,
            answers=self.answers,
            measured=self.answers >= MEASURED and age <= FORGOTTEN_S,
        )

    def learn(self, work: Work, *, ttft_ms: float | None, total_ms: float, now: float) -> None:
        """An answer took this long; `ttft_ms` None: nothing came that could be timed."""
        if ttft_ms is None or not (0 <= ttft_ms <= total_ms < math.inf):
            return
        age = self._age(now)
        if age > FORGOTTEN_S:
            self.answers = 0
        for line in (self._first, self._rest):
            line.age(0.5 ** (age / STALE_S))
            if not self.answers:
                line.witnesses = []
        first, rest = self._inputs(work)
        if max(first) > 0:
            self._first.learn(first, ttft_ms)
        if work.output > 1 and max(rest) > 0:
            self._rest.learn(rest, max(total_ms - ttft_ms, 1e-3))
        self.answers = min(self.answers + 1, _MOST_ANSWERS)
        self.seen_at = now

    def _age(self, now: float) -> float:
        """Seconds since the last answer; after a clock was set back, as many as it was."""
        return math.inf if self.seen_at is None else abs(now - self.seen_at)

    def _inputs(self, work: Work) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.own:
            return (min(work.own_first_ms, _MOST),), (min(work.own_rest_ms, _MOST),)
        first = 1.0, min(float(work.uncached), _MOST), min(float(work.cached), _MOST), min(float(work.load), _MOST)
        return first, (min(float(work.output), _MOST), 1.0)

    def to_dict(self) -> dict[str, Any]:
        """What it learned, as JSON."""
        lines = {
            name: {
                "weights": line.weights,
                "spread": line.spread,
                "level": line.level,
                "variance": line.variance,
                "witnesses": line.witnesses,
            }
            for name, line in (("first", self._first), ("rest", self._rest))
        }
        return {**lines, "answers": self.answers, "seen_at": self.seen_at}

    def load(self, data: Any) -> None:
        """Take up what `to_dict` gave; data that cannot be that is left aside."""
        try:
            lines = [_read(data[name], line) for name, line in (("first", self._first), ("rest", self._rest))]
            answers, seen_at = int(data["answers"]), None if data["seen_at"] is None else float(data["seen_at"])
        except (TypeError, ValueError, KeyError, OverflowError):
            return
        if 0 <= answers <= _MOST_ANSWERS and (seen_at is None or math.isfinite(seen_at)):
            self._first, self._rest = lines
            self.answers, self.seen_at = answers, seen_at


def _read(data: Any, like: _Line) -> _Line:
    """A line that answers could have made; whatever it is asked for stays a number. Raises ValueError and the like."""
    weights = [float(v) for v in data["weights"]]
    spread = [[float(v) for v in row] for row in data["spread"]]
    witnesses = [float(v) for v in data["witnesses"]]
    level, variance, size = float(data["level"]), float(data["variance"]), len(like.prior)
    shaped = len(weights) == len(spread) == size and all(len(row) == size for row in spread) and len(witnesses) <= _WITNESSES
    fine = all(0 <= w <= _MOST for w in weights) and all(abs(v) <= _MOST**2 for row in spread for v in row)
    fine = fine and 0 <= variance <= _WIDEST and all(abs(v) <= _FARTHEST for v in (level, *witnesses))
    if not shaped or not fine or min(spread[i][i] for i in range(size)) < 0:
        raise ValueError("out of range")
    return _Line(like.prior, like.steady, weights, spread, level, variance, witnesses)
