"""How long a backend takes, learned from how long it took.

The time to the first token is linear in what must be read: a fixed part, the tokens to prefill, those read from a cache, and
the other requests under way; the time after it is linear in the output. Both are fitted by recursive least squares on
*relative* errors with forgetting, starting from a prior, so that a dozen answers after a change the new speed is known. How
far answers scatter around the line is kept as well, as the spread of the logarithm of actual over expected time (times of
answers are about lognormal), because limits are kept by the slow answers, not by the mean one.

What is known grows old: after `STALE_S` without an answer the estimate leans back towards the prior, so that a backend that
was slow once is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STALE_S = 900.0
"""Seconds after which half of what was learned is doubted."""
HIGH = 0.95
"""The quantile that latency limits are held against."""
_FORGET = 0.9
_NOISE = 0.25
_STEP = 0.1
_DEVIATIONS = 1.645  # of a normal law, that `HIGH` of it stay below
_LEVEL = 0.3
_FARTHEST = math.log(1e4)
MEASURED = 3
"""Answers after which an estimate counts as measured."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Expected milliseconds, and those that `HIGH` of the answers keep; `answers` is how many taught it."""

    ttft_ms: float
    total_ms: float
    ttft_high_ms: float
    total_high_ms: float
    answers: int

    @property
    def measured(self) -> bool:
        return self.answers >= MEASURED


@dataclass(slots=True)
class _Line:
    """A linear form fitted to relative errors, with the quantiles of what is left over."""

    prior: tuple[float, ...]
    weights: list[float] = field(default_factory=list)
    spread: list[list[float]] = field(default_factory=list)
    level: float = 0.0  # log of how far the last answers lie off the line: a change of speed shows here first
    variance: float = 0.06  # of the log of actual over expected; at first that of answers within a factor of 1.5

    def __post_init__(self) -> None:
        if not self.weights:
            self.weights = list(self.prior)
            self.spread = [[(w * w if i == j else 0.0) for j in range(len(self.prior))] for i, w in enumerate(self.prior)]

    @property
    def high(self) -> float:
        """The factor over the expected time that `HIGH` of the answers stay below."""
        return math.exp(_DEVIATIONS * math.sqrt(self.variance))

    def value(self, x: Sequence[float], trust: float) -> float:
        learned = assumed = 0.0
        for value, weight, prior in zip(x, self.weights, self.prior, strict=True):
            learned += weight * value
            assumed += prior * value
        return max(trust * learned * math.exp(self.level) + (1 - trust) * assumed, 1e-3)

    def learn(self, x: Sequence[float], actual: float) -> None:
        n = len(x)
        ratio = math.log(max(actual, 1e-3) / self.value(x, 1.0))
        self.level = max(min(self.level + _LEVEL * ratio, _FARTHEST), -_FARTHEST)
        self.variance += _STEP * (min(ratio * ratio, 4.0) - self.variance)
        scaled = [v / max(actual, 1e-3) for v in x]
        gain = [sum(row[j] * scaled[j] for j in range(n)) for row in self.spread]
        total = _NOISE**2 + sum(scaled[i] * gain[i] for i in range(n))
        wrong = 1.0 - sum(self.weights[i] * scaled[i] for i in range(n))
        # One answer that hung must not turn the line over.
        wrong = max(min(wrong, 1.0), -4.0)
        for i in range(n):
            self.weights[i] = max(self.weights[i] + gain[i] * wrong / total, 0.0)
        for i in range(n):
            for j in range(n):
                self.spread[i][j] = (self.spread[i][j] - gain[i] * gain[j] / total) / _FORGET
        for i in range(n):
            most = max(self.prior[i], self.weights[i]) ** 2
            if self.spread[i][i] > most:  # directions that nothing excites must not run away
                shrink = math.sqrt(most / self.spread[i][i])
                for j in range(n):
                    self.spread[i][j] *= shrink
                    self.spread[j][i] *= shrink


@dataclass(slots=True)
class SpeedModel:
    """The speed of one backend. Times in milliseconds; not for several threads at once.

    `first` is the prior of the time to the first token: fixed, for each token of prefill, for each token read from a cache,
    for each other request under way. `per_token` is the prior for each token of output. With `own` the backend knows its
    speed and its queue itself (a local engine does): then only how far it is off is learned.
    """

    first: tuple[float, float, float, float] = (600.0, 0.03, 0.003, 20.0)
    per_token: float = 15.0
    own: bool = False
    answers: int = 0
    seen_at: float | None = None
    _first: _Line = field(init=False)
    _rest: _Line = field(init=False)

    def __post_init__(self) -> None:
        self._first = _Line((1.0,) if self.own else self.first)
        self._rest = _Line((1.0,) if self.own else (self.per_token, self.per_token))

    def speed(self, work: Work, *, now: float) -> Speed:
        """What this work is expected to take at `now` (Unix seconds)."""
        trust = 0.0 if self.seen_at is None else 0.5 ** (max(now - self.seen_at, 0.0) / STALE_S)
        x = self._inputs(work)
        first, rest = self._first.value(x[0], trust), self._rest.value(x[1], trust)
        first_high = first * self._first.high
        return Speed(
            ttft_ms=first,
            total_ms=first + rest,
            ttft_high_ms=first_high,
            total_high_ms=first_high + rest * self._rest.high,
            answers=self.answers,
        )

    def learn(self, work: Work, *, ttft_ms: float | None, total_ms: float, now: float) -> None:
        """An answer took this long; `ttft_ms` None: nothing came that could be timed."""
        if ttft_ms is None or not (0 <= ttft_ms <= total_ms < math.inf):
            return
        first, rest = self._inputs(work)
        if max(first) > 0:
            self._first.learn(first, ttft_ms)
        if work.output > 1 and max(rest) > 0:
            self._rest.learn(rest, max(total_ms - ttft_ms, 1e-3))
        self.answers += 1
        self.seen_at = now

    def _inputs(self, work: Work) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.own:
            return (work.own_first_ms,), (work.own_rest_ms,)
        return (1.0, float(work.uncached), float(work.cached), float(work.load)), (float(work.output), 1.0)

    def to_dict(self) -> dict[str, Any]:
        """What it learned, as JSON."""
        lines = {
            name: {"weights": line.weights, "spread": line.spread, "level": line.level, "variance": line.variance}
            for name, line in (("first", self._first), ("rest", self._rest))
        }
        return {**lines, "answers": self.answers, "seen_at": self.seen_at}

    def load(self, data: Any) -> None:
        """Take up what `to_dict` gave; data that cannot be that is left aside."""
        try:
            lines = [_read(data[name], line.prior) for name, line in (("first", self._first), ("rest", self._rest))]
            answers, seen_at = int(data["answers"]), None if data["seen_at"] is None else float(data["seen_at"])
        except (TypeError, ValueError, KeyError):
            return
        self._first, self._rest = lines
        self.answers, self.seen_at = answers, seen_at


def _read(data: Any, prior: tuple[float, ...]) -> _Line:
    weights = [float(v) for v in data["weights"]]
    spread = [[float(v) for v in row] for row in data["spread"]]
    level, variance, size = float(data["level"]), float(data["variance"]), len(prior)
    shaped = len(weights) == len(spread) == size and all(len(row) == size for row in spread)
    if not shaped or not all(math.isfinite(v) for v in (*weights, *(v for row in spread for v in row), level, variance)):
        raise ValueError("not what was written")
    if min(weights) < 0 or variance < 0 or abs(level) > _FARTHEST or min(spread[i][i] for i in range(size)) < 0:
        raise ValueError("out of range")
    return _Line(prior, weights, spread, level, variance)
