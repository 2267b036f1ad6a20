"""The in-process llama.cpp backend: a GGUF model that answers on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from cachespec.backends._local import LocalBackend, at_least
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

# Until something was measured: what one ordinary CPU core does.
_READS_PER_S = 10e9
_FLOPS_PER_THREAD = 40e9


class LlamaCppBackend(LocalBackend):
    """A local model through llama.cpp. The contract is `backends.base.Backend`; what is cached is this process's KV.

    Args:
        model: a path, ``hf:org/repo[/file]``, or the name of a model that an installed package ships (``smollm2``).
        context: tokens that prompt and answer of a request may have together.
        threads: None takes half of the logical cores that this process may use, at least one.
        gpu_layers: layers to put on the GPU; None leaves that to llama.cpp.
        prefill_chunk: prompt tokens a call, 1 to 512. Between calls, other work gets its turn.
        deterministic: the text for a seed does not depend on what was cached or how the prompt was cut (contract E2).
            Costs a few seconds at start, and prefill speed where the kernels' invariant width is below `prefill_chunk`.
        cost: ``"0"``, ``{"per_hour": "0.40"}`` or ``{"per_mtok": ...}``; see `pricing.local_rates`.
        draft: drafters are not built yet: any is an UnknownPluginError.

    Raises ConfigError for values out of range. Nothing is loaded before `start`.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        context: int = 4096,
        threads: int | None = None,
        gpu_layers: int | None = None,
        prefill_chunk: int = 128,
        deterministic: bool = False,
        cost: Mapping[str, Any] | str | None = None,
        draft: Mapping[str, Any] | None = None,
    ) -> None:
        at_least(1 if threads is None else threads, 1, "threads")
        at_least(0 if gpu_layers is None else gpu_layers, -1, "gpu_layers")
        self._threads = threads or _default_threads()
        self._gpu_layers = gpu_layers
        super().__init__(
            name=name,
            model=model,
            context=context,
            prefill_chunk=prefill_chunk,
            deterministic=deterministic,
            cost=cost,
            draft=draft,
            reads_per_s=_READS_PER_S,
            flops_per_s=_FLOPS_PER_THREAD * self._threads,
        )

    def load_runtime(self, progress: Callable[[float], bool]) -> Runtime:
        """See `LocalBackend.load_runtime`."""
        return LlamaCppRuntime(
            find_model(self.model),
            context=self._context,
            threads=self._threads,
            width=self._prefill_chunk,
            gpu_layers=self._gpu_layers,
            flash_attention=True if self._deterministic else None,
            progress=progress,
        )


def _default_threads() -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return max(1, cores // 2)
