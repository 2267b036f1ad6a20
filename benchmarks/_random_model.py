"""Checkpoints that no file holds: random weights in the shape of well-known models, made on the device that runs them.

Speed depends on shapes alone. What such a model says means nothing, so that one kind of it is made to say something: it
knows the token that follows each token, and is given the text that it would write (`chain`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from cachespec.engine.runtimes.torch.config import ModelConfig, Rope
from cachespec.engine.runtimes.torch.tokenizer import Vocabulary

_LLAMA_3 = Rope(theta=500000.0, kind="llama3", factor=8.0, original=8192)
_shape = partial(ModelConfig, eps=1e-6)
SHAPES = {
    "llama-3-8b": _shape(
        architecture="llama", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256,
        rope=_LLAMA_3,
    ),
    "qwen3-1.7b": _shape(
        architecture="qwen3", layers=28, hidden=2048, intermediate=6144, heads=16, kv_heads=8, head_dim=128, vocab=151936,
        rope=Rope(theta=1000000.0), tied=True, qk_norm=True,
    ),
    "small-llama": _shape(
        architecture="llama", layers=3, hidden=96, intermediate=160, heads=6, kv_heads=2, head_dim=16, vocab=512,
        rope=replace(_LLAMA_3, original=64),
    ),
    "small-qwen3": _shape(
        architecture="qwen3", layers=3, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32, vocab=512,
        rope=Rope(theta=10000.0), tied=True, qk_norm=True,
    ),
}  # fmt: skip
"""Sizes of the published models, and small ones with the same parts."""


class RandomCheckpoint:
    """See `Checkpoint`. `chained`: token t is followed by t + 1, whatever stands before; all weights are still computed with.

    `device`: where weights are made, of `dtype`. They are the same every time on the same device.
    """

    chat_template: str | None = None

    def __init__(self, name: str, *, device: torch.device, dtype: torch.dtype, chained: bool = False) -> None:
        config = SHAPES[name]
        self.path, self.description = Path(name), f"random {name}"
        self.config = replace(config, tied=False) if chained else config
        self._device, self._dtype, self._chained = device, dtype, chained

    def has(self, name: str) -> bool:
        return not name.endswith(".bias")

    def tensor(self, name: str) -> Tensor:
        c, part = self.config, name.rpartition(".")[2]
        if part.endswith("norm"):
            return self._normal(name, (c.head_dim if part in ("q_norm", "k_norm") else c.hidden,), 0.1).add_(1)
        if name == "head" and self._chained:  # the embedding of the token before; its length would be the logit
            return self.tensor("embed").roll(1, 0).mul_(c.hidden**-0.5)
        queries = c.heads * c.head_dim
        outputs, inputs = {
            "embed": (c.vocab, c.hidden),
            "head": (c.vocab, c.hidden),
            "q": (queries, c.hidden),
            "k": (c.kv_heads * c.head_dim, c.hidden),
            "v": (c.kv_heads * c.head_dim, c.hidden),
            "o": (c.hidden, queries),
            "gate": (c.intermediate, c.hidden),
            "up": (c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
        }[part]
        if self._chained and part in ("o", "down"):  # what blocks add to a token's embedding
            return torch.zeros(outputs, inputs, device=self._device, dtype=self._dtype)
        return self._normal(name, (outputs, inputs), 1.0 if name == "embed" and self._chained else 2 * inputs**-0.5)

    def _normal(self, name: str, shape: tuple[int, ...], deviation: float) -> Tensor:
        dice = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        made = torch.empty(shape, device=self._device, dtype=self._dtype)
        return made.normal_(0.0, deviation, generator=dice)

    def rope_factors(self) -> Tensor | None:
        return None

    def vocabulary(self) -> Vocabulary:
        """Numbers, none of which ends an answer."""
        from tokenizers import Tokenizer, models

        words = Tokenizer(models.WordLevel({f"{i} ": i for i in range(self.config.vocab)}, unk_token="0 "))
        return Vocabulary(words, bos="", eos="", add_bos=False, ends=())

    def close(self) -> None:
        """There is nothing to close."""


def chain(start: int, count: int, vocab: int) -> list[int]:
    """What a chained model says after `start`, and `start` before it."""
    return [(start + i) % vocab for i in range(count)]
