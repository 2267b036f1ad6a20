"""What tests of the engine's loop share: jobs on byte tokens, readers, and an engine that is checked when it is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.engine.scripted import ScriptedRuntime, wait_until

from cachespec.engine.loop import Engine
from cachespec.engine.sampling import Sampling
from cachespec.engine.sequence import Job, Sequence
from cachespec.events import Event, Finished, TextDelta, UsageReported
from cachespec.usage import Usage

GREEDY = Sampling(seed=0, temperature=0)


@contextmanager
def running(runtime: Any, chunk: int = 128, parallel: int = 1, **more: Any) -> Iterator[Engine]:
    """Afterwards nothing may be left: no lease, no slot that is lost, no page that nobody holds."""
    engine = Engine(runtime, name="test", prefill_chunk=chunk, parallel=parallel, **more)
    engine.start()
    try:
        yield engine
        if engine.failure is None:
            wait_until(lambda: engine.active == 0)
            assert not engine._slots._leases
            engine._slots.check()
    finally:
        engine.close()
    assert not isinstance(runtime, ScriptedRuntime) or runtime.closed


def job(prompt: str = "prompt", output: int = 50, **more: object) -> Job:
    return replace(Job(prompt=ids(prompt), sampling=GREEDY, output=output), **more)  # type: ignore[arg-type]


def ids(prompt: str) -> tuple[int, ...]:
    return tuple(prompt.encode())


def read(sequence: Sequence) -> list[Event]:
    """To the end. Raises the sequence's error."""
    events: list[Event] = []
    while True:
        ready = threading.Event()
        ended = sequence.done
        events += (taken := sequence.take())
        if ended and not taken:
            if sequence.error is not None:
                raise sequence.error
            return events
        if not taken and sequence.when_ready(ready.set):
            assert ready.wait(30), "nothing came"


def read_all(sequences: list[Sequence]) -> list[list[Event]]:
    """All of them at once, as that many readers would."""
    found: list[list[Event]] = [[] for _ in sequences]

    def one(i: int, sequence: Sequence) -> None:
        found[i] = read(sequence)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(sequences)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def text(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def usage(events: list[Event]) -> Usage:
    return next(e.usage for e in events if isinstance(e, UsageReported))


def finish(events: list[Event]) -> Finished:
    (found,) = [e for e in events if isinstance(e, Finished)]
    return found
