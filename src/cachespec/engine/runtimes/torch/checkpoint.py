"""What a checkpoint on disk offers to the decoder, whatever its format.

Weights go by short names: ``embed``, ``norm``, ``head``, and for layer i ``i.q``, ``i.k``, ``i.v``, ``i.o``, ``i.gate``,
``i.up``, ``i.down``, the norms ``i.attn_norm``, ``i.mlp_norm``, ``i.q_norm``, ``i.k_norm``, and ``i.q.bias`` and so on.
Matrices are [outputs, inputs]; queries and keys are in the order of the Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cachespec.engine.runtimes.torch.config import ModelConfig
from cachespec.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from cachespec.engine.runtimes.torch.tokenizer import Vocabulary

PROJECTIONS: Final = ("q", "k", "v", "o", "gate", "up", "down")


class Checkpoint(Protocol):
    """An open checkpoint. `tensor` gives weights as they are stored (floats of 16 or 32 bits), one at a time."""

    path: Path
    config: ModelConfig
    description: str
    chat_template: str | None

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""

    def tensor(self, name: str) -> Tensor:
        """A weight. Raises ConfigError when it is missing, quantised in a way nobody here knows, or damaged."""

    def rope_factors(self) -> Tensor | None:
        """What each rotary frequency is divided by, [head_dim / 2], where the file says so."""

    def vocabulary(self) -> Vocabulary:
        """Tokens, merges and special tokens. Raises ConfigError for a tokenizer that is not supported."""

    def close(self) -> None:
        """Let go of the file."""


def expected(config: ModelConfig) -> Iterator[str]:
    """Names of the weights that a model of this shape must have."""
    yield "embed"
    yield "norm"
    if not config.tied:
        yield "head"
    for i in range(config.layers):
        yield from (f"{i}.{name}" for name in (*PROJECTIONS, "attn_norm", "mlp_norm"))
        if config.qk_norm:
            yield from (f"{i}.q_norm", f"{i}.k_norm")


def check_names(config: ModelConfig, names: Iterable[str], where: str) -> None:
    """Raises ConfigError unless these are the weights of such a model, biases being optional: nothing is left unused."""
    there, needed = set(names), set(expected(config))
    allowed = needed | {f"{i}.{name}.bias" for i in range(config.layers) for name in PROJECTIONS}
    if config.tied:
        allowed.add("head")  # stored by some although it is the embedding
    for problem, which in (("lacks", needed - there), ("has weights nobody here knows:", there - allowed)):
        if which:
            some = ", ".join(sorted(which)[:4])
            more = f" and {len(which) - 4} more" if len(which) > 4 else ""
            raise ConfigError(f"{where}: not a complete {config.architecture} model; it {problem} {some}{more}", key="model")
