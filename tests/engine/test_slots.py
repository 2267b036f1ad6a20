"""Room among pins: an idle engine takes whatever would fit in an empty one, and pins still keep what they can."""

from __future__ import annotations

import random
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.engine.loop_support import ids, job, read, running, text, usage
from tests.engine.scripted import ScriptedRuntime
from tests.engine.tiny_models import llama

from cachespec.engine.pages import PAGE
from cachespec.engine.runtimes.base import Runtime, Span
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime
from cachespec.engine.slots import Lease, Slots
from cachespec.errors import OutOfPagesError

CONTEXT = 160
MANUAL = "The keeper counts the boats that pass, and writes them down in the book of the night. "
KINDS: dict[str, dict[str, Any]] = {
    "own": {"sequences": 3, "shares": False},
    "shared": {"sequences": 8, "shares": True, "room": 2 * CONTEXT},
    "tight": {"sequences": 4, "shares": True, "room": CONTEXT},
    "forgetful": {"sequences": 3, "shares": False, "forgets": True},
}


def fill(runtime: Runtime, slots: Slots, lease: Lease, tokens: list[int]) -> None:
    """Compute what is missing, as an engine would: what came back from host memory has room of its own, and is not counted."""
    assert slots.make_room(len(tokens) - lease.held), "there was no room for what was let in"
    while True:
        try:
            runtime.evaluate([Span(sequence=lease.slot, start=lease.held, tokens=tokens[lease.held :])])
            break
        except OutOfPagesError:
            assert slots.evict(len(tokens) - lease.held), "nothing could go, and there was no room"
    lease.held = len(tokens)
    slots.keep(lease, tokens)


@pytest.mark.parametrize("host_bytes", [0, 10**6])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_pinned_an_idle_engine_takes_what_an_empty_one_does(seed: int, kind: str, host_bytes: int) -> None:
    chance = random.Random(seed)
    runtime = ScriptedRuntime(context=CONTEXT, **KINDS[kind])
    slots = Slots(runtime, seats=1, host_bytes=host_bytes)
    space = slots.namespace(None)
    beginnings = [[chance.randrange(256) for _ in range(chance.randrange(100))] for _ in range(4)]
    said: dict[int, list[int]] = {}
    for _ in range(60):
        session = chance.choice([None, *range(6)])
        before = said.get(session, []) if session is not None else []
        start = before if before and len(before) < 130 else chance.choice(beginnings)
        tokens = start + [chance.randrange(256) for _ in range(chance.randrange(1, CONTEXT - len(start) + 1))]
        lease = slots.admit(tokens, space)
        assert lease is not None, "it was refused with nobody running"
        assert runtime.kv[lease.slot] == tokens[: lease.held]
        fill(runtime, slots, lease, tokens)
        slots.release(lease, tokens)
        if session is not None:
            said[session] = tokens
            slots.pin(session, tokens, space, monotonic() + 300)
        slots.check()


@pytest.mark.parametrize("seed", range(6))
def test_one_that_runs_leaves_a_slot_to_the_next(seed: int) -> None:
    """Two seats, two more slots, and both of those pinned."""
    chance = random.Random(seed)
    runtime = ScriptedRuntime(context=CONTEXT, sequences=4, shares=False)
    slots = Slots(runtime, seats=2)
    space = slots.namespace(None)
    leases: list[tuple[Lease, list[int]]] = []
    for i in range(80):
        if len(leases) == 2:
            lease, tokens = leases.pop(chance.randrange(2))
            slots.release(lease, tokens)
            if chance.random() < 0.6:
                slots.pin(chance.randrange(4), tokens, space, monotonic() + 300)
        tokens = [*ids(MANUAL[: chance.choice([10, 40, 70])]), *(chance.randrange(256) for _ in range(40 + i % 40))]
        admitted = slots.admit(tokens, space)
        assert admitted is not None
        fill(runtime, slots, admitted, tokens)
        leases.append((admitted, tokens))
        slots.check()


def sessions_then_two_alike(runtime: Any, count: int) -> None:
    with running(runtime, parallel=1) as engine:
        for i in range(count):
            read(engine.submit(job(f"Session {i}. {MANUAL}", output=4, session=f"s{i}", keep_s=300)))
        first = read(engine.submit(job(MANUAL + "What does the keeper count?", output=4)))
        second = read(engine.submit(job(MANUAL + "Who is he?", output=4)))
        assert text(first)
        assert text(second)
        assert usage(second).cache_read == len(MANUAL) // PAGE * PAGE, "what both begin with was computed again"
        for i in range(count):
            again = read(engine.submit(job(f"Session {i}. {MANUAL}Go on.", output=4, session=f"s{i}", keep_s=300)))
            assert (usage(again).cache_read or 0) >= len(MANUAL) // PAGE * PAGE, "a pin was not respected"


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_sessions_in_all_spare_slots_do_not_keep_others_out(kind: str) -> None:
    runtime = ScriptedRuntime(context=600, **(KINDS[kind] | ({"room": 6000} if kind == "shared" else {})))
    sessions_then_two_alike(runtime, runtime.sequences - 1)


def test_sessions_in_all_spare_slots_with_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = llama(tmp_path / "tiny.gguf")
    runtime = LlamaCppRuntime(path, context=600, threads=1, sequences=3, isolated=True, width=128, flash_attention=True)
    sessions_then_two_alike(runtime, 2)
