"""A runtime without a model: logits, or an exact law, are a function of the last tokens. For speculation's tests.

It keeps the contract of `runtimes.base` strictly, for several sequences: positions without gaps, rows only of the last call,
nothing evaluated past the context.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachespec.engine.runtimes.base import ModelInfo, Span
from cachespec.engine.sampling import Sampling, draw
from cachespec.errors import OutOfPagesError

Row = Callable[[tuple[int, ...]], NDArray[np.float32]]


def random_logits(vocab: int, *, order: int = 2, seed: int = 0, spread: float = 2.0) -> Row:
    """Normal logits that depend on the last `order` tokens."""
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def row(tokens: tuple[int, ...]) -> NDArray[np.float32]:
        context = tokens[-order:] if order else ()
        if context not in known:
            rng = np.random.default_rng([seed, len(context), *context])
            known[context] = (spread * rng.standard_normal(vocab)).astype(np.float32)
        return known[context]

    return row


def near(row: Row, disagreement: float, vocab: int, *, order: int = 2, seed: int = 1) -> Row:
    """Logits like those of `row`, with noise: a draft model."""
    noise = random_logits(vocab, order=order, seed=seed, spread=disagreement)
    return lambda tokens: row(tokens) + noise(tokens)


class MarkovRuntime:
    """`ends`: ids that end an answer. `pieces`: the bytes of the tokens, their number as text when not given."""

    def __init__(
        self,
        row: Row,
        vocab: int,
        *,
        sequences: int = 4,
        context: int = 4096,
        width: int = 512,
        ends: Sequence[int] = (),
        pieces: Sequence[bytes] | None = None,
        controls: Mapping[str, int] | None = None,
        cuts: bool = True,
    ) -> None:
        self.info = ModelInfo(
            architecture="markov",
            description="markov",
            context=context,
            trained_context=None,
            vocab=vocab,
            parameters=1,
            size=1,
            chat_template=None,
            bos="",
            eos="",
            add_bos=False,
            controls=controls or {},
            fingerprint=b"markov",
        )
        self.sequences, self.width, self.cuts = sequences, width, cuts
        self.row, self.ends = row, frozenset(ends)
        self.pieces = pieces or [b"%d " % token for token in range(vocab)]
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self.calls: list[list[int]] = []
        self.evaluated = 0
        self._rows: list[tuple[int, ...]] = []

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return [self.pieces.index(text[i : i + 1].encode()) for i in range(len(text))]

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        assert 0 < sum(len(span.tokens) for span in spans) <= self.width
        assert len({span.sequence for span in spans}) == len(spans)
        for span in spans:
            assert span.start == len(self.held[span.sequence]), "a gap or an overlap in the positions"
            assert 0 <= span.rows <= len(span.tokens)
            assert all(0 <= token < self.info.vocab for token in span.tokens)
        if sum(map(len, self.held)) + sum(len(span.tokens) for span in spans) > self.info.context:
            raise OutOfPagesError("no room")
        self._rows = []
        for span in spans:
            held = self.held[span.sequence]
            held += span.tokens
            self._rows += [tuple(held[: len(held) - span.rows + 1 + j]) for j in range(span.rows)]
            self.evaluated += len(span.tokens)
        self.calls.append([len(span.tokens) for span in spans])
        return list(range(len(self._rows)))

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        assert all(len(self._rows[r]) == p for r, p in zip(rows, positions, strict=True)), "a row of another position"
        return [self.sample(self._rows[r], s, p) for r, s, p in zip(rows, sampling, positions, strict=True)]

    def sample(self, tokens: tuple[int, ...], sampling: Sampling, position: int) -> int:
        return draw(self.row(tokens), sampling, position)

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return np.stack([self.row(self._rows[r]) for r in rows])

    def length(self, sequence: int) -> int:
        return len(self.held[sequence])

    def truncate(self, sequence: int, length: int) -> bool:
        if length < len(self.held[sequence]) and not self.cuts:
            return False
        del self.held[sequence][length:]
        return True

    def fork(self, source: int, target: int, length: int) -> bool:
        self.held[target] = self.held[source][:length]
        return True

    def free(self, sequence: int) -> None:
        self.held[sequence] = []

    def export_state(self, sequence: int) -> bytes:
        return repr(self.held[sequence]).encode()

    def import_state(self, sequence: int, data: bytes) -> bool:
        return False

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...

    def facts(self) -> Mapping[str, Any]:
        return {}


def random_tokens(vocab: int, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]
