"""What benchmarks of the local engine share: prompts, readers of an engine, a runtime that outlives engines, summaries."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sequence import Sequence as Running
from cachespec.events import TextDelta

SPEC_BENCH = Path(__file__).parent.parent.parent / "shared" / "data" / "prompts" / "spec_bench.jsonl"
_OWN = (
    "Write one line about a fox that crosses a frozen river.",
    "List the tide times of a harbour for Monday, Tuesday and Wednesday.",
    "Repeat exactly: one two three one two three one two three.",
    "Explain in two sentences why the sky is blue.",
    "Translate into French: the harbour was quiet in the early morning.",
    "What is seventeen times twenty-three? Show the steps.",
    "Name three rivers of Europe and the seas they flow into.",
    "Write a Python function that reverses a list.",
)


def prompts(count: int, file: Path = SPEC_BENCH) -> list[str]:
    """First turns of Spec-Bench, evenly over its tasks; where the file is absent, a few of our own over and over."""
    if file.is_file():
        texts = [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]
    else:
        texts = [f"{text} ({i})" for i in range(-(-count // len(_OWN))) for text in _OWN]
    return [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]


def chat_tokens(runtime: Runtime, text: str, most: int) -> tuple[int, ...]:
    """A user's turn in ChatML, its text cut to `most` tokens."""
    body = runtime.tokenize(text, special=False)[:most]
    head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    return (*runtime.tokenize(head, special=True), *body, *runtime.tokenize(tail, special=True))


class Kept:
    """A runtime that is emptied, not closed, when an engine ends, so that the next one need not load it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def close(self) -> None:
        for sequence in range(self._runtime.sequences):
            self._runtime.free(sequence)


def kept(runtime: Runtime) -> Runtime:
    """See `Kept`."""
    return cast("Runtime", Kept(runtime))


@dataclass(slots=True)
class Answer:
    """One request, read to its end. `at` are the times when text came, `first` the seconds to the first of them."""

    running: Running
    began: float
    at: list[float]

    @property
    def first(self) -> float:
        return self.at[0] - self.began

    @property
    def tokens(self) -> list[int]:
        return self.running.tokens[len(self.running.job.prompt) :]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]


def read(running: Running, began: float | None = None) -> Answer:
    """To the end, in this thread. Raises the sequence's error."""
    answer = Answer(running, perf_counter() if began is None else began, [])
    while True:
        ready = threading.Event()
        ended, events = running.done, running.take()
        answer.at += [perf_counter() for e in events if isinstance(e, TextDelta)]
        if ended and not events:
            if running.error is not None:
                raise running.error
            return answer
        if not events and running.when_ready(ready.set):
            ready.wait()


def read_all(sequences: Sequence[Running]) -> list[Answer]:
    """All at once, a thread each."""
    began = perf_counter()
    with ThreadPoolExecutor(max(1, len(sequences))) as pool:
        return list(pool.map(lambda running: read(running, began), sequences))


def requantised(folder: Path, kind: str = "Q4_0", model: str = "smollm2") -> Path:
    """The same model's weights at another quantisation, by llama.cpp's own tool: a draft model that mostly agrees."""
    from llama_cpp import llama_cpp

    from cachespec.engine.runtimes.llamacpp import library

    library()
    bindings = cast("Any", llama_cpp)
    wanted = bindings.llama_model_quantize_default_params()
    wanted.ftype, wanted.allow_requantize, wanted.nthread = getattr(bindings, f"LLAMA_FTYPE_MOSTLY_{kind}"), True, 1
    path = folder / f"{kind}.gguf"
    if bindings.llama_model_quantize(str(find_model(model)).encode(), str(path).encode(), ctypes.byref(wanted)):
        raise RuntimeError(f"llama.cpp cannot write {path}")
    return path


def interleaved(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each returns, a round of all of them at a time in turning order; a round before that to warm up is left out."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for turn in range(rounds + 1):
        for name in order:
            value = candidates[name]()
            if turn:
                found[name].append(value)
        order = order[1:] + order[:1]
    return found


def middle(values: Iterable[float], scale: float = 1.0, digits: int = 2) -> str:
    """Median [least, greatest]."""
    many = [value * scale for value in values]
    return f"{statistics.median(many):.{digits}f} [{min(many):.{digits}f}, {max(many):.{digits}f}]"


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least this part of them does not pass."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 1) - 1))]


def machine() -> str:
    """The day, the processor, and how many of its threads this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{date.today().isoformat()}, {cores} cores of {name}, Python {platform.python_version()}"
