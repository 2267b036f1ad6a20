"""Where a model runs, with what precision, and on how many threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, Literal

import torch

from cachespec.errors import ConfigError

Precision = Literal["auto", "float32", "bfloat16", "int8"]
_PRECISIONS: Final = ("auto", "float32", "bfloat16", "int8")


def pick_device(name: str) -> torch.device:
    """``auto``: a CUDA device where there is one, else the CPU. Raises ConfigError for what is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is no device", key="device", hint="auto, cpu, cuda, cuda:0...") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name!r} is not supported, only cpu and cuda are", key="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no {name}: torch sees {torch.cuda.device_count()} CUDA devices", key="device")
    if name == "cuda":  # another thread's current device may be another one
        return torch.device("cuda", torch.cuda.current_device())
    return device


def pick_precision(name: str, device: torch.device) -> tuple[torch.dtype, bool]:
    """The dtype of matrix products, and whether weights are int8. ``auto``: bfloat16 where the hardware multiplies it.

    Raises ConfigError for another name.
    """
    if name not in _PRECISIONS:
        raise ConfigError(f"must be one of {', '.join(_PRECISIONS)}, not {name!r}", key="dtype")
    if name == "auto":
        name = "bfloat16" if multiplies_bfloat16(device) else "float32"
    return (torch.float32 if name == "float32" else torch.bfloat16), name == "int8"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has instructions for it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(test() for test in tests if test is not None)


def library(device: torch.device) -> str:
    """torch, its version, and what it chooses kernels by: the processor's instructions, or the graphics card."""
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


class Threads:
    """How many threads torch uses. It keeps that number per thread of ours: `use` before computing in a new one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._set: int | None = None

    def use(self) -> None:
        """Make this thread's operations use `count` threads. Cheap when that is so already."""
        here = threading.get_ident()
        if self._set != here:
            torch.set_num_threads(self.count)
            self._set = here

    def change(self, count: int) -> None:
        self.count, self._set = count, None
        self.use()


def fastest(
    threads: Threads,
    work: Callable[[], None],
    *,
    rounds: int = 5,
    seconds: float = 3.0,
    clock: Callable[[], float] = perf_counter,
) -> int:
    """Set the number of threads with which `work` takes least time, and return it.

    Candidates are tried in turns, so that a busy moment of the machine hits all of them, and judged by their best time. When
    `seconds` are over nothing more is tried; large numbers come first, since it is large models that take so long.
    """
    counts = list(candidates())
    best = dict.fromkeys(counts, float("inf"))
    until = clock() + seconds
    for count in counts * rounds if len(counts) > 1 else ():
        if clock() >= until and min(best.values()) < float("inf"):
            break
        threads.change(count)
        work()  # the first one with another number of threads starts or stops some
        start = clock()
        work()
        best[count] = min(best[count], clock() - start)
    threads.change(min(counts, key=lambda count: best[count]))
    return threads.count


def candidates() -> Sequence[int]:
    """All processors this process may use, half of them, which may be all cores, and ...4, 2, 1."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = (2**i for i in range(available.bit_length()))
    return sorted({min(count, available) for count in (*powers, max(1, available // 2), available)}, reverse=True)
