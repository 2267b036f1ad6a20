"""What the tests of planned caching share: clients with a clock of their own against the vendors' rules on loopback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.wire.cache_rules import CacheRules
from tests.wire.server import WireServer

from cachespec.caching import CacheAsk, CachePlan, Choice, Held, KeepAlive, Outcome
from cachespec.client import Client
from cachespec.ledger.base import Ledger
from cachespec.testing import FakeClock

PRICES = {"input": "1", "cache_read": "0.1", "cache_write": {"5m": "1.25", "1h": "2", "30m": "1.25"}, "output": "10"}
WORDS = "The quick brown fox jumps over the lazy dog while the five boxing wizards look on. "


def text(tokens: int, salt: str = "") -> str:
    """English of about so many tokens."""
    return (salt + WORDS * (tokens * 4 // len(WORDS) + 1))[: tokens * 4]


class Recording:
    """A caching policy of the tests: marks tools and system, what is warm, and the own end; it keeps all it is told.

    `ttls` are the lifetimes of those three; None leaves one out. `opt_out` is what it says besides.
    """

    def __init__(
        self, *, head: str | None = "5m", warm: str | None = "5m", end: str | None = "5m", opt_out: bool = False
    ) -> None:
        self.head, self.warm, self.end, self.opt_out = head, warm, end, opt_out
        self.asks: list[CacheAsk] = []
        self.told: list[tuple[CacheAsk, Outcome]] = []
        self.saved = b""

    def plan(self, ask: CacheAsk) -> CachePlan:
        prefixes = ask.prefixes
        names = {lifetime.name for lifetime in ask.terms.lifetimes}
        chosen: dict[int, str] = {}
        heads = [i for i, p in enumerate(prefixes) if p.kind in ("tools", "system")]
        live = [i for i, p in enumerate(prefixes) if p.warm is not None]
        for ttl, places in ((self.end, [len(prefixes) - 1]), (self.warm, live[-1:]), (self.head, heads[-1:])):
            if ttl is not None:
                chosen |= dict.fromkeys(places, ttl if ttl in names else ask.terms.lifetimes[0].name)
        marks = tuple(Choice(index=i, ttl=chosen[i]) for i in sorted(chosen))
        return CachePlan(marks=marks, opt_out=self.opt_out)

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None:
        self.asks.append(ask)

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None:
        self.told.append((ask, outcome))

    def held(self, held: Held, now: float) -> KeepAlive | None:
        return None

    def dump(self) -> bytes:
        return self.saved

    def load(self, data: bytes) -> None:
        self.saved = data


@dataclass
class Vendor:
    """The loopback server with the rules of a vendor, and the clock that it shares with the clients."""

    server: WireServer
    rules: CacheRules
    clock: FakeClock

    def client(
        self,
        model: str,
        policy: Any = Recording,
        *,
        api: str | None = None,
        ledger: Ledger | Mapping[str, Any] | None = None,
        hooks: Any = (),
        secret: str | None = None,
        **more: Any,
    ) -> Client:
        """A client with one backend, `b`. `model` decides the vendor; ``@ok-5`` is added, so that answers are short.
        `policy` None is the default one."""
        api = api or ("messages" if model.startswith("claude") else "responses")
        url = self.server.url if api == "messages" else self.server.openai_url
        table: dict[str, Any] = {"model": f"{model}@ok-5", "base_url": url, "api_key": "k", "prices": PRICES}
        table |= {"use": "anthropic"} if api == "messages" else {"use": "openai", "api": api}
        return Client(
            backends={"b": {**table, **more}},
            policies={} if policy is None else {"caching": policy() if policy is Recording else policy},
            ledger=ledger,
            secret=secret,
            clock=self.clock,
            hooks=hooks,
        )

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request.json for request in self.server.requests]

    @property
    def reads(self) -> list[int]:
        return [read for _, read, _, _ in self.rules.log]

    @property
    def writes(self) -> list[dict[str, int]]:
        return [written for _, _, written, _ in self.rules.log]


def marks_of(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every mark in a body, in wire order, as (path, lifetime); the automatic one last, as ``""``."""
    found: list[tuple[str, str]] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in ("cache_control", "prompt_cache_breakpoint"):
                    walk(inner, f"{path}.{name}" if path else name)
            marks = [value[name] for name in ("cache_control", "prompt_cache_breakpoint") if name in value and path]
            found.extend((path, mark.get("ttl") or "5m") for mark in marks)
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                walk(inner, f"{path}[{i}]")

    for key in ("tools", "system", "instructions", "input", "messages"):
        walk(body.get(key), key)
    if "cache_control" in body:
        found.append(("", body["cache_control"].get("ttl") or "5m"))
    return found


def prefix_bytes(body: Mapping[str, Any]) -> list[str]:
    """What a model reads of a body, block by block: without marks, and a plain text as the block that it is."""
    blocks: list[str] = []
    for key in ("tools", "system"):
        value = body.get(key) or []
        blocks += [_bytes(part) for part in ([value] if isinstance(value, str) else value)]
    for item in body.get("messages") or body.get("input") or []:
        content = item.get("content", item.get("output"))
        rest = {k: v for k, v in item.items() if k not in ("content", "output")}
        parts = [content] if isinstance(content, str) else content or []
        blocks += [json.dumps(rest, ensure_ascii=False) + _bytes(part) for part in parts] or [json.dumps(rest)]
    return blocks


def _bytes(part: Any) -> str:
    if isinstance(part, str):
        return json.dumps(part, ensure_ascii=False)
    plain = {k: v for k, v in part.items() if k not in ("cache_control", "prompt_cache_breakpoint")}
    if plain.keys() == {"type", "text"} and plain["type"] in ("text", "input_text", "output_text"):
        return json.dumps(plain["text"], ensure_ascii=False)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [_bytes(inner) for inner in content]
    elif isinstance(content, str):
        plain["content"] = [json.dumps(content, ensure_ascii=False)]
    return json.dumps(plain, ensure_ascii=False)
