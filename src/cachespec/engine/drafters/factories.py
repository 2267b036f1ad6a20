"""Drafters that need a draft model, as plug-ins: `target` and `load` come from the backend that they draft for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from cachespec.annotations import PositiveInt, Share
from cachespec.engine.drafters.hybrid import HybridDrafter
from cachespec.engine.drafters.limits import Bytes
from cachespec.engine.drafters.model import ModelDrafter
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.runtimes.base import Runtime

Load: TypeAlias = Callable[[str, str | None], Runtime]
"""Loads a draft model, by its name and the runtime it is to run on (None: that of the target)."""


def model(
    *,
    model: str,
    target: Runtime,
    load: Load,
    runtime: Literal["llamacpp", "torch"] | None = None,
    min_probability: Share = 0.2,
) -> ModelDrafter:
    """A draft model, `model` being named as a backend's is. Raises as loading does, and ConfigError: another vocabulary."""
    draft = load(model, runtime)
    try:
        return ModelDrafter(draft, target, min_probability=min_probability)
    except BaseException:
        draft.close()
        raise


def hybrid(
    *,
    model: str,
    target: Runtime,
    load: Load,
    runtime: Literal["llamacpp", "torch"] | None = None,
    min_probability: Share = 0.2,
    confidence: Share = 0.75,
    min_match: PositiveInt = 1,
    history_bytes: Bytes = 64 << 20,
) -> HybridDrafter:
    """The suffix drafter where it is sure of its next token by `confidence`, else a draft model."""
    suffix = SuffixDrafter(min_match=min_match, history_bytes=history_bytes)
    guessing = load(model, runtime)
    try:
        return HybridDrafter(suffix, ModelDrafter(guessing, target, min_probability=min_probability), confidence=confidence)
    except BaseException:
        guessing.close()
        raise
