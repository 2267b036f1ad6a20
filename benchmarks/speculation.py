"""Speculation by task, on one runtime: acceptance, tokens a pass, speed-up over plain decoding, beside fixed draft lengths.

    python -m benchmarks.speculation llamacpp --threads 1
    python -m benchmarks.speculation float32 --threads 2 --tasks summarization rag
    python -m benchmarks.speculation bfloat16 --records FILE      # appends what it measured
    python -m benchmarks.speculation --report FILE [FILE ...]     # tables of what was measured, also of several runs

The runtimes are ``llamacpp`` and torch's ``float32``, ``bfloat16`` and ``int8``. Prompts are those of Spec-Bench
(``--prompts``, six tasks), their first turns in the model's chat template, and with ``--sets`` the edits, summaries and free
texts of ``peers/texts.json``. Greedy. Every prompt is evaluated once; then all candidates decode from its KV, in turning
order, ``--rounds`` times. Times are from the first token to the last. A pair is a candidate and plain decoding (or the best
fixed length of the task, chosen with hindsight, 0 among them) on the same prompt in the same round; intervals are bootstraps
over pairs.

Draft models: ``--draft-model FILE [--draft-runtime llamacpp]`` adds the draft model alone and the hybrid of both;
``--pair DIR`` takes target and draft from a folder with two GGUF files of one vocabulary, the larger one being the target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._speculation import Bench, Records, Run, backend_for, geometric, interval

from cachespec.engine.drafters import factories
from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.policies.acceptance import Fixed, Goodput

RUNTIMES = ("llamacpp", "float32", "bfloat16", "int8")
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
SETS = ("edit", "verbatim", "summary", "free")
TEXTS = Path(__file__).parent / "peers" / "texts.json"
SHORTEST = 16
"""Answers of fewer tokens say nothing of speed."""
DISTURBED = 0.25
"""Share of a core that others took, from which a run does not count, if making it again did not help."""
Prompts = dict[str, list[str]]


def spec_bench(path: Path) -> Prompts:
    """First turns by task. The eight categories of MT-bench are one task, taken in turn."""
    by_category = defaultdict[str, list[str]](list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        by_category[question["category"]].append(question["turns"][0])
    chat = [by_category[c][i] for i in range(5) for c in CHAT if i < len(by_category[c])]
    return {"mt_bench": chat, **{task: by_category[task] for task in TASKS[1:]}}


def measure(given: argparse.Namespace, records: Records) -> None:
    backend = backend_for(given.runtime, model=given.model, threads=given.threads, context=given.context)
    bench = Bench(backend, threads=given.threads, cpu=given.clock == "cpu")
    drafters: list[Any] = []
    try:
        head = {"head": True, "runtime": given.runtime, "threads": given.threads, "model": bench.runtime.info.description}
        records.add({**head, "costs": {str(n): s for n, s in bench.costs.points[1].items()}})
        names = candidates(given, bench, drafters)
        prompts = {} if given.sets and not given.tasks else spec_bench(given.prompts)
        prompts |= json.loads(TEXTS.read_text())
        bench.warm(bench.prompt("Name three colours."))
        for name in names:  # code and caches are warm, the first steps of each done
            bench.run(name, bench.prompt("Name three colours."), 24)
        for task in [*(given.tasks or (() if given.sets else TASKS)), *(given.sets or ())]:
            chosen = choose(bench, prompts[task], given)
            for number, prompt in enumerate(chosen):
                bench.warm(prompt)
                for turn in range(given.rounds):
                    shift = (turn * 3 + number) % len(names)
                    order = names[shift:] + names[:shift]
                    runs = {name: bench.run(name, prompt, given.tokens) for name in order}
                    record(records, given, task, number, turn, runs)
            print(f"{task}: {len(chosen)} prompts", file=sys.stderr)
    finally:
        bench.close()
        for drafter in drafters:
            drafter.stop()


def candidates(given: argparse.Namespace, bench: Bench, drafters: list[Any]) -> list[str]:
    def drafter(made: Any) -> Any:
        drafters.append(made)
        return made

    bench.add("plain", None, None)
    bench.add("adaptive", Goodput(), drafter(SuffixDrafter()))
    names = ["plain", "adaptive"]
    for length in given.static:
        bench.add(f"fixed {length}", Fixed(draft_length=length), drafter(SuffixDrafter()))
        names.append(f"fixed {length}")
    if given.draft_model:
        how = {"model": given.draft_model, "target": bench.runtime, "load": bench.backend.load_draft}
        model = drafter(factories.model(**how, runtime=given.draft_runtime))
        bench.add("model", Goodput(), model)
        bench.add("model fixed 4", Fixed(draft_length=4), drafter(factories.model(**how, runtime=given.draft_runtime)))
        bench.add("hybrid", Goodput(), drafter(factories.hybrid(**how, runtime=given.draft_runtime)))
        names += ["model", "model fixed 4", "hybrid"]
    return names


def choose(bench: Bench, texts: list[str], given: argparse.Namespace) -> list[tuple[int, ...]]:
    """The first prompts that are short enough, of a selection spread over all of them."""
    step = max(1, len(texts) // (2 * given.count))
    found = []
    for text in [*texts[::step], *texts]:
        prompt = bench.prompt(text)
        if len(prompt) <= given.prompt_tokens and prompt not in found:
            found.append(prompt)
        if len(found) == given.count:
            break
    return found


def record(records: Records, given: argparse.Namespace, task: str, number: int, turn: int, runs: dict[str, Run]) -> None:
    plain = runs["plain"]
    for name, run in runs.items():
        passes = run.passes
        records.add(
            {
                "runtime": given.runtime,
                "threads": given.threads,
                "task": task,
                "prompt": number,
                "round": turn,
                "candidate": name,
                "seconds": run.decode_s,
                "cpu_s": run.decode_cpu_s,
                "tokens": len(run.tokens),
                "others": run.others,
                "same": run.tokens == plain.tokens,
                "lengths": {str(length): count for length, count in passes.lengths.items()},
                "drafted": passes.drafted,
                "accepted": passes.accepted,
                "rejected": passes.rejected,
                "emitted": passes.emitted,
                "planning_s": passes.planning_s,
            }
        )


def report(records: list[dict[str, Any]], clock: str) -> str:
    lines = []
    for head in (r for r in records if r.get("head")):
        first = head["costs"]["1"]
        costs = ", ".join(f"{n}: {s / first:.2f}" for n, s in head["costs"].items())
        title = f"{head['runtime']}, {head['threads']} threads, {head['model']}"
        lines.append(f"{title}: {first * 1e3:.1f} ms a token; t(n)/t(1) {costs}")
    found = [r for r in records if not r.get("head") and r["tokens"] >= SHORTEST]
    if clock == "cpu":
        found = [{**r, "seconds": r["cpu_s"]} for r in found if r["threads"] == 1]
    else:
        found = [r for r in found if r["others"] <= DISTURBED]
    for key in dict.fromkeys((r["runtime"], r["threads"]) for r in found):
        ours = [r for r in found if (r["runtime"], r["threads"]) == key]
        names = list(dict.fromkeys(r["candidate"] for r in ours))
        lines += [
            "",
            f"{key[0]}, {key[1]} threads",
            "",
            row("task", "candidate", *HEADINGS),
            row(*["---"] * (2 + len(HEADINGS))),
        ]
        for task in dict.fromkeys(r["task"] for r in ours):
            lines += task_rows([r for r in ours if r["task"] == task], names)
    return "\n".join(lines)


HEADINGS = (
    "tokens/s",
    "acceptance",
    "tokens a pass",
    "x plain [95 %]",
    "best fixed",
    "x best fixed [95 %]",
    "lengths",
    "choosing",
    "same text",
    "pairs",
)


def task_rows(records: list[dict[str, Any]], names: list[str]) -> Iterable[str]:
    """A row for each adaptive candidate; of the fixed lengths only the best stands there, with its speed-up."""
    speeds = defaultdict[str, dict[tuple[int, int], float]](dict)
    for r in records:
        speeds[r["candidate"]][r["prompt"], r["round"]] = (r["tokens"] - 1) / r["seconds"]
    plain = speeds["plain"]
    if not plain:
        return
    statics = {name: speeds[name] for name in names if name == "plain" or "fixed" in name}
    gains = {name: geometric([s[k] / plain[k] for k in s if k in plain]) for name, s in statics.items() if s}
    for name in names:
        if name == "plain" or "fixed" in name:
            continue
        mine = [r for r in records if r["candidate"] == name]
        rival = max((n for n in gains if not n.startswith("model") or name != "adaptive"), key=lambda n: gains[n])
        over = {base: [speeds[name][k] / s[k] for k in speeds[name] if k in s] for base, s in statics.items()}
        total = Counter[str]()
        for r in mine:
            total.update({k: r[k] for k in ("accepted", "rejected", "emitted")})
        lengths = Counter[int]()
        for r in mine:
            lengths.update({int(length): count for length, count in r["lengths"].items()})
        tried = total["accepted"] + total["rejected"]
        passes = sum(lengths.values())
        yield row(
            mine[0]["task"],
            name,
            f"{geometric(list(speeds[name].values())):.1f}",
            f"{total['accepted'] / tried:.2f}" if tried else "-",
            f"{total['emitted'] / passes:.2f}",
            bounds(over["plain"]),
            f"{rival.removeprefix('fixed ').replace('plain', '0')} ({gains[rival]:.2f})",
            bounds(over[rival]),
            shares(lengths),
            f"{sum(r['planning_s'] for r in mine) / sum(r['seconds'] for r in mine):.1%}",
            f"{sum(r['same'] for r in mine)}/{len(mine)}",
            str(len(over["plain"])),
        )


def bounds(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return f"{geometric(ratios):.3f} [{low:.3f}, {high:.3f}]"


def shares(lengths: Counter[int]) -> str:
    """How often each length was drafted, in groups."""
    groups = (("0", 0, 0), ("1-3", 1, 3), ("4-7", 4, 7), ("8+", 8, 999))
    total = sum(lengths.values())
    parts = [(name, sum(c for n, c in lengths.items() if low <= n <= high) / total) for name, low, high in groups]
    return ", ".join(f"{name}: {share:.0%}" for name, share in parts if share)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", nargs="?", choices=RUNTIMES)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/prompts/spec_bench.jsonl"))
    parser.add_argument(
        "--tasks", nargs="*", choices=TASKS, help="of Spec-Bench; all, where neither these nor --sets are given"
    )
    parser.add_argument("--sets", nargs="*", choices=SETS)
    parser.add_argument("--count", type=int, default=5, help="prompts a task")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--static", type=int, nargs="*", default=[2, 4, 8, 16], help="fixed draft lengths to compare with")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-runtime", choices=("llamacpp", "torch"))
    parser.add_argument("--pair", type=Path, help="a folder with a target and a draft model, both GGUF")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: CPU seconds, of one thread, on a machine that is not quiet",
    )
    parser.add_argument("--records", type=Path, help="append what was measured to this file, one JSON value a line")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args(arguments)
    if given.pair:
        files = sorted(given.pair.glob("*.gguf"), key=lambda file: file.stat().st_size)
        if len(files) != 2:
            parser.error(f"{given.pair} holds {len(files)} GGUF files, not two")
        given.draft_model, given.model = str(files[0]), str(files[1])
    if given.report:
        print(report(Records.read(given.report), given.clock))
        return 0
    if given.runtime is None:
        parser.error("a runtime, or --report")
    records = Records(given.records)
    if given.clock == "cpu" and given.threads != 1:
        parser.error("CPU seconds tell the speed of one thread only")
    measure(given, records)
    print(report(records.all, given.clock))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
