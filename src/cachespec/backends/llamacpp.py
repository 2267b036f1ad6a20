"""The in-process llama.cpp backend: a GGUF model that answers on this machine."""

from __future__ import annotations

import os

from cachespec.annotations import AcceptanceTable, CostTable, DraftTable
from cachespec.backends._drafts import draft_fits, load_draft
from cachespec.backends._local import LocalBackend
from cachespec.backends._startup import SPARE_SLOTS, EngineSettings, Progress, thread_count, whole
from cachespec.durations import Duration
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

# Until something was measured: what one ordinary CPU core does.
_READS_PER_S = 10e9
_FLOPS_PER_THREAD = 40e9
_MOST_LAYERS = 2**31 - 1  # what the library has a number for


class LlamaCppBackend(LocalBackend):
    """A local model through llama.cpp. The contract is `backends.base.Backend`; what is cached is this process's KV.

    Args:
        model: a path, ``hf:org/repo[/file]``, or the name of a model that an installed package ships (``smollm2``).
        context: tokens that prompt and answer of a request may have together.
        parallel: requests that run at once; others wait.
        kv_tokens: tokens of all requests and kept prefixes together that there is memory for; None is twice `context`.
        threads: None takes half of the logical cores that this process may use, at least one.
        gpu_layers: layers to put on the GPU; None leaves that to llama.cpp.
        prefill_chunk: prompt tokens a call, 1 to 512. Between calls, other work gets its turn.
        max_gap: how many times longer than otherwise a running stream may wait for its next token while a prompt comes in.
        host_cache_mb: memory for KV that had to make room, in MB.
        keep_warm: how long what a session computed goes after what others did.
        deterministic: the text for a seed depends on nothing else: not on what was cached, on how the prompt was cut, on who
            runs beside it, nor on drafts (contract E2). Costs a few seconds at start, memory for `context` tokens for each of
            `parallel` and two more, and speed where the kernels' invariant width is small.
        cost: ``"0"``, ``{"per_hour": "0.40"}`` or ``{"per_mtok": ...}``; see `pricing.local_rates`.
        draft: the drafter, ``{"use": "suffix"}``; None decodes plainly. Its first start measures for some seconds.
        acceptance: the policy that says how far to draft; ``goodput`` where neither this nor ``[policies]`` says.
        require_eval: the acceptance that ``cachespec eval`` must have found for this model and drafter before anything is
            drafted; None asks for no evidence.

    Raises ConfigError for values out of range, UnknownPluginError. Nothing is loaded before `start`.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        context: int = 4096,
        parallel: int = 4,
        kv_tokens: int | None = None,
        threads: int | None = None,
        gpu_layers: int | None = None,
        prefill_chunk: int = 128,
        max_gap: float = 4.0,
        host_cache_mb: int = 256,
        keep_warm: Duration = 300.0,
        deterministic: bool = False,
        cost: CostTable = None,
        draft: DraftTable = None,
        acceptance: AcceptanceTable = None,
        require_eval: float | None = None,
    ) -> None:
        thread_count(threads)
        if gpu_layers is not None:
            whole(gpu_layers, "gpu_layers", least=-1, most=_MOST_LAYERS)
        self._threads = threads or default_threads()
        self._gpu_layers = gpu_layers
        settings = EngineSettings(
            name=name,
            context=context,
            parallel=parallel,
            prefill_chunk=prefill_chunk,
            max_gap=max_gap,
            kv_tokens=kv_tokens,
            host_cache_mb=host_cache_mb,
            keep_warm=keep_warm,
            deterministic=deterministic,
            draft=draft,
            acceptance=acceptance,
            require_eval=require_eval,
        )
        flops = _FLOPS_PER_THREAD * self._threads
        super().__init__(settings, model=model, cost=cost, reads_per_s=_READS_PER_S, flops_per_s=flops)

    def load_runtime(self, progress: Progress) -> Runtime:
        """See `LocalBackend.load_runtime`."""
        settings = self.settings
        return LlamaCppRuntime(
            find_model(self.model),
            context=settings.context,
            threads=self._threads,
            sequences=settings.parallel + SPARE_SLOTS if settings.deterministic else settings.shared_slots,
            room=settings.room,
            isolated=settings.deterministic,
            width=settings.width,
            gpu_layers=self._gpu_layers,
            flash_attention=True if settings.deterministic else None,
            progress=progress,
        )

    def load_draft(self, model: str, runtime: str | None) -> Runtime:
        """See `LocalBackend.load_draft`."""
        return load_draft(model, runtime or "llamacpp", self.settings, threads=self._threads, gpu_layers=self._gpu_layers)

    def draft_fits(self, model: str, runtime: str | None) -> bool | None:
        """See `LocalBackend.draft_fits`."""
        return draft_fits(model, runtime or "llamacpp", self.settings)


def default_threads() -> int:
    """Half of the logical cores that this process may use: of two that share a core, the second hinders."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return max(1, cores // 2)
