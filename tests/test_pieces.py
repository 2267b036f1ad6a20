"""Large things are made bit by bit, and nobody waits for more than a bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import perf_counter

import anyio
import anyio.lowlevel
import pytest

from cachespec.pieces import STRETCH_S, gathered, listed


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_a_list_is_the_same_in_pieces(count: int) -> None:
    rows = [[f"ü{i}", i, None, {"a": [1.5]}] for i in range(count)]
    pieces = list(listed(iter(rows)))
    assert json.loads("".join(pieces)) == rows
    assert max(len(piece) for piece in pieces) < 1_000


def test_rows_are_asked_for_when_they_are_due() -> None:
    asked: list[int] = []

    def rows() -> Iterator[int]:
        for i in range(100):
            asked.append(i)
            yield i

    pieces = listed(rows())
    next(pieces)
    assert 0 < len(asked) < 50


@pytest.mark.anyio
async def test_others_run_between_pieces_and_cancelling_leaves_nothing_behind() -> None:
    done: list[int] = []
    turns = 0

    def slow() -> Iterator[bytes]:
        for i in range(30):
            until = perf_counter() + STRETCH_S
            while perf_counter() < until:
                pass
            done.append(i)
            yield b"x"

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        assert await gathered(slow()) == b"x" * 30
        assert turns >= 29
        with anyio.CancelScope() as scope:
            scope.cancel()
            await gathered(slow())
        assert scope.cancelled_caught
        assert len(done) == 31  # one of them, of which nothing is left
        tasks.cancel_scope.cancel()
    assert await gathered(iter([])) == b""
