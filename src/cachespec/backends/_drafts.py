"""Loading a draft model beside a target, on either runtime, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachespec.backends._startup import EngineSettings
from cachespec.engine.models import find_checkpoint, find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.errors import CachespecError

_OVERHEAD = 1.2  # memory that is taken over what is counted
_SHARED: Mapping[str, Any] = {"device": "auto", "dtype": "auto"}


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

        shared = {**_SHARED, **(torch or {})}
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


def draft_fits(model: str, runtime: str, settings: EngineSettings, *, torch: Mapping[str, Any] | None = None) -> bool | None:
    """Whether the same model has room in the memory that is left; None where nobody can tell, or loading says what is wrong."""
    try:
        path = find_checkpoint(model)
        if runtime == "torch":
            from cachespec.engine.runtimes.torch.memory import room

            shared = {**_SHARED, **(torch or {})}
            need, free = room(path, context=settings.context, sequences=settings.parallel, **shared)
        else:
            from cachespec.engine.runtimes.llamacpp import library

            if library().c.llama_supports_gpu_offload():
                return None  # how much of it a graphics card takes is llama.cpp's to say
            files = [path] if path.is_file() else [*path.glob("*.gguf")]
            need, free = sum(file.stat().st_size for file in files), None
    except (CachespecError, ImportError, OSError):
        return None
    free = free_memory() if free is None else free
    return None if free is None else need * _OVERHEAD < free


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the system says it can give, within the limit of this process's group; None where it does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no limit ("max"), or none that can be read
        return free
