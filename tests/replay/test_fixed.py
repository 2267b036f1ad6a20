"""The fixed policies: where they mark, and what they are known to cost on the public traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachespec.replay.fixed import fixed_policies
from cachespec.replay.simulate import simulate
from cachespec.replay.traces import Trace, parse_trace, read_trace
from cachespec.replay.vendor import VENDORS

from .support import run
from .test_bound import chat
from .test_simulate import agent

TERMS = VENDORS["anthropic"]


def marks(name: str, lines: list[str], vendor: str = "anthropic") -> list[list[list[object]]]:
    terms = VENDORS[vendor]
    return [json.loads(line)["marks"] for line in run(lines, fixed_policies(terms)[name], terms)[2]]


def test_where_they_mark() -> None:
    lines = [agent(0, 3), agent(10, 5), agent(20, 6)]
    assert marks("last-message:5m", lines) == [[[30, "5m"]], [[50, "5m"]], [[60, "5m"]]]
    assert marks("always:1h", lines)[1] == [[10, "1h"], [50, "1h"]]
    assert marks("previous:5m", lines)[2] == [[10, "5m"], [50, "5m"], [60, "5m"]]
    assert marks("off", lines) == marks("caller", lines) == [[], [], []]


def test_quarters_are_whole_blocks() -> None:
    line = '{"timestamp": 0, "input_length": 4200, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    assert marks("quarters:5m", [line]) == [[[1024, "5m"], [2048, "5m"], [3072, "5m"], [4096, "5m"]]]
    assert marks("quarters:5m", [chat(0, 1, 2, 3)]) == [[[512, "5m"], [1024, "5m"]]]  # before the own end


def test_openai_by_default_writes_and_can_be_told_not_to() -> None:
    lines = [agent(0, 3), agent(10, 5)]
    assert marks("caller", lines, "openai-5.6") == [[[30, "30m"]], [[50, "30m"]]]
    assert marks("off", lines, "openai-5.6") == [[], []]
    assert marks("last-message:30m", lines, "openai-5.6") == [[[30, "30m"]], [[30, "30m"], [50, "30m"]]]


KNOWN = {
    "coding_agent": {"last-message:5m": 0.209, "always:5m": 0.207, "always:1h": 0.189, "previous:1h": 0.182, "off": 1.0},
    "conversation": {"last-message:5m": 0.935, "quarters:5m": 0.913, "caller": 1.0},
}


@pytest.fixture(scope="module", params=sorted(KNOWN))
def public(request: pytest.FixtureRequest, shared_data: Path) -> tuple[str, Trace]:
    return request.param, read_trace(str(shared_data / "traces" / f"{request.param}.jsonl.gz"))


@pytest.mark.shared
def test_known_costs(public: tuple[str, Trace]) -> None:
    name, trace = public
    fixed = fixed_policies(TERMS)
    costs = {policy: round(simulate(trace, fixed[policy], TERMS).relative, 3) for policy in KNOWN[name]}
    assert costs == KNOWN[name]


def test_an_empty_prompt_costs_nothing() -> None:
    trace = parse_trace(['{"timestamp": 0, "input_length": 0, "hash_ids": []}'])
    for policy in fixed_policies(TERMS).values():
        assert simulate(trace, policy, TERMS).cost == 0
