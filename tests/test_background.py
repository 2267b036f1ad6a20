"""Jobs beside requests: in their time, replaceable, gone when the client closes, harmless when the loop dies."""

from __future__ import annotations

import logging
import threading
import time

import anyio
import pytest

from cachespec.background import Background
from cachespec.clock import SystemClock
from cachespec.testing import FakeClock


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "cachespec-background"]


@pytest.mark.anyio
async def test_jobs_run_on_the_loop_when_they_are_due() -> None:
    background, ran = Background(SystemClock()), []
    here = threading.get_ident()
    done = anyio.Event()

    async def job() -> None:
        await anyio.sleep(0)
        ran.append(threading.get_ident())
        done.set()

    background.at(time.time() + 0.05, "a", job)
    with anyio.fail_after(10):
        await done.wait()
    assert ran == [here]
    await background.aclose()
    await background.aclose()
    assert not threads()


@pytest.mark.anyio
async def test_order_replacement_and_cancellation() -> None:
    clock = FakeClock()
    background, ran = Background(clock), []

    def note(name: str) -> None:
        async def job() -> None:
            ran.append(name)

        background.at(clock.now + float(name.partition("@")[2]), name.partition("@")[0], job)

    for name in ("late@100000", "b@20000", "a@10000", "gone@10000", "a@30000"):
        note(name)
    background.cancel("gone")
    background.cancel("never")
    assert len(background) == 3
    assert await background.run_due() == 0
    clock.advance(30_000)
    assert await background.run_due() == 2
    assert ran == ["b@20000", "a@30000"]
    clock.advance(100_000)
    assert await background.run_due() == 1
    assert len(background) == 0
    await background.aclose()


@pytest.mark.anyio
async def test_a_job_that_fails_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    background, ran = Background(clock), []

    async def bad() -> None:
        raise ValueError("broken")

    async def good() -> None:
        ran.append(1)

    with caplog.at_level(logging.ERROR, logger="cachespec.background"):
        background.at(clock.now + 90_000, "bad", bad)
        background.at(clock.now + 90_001, "good", good)
        clock.advance(90_001)
        assert await background.run_due() == 2
    assert ran == [1]
    assert "broken" in caplog.text
    await background.aclose()


@pytest.mark.anyio
async def test_closing_cancels_what_runs_and_plans_nothing_more() -> None:
    background = Background(SystemClock())
    started = anyio.Event()
    ended: list[str] = []

    async def long() -> None:
        started.set()
        try:
            await anyio.sleep(600)
            ended.append("slept")
        finally:
            ended.append("left")

    background.at(time.time(), "long", long)
    with anyio.fail_after(10):
        await started.wait()
        await background.aclose()
    assert ended == ["left"]
    background.at(time.time(), "more", long)
    assert len(background) == 0
    assert not threads()


@pytest.mark.anyio
async def test_many_replacements_do_not_grow_it() -> None:
    clock = FakeClock()
    background = Background(clock)

    async def job() -> None: ...

    for i in range(10_000):
        background.at(clock.now + 90_000 + i, i % 10, job)
    assert len(background) == 10
    assert len(background._heap) < 200
    await background.aclose()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_ends_without_closing_leaves_no_thread(backend: str) -> None:
    async def main() -> None:
        async def job() -> None: ...

        background = Background(SystemClock())
        background.at(time.time() + 0.2, "a", job)

    anyio.run(main, backend=backend)
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not threads()
