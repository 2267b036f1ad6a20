"""Speculation on paper: recorded answers, played against measured costs of calls. No noise, so also on a busy machine.

    python -m benchmarks.speculation_replay [--count 6] [--answers FILE]

Decodes the prompts of Spec-Bench (``--prompts``) and of ``peers/texts.json`` once, with llama.cpp, or reads what an earlier run
saved in ``--answers``. Then policies verify drafts against these answers, as a target at temperature 0 would, and each call
takes what the table says: `TABLES`, measured by `engine.costs.calibrate` on a quiet machine. The policy sees those times with
noise, as it does in life; the time that is counted has none. Requests come mixed (means over several orders), and nothing is
remembered from one to the next but what the estimates learn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks._speculation import Bench, backend_for, geometric
from benchmarks.speculation import TASKS, TEXTS, choose, row, spec_bench

from cachespec.engine.accounts import Outcome
from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, CostTable
from cachespec.policies.acceptance import Fixed, Goodput

TABLES = {
    "llama.cpp Q4_1, 1 thread": (
        {1: 10.5, 2: 21.1, 3: 28.3, 4: 34.1, 5: 44.7, 6: 51.4, 8: 59.6, 9: 69.8, 12: 84.2, 16: 109.3, 24: 159.6, 32: 209.7}
    ),
    "llama.cpp Q4_1, 2 threads": (
        {1: 6.7, 2: 12.6, 3: 15.9, 4: 18.6, 5: 23.8, 6: 27.2, 8: 31.3, 9: 36.6, 12: 43.6, 16: 56.5, 24: 82.5, 32: 108.1}
    ),
    "torch float32, 2 threads": (
        {1: 25.5, 2: 26.4, 3: 26.1, 4: 26.2, 5: 25.8, 6: 25.8, 8: 30.3, 9: 30.7, 12: 33.5, 16: 38.6, 24: 50.5, 32: 61.7}
    ),
    "torch bfloat16, 2 threads": (
        {1: 17.5, 2: 17.9, 3: 18.1, 4: 17.9, 5: 18.5, 6: 18.9, 8: 21.1, 9: 22.0, 12: 24.6, 16: 28.8, 24: 37.4, 32: 44.1}
    ),
}
"""Milliseconds of a call of one sequence by its tokens: SmolLM2-135M, 2 cores of an AMD EPYC."""
STATIC = (2, 4, 8, 16, 24)
SHORTEST = 16
Answer = tuple[str, list[int], list[int]]
"""Task, prompt, answer."""


def record(given: argparse.Namespace) -> list[Answer]:
    bench = Bench(backend_for("llamacpp", model="smollm2", threads=1, context=2048), threads=1, budget_s=0.1)
    bench.add("plain", None, None)
    try:
        texts = spec_bench(given.prompts) | json.loads(TEXTS.read_text())
        found: list[Answer] = []
        for task in [*TASKS, "edit", "verbatim", "summary", "free"]:
            for prompt in choose(bench, texts[task], given):
                run = bench.run("plain", prompt, given.tokens, reuse=False)
                found.append((task, list(prompt), list(run.tokens)))
            print(task, file=sys.stderr)
    finally:
        bench.close()
    return found


def play(policy: AcceptancePolicy, table: CostTable, answers: Sequence[Answer], seed: int) -> dict[str, tuple[float, float]]:
    """By task: speed over plain decoding, and the share of steps without a draft."""
    noise = random.Random(seed)
    control = SpeculationControl(policy, SuffixDrafter(), costs=CostModel(table), max_tokens=128)
    plain, spent = defaultdict[str, float](float), defaultdict[str, float](float)
    steps, idle = defaultdict[str, int](int), defaultdict[str, int](int)
    for task, prompt, answer in answers:
        track = control.open(prompt, sampling=Sampling(seed=0, temperature=0), namespace=None, output=len(answer))
        control.accept(track, answer[:1])  # it came of the prompt
        at = 1
        while at < len(answer):
            plan = control.plan([track], [len(answer) - at])[0]
            draft = plan.draft.tokens
            right = next((i for i, token in enumerate(draft) if token != answer[at + i]), len(draft))
            took = table.seconds(1, 1 + len(draft))
            control.settle([track], [plan], [Outcome(right, answer[at : at + right + 1])], took * noise.uniform(0.97, 1.09))
            at += right + 1
            spent[task] += took
            steps[task] += 1
            idle[task] += not draft
        control.close(track, learn=False)
        plain[task] += (len(answer) - 1) * table.seconds(1, 1)
    return {task: (plain[task] / spent[task], idle[task] / steps[task]) for task in plain}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="what was recorded; made when it is not there")
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/prompts/spec_bench.jsonl"))
    parser.add_argument("--count", type=int, default=6, help="prompts a task")
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--orders", type=int, default=6)
    given = parser.parse_args(arguments)
    if given.answers and given.answers.exists():
        answers: list[Answer] = json.loads(given.answers.read_text())
    else:
        answers = record(given)
        if given.answers:
            given.answers.write_text(json.dumps(answers))
    answers = [answer for answer in answers if len(answer[2]) >= SHORTEST]
    tasks = list(dict.fromkeys(task for task, _, _ in answers))
    for name, points in TABLES.items():
        table = CostTable({1: {n: ms / 1000 for n, ms in points.items()}})
        fixed = {0: dict.fromkeys(tasks, 1.0)}
        for length in STATIC:
            fixed[length] = {t: speed for t, (speed, _) in play(Fixed(draft_length=length), table, answers, 0).items()}
        runs = []
        for seed in range(given.orders):
            mixed = list(answers)
            random.Random(seed).shuffle(mixed)
            runs.append(play(Goodput(), table, mixed, seed))
        print(f"\n{name}\n\n{row('task', 'adaptive over plain [orders]', 'best fixed', 'over best fixed', 'plain steps')}")
        print(row(*["---"] * 5))
        for task in tasks:
            speeds = [run[task][0] for run in runs]
            speed, idle = geometric(speeds), sum(run[task][1] for run in runs) / len(runs)
            best = max(fixed, key=lambda length: fixed[length][task])
            rival = fixed[best][task]
            cells = (f"{speed:.3f} [{min(speeds):.3f}, {max(speeds):.3f}]", f"{best} ({rival:.3f})", f"{speed / rival:.3f}")
            print(row(task, *cells, f"{idle:.0%}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
