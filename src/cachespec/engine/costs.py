"""Measured costs: calibration at start, kept per machine, model and settings, and followed while decoding (contract E4)."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from cachespec.engine.assumptions import completed
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.sampling import Sampling, key
from cachespec.engine.speculation import CostTable
from cachespec.errors import InputError

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33)
"""Tokens a sequence: dense where drafts are short, and on both sides of the powers of two, where kernels change."""
BATCHES: Final = (1, 2, 4, 8, 16, 32)

_VERSION = 1
_CONTEXT = 64  # tokens that stand before what is measured
_WARM, _LEARN, _FOLLOW = 3, 0.05, 0.1
_FAR, _TRIES = 8.0, 6  # how wrong an assumption may be found at once, and steps after which it counts as measured
_STALE = 32  # observations after which the table is made anew
ANCHORS: Final = 3
"""Plain steps, of which the fastest counts, that tell the machine's speed."""


def calibrate(
    runtime: Runtime,
    *,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    repeats: int = 3,
    seconds: float = 3.0,
    known: CostTable | None = None,
    clock: Callable[[], float] = perf_counter,
) -> CostTable:
    """Measure t(batch, tokens) on a runtime whose sequences are empty, and are so afterwards.

    The fastest of `repeats`, since whatever else the machine does only ever adds. What is needed most comes first; when
    `seconds` are over, what is left is assumed, and the table says so. At least plain decoding of one sequence is measured, and
    a call of several tokens. What `known` says was measured is not measured again.
    """
    rows: dict[int, dict[int, float]] = {} if known is None else known.measured
    batches = [b for b in batches if b <= min(runtime.sequences, runtime.width)]
    bench = _Bench(runtime, max(batches), max(widths), clock)
    calls, until = [], clock() + seconds
    try:
        for batch, width in (call for call in _by_need(widths, batches) if bench.fits(*call)):
            calls.append((batch, batch * width))
            enough = len(rows.get(1, {})) > 1
            if batch * width not in rows.get(batch, {}) and (clock() < until or not enough):
                best = bench.fastest(batch, width, repeats + (1 if rows else _WARM), until)
                rows.setdefault(batch, {})[batch * width] = best
    finally:
        for sequence in range(runtime.sequences):
            runtime.free(sequence)
    return completed({batch: dict(sorted(row.items())) for batch, row in rows.items()}, calls)


def _by_need(widths: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int]]:
    """Calls of (sequences, tokens each) in the order in which they are worth measuring.

    A single stream's outline, then what every batch size takes plainly and with a few drafts, then all that lies between.
    """
    outline = [w for w in (1, 8, 2, 4, 16) if w in widths] or [min(widths)]
    first = [(1, w) for w in outline if 1 in batches]
    second = [(b, w) for w in sorted(outline) for b in batches if b > 1]
    rest = [(b, w) for b in batches for w in widths]
    return list(dict.fromkeys([*first, *second, *rest]))


