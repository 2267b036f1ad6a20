"""What the suffix drafter costs and is worth, without running a model: on the recorded answers of agents.

    python benchmarks/suffix_drafter.py [FOLDER]

FOLDER holds the recorded conversations (``../shared/data/agents``); without it, or without the small model whose tokenizer
is used, only costs are printed. Recorded answers are drafted against as a target at temperature 0 would verify them;
speeds are those that measured tables of t(n) give, relative to plain decoding.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from cachespec.engine.accounts import Outcome
from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.drafters.automaton import SuffixAutomaton
from cachespec.engine.drafters.suffix import CATCH_UP, SuffixDrafter
from cachespec.engine.sampling import Sampling
from cachespec.engine.speculation import AcceptancePolicy, CostTable
from cachespec.errors import CachespecError
from cachespec.policies.acceptance import Fixed, Goodput

HOW = Sampling(seed=0, temperature=0)
TABLES = {
    "torch bfloat16": {1: 22.9, 2: 21.5, 4: 21.5, 8: 23.6, 16: 27.7, 32: 35.7},
    "torch float32": {1: 41.0, 2: 65.2, 3: 81.6, 5: 56.6, 9: 68.9, 12: 66.8, 17: 77.9, 33: 105.0},
    "llama.cpp BF16": {1: 10.3, 2: 13.9, 4: 19.7, 8: 32.3, 16: 41.2, 32: 77.3},
    "llama.cpp Q4_1": {1: 7.5, 2: 19.4, 4: 33.5, 8: 55.3, 16: 95.3, 32: 180.0},
}
"""Milliseconds of a call by its tokens, measured for a 135M model on one or two cores."""
Answer = tuple[list[int], list[int]]


def costs() -> None:
    rng = random.Random(0)
    text: list[int] = []
    while len(text) < 20_000:  # words by rank, and passages that come again
        if text and rng.random() < 0.02:
            at = rng.randrange(len(text))
            text += text[at : at + rng.randrange(5, 60)]
        else:
            text.append(int(rng.paretovariate(0.6)) % 50_000)
    start = perf_counter()
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    each = (perf_counter() - start) / len(text)
    print(f"learning a token            {each * 1e6:6.1f} us, {automaton.bytes / len(text):.0f} bytes")
    drafter = SuffixDrafter()
    track = drafter.open(text[:4000], sampling=HOW, namespace=b"n")
    for _ in range(4000 // CATCH_UP + 1):
        drafter.prospects([track], 8)
    count, start = 0, perf_counter()
    for token in text[4000:8000]:
        count += len(drafter.propose([track], [8])[0].tokens)
        drafter.accept(track, [token])
    took = perf_counter() - start
    print(f"drafting, at every token    {took / 4000 * 1e6:6.1f} us a step, {took / count * 1e6:.1f} us a drafted token")


def planning() -> None:
    """What a step costs beside the model's call: a draft found, its length chosen, what became of it scored."""
    rng = random.Random(1)
    free = [int(rng.paretovariate(0.5)) % 50_000 for _ in range(1500)]
    copied = [rng.randrange(50_000) for _ in range(400)] * 4
    for kind, text in (("free text", free), ("copied text", copied)):
        for name in ("llama.cpp Q4_1", "torch bfloat16"):
            table = CostTable({1: {n: ms / 1000 for n, ms in TABLES[name].items()}})
            control = SpeculationControl(Goodput(), SuffixDrafter(), costs=CostModel(table), max_tokens=64)
            track, at = control.open(text[:500], sampling=HOW, namespace=b"n", output=1000), 500
            control.plan([track], [1000])
            times = []
            while at < 1400:
                start = perf_counter()
                plans = control.plan([track], [1500 - at])
                planned = perf_counter() - start
                draft = plans[0].draft.tokens
                right = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
                outcome = Outcome(right, text[at : at + right + 1])
                took = table.seconds(1, 1 + len(draft))
                start = perf_counter()
                control.settle([track], plans, [outcome], took)
                times.append(planned + perf_counter() - start)
                at += right + 1
            middle = sorted(times)[len(times) // 2]
            print(f"a step, {kind:11} on {name:14} {middle * 1e6:6.1f} us, {(1400 - 500) / len(times):.1f} tokens a step")


def recorded(folder: Path) -> dict[str, list[Answer]]:
    """Conversations as pairs of what came before and an answer, in tokens of the small model."""
    from cachespec.engine.models import find_model
    from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

    runtime = LlamaCppRuntime(find_model("smollm2"), context=64, threads=1)
    found: dict[str, list[Answer]] = {"coding": [], "support": []}

    def read(kind: str, messages: Sequence[dict[str, Any]], most: int) -> None:
        before = ""
        for message in messages:
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            text += "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())
            if message["role"] == "assistant" and len(text) > 100 and most:
                most -= 1
                prompt, answer = (runtime.tokenize(side, special=False) for side in (before[-24_000:], text[:4000]))
                found[kind].append((prompt, answer))
            before += f"\n{message['role']}\n{text}"

    for path in sorted(folder.glob("agentic_code_*.json.gz"))[:3]:
        read("coding", json.loads(gzip.decompress(path.read_bytes()))["messages"], 12)
    for task in json.loads(gzip.decompress((folder / "airline_support.json.gz").read_bytes()))[:12]:
        read("support", task["traj"], 12)
    runtime.close()
    return found


def play(answers: Sequence[Answer], policy: AcceptancePolicy, table: CostTable) -> tuple[float, float, float]:
    """Speed over plain decoding, tokens a pass, mean draft length."""
    control = SpeculationControl(policy, SuffixDrafter(), costs=CostModel(table), max_tokens=64)
    seconds, passes, drafted = 0.0, 0, 0
    for prompt, answer in answers:
        track, at = control.open(prompt, sampling=HOW, namespace=b"n", output=len(answer)), 0
        while at < len(answer):
            plans = control.plan([track], [len(answer) - at])
            draft = plans[0].draft.tokens
            right = next((i for i, token in enumerate(draft) if token != answer[at + i]), len(draft))
            took = table.seconds(1, 1 + len(draft))
            control.settle([track], plans, [Outcome(right, answer[at : at + right + 1])], took)
            at, seconds, passes, drafted = at + right + 1, seconds + took, passes + 1, drafted + len(draft)
        control.close(track, learn=True)
    tokens = sum(len(answer) for _, answer in answers)
    return tokens * table.seconds(1, 1) / seconds, tokens / passes, drafted / passes


def main() -> None:
    costs()
    planning()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data/agents")
    if not folder.is_dir():
        print(f"{folder}: no recorded conversations")
        return
    try:
        groups = recorded(folder)
    except CachespecError as error:
        print(f"no tokenizer: {error}")
        return
    for kind, answers in groups.items():
        print(f"\n{kind}: {len(answers)} answers, {sum(len(answer) for _, answer in answers):,} tokens")
        for name, row in TABLES.items():
            table = CostTable({1: {n: ms / 1000 for n, ms in row.items()}})
            speed, tokens, length = play(answers, Goodput(), table)
            fixed = {k: play(answers, Fixed(draft_length=k), table)[0] for k in (1, 2, 4, 8, 16)}
            shown = "  ".join(f"{k}: {x:.2f}" for k, x in fixed.items())
            print(f"{name:15} goodput {speed:.2f}x, {tokens:.2f} tokens a pass, length {length:.1f}   fixed {shown}")


if __name__ == "__main__":
    main()
