"""The contract of a runtime: something that holds a model and the KV of a few sequences.

A runtime computes and decides nothing: it evaluates the tokens it is told to, draws tokens from the rows it computed,
and forgets what it is told to forget. The engine's loop is the same for every runtime.

Threads. `tokenize`, `piece`, `is_end` and `interrupt` may be called from any thread at any time. Everything else belongs
to one thread at a time, because no library's context takes two: the one that loads it, then the engine's. After `close`
every method raises `RuntimeError`, whoever calls it.

Positions. A sequence is a small integer below `sequences`; its tokens stand at positions 0, 1, 2... without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cachespec.engine.sampling import Sampling


class Interrupted(Exception):
    """`interrupt` was called while `evaluate` ran.

    Each sequence of the call is as it was before it; one that cannot be rolled back is empty (`length` tells).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded model.

    Attributes:
        context: tokens that one sequence has room for.
        trained_context: the longest context the model was trained for; None when the file does not say.
        vocab: number of token ids; a row of logits is that long.
        size: bytes of the weights in memory; `parameters` their number.
        chat_template: the model's own Jinja template; None when it has none.
        bos, eos: their text, empty when the model has none. `add_bos`: a prompt starts with bos.
        controls: text and id of the control tokens, which text written by users must never become.
        fingerprint: 16 bytes that tell this model, its quantisation and its KV type from others.
        room: tokens that all sequences together have room for; None: each has `context` of its own.
        shares: a fork shares the KV of its source, so that it takes no room; else it copies.
        rewinds: `truncate` can forget a part of a sequence. Without that (recurrent models) there is no speculation.
        draws_together: drawing from many rows costs hardly more than from one, and they are drawn in one call.
        kv_bytes: memory of one token's KV; 0 when it is not known.
    """

    architecture: str
    description: str
    context: int
    trained_context: int | None
    vocab: int
    parameters: int
    size: int
    chat_template: str | None
    bos: str
    eos: str
    add_bos: bool
    controls: Mapping[str, int] = field(default_factory=dict)
    fingerprint: bytes = b""
    room: int | None = None
    shares: bool = False
    rewinds: bool = True
    draws_together: bool = False
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens to evaluate for one sequence from position `start`, with the logits of the last `rows` of them."""

    sequence: int
    start: int
    tokens: Sequence[int]
    rows: int = 0


class Runtime(Protocol):
    """See the module's docstring. `width` is the most tokens one `evaluate` takes, over all its spans."""

    info: ModelInfo
    sequences: int
    width: int

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Tokens of `text`, without bos or eos. `special`: the text of a control token becomes that token."""

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters; empty for a control token."""

    def is_end(self, token: int) -> bool:
        """Whether this token ends an answer."""

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        """Evaluate, write the KV, and return a handle for each wanted row, in order.

        Each span starts where its sequence ends. Handles are valid until the next `evaluate`.

        Raises: `Interrupted`; OutOfPagesError when there is no room, and nothing changed; ValueError for spans that do
        not fit the rules; RuntimeError when the library failed, after which the runtime is of no further use.
        """

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        """One token per row, by the rule of `engine.sampling`; `positions` are those of the tokens to be drawn.

        Changes nothing: the same arguments give the same tokens. Raises ArithmeticError for a row without a number.
        """

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """A copy of these rows of logits, shape [len(rows), vocab]."""

    def length(self, sequence: int) -> int:
        """How many tokens the sequence holds."""

    def truncate(self, sequence: int, length: int) -> bool:
        """Forget everything from position `length` on. False: this model cannot (recurrent, sliding window).

        After False the sequence must be freed; what it holds is of no use.
        """

    def fork(self, source: int, target: int, length: int) -> bool:
        """Make the empty sequence `target` share the first `length` tokens of `source`. False: this model cannot."""

    def free(self, sequence: int) -> None:
        """Forget the sequence. Always works; freeing an empty one changes nothing."""

    def export_state(self, sequence: int) -> bytes:
        """The sequence's KV as bytes, for `import_state` of the same model with the same settings."""

    def import_state(self, sequence: int, data: bytes) -> bool:
        """Put exported bytes into an empty sequence. False: not ours, or no room; the sequence is then empty."""

    def interrupt(self) -> None:
        """Make the `evaluate` that is running, or else the next one, raise `Interrupted`, within about 10 ms."""

    def resume(self) -> None:
        """Take an `interrupt` back."""

    def close(self) -> None:
        """Free the model. Idempotent; waits for a `tokenize` that is running."""

    def facts(self) -> Mapping[str, Any]:
        """Settings worth showing to a person: threads, device, attention kernel."""
