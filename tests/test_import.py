"""`import cachespec` costs next to nothing and loads no SDK, no engine and no heavy library."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from time import perf_counter

import pytest

HEAVY = {
    *("openai", "anthropic", "torch", "llama_cpp", "numpy", "pydantic", "genai_prices"),
    *("httpx2", "rich", "tenacity", "trio", "huggingface_hub"),
}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def seconds(code: str) -> float:
    def once() -> float:
        begin = perf_counter()
        run(code)
        return perf_counter() - begin

    return statistics.median(once() for _ in range(7))


def test_import_is_quick() -> None:
    """Measured against a bare interpreter, whose own start is not ours to answer for."""
    assert seconds("import cachespec") - seconds("pass") < 0.150


@pytest.mark.parametrize(
    "code",
    [
        "import cachespec",
        "from cachespec import Client, connect, Message, InputError, Usage",
        "import cachespec.request, cachespec.bodies; cachespec.request.build_request('Hi', response_format='json')",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    loaded = set(json.loads(run(f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))")))
    assert loaded.isdisjoint(HEAVY)


def test_a_bare_import_loads_only_itself() -> None:
    loaded = json.loads(run("import cachespec\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"))
    assert [name for name in loaded if name.startswith("cachespec")] == ["cachespec"]
