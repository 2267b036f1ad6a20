"""The decoder: embeddings, blocks of attention and MLP, a last norm, logits.

Tokens of all sequences of a call are one matrix [tokens, hidden], since that is where the time goes; only attention looks
at sequences one by one. On a CPU the residual stream and all norms are float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from cachespec.engine.runtimes.torch.checkpoint import Checkpoint
from cachespec.engine.runtimes.torch.linear import PAD, Linear, Output, int8_rows, make_head, make_linear, packs
from cachespec.engine.runtimes.torch.norm import FusedNorm, HeadNorm, LengthNorm, Norm
from cachespec.engine.runtimes.torch.rope import interleaved
from cachespec.errors import ConfigError

_SAMPLE: Final = 64  # values of each weight that tell checkpoints apart


class Attend(Protocol):
    """Writes a layer's keys and values to the KV, and attends.

    heads [tokens, packed heads, head_dim], float32 on a CPU: queries (scaled), keys, values, rotated.
    Returns [tokens, heads * head_dim] of the model's dtype. May raise `Interrupted`.
    """

    def __call__(self, layer: int, heads: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's weights, each as the function it computes."""

    attn_norm: Norm
    qkv: Linear
    qk_norm: HeadNorm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """The model's weights on a device, and the forward pass.

    Attributes:
        dtype: that of the matrices' inputs and outputs.
        words: token ids that logits are computed for; rows of the output matrix that only pad it are left out, so that
            no token without a text is ever drawn.
        pad: fewer tokens than this take as long as this many.
        parameters, nbytes: of all weights. token_reads: bytes of those that decoding a token reads.
        digest: tells these weights from others, by a sample of each.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        int8: bool,
        device: torch.device,
        words: int,
        report: Callable[[float], None],
    ) -> None:
        self.config = config = checkpoint.config
        self.dtype, self.device, self.words = dtype, device, words
        self.pad = PAD if not int8 and packs(dtype, device) else 1
        self.parameters = 0
        self._hash = blake2b(digest_size=16)
        self._residual = torch.float32 if device.type == "cpu" else dtype
        embed = self._read(checkpoint, "embed", (config.vocab, config.hidden))
        head = embed if config.tied else self._read(checkpoint, "head", (config.vocab, config.hidden))
        self.embed = embed.to(device=device, dtype=dtype)
        shared = config.tied and device.type != "cpu"  # a CPU keeps them in different forms
        self.head: Output = make_head((self.embed if shared else head)[:words], dtype, device)
        del embed, head
        rows = int8_rows(device, dtype) if int8 else None
        self.norm = self._norm(checkpoint, "norm")
        self.blocks: list[Block] = []
        for i in range(config.layers):
            report((i + 1) / (config.layers + 1))
            self.blocks.append(self._block(checkpoint, i, rows))
        matrices = [m for b in self.blocks for m in (b.qkv, b.o, b.gate_up, b.down)]
        self.token_reads = self.head.nbytes + sum(m.nbytes for m in matrices)
        self.nbytes = self.token_reads + (0 if shared else self.embed.nbytes)
        self.digest = self._hash.hexdigest()

    def _block(self, checkpoint: Checkpoint, i: int, int8: int | None) -> Block:
        c = self.config
        order = interleaved(c.head_dim)
        sizes = {
            "q": (c.heads * c.head_dim, c.hidden),
            "k": (c.kv_heads * c.head_dim, c.hidden),
            "v": (c.kv_heads * c.head_dim, c.hidden),
            "o": (c.hidden, c.heads * c.head_dim),
            "gate": (c.intermediate, c.hidden),
            "up": (c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
        }

        def read(name: str, suffix: str = "") -> Tensor | None:
            full = f"{i}.{name}{suffix}"
            if suffix and not checkpoint.has(full):
                return None
            found = self._read(checkpoint, full, sizes[name][:1] if suffix else sizes[name])
            if name in ("q", "k"):
                return found.view(-1, c.head_dim, *found.shape[1:])[:, order].flatten(0, 1)
            return found

        def linear(*names: str) -> Linear:
            weights, biases = ([read(name, suffix) for name in names] for suffix in ("", ".bias"))
            return make_linear(_joined(weights), _joined_biases(weights, biases), self.dtype, int8=int8, device=self.device)

        qk_norm = None
        if c.qk_norm:
            q, k = (self._read(checkpoint, f"{i}.{name}", (c.head_dim,)).float()[order] for name in ("q_norm", "k_norm"))
            per_head = torch.cat((q.expand(c.heads, -1), k.expand(c.kv_heads, -1)))
            qk_norm = HeadNorm(per_head.to(self.device), c.eps)
        return Block(
            attn_norm=self._norm(checkpoint, f"{i}.attn_norm"),
            qkv=linear("q", "k", "v"),
            qk_norm=qk_norm,
            o=linear("o"),
            mlp_norm=self._norm(checkpoint, f"{i}.mlp_norm"),
            gate_up=linear("gate", "up"),
            down=linear("down"),
        )

    def _norm(self, checkpoint: Checkpoint, name: str) -> Norm:
        weight = self._read(checkpoint, name, (self.config.hidden,)).to(device=self.device, dtype=self._residual)
        return LengthNorm(weight, self.config.eps) if self.device.type == "cpu" else FusedNorm(weight, self.config.eps)

    def _read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
        found = checkpoint.tensor(name)
        if tuple(found.shape) != shape:
            raise ConfigError(f"{checkpoint.path}: {name} is {list(found.shape)}, not {list(shape)}", key="model")
        self.parameters += found.numel()
        flat = found.reshape(-1)
        self._hash.update(flat[:: max(1, len(flat) // _SAMPLE)].float().cpu().numpy().tobytes())
        return found

    def hidden(self, tokens: Tensor, turns: Tensor, attend: Attend, stopped: Callable[[], None]) -> Tensor:
        """The residual stream after the last block, [tokens, hidden].

        `turns`: `rope.rotations` of the tokens. `stopped` is called between steps and raises to end the pass.
        """
        c, dtype = self.config, self.dtype
        count, width, normed = tokens.shape[0], c.intermediate, c.heads + c.kv_heads
        h = F.embedding(tokens, self.embed).to(self._residual)
        for i, block in enumerate(self.blocks):
            stopped()
            packed = block.qkv(block.attn_norm(h).to(dtype)).float()
            heads = packed.view(count, c.packed_heads, c.head_dim)
            if block.qk_norm is not None:
                block.qk_norm(heads[:, :normed])
            packed.view(torch.complex64).mul_(turns)
            attended = attend(i, heads)
            stopped()
            block.o.add_to(h, attended)
            both = block.gate_up(block.mlp_norm(h).to(dtype))
            stopped()
            block.down.add_to(h, F.silu(both[:, :width]).mul_(both[:, width:]))
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of the residual stream, float32 [rows, vocab]."""
        return self.head(self.norm(hidden).to(self.dtype))


def _joined(parts: list[Tensor | None]) -> Tensor:
    there = [part for part in parts if part is not None]
    return there[0] if len(there) == 1 else torch.cat(there)


def _joined_biases(weights: list[Tensor | None], biases: list[Tensor | None]) -> Tensor | None:
    """The biases one after the other, zeros where one of several projections has none; None when none has."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs if w is not None])
