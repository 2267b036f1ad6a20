"""What ``cachespec eval`` predicts beside what is measured: speed-ups of suffix speculation by task, on one runtime.

    python -m benchmarks.eval_accuracy llamacpp
    python -m benchmarks.eval_accuracy float32 --tasks summarization rag --records FILE   # appends what it measured
    python -m benchmarks.eval_accuracy --report FILE [FILE ...]                          # a table of several runs

Runtimes and tasks are those of `benchmarks.speculation`: first turns of Spec-Bench, greedy. For each task the evaluation runs
first; then the same prompts are answered by one engine, plainly and with speculation in turning order, ``--rounds`` times, each
time with a drafter that learns from answer to answer as a live one does. Times are from the first token to the last, in CPU
seconds of the process where there is one thread, since a shared machine disturbs those least, else in seconds. Measured is the
time of plain decoding over that with speculation, for all prompts of a round, and the median, least and greatest of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import anyio
from benchmarks._speculation import Bench, Records, Run, backend_for
from benchmarks.speculation import RUNTIMES, TASKS, Prompts, spec_bench

from cachespec.config import Config, parse_config
from cachespec.engine.costs import CalibrationStore
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.evaluation.prompts import Line, Slice
from cachespec.evaluation.run import evaluate
from cachespec.policies.acceptance import Goodput
from cachespec.request import build_request

TARGET = 0.15


class Pairs(Bench):
    """The bench, without warming and repeating: a drafter that saw an answer twice knows it."""

    def once(self, name: str, text: str, tokens: int) -> Run:
        self._switch.current = self._controls[name]
        return self._run(self.prompt(text), tokens, "auto" if name != "plain" else "no-write")


def config(given: argparse.Namespace) -> Config:
    """The backend that `backend_for` makes, as a configuration."""
    runtime = given.runtime
    kind = (
        'use = "llamacpp"'
        if runtime == "llamacpp"
        else f'use = "torch"\ndevice = "cpu"\ndtype = "{runtime}"\nprefill_chunk = 128'
    )
    rest = f'model = "{given.model}"\ncontext = {given.context}\nparallel = 1\nthreads = {given.threads}\n'
    return parse_config(f'[backends.bench]\n{kind}\n{rest}draft = {{ use = "suffix" }}\n')


def slice_of(task: str, texts: list[str]) -> Slice:
    lines = tuple(
        Line(number=i, category=task, request=build_request(text, temperature=0)) for i, text in enumerate(texts, start=1)
    )
    return Slice(name=task, lines=lines)


def predicted(given: argparse.Namespace, task: str, texts: list[str], store: CalibrationStore) -> dict[str, Any]:
    async def run() -> Any:
        return await evaluate(
            slice_of(task, texts),
            config(given),
            "bench",
            progress=lambda what, done, total: None,
            limit=None,
            max_output_tokens=given.tokens,
            store=store,
        )

    group = anyio.run(run).evaluation.overall
    found: dict[str, Any] = group.drafters["suffix"].to_dict()
    return found


def measured(given: argparse.Namespace, bench: Pairs, texts: list[str]) -> tuple[list[float], float]:
    """Speed-ups of the rounds, and tokens a pass."""
    drafters = [SuffixDrafter() for _ in range(given.rounds)]
    totals = [[0.0, 0.0] for _ in drafters]
    emitted = passes = 0
    for turn, drafter in enumerate(drafters):
        bench.add(f"draft {turn}", Goodput(), drafter)
    for number, text in enumerate(texts):
        bench.once("plain", text, 1)
        for turn in range(given.rounds):
            names = ["plain", f"draft {turn}"]
            runs = {name: bench.once(name, text, given.tokens) for name in (names if (number + turn) % 2 else names[::-1])}
            plain, draft = (runs[name] for name in names)
            for i, run in enumerate((plain, draft)):
                seconds = run.decode_cpu_s if given.threads == 1 else run.decode_s
                totals[turn][i] += seconds / max(1, len(run.tokens) - 1) * (len(plain.tokens) - 1)
            emitted += draft.passes.emitted
            passes += sum(draft.passes.lengths.values())
    return [plain / draft for plain, draft in totals], emitted / max(1, passes)


def measure(given: argparse.Namespace, records: Records) -> None:
    texts: Prompts = spec_bench(given.prompts)
    store = CalibrationStore()
    cpu = given.threads == 1
    backend = backend_for(given.runtime, model=given.model, threads=given.threads, context=given.context)
    bench = Pairs(backend, threads=given.threads, cpu=cpu, budget_s=20.0)
    try:
        # Both go by the same calibration.
        runtime = bench.runtime
        store.save(runtime.info.fingerprint, {**runtime.facts(), "parallel": 1, "invariant": runtime.width}, bench.costs)
        bench.add("plain", None, None)
        bench.once("plain", "Name three colours.", 24)
        for task in given.tasks or TASKS:
            short = [text for text in texts[task] if len(text) < given.characters]
            chosen = short[:: max(1, len(short) // given.count)][: given.count]
            said = predicted(given, task, chosen, store)
            ratios, each = measured(given, bench, chosen)
            record = {"runtime": given.runtime, "threads": given.threads, "task": task, "prompts": len(chosen)}
            records.add({**record, "predicted": said, "measured": ratios, "tokens_per_pass": each})
            print(row(records.all[-1]), file=sys.stderr)
    finally:
        bench.close()


def report(records: list[dict[str, Any]]) -> str:
    head = ("runtime", "task", "prompts", "acceptance [95 %]", "tokens a pass", "predicted", "measured", "off by")
    rows = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *map(row, records)]
    off = [abs(error(record)) for record in records]
    inside = sum(value <= TARGET for value in off)
    return "\n".join(
        [*rows, "", f"{inside} of {len(off)} within {TARGET:.0%}; mean {statistics.mean(off):.1%}, worst {max(off):.1%}."]
    )


def error(record: dict[str, Any]) -> float:
    """How far the prediction is off what was measured, relative to that."""
    said: float = record["predicted"]["predicted_speedup"]
    found: float = statistics.median(record["measured"])
    return said / found - 1


def row(record: dict[str, Any]) -> str:
    said, ratios = record["predicted"], record["measured"]
    rate = "-" if said["acceptance"] is None else f"{said['acceptance']:.2f} [{said['low']:.2f}, {said['high']:.2f}]"
    cells = (
        f"{record['runtime']}, {record['threads']} thr",
        record["task"],
        str(record["prompts"]),
        rate,
        f"{said['tokens_per_pass']:.2f} / {record['tokens_per_pass']:.2f}",
        f"{said['predicted_speedup']:.2f}",
        f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
        f"{error(record):+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", nargs="?", choices=RUNTIMES)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/prompts/spec_bench.jsonl"))
    parser.add_argument("--tasks", nargs="*", choices=TASKS, help="all, where none is given")
    parser.add_argument("--count", type=int, default=4, help="prompts a task")
    parser.add_argument("--characters", type=int, default=4000, help="longer prompts are left out")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=Path, help="append what was measured to this file, one JSON value a line")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args(arguments)
    if given.report:
        print(report(Records.read(given.report)))
        return 0
    if given.runtime is None:
        parser.error("a runtime, or --report")
    records = Records(given.records)
    measure(given, records)
    print(report(records.all))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
