"""Whether a text depends on anything but its request: drafters, company, what was cached, temperature.

    python -m benchmarks.identity --save FILE [--modes M ...] [--prompts 50] [--tokens 24] [--cut 64] [--minutes N]

Every cell of {no drafter, suffix, draft model, random, adversarial} x temperatures {0, 0.7, 1.0} x prompts is answered four
times: alone and in a batch of 8, cold and on a warm prefix. All are compared, token by token, with the answer without a
drafter, alone and cold. Drafts have a fixed length of 4 and are verified whether that pays or not. The draft model
is the same model at another quantisation (made here with llama.cpp's own tool): it mostly agrees, and is not always right. The
adversary knows the right answer; it proposes a part of it, then a wrong token, then the right ones again.

Modes: `llamacpp-deterministic` and `torch-float32-deterministic` keep every call inside the width that start-up finds
invariant, and every text must be the same. In `llamacpp` and `torch-bfloat16`, the defaults, the share of equal texts is
told, and for every text that differs the logit gap at its first other token: by how much the baseline's token beat the other,
in logits, noise included. Beside it stands the measured effect of the width: by how much the difference of two of the 50 best
logits changes when the same tokens are evaluated in calls of other widths, or together with other sequences.

With --minutes it stops after so long; called again, it goes on. The prompts are those of Spec-Bench (`--file`), evenly over its
tasks, cut to --cut tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeAlias

from benchmarks._local import SPEC_BENCH, Answer, chat_tokens, kept, machine, prompts, read, read_all, requantised
from benchmarks._widths import gap, width_effect

from cachespec.engine.control import SpeculationControl, Track
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.base import Draft, Drafter
from cachespec.engine.drafters.model import ModelDrafter
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.invariance import invariant_width
from cachespec.engine.loop import Engine
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling, key
from cachespec.engine.sequence import Job
from cachespec.engine.speculation import Candidate, CostTable
from cachespec.policies.acceptance import Fixed

DRAFTERS: Final = ("none", "suffix", "model", "random", "adversarial")
TEMPERATURES: Final = (0.0, 0.7, 1.0)
COMPANY: Final = ("alone", "batch")
START: Final = ("cold", "warm")
BATCH: Final = 8
LENGTH: Final = 4
"""Tokens of every draft."""
CONTEXT: Final = 320
_KEPT_SLOTS = 32

Cell: TypeAlias = tuple[str, float, str, str, int]
"""Drafter, temperature, company, start, and the number of the prompt."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a runtime is set up. `invariant`: calls stay inside the width that is found invariant."""

    load: Callable[[], Runtime]
    invariant: bool
    chunk: int


def _llamacpp(*, isolated: bool) -> Runtime:
    from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

    return LlamaCppRuntime(
        find_model("smollm2"),
        context=CONTEXT,
        threads=1,
        sequences=BATCH + 2 if isolated else _KEPT_SLOTS,
        room=16 * CONTEXT,
        isolated=isolated,
        width=136,
        flash_attention=True if isolated else None,
    )


def _torch(dtype: Any) -> Runtime:
    from cachespec.engine.runtimes.torch import TorchRuntime

    path = find_model("smollm2")
    return TorchRuntime.load(path, context=CONTEXT, sequences=BATCH + 2, device="cpu", dtype=dtype, threads=1, width=136)


MODES: Final[Mapping[str, Mode]] = {
    "llamacpp-deterministic": Mode(lambda: _llamacpp(isolated=True), invariant=True, chunk=128),
    "torch-float32-deterministic": Mode(lambda: _torch("float32"), invariant=True, chunk=256),
    "llamacpp": Mode(lambda: _llamacpp(isolated=False), invariant=False, chunk=128),
    "torch-bfloat16": Mode(lambda: _torch("bfloat16"), invariant=False, chunk=256),
}