class _Bench:
    """Sequences with some context, and the time of calls that go on from it."""

    def __init__(self, runtime: Runtime, most: int, widest: int, clock: Callable[[], float]) -> None:
        self._runtime, self._clock = runtime, clock
        self._context = min(_CONTEXT, max(1, runtime.info.context // most - widest), runtime.width)
        self._tokens = [key(0, i) % runtime.info.vocab for i in range(_CONTEXT + widest)]

    def fits(self, batch: int, width: int) -> bool:
        runtime = self._runtime
        return batch * width <= runtime.width and batch * (self._context + width) <= runtime.info.context

    def fastest(self, batch: int, width: int, times: int, until: float) -> float:
        """Seconds of the fastest of so many calls, draws included; of two, when the time is over."""
        runtime, clock, best = self._runtime, self._clock, float("inf")
        for sequence in range(batch):
            if not runtime.length(sequence):
                runtime.evaluate([Span(sequence=sequence, start=0, tokens=self._tokens[: self._context])])
        greedy = Sampling(seed=0, temperature=0)
        tokens = self._tokens[-width:]
        spans = [Span(sequence=s, start=runtime.length(s), tokens=tokens, rows=width) for s in range(batch)]
        positions = [s.start + j + 1 for s in spans for j in range(width)]
        for i in range(times):
            if i > 1 and clock() > until:
                break
            before = clock()
            rows = runtime.evaluate(spans)
            runtime.draw(rows, [greedy] * len(rows), positions)
            best = min(best, clock() - before)
            if not all(runtime.truncate(span.sequence, span.start) for span in spans):
                raise InputError("a model that cannot be rolled back cannot speculate", field="draft")
        return max(best, 1e-9)


class CostModel:
    """A calibrated table that follows what steps really take. Not for two threads at once.

    Two things change: how fast the machine is at the moment, which plain steps tell, and the shape of the table, which the
    others tell. While no plain step is made, the two cannot be told apart, and all is put down to the shape; the next few
    plain ones show what part of it the machine was, which is then taken back. `unanchored` counts the steps since.

    What is only assumed is learned from the first steps that come by, which is quicker, and costs nothing.
    """

    def __init__(self, table: CostTable) -> None:
        self._points = {batch: dict(row) for batch, row in table.points.items()}
        self._assumed = dict.fromkeys(table.assumed, 0)  # how often each was seen
        self._table, self._speed, self._seen = table, 1.0, 0
        self._plain: list[float] = []
        self._moved: set[tuple[int, int]] = set()
        self.unanchored = 0

    @property
    def table(self) -> CostTable:
        """The current costs, at the machine's calibrated speed."""
        return self._table

    @property
    def speed(self) -> float:
        """Seconds a step takes now over those of the table; draft costs measured now are to be divided by it."""
        return self._speed

    def observe(self, batch: int, tokens: int, seconds: float) -> None:
        """Note what a step took. A single outlier, such as a page fault, moves little."""
        row = self._points.get(batch)
        if row is None:
            row = self._new_row(batch)
        expected = row.get(tokens)
        if expected is None:
            expected = row[tokens] = self._table.seconds(batch, tokens)
            if (batch, min((n for n in row if n != tokens), key=lambda n: abs(n - tokens))) in self._assumed:
                self._assumed[batch, tokens] = 0
        exact = seconds / (expected * self._speed)
        ratio = min(2.0, max(0.5, exact))
        self._seen += 1
        if (batch, tokens) in self._assumed:
            self._learn(batch, tokens, min(_FAR, max(1 / _FAR, exact)))
        elif tokens > batch:
            row[tokens] = expected * ratio**_LEARN
            self._moved.add((batch, tokens))
            self.unanchored += 1
        elif self._moved:
            self._plain.append(ratio)
            if len(self._plain) == ANCHORS:
                self._anchor(min(self._plain))
        else:
            self._speed *= ratio**_FOLLOW
        if self._seen % _STALE == 0:
            self._renew()

    def _new_row(self, batch: int) -> dict[int, float]:
        """A batch size that was never measured gets a row of its own, all of it assumed."""
        nearest = min(self._points, key=lambda known: abs(known - batch))
        widths = {max(1, round(tokens / nearest)) for tokens in self._points[nearest]} | {1}
        row = self._points[batch] = {batch * w: self._table.seconds(batch, batch * w) for w in sorted(widths)}
        self._assumed.update(dict.fromkeys(((batch, tokens) for tokens in row), 0))
        return row

    def _learn(self, batch: int, tokens: int, ratio: float) -> None:
        """What was assumed turned out so much dearer: the mean of a few steps. The first moves the rest of its row, too."""
        row, seen = self._points[batch], self._assumed[batch, tokens] + 1
        unseen = [n for n in row if n != tokens and self._assumed.get((batch, n)) == 0] if seen == 1 else []
        for n in (tokens, *unseen):
            row[n] *= ratio ** (1 / seen)
        self._assumed[batch, tokens] = seen
        if seen == _TRIES:
            del self._assumed[batch, tokens]
        self._renew()

    def _renew(self) -> None:
        self._table = CostTable(self._points, assumed=self._assumed)

    def _anchor(self, ratio: float) -> None:
        """The machine turned out so much slower than was thought while only other steps were made."""
        self._speed *= ratio
        for batch, tokens in self._moved:
            self._points[batch][tokens] /= ratio
        self._moved.clear()
        self._plain.clear()
        self.unanchored = 0
        self._renew()


def cache_folder() -> Path:
    """Where calibrations are kept: the user's cache folder."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "cachespec" / "calibration"


class CalibrationStore:
    """What was measured, on disk, one file for each machine, model and settings. A file that is not right is as good as none.

    `settings` are all that the result depends on, the library and its version among them.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_folder() if folder is None else folder

    def read(self, fingerprint: bytes, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What `write` wrote for this, if it did. The values may be anything: files can be edited."""
        identity = _identity(fingerprint, settings)
        try:
            saved = json.loads(self._path(identity).read_text())
            return saved if saved["version"] == _VERSION and saved["identity"] == identity else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, fingerprint: bytes, settings: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
        """Write it whole or not at all. False: the folder cannot be written, and the next start measures again."""
        identity = _identity(fingerprint, settings)
        path = self._path(identity)
        text = json.dumps({"version": _VERSION, "identity": identity, **values}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
                file.write(text)
            Path(file.name).replace(path)
        except OSError:
            return False
        return True

    def load(self, fingerprint: bytes, settings: Mapping[str, Any]) -> CostTable | None:
        """The table of costs that was saved for this, if there is one."""
        saved = self.read(fingerprint, settings)
        if saved is None:
            return None
        try:
            return CostTable({int(b): {int(n): float(s) for n, s in row.items()} for b, row in saved["points"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, InputError):
            return None

    def save(self, fingerprint: bytes, settings: Mapping[str, Any], table: CostTable) -> bool:
        """Write a table of costs, as far as it was measured; see `write`."""
        return self.write(fingerprint, settings, {"points": table.measured})

    def _path(self, identity: str) -> Path:
        return self._folder / f"{blake2b(identity.encode(), digest_size=12).hexdigest()}.json"


def _identity(fingerprint: bytes, settings: Mapping[str, Any]) -> str:
    machine = [platform.system(), platform.machine(), _processor(), os.cpu_count()]
    return json.dumps([machine, fingerprint.hex(), dict(settings)], sort_keys=True, default=str)


def _processor() -> str:
    """The processor's name, as the system states it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
