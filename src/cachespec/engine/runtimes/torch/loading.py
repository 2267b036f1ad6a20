"""From a path to the parts of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from cachespec.engine.runtimes.base import ModelInfo
from cachespec.engine.runtimes.torch import cuda
from cachespec.engine.runtimes.torch.checkpoint import Checkpoint
from cachespec.engine.runtimes.torch.devices import multiplies_bfloat16
from cachespec.engine.runtimes.torch.gguf_file import GGUFCheckpoint
from cachespec.engine.runtimes.torch.hugging_face import HuggingFaceCheckpoint
from cachespec.engine.runtimes.torch.kv import MARGIN, Slab
from cachespec.engine.runtimes.torch.model import Decoder
from cachespec.engine.runtimes.torch.rope import rotation_table
from cachespec.engine.runtimes.torch.step import CpuStep, Step, Switch
from cachespec.engine.runtimes.torch.tokenizer import Vocabulary
from cachespec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a runtime is made of. `switch` stops a running `step`."""

    info: ModelInfo
    decoder: Decoder
    vocabulary: Vocabulary
    slab: Slab
    step: Step
    switch: Switch


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face directory or a GGUF file. Raises ConfigError for what is neither, MissingDependencyError."""
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or directory", key="model")
    return GGUFCheckpoint(path)


def load_parts(
    checkpoint: Checkpoint,
    *,
    context: int,
    sequences: int,
    device: torch.device,
    dtype: torch.dtype,
    int8: bool,
    report: Callable[[float], None],
) -> Parts:
    """Read a checkpoint, put it on the device, and close it. `report` gets the loaded part, and may raise to stop.

    Raises: ConfigError (unsupported, damaged, context beyond what it was trained for, no room); MissingDependencyError.
    """
    try:
        _check_context(checkpoint, context)
        vocabulary = checkpoint.vocabulary()
        if vocabulary.size > checkpoint.config.vocab:
            raise ConfigError(f"{checkpoint.path}: the tokenizer has more tokens than the model", key="model")
        switch = Switch()
        with torch.inference_mode():
            try:
                decoder = Decoder(checkpoint, dtype, int8=int8, device=device, words=vocabulary.size, report=report)
            except torch.OutOfMemoryError as error:
                raise ConfigError(f"{checkpoint.path} does not fit into {device}: {error}", key="model") from error
            slab, step = _step(decoder, checkpoint, context, sequences, switch)
        info = _describe(checkpoint, vocabulary, decoder, slab, int8=int8)
    finally:
        checkpoint.close()
    return Parts(info=info, decoder=decoder, vocabulary=vocabulary, slab=slab, step=step, switch=switch)


def _check_context(checkpoint: Checkpoint, context: int) -> None:
    config, name = checkpoint.config, checkpoint.path.name
    if config.trained_context is not None and context > config.trained_context:
        detail = f"{context} is more than the {config.trained_context} tokens that {name} was trained for"
        raise ConfigError(detail, key="context")
    if config.window is not None and context > config.window:
        detail = f"{name} looks back {config.window} tokens, and sliding windows are not supported"
        raise ConfigError(detail, key="context", hint=f"at most {config.window}, up to which it makes no difference")


def _step(decoder: Decoder, checkpoint: Checkpoint, context: int, sequences: int, switch: Switch) -> tuple[Slab, Step]:
    device, config = decoder.device, decoder.config
    table = rotation_table(config, context + MARGIN, checkpoint.rope_factors())

    def make(dtype: torch.dtype) -> Slab:
        try:
            return Slab(config, sequences=sequences, context=context, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's out-of-memory errors are such
            raise ConfigError(f"no room for {sequences} sequences of {context} tokens: {error}", key="context") from error

    # Without instructions for it, a processor converts bfloat16 at every read, which costs more than reading half saves.
    slab = make(decoder.dtype if multiplies_bfloat16(device) else torch.float32)
    if device.type == "cpu":
        return slab, CpuStep(decoder, slab, table, switch)
    return slab, cuda.make_step(decoder, slab, table.to(device), switch)


def _describe(checkpoint: Checkpoint, vocabulary: Vocabulary, decoder: Decoder, slab: Slab, *, int8: bool) -> ModelInfo:
    config = checkpoint.config
    dtype = "int8" if int8 else str(decoder.dtype).removeprefix("torch.")
    identity = [config, dtype, slab.dtype, decoder.digest, blake2b(vocabulary.identity()).hexdigest()]
    return ModelInfo(
        architecture=config.architecture,
        description=f"{checkpoint.description}, {dtype}",
        context=slab.context,
        trained_context=config.trained_context,
        vocab=vocabulary.size,
        parameters=decoder.parameters,
        size=decoder.nbytes,
        chat_template=checkpoint.chat_template,
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        add_bos=vocabulary.add_bos,
        controls=vocabulary.controls,
        fingerprint=blake2b(repr(identity).encode(), digest_size=16).digest(),
        draws_together=decoder.device.type != "cpu",
        kv_bytes=slab.token_bytes,
    )