class Guesser:
    """Drafts by a function of the prompt, the temperature, the answer so far and the length."""

    def __init__(self, name: str, guess: Callable[[tuple[int, ...], float, list[int], int], list[int]]) -> None:
        self.name, self._guess, self._open = name, guess, 0
        self.sources: tuple[str, ...] = (name,)

    def open(
        self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None
    ) -> tuple[tuple[int, ...], float, list[int]]:
        self._open += 1
        return tuple(prompt), sampling.temperature, []

    def prospects(self, tracks: Sequence[Any], limit: int) -> list[Draft]:
        return self.propose(tracks, [limit] * len(tracks))

    def propose(self, tracks: Sequence[Any], lengths: Sequence[int]) -> list[Draft]:
        pairs = zip(tracks, lengths, strict=True)
        found = [tuple(self._guess(prompt, heat, answer, k)[:k]) for (prompt, heat, answer), k in pairs]
        return [Draft(source=self.name, tokens=g, confidence=(0.5,) * len(g)) for g in found]

    def accept(self, track: Any, tokens: Sequence[int]) -> None:
        track[2].extend(tokens)

    def close(self, track: Any, *, learn: bool) -> None:
        self._open -= 1

    def stats(self) -> dict[str, int]:
        return {"tracks": self._open, "bytes": 0}

    def stop(self) -> None: ...


class Insistent(SpeculationControl):
    """Verifies whatever was drafted, also what it has learned to be hopeless."""

    def _candidate(self, track: Track, hint: Draft, remaining: int) -> Candidate:
        found = super()._candidate(track, hint, remaining)
        return found if hint.pending else replace(found, chances=(0.5,) * len(hint.tokens))


