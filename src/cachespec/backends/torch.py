"""The in-process torch backend: a checkpoint of the Llama or Qwen family that answers on this machine, on CPU or CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from cachespec.annotations import AcceptanceTable, CostTable, DraftTable
from cachespec.backends._drafts import draft_fits, load_draft
from cachespec.backends._local import LocalBackend
from cachespec.backends._startup import SPARE_SLOTS, EngineSettings, Progress, thread_count
from cachespec.durations import Duration
from cachespec.engine.costs import CalibrationStore
from cachespec.engine.models import find_checkpoint
from cachespec.engine.runtimes.base import Runtime
from cachespec.errors import ConfigError, MissingDependencyError
from cachespec.shown import shown

Precision: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]

# Until something was measured, by device: bytes read and floating-point operations a second.
_CPU = (10e9, 50e9)
_CUDA = (1e12, 50e12)
_DEVICE = r"auto|cpu|cuda(:[0-9]+)?"


class TorchBackend(LocalBackend):
    """A local model through torch. The contract is `backends.base.Backend`; what is cached is this process's KV.

    Args:
        model: a GGUF file or a folder with a Hugging Face checkpoint; ``hf:org/repo[/file]``; or the name of a model that an
            installed package ships (``smollm2``).
        context: tokens that prompt and answer of a request may have together. Each of `parallel` and two more sequences has
            memory for so many.
        parallel: requests that run at once; others wait.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``; ``auto`` takes CUDA where it is.
        dtype: of matrix products; ``int8`` keeps weights in 8 bits. ``auto`` is bfloat16 where the hardware multiplies it.
        threads: of the CPU; None measures at the first start which number is fastest.
        prefill_chunk: prompt tokens a call, 1 to 512. Between calls, other work gets its turn.
        max_gap: how many times longer than otherwise a running stream may wait for its next token while a prompt comes in.
        host_cache_mb: memory for KV that had to make room, in MB.
        keep_warm: how long what a session computed goes after what others did.
        deterministic: the text for a seed depends on nothing else (contract E2): calls stay inside the width in which the first
            start, in some seconds, finds the kernels' rounding to be that of single tokens.
        cost: ``"0"``, ``{"per_hour": "0.40"}`` or ``{"per_mtok": ...}``; see `pricing.local_rates`.
        draft: the drafter, ``{"use": "suffix"}``; None decodes plainly. Its first start measures for some seconds.
        acceptance: the policy that says how far to draft; ``goodput`` where neither this nor ``[policies]`` says.
        require_eval: the acceptance that ``cachespec eval`` must have found for this model and drafter before anything is
            drafted; None asks for no evidence.

    Raises ConfigError for values out of range, UnknownPluginError. Nothing is loaded before `start`, torch neither.
    """

    folders = True

    def __init__(
        self,
        *,
        name: str,
        model: str,
        context: int = 4096,
        parallel: int = 4,
        device: str = "auto",
        dtype: Precision = "auto",
        threads: int | None = None,
        prefill_chunk: int = 256,
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
        if not isinstance(device, str) or not re.fullmatch(_DEVICE, device):
            raise ConfigError(f"{shown(device)} is no device", key="device", hint="auto, cpu, cuda, cuda:0...")
        if dtype not in get_args(Precision):
            raise ConfigError(f"must be one of {', '.join(get_args(Precision))}, not {shown(dtype)}", key="dtype")
        self._device, self._dtype, self._threads = device, dtype, threads
        settings = EngineSettings(
            name=name,
            context=context,
            parallel=parallel,
            prefill_chunk=prefill_chunk,
            max_gap=max_gap,
            kv_tokens=None,
            host_cache_mb=host_cache_mb,
            keep_warm=keep_warm,
            deterministic=deterministic,
            draft=draft,
            acceptance=acceptance,
            require_eval=require_eval,
        )
        reads, flops = _CUDA if device.startswith("cuda") else _CPU
        super().__init__(settings, model=model, cost=cost, reads_per_s=reads, flops_per_s=flops)

    def load_runtime(self, progress: Progress) -> Runtime:
        """See `LocalBackend.load_runtime`."""
        settings = self.settings
        return load_torch(
            self.model,
            context=settings.context,
            sequences=settings.parallel + SPARE_SLOTS,
            threads=self._threads,
            device=self._device,
            dtype=self._dtype,
            width=settings.width,
            progress=progress,
            store=CalibrationStore(),
        )

    def load_draft(self, model: str, runtime: str | None) -> Runtime:
        """See `LocalBackend.load_draft`."""
        return load_draft(model, runtime or "torch", self.settings, threads=self._threads, torch=self._shared)

    def draft_fits(self, model: str, runtime: str | None) -> bool | None:
        """See `LocalBackend.draft_fits`."""
        return draft_fits(model, runtime or "torch", self.settings, torch=self._shared)

    @property
    def _shared(self) -> Mapping[str, Any]:
        return {"device": self._device, "dtype": self._dtype}


def load_torch(
    model: str,
    *,
    context: int,
    sequences: int,
    threads: int | None,
    device: str,
    dtype: Precision,
    width: int = 128,
    progress: Callable[[float], bool] | None = None,
    store: CalibrationStore | None = None,
) -> Runtime:
    """Load a checkpoint. Raises ConfigError, NotFoundError, MissingDependencyError; `Interrupted` when `progress` says so."""
    try:
        from cachespec.engine.runtimes.torch import TorchRuntime
    except ImportError as error:
        if (error.name or "").startswith("cachespec"):
            raise
        raise MissingDependencyError(f"the torch backend needs {error.name or 'torch'}", extra="torch") from error
    path = find_checkpoint(model)
    return TorchRuntime.load(
        path,
        context=context,
        sequences=sequences,
        device=device,
        dtype=dtype,
        threads=threads,
        width=width,
        progress=progress,
        store=store,
    )
