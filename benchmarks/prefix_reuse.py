"""What a conversation's second turn saves: time to first token on a warm prefix beside a cold one, hits, and the index's cost.

    python -m benchmarks.prefix_reuse {llamacpp,float32,bfloat16,int8} [--threads 1] [--shared 2000] [--rounds 3]

The first turn is a document of at least --shared tokens with a question, the second another question on it. Each round, with KV
that no other round sees, times in turning order: the second turn without any KV; the first turn without an index (``cache =
"off"``), and with one that finds nothing; after it the second turn, warm. Times run from the request's text to the first token,
so with the chat template and the tokenizer. *Common prefix* is what the tokens of the second turn share with those of the first
and its answer. What the index costs is told twice: as the ratio of the two first turns, which noise is in, and as the time
spent in all that looks up, shares, keeps and frees KV, over the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any, cast

from benchmarks._local import machine, middle, prompts, read
from benchmarks._speculation import backend_for

from cachespec.engine.averages import shared_prefix
from cachespec.engine.chat import ChatTemplate
from cachespec.engine.loop import Engine
from cachespec.engine.pages import PAGE
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job
from cachespec.messages import Message, TextPart

RUNTIMES = ("llamacpp", "float32", "bfloat16", "int8")
ANSWER = 16
QUESTIONS = "Which of these is about a river? Answer briefly.", "And which one is about a number? Answer briefly."


class Timed:
    """The slots of an engine, with the seconds that their methods took."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **more: Any) -> Any:
            began = perf_counter()
            try:
                return found(*args, **more)
            finally:
                self.seconds += perf_counter() - began

        return call


class Chat:
    """An engine, and conversations with it."""

    def __init__(self, runtime: Runtime, *, chunk: int) -> None:
        self.runtime, self._template = runtime, ChatTemplate(runtime.info)
        self._engine = Engine(runtime, parallel=2, prefill_chunk=chunk)
        self.timed = Timed(self._engine._slots)
        self._engine._slots = cast("Any", self.timed)
        self._engine.start()

    def document(self, tokens: int) -> str:
        """Text of about so many tokens."""
        found = self.runtime.tokenize("\n\n".join(prompts(1 + tokens // 20)), special=False)
        while len(found) < tokens:
            found += found
        return b"".join(map(self.runtime.piece, found[:tokens])).decode("utf-8", "replace")

    def ask(self, turns: Sequence[str], *, cache: Any, space: str) -> dict[str, Any]:
        """Seconds to the first token, tokens of the prompt and the answer, tokens reused, seconds in the index."""
        spent, began = self.timed.seconds, perf_counter()
        messages = [Message(role="assistant" if i % 2 else "user", parts=(TextPart(text=t),)) for i, t in enumerate(turns)]
        prompt = self._template.prompt(self.runtime, (), messages, ()).tokens
        how = Sampling(seed=0, temperature=0.0)
        answer = read(self._engine.submit(Job(prompt=prompt, sampling=how, output=ANSWER, cache=cache, namespace=space)), began)
        text = b"".join(map(self.runtime.piece, answer.tokens)).decode("utf-8", "replace")
        reused = answer.running.usage.cache_read or 0
        seconds = self.timed.seconds - spent
        return {
            "first": answer.first,
            "prompt": prompt,
            "made": answer.tokens,
            "text": text,
            "reused": reused,
            "index": seconds,
        }

    def close(self) -> None:
        self._engine.close()


def measure(name: str, *, threads: int, shared: int, rounds: int, model: str = "smollm2") -> dict[str, Any]:
    backend = backend_for(name, model=model, threads=threads, context=shared + shared // 2 + 256)
    chat = Chat(backend.load_runtime(lambda part: True), chunk=backend.settings.prefill_chunk)
    found: dict[str, list[Any]] = {key: [] for key in ("cold", "off", "first", "warm", "hits", "common", "index")}
    try:
        document = chat.document(shared + 16)
        begin = f"{document}\n\n{QUESTIONS[0]}"
        chat.ask([QUESTIONS[0]], cache="off", space="warm up")
        for turn in range(rounds):
            space, order = f"round {turn}", ["off", "first", "cold"]
            text = ""
            for kind in order[turn % 3 :] + order[: turn % 3]:
                turns = [begin, "none.", QUESTIONS[1]] if kind == "cold" else [begin]
                got = chat.ask(turns, cache="auto" if kind == "first" else "off", space=space)
                found[kind].append(got["first"])
                if kind == "first":
                    assert not got["reused"]
                    text, kept = got["text"], [*got["prompt"], *got["made"]]
                    found["index"].append(got["index"] / got["first"])
            got = chat.ask([begin, text, QUESTIONS[1]], cache="auto", space=space)
            found["warm"].append(got["first"])
            found["hits"].append(got["reused"])
            found["common"].append(shared_prefix(kept, list(got["prompt"])))
    finally:
        chat.close()
    return {"runtime": name, "threads": threads, "chunk": backend.settings.prefill_chunk, **found}


def table(report: dict[str, Any]) -> str:
    cold, warm, off, first = (report[name] for name in ("cold", "warm", "off", "first"))
    share = [a / b for a, b in zip(warm, cold, strict=True)]
    ratio = [a / b for a, b in zip(first, off, strict=True)]
    short = max(common - hits for common, hits in zip(report["common"], report["hits"], strict=True))
    return "\n".join(
        [
            f"{machine()}; {report['runtime']}, {report['threads']} threads, {len(warm)} rounds",
            "",
            "| time to first token, s | |",
            "| --- | --- |",
            f"| second turn, cold | {middle(cold)} |",
            f"| second turn, warm | {middle(warm, digits=3)} |",
            f"| first turn, no index | {middle(off)} |",
            f"| first turn, index without a hit | {middle(first)} |",
            "",
            f"- warm / cold (target <= 15 %): {statistics.median(share):.2%} [{min(share):.2%}, {max(share):.2%}]",
            f"- common prefix {min(report['common'])} to {max(report['common'])} tokens, hits {min(report['hits'])} to "
            f"{max(report['hits'])}; short of it at most by (target <= {PAGE}): {short}",
            f"- first turn with an index / without: {middle(ratio, digits=3)}",
            f"- time in the index at zero hits (target <= 1 %): {middle(report['index'], 100, 3)} %",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shared", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    report = measure(given.runtime, threads=given.threads, shared=given.shared, rounds=given.rounds)
    print(json.dumps(report) if given.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
