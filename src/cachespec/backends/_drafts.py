"""Loading a draft model beside a target, on either runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachespec.backends._startup import EngineSettings
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime


def load_draft(
    model: str,
    runtime: str,
    settings: EngineSettings,
    *,
    threads: int | None,
    gpu_layers: int | None = None,
    torch: Mapping[str, Any] | None = None,
) -> Runtime:
    """A draft model for as many requests as run at once, with the target's context. Raises as loading does.

    `torch` are options of the target's that a draft on that runtime shares: device and precision.
    """
    if runtime == "torch":
        from cachespec.backends.torch import load_torch

        shared = {"device": "auto", "dtype": "auto", **(torch or {})}
        return load_torch(model, context=settings.context, sequences=settings.parallel, threads=threads, **shared)
    from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

    return LlamaCppRuntime(
        find_model(model),
        context=settings.context,
        threads=threads or 1,
        sequences=settings.parallel,
        room=settings.context * min(2, settings.parallel),
        width=128,
        gpu_layers=gpu_layers,
    )