class Results:
    """The answers, in a file with a line for each, which a later run goes on from."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.lines: dict[tuple[str, Cell], dict[str, Any]] = {}
        self.settings: dict[str, Any] = {}
        self.widths: dict[str, int] = {}
        for text in file.read_text().splitlines() if file.is_file() else ():
            self._take(json.loads(text))

    def add(self, *lines: dict[str, Any]) -> None:
        with self._file.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "settings" in line:
            self.settings = line["settings"]
        elif "width" in line:
            self.widths[line["mode"]] = line["width"]
        else:
            drafter, temperature, company, start, number = line["cell"]
            self.lines[line["mode"], (drafter, temperature, company, start, number)] = line

    def tokens(self, mode: str, cell: Cell) -> list[int]:
        return list(self.lines[mode, cell]["tokens"])

    def cells(self, mode: str) -> list[Cell]:
        return [cell for name, cell in self.lines if name == mode]


def first(number: int, temperature: float) -> Cell:
    """The cell of a prompt that others are compared with."""
    return "none", temperature, "alone", "cold", number


def baseline(cell: Cell) -> Cell:
    """What a cell is compared with."""
    return first(cell[4], cell[1])


class Run:
    """One mode: a loaded runtime, the prompts in tokens, and the answers."""

    def __init__(self, name: str, results: Results, texts: Sequence[str], tokens: int, cut: int, scratch: Path) -> None:
        mode = MODES[name]
        self.name, self.results, self.output, self.scratch, self.chunk = name, results, tokens, scratch, mode.chunk
        self.runtime = mode.load()
        self.prompts = [chat_tokens(self.runtime, text, cut) for text in texts]
        if name not in results.widths:
            width = invariant_width(self.runtime) if mode.invariant else self.runtime.width
            results.add({"mode": name, "width": width})
        self.width = results.widths[name]

    def close(self) -> None:
        self.runtime.close()

    def drafter(self, name: str) -> Drafter[Any] | None:
        vocab = self.runtime.info.vocab
        if name == "suffix":
            return SuffixDrafter()
        if name == "model":
            return self._draft_model()
        if name == "random":
            return Guesser(name, lambda prompt, t, answer, k: [key(len(prompt), len(answer) + j) % vocab for j in range(k)])
        if name == "adversarial":
            known = {
                (self.prompts[cell[4]], cell[1]): self.results.tokens(self.name, cell)
                for cell in self.results.cells(self.name)
                if cell == baseline(cell)
            }
            return Guesser(name, lambda prompt, t, answer, k: almost_right(known[prompt, t], answer, k, vocab))
        return None

    def _draft_model(self) -> ModelDrafter:
        from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

        path = requantised(self.scratch)
        draft = LlamaCppRuntime(path, context=CONTEXT, threads=1, sequences=BATCH, room=BATCH * CONTEXT, width=128)
        return ModelDrafter(draft, self.runtime)

    def answer(self, drafter: str, late: Callable[[], bool]) -> bool:
        """All that is missing of one drafter's answers; False when it got late."""
        groups = [range(i, min(i + BATCH, len(self.prompts))) for i in range(0, len(self.prompts), BATCH)]
        missing = [
            (t, group)
            for t, group in product(TEMPERATURES, groups)
            if any((self.name, (drafter, t, c, s, i)) not in self.results.lines for c, s, i in product(COMPANY, START, group))
        ]
        if not missing:
            return True
        made = self.drafter(drafter)
        costs = CostModel(CostTable({1: {1: 1e-3}}))
        policy = Fixed(draft_length=LENGTH)
        control = None if made is None else Insistent(policy, made, costs=costs, max_tokens=self.width)
        engine = Engine(
            kept(self.runtime),
            parallel=BATCH,
            prefill_chunk=self.chunk,
            width=self.width,
            host_bytes=64 << 20,
            control=control,
        )
        engine.start()
        try:
            for temperature, group in missing:
                if late():
                    return False
                self._group(engine, drafter, temperature, group)
        finally:
            engine.close()
        return True

    def _group(self, engine: Engine, drafter: str, temperature: float, group: Sequence[int]) -> None:
        """Cold, and again with what that left; alone, and then all at once, from the same KV and without any."""

        def job(number: int, cache: Any) -> Job:
            sampling = Sampling(seed=1000 + number, temperature=temperature)
            space = f"{temperature}"
            return Job(prompt=self.prompts[number], sampling=sampling, output=self.output, cache=cache, namespace=space)

        found: dict[tuple[str, str], list[Answer]] = {}
        found["alone", "cold"] = [read(engine.submit(job(i, "auto"))) for i in group]
        found["alone", "warm"] = [read(engine.submit(job(i, "auto"))) for i in group]
        found["batch", "warm"] = read_all([engine.submit(job(i, "auto")) for i in group])
        found["batch", "cold"] = read_all([engine.submit(job(i, "off")) for i in group])
        for (company, start), answers in found.items():
            for i, answer in zip(group, answers, strict=True):
                usage = answer.running.usage
                self.results.add(
                    {
                        "mode": self.name,
                        "cell": [drafter, temperature, company, start, i],
                        "tokens": answer.tokens,
                        "reused": usage.cache_read,
                        "drafted": usage.drafted,
                        "accepted": usage.accepted,
                    }
                )


def almost_right(answer: Sequence[int], made: Sequence[int], length: int, vocab: int) -> list[int]:
    """Some right tokens, a wrong one, right ones again; where the answer is over, what comes first of it."""
    right = [*answer[len(made) :], *answer, *([0] * length)][:length]
    wrong = key(len(made), 5) % (length + 1)
    return [(token + 1) % vocab if j == wrong else token for j, token in enumerate(right)]


