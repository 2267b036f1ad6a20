"""How much memory a model takes here, told by its shape before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from cachespec.engine.runtimes.torch.config import ModelConfig
from cachespec.engine.runtimes.torch.devices import pick_device, pick_precision
from cachespec.engine.runtimes.torch.loading import open_checkpoint


def needed_bytes(config: ModelConfig, dtype: torch.dtype, *, int8: bool, context: int, sequences: int) -> int:
    """Weights, as they lie in memory (not in a file, where they may be quantised), and keys and values, in bytes."""
    heads = (config.heads + config.packed_heads) * config.head_dim  # outputs of q, k and v, and inputs of o
    matrices = config.layers * config.hidden * (heads + 3 * config.intermediate)
    embeddings = config.vocab * config.hidden * (1 if config.tied else 2)
    weights = matrices * (1 if int8 else dtype.itemsize) + embeddings * dtype.itemsize
    cells = 2 * config.layers * config.kv_heads * config.head_dim * context * (sequences + 1)
    return weights + cells * dtype.itemsize


def room(path: Path, *, context: int, sequences: int, device: str, dtype: str) -> tuple[int, int | None]:
    """Bytes that the model of a checkpoint needs, and bytes that are free on a CUDA device; None where it is not one.

    Raises ConfigError for a checkpoint that is not supported, a device or a precision that is not there.
    """
    place = pick_device(device)
    kind, int8 = pick_precision(dtype, place)
    checkpoint = open_checkpoint(path)
    try:
        need = needed_bytes(checkpoint.config, kind, int8=int8, context=context, sequences=sequences)
    finally:
        checkpoint.close()
    return need, torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else None
