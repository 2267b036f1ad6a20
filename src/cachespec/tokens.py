"""How many tokens a prompt has for a model whose tokenizer is not at hand: learned from what the vendor reports.

Tokens are linear in what a prompt is made of: characters of text, bytes beyond one a character (other scripts), bytes of JSON
in tool definitions and in tool traffic, and what a vendor puts around each piece. The weights start from the usual densities
and are corrected by every reported usage with recursive least squares (Haykin, Adaptive Filter Theory, ch. 9) under drift, so
that they follow a new tokenizer. Errors are relative, since a long prompt may not outvote a hundred short ones.

No network, no download (contract D3); an estimate costs about a microsecond once the sizes of a prompt are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachespec.prompt import Segment
from cachespec.values import quick

PRIOR = (0.25, 0.30, 0.24, 0.28, 4.0)
"""Tokens for a character of text, a byte beyond that, a byte of a tool's JSON, of other JSON, and for a piece."""
_DOUBT = (0.08, 0.15, 0.08, 0.10, 3.0)
"""How far the prior may be off: one standard deviation of each weight."""
_NOISE = 0.06
"""Relative spread of a vendor's count around the linear form, seen between kinds of text of one tokenizer."""
_DRIFT = 0.03
_HEAVIEST = 10_000.0  # tokens that nothing of what is weighed has; a piece has a few, and what a vendor puts before it
_FARTHEST = 1e6  # a relative error
_WIDEST = 100.0  # a product of two doubts
_MOST_SEEN = 10**12
IMAGE_TOKENS = 1_000
"""What an image is taken to hold: vendors count them by size and detail, which no byte says."""


@quick
@dataclass(frozen=True, slots=True)
class Sizes:
    """What a prompt, or a part of it, is made of: the five quantities that `PRIOR` weighs, and images."""

    text: int = 0
    wide: int = 0
    tools: int = 0
    json: int = 0
    pieces: int = 0
    images: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.text + other.text,
            self.wide + other.wide,
            self.tools + other.tools,
            self.json + other.json,
            self.pieces + other.pieces,
            self.images + other.images,
        )


def sizes_of(segments: Iterable[Segment]) -> Sizes:
    """The sizes of these segments. Images inside them must be taken out by the caller, who knows their bytes."""
    text = wide = tools = json = pieces = 0
    for segment in segments:
        kind, value = segment.kind, segment.value
        if kind == "params":
            continue  # no model reads them as they are
        pieces += 1
        if isinstance(value, str):
            text += len(value)
            wide += segment.size - len(value)
        elif kind == "tools":
            tools += segment.size
        else:
            json += segment.size
    return Sizes(text, wide, tools, json, pieces)


@dataclass(slots=True)
class TokenModel:
    """The densities of one model's tokenizer. Not for several threads at once."""

    weights: list[float] = field(default_factory=lambda: list(PRIOR))
    spread: list[list[float]] = field(default_factory=lambda: _diagonal(_DOUBT))
    seen: int = 0
    error: float | None = None
    """Mean relative error of the last estimates (exponentially weighted); None until something was reported."""

    def tokens(self, sizes: Sizes) -> int:
        """The estimate: never below one token for a prompt that holds anything."""
        w = self.weights
        linear = w[0] * sizes.text + w[1] * sizes.wide + w[2] * sizes.tools + w[3] * sizes.json + w[4] * sizes.pieces
        return max(round(linear) + IMAGE_TOKENS * sizes.images, 1 if sizes.pieces else 0)

    def learn(self, sizes: Sizes, reported: int) -> None:
        """Take up what a vendor counted for a prompt. Prompts with images, and counts that cannot be, teach nothing."""
        if reported <= 0 or sizes.images or not sizes.pieces or reported > _most(sizes):
            return
        miss = min(abs(self.tokens(sizes) - reported) / reported, _FARTHEST)
        self.error = miss if self.error is None else 0.9 * self.error + 0.1 * miss
        self.seen = min(self.seen + 1, _MOST_SEEN)
        x = [value / reported for value in (sizes.text, sizes.wide, sizes.tools, sizes.json, sizes.pieces)]
        gain = [sum(row[j] * x[j] for j in range(5)) for row in self.spread]
        scale = _NOISE**2 + sum(x[i] * gain[i] for i in range(5))
        if not scale >= _NOISE**2 / 2:  # no matrix of doubts: rounding, or what was saved was damaged
            self.spread = _diagonal(_DOUBT)
            return
        wrong = 1.0 - sum(self.weights[i] * x[i] for i in range(5))
        for i in range(5):
            # A weight below nothing would make longer prompts shorter.
            self.weights[i] = min(max(self.weights[i] + gain[i] * wrong / scale, 0.0), _HEAVIEST)
        for i in range(5):
            for j in range(5):
                self.spread[i][j] -= gain[i] * gain[j] / scale
        for i in range(5):
            # Doubt grows again with every report, since a model may change behind its name; never beyond where it began.
            grown = min(self.spread[i][i] + (_DRIFT * _DOUBT[i]) ** 2, _DOUBT[i] ** 2)
            self.spread[i][i] = grown if math.isfinite(grown) and grown > 0 else _DOUBT[i] ** 2
        if not all(abs(v) <= _WIDEST for row in self.spread for v in row):
            self.spread = _diagonal(_DOUBT)

    def to_dict(self) -> dict[str, Any]:
        """What it learned, as JSON."""
        return {"weights": self.weights, "spread": self.spread, "seen": self.seen, "error": self.error}

    @classmethod
    def from_dict(cls, data: Any) -> TokenModel:
        """What `to_dict` gave; a fresh model where the data cannot be that."""
        try:
            weights, spread = [float(v) for v in data["weights"]], [[float(v) for v in row] for row in data["spread"]]
            seen, error = int(data["seen"]), data["error"]
            made = cls(weights, spread, seen, None if error is None else float(error))
        except (TypeError, ValueError, KeyError, OverflowError):
            return cls()
        shaped = len(weights) == len(spread) == 5 and all(len(row) == 5 for row in spread)
        fine = all(0 <= w <= _HEAVIEST for w in weights) and all(abs(v) <= _WIDEST for row in spread for v in row)
        return made if shaped and fine and 0 <= seen <= _MOST_SEEN and 0 <= (made.error or 0.0) <= _FARTHEST else cls()


def _most(sizes: Sizes) -> int:
    """More tokens than these sizes can have: a token is a byte at least, and a vendor adds some of its own."""
    return 2 * (sizes.text + sizes.wide + sizes.tools + sizes.json) + 16 * sizes.pieces + 4_096


def _diagonal(doubt: Sequence[float]) -> list[list[float]]:
    return [[d * d if i == j else 0.0 for j in range(len(doubt))] for i, d in enumerate(doubt)]