def report(run: Run, *, texts: int) -> list[str]:
    """Shares of equal texts by drafter, and what is known of those that differ."""
    results, mode = run.results, run.name
    cells = [cell for cell in results.cells(mode) if cell != baseline(cell)]
    lines = [
        f"{mode}: {run.width} tokens a call at most; {len(cells):,} answers compared with those without a drafter, alone, cold"
    ]
    lines += ["", "| drafter | " + " | ".join(f"{c}, {s}" for c, s in product(COMPANY, START)) + " | accepted |"]
    lines += ["| --- |" + " --- |" * (len(COMPANY) * len(START) + 1)]
    equal = {cell: results.tokens(mode, cell) == results.tokens(mode, baseline(cell)) for cell in cells}
    for drafter in DRAFTERS:
        shown = []
        for company, start in product(COMPANY, START):
            here = [equal[cell] for cell in cells if (cell[0], cell[2], cell[3]) == (drafter, company, start)]
            shown.append(f"{sum(here)}/{len(here)}" if here else "(it is what the others are compared with)")
        lines.append(f"| {drafter} | {' | '.join(shown)} | {_accepted(results, mode, drafter)} |")
    warm = [cell for cell in cells if cell[3] == "warm"]
    least = min((results.lines[mode, cell]["reused"] - (len(run.prompts[cell[4]]) - 1) // 16 * 16 for cell in warm), default=0)
    reused = sum(results.lines[mode, cell]["reused"] > 0 for cell in warm)
    lines += ["", f"- equal: {sum(equal.values()):,} of {len(equal):,} ({sum(equal.values()) / max(1, len(equal)):.2%})"]
    lines += [f"- warm answers that reused KV: {reused:,} of {len(warm):,} (whole pages short of all there is: {-least})"]
    other = [cell for cell, same in equal.items() if not same]
    if other:
        lines += _differences(run, other, texts)
    return lines


def _accepted(results: Results, mode: str, drafter: str) -> str:
    lines = [line for (name, cell), line in results.lines.items() if name == mode and cell[0] == drafter]
    drafted = sum(line["drafted"] or 0 for line in lines)
    return f"{sum(line['accepted'] or 0 for line in lines) / drafted:.0%} of {drafted:,}" if drafted else ""


def _differences(run: Run, cells: Iterable[Cell], texts: int) -> list[str]:
    results, mode = run.results, run.name
    known: dict[tuple[Cell, tuple[int, ...]], float] = {}
    gaps = []
    for cell in cells:
        expected, other = results.tokens(mode, baseline(cell)), results.tokens(mode, cell)
        at = (baseline(cell), tuple(other))
        if at not in known:
            how = Sampling(seed=1000 + cell[4], temperature=cell[1])
            known[at] = abs(gap(run.runtime, run.prompts[cell[4]], expected, other, how))
        gaps.append(known[at])
    t = TEMPERATURES[0]
    everything = [token for i, prompt in enumerate(run.prompts) for token in (*prompt, *results.tokens(mode, first(i, t)))]
    length = run.runtime.width
    everything *= -(-texts * length // len(everything))
    effect = width_effect(run.runtime, [everything[i * length : (i + 1) * length] for i in range(texts)])
    below = sum(g < max(effect) for g in gaps)
    return [
        f"- of {len(gaps)} that differ, {below} do so from a gap below the greatest effect of the width; "
        f"gap at the first other token: median {statistics.median(gaps):.2g}, most {max(gaps):.2g}",
        f"- effect of the width on {len(effect):,} rows: median {statistics.median(effect):.2g}, most {max(effect):.2g}",
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--cut", type=int, default=64)
    parser.add_argument("--file", type=Path, default=SPEC_BENCH)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    given = parser.parse_args(arguments)
    results = Results(given.save)
    settings = {"prompts": given.prompts, "tokens": given.tokens, "cut": given.cut}
    if results.settings not in ({}, settings):
        parser.error(f"{given.save} was begun with {results.settings}")
    if not results.settings:
        results.add({"settings": settings})
    deadline = monotonic() + given.minutes * 60
    texts = prompts(given.prompts, given.file)
    print(f"{machine()}; {len(texts)} prompts cut to {given.cut} tokens, {given.tokens} tokens an answer")
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.modes:
            run = Run(name, results, texts, given.tokens, given.cut, Path(scratch))
            try:
                order = ["none", *(d for d in given.drafters if d != "none")]  # which the adversary learns from
                if not all(run.answer(drafter, lambda: monotonic() > deadline) for drafter in order):
                    print(f"{name}: {len(results.cells(name)):,} answers until now")
                    return 3
                print("\n" + "\n".join(report(run, texts=min(BATCH, len(texts)))))
            finally:
                run.close()
    deterministic = [name for name in given.modes if MODES[name].invariant]
    wrong = [
        (name, cell)
        for name in deterministic
        for cell in results.cells(name)
        if results.tokens(name, cell) != results.tokens(name, baseline(cell))
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
