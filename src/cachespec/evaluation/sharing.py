"""How many tokens of a slice were in an earlier request's beginning already, and for how long it would have had to be kept.

Prompts are cut into pages whose digests chain, as the engine's prefix index and vendors do it: a page is shared when the same
page, after the same pages, was asked before by the same tenant. A prefix lives from when it was last asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from cachespec.engine.pages import PAGE
from cachespec.prompt import Prompt

LIFETIMES: Final = {"5m": 300.0, "1h": 3_600.0, "any": math.inf}
_BYTES = 64  # of a page, where tokens are estimated

Pages: TypeAlias = Sequence[tuple[bytes, float]]
"""Digest and tokens of each page of a prompt, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Shared tokens of a slice, over all, and by lifetime; a lifetime is None where the slice has no times."""

    shared_tokens: int
    total_tokens: int
    by_lifetime: dict[str, int | None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "shared_tokens": self.shared_tokens,
            "total_tokens": self.total_tokens,
            "by_lifetime": dict(self.by_lifetime),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's prompt: when it was asked (seconds; None: only the order is known), its tokens, its pages."""

    t: float | None
    tokens: int
    pages: Pages


def shared(requests: Iterable[Asked]) -> Prefixes:
    """What is shared. Requests come in the order in which they were asked."""
    seen: dict[bytes, float] = {}
    sums = dict.fromkeys(LIFETIMES, 0.0)
    total, timed = 0, True
    for number, request in enumerate(requests):
        now = float(number) if request.t is None else request.t
        timed = timed and request.t is not None
        total += request.tokens
        alive = set(LIFETIMES)
        for digest, tokens in request.pages:
            age = now - seen[digest] if digest in seen else None
            alive = {name for name in alive if age is not None and age <= LIFETIMES[name]}
            for name in alive:
                sums[name] += tokens
            seen[digest] = now
    counts = {name: min(total, round(value)) for name, value in sums.items()}
    return Prefixes(
        shared_tokens=counts["any"],
        total_tokens=total,
        by_lifetime={name: count if timed or name == "any" else None for name, count in counts.items()},
    )


def token_pages(tokens: Sequence[int], tenant: str | None) -> Pages:
    """Whole pages of a prompt whose tokens are known."""
    digest, pages = _start(tenant), []
    for at in range(0, len(tokens) - PAGE + 1, PAGE):
        digest = _chained(digest, b"".join(token.to_bytes(4, "little") for token in tokens[at : at + PAGE]))
        pages.append((digest, float(PAGE)))
    return pages


def text_pages(prompt: Prompt, tokens: int) -> Pages:
    """Pages of a prompt of about `tokens` tokens, spread over its bytes. A piece's pages end with it."""
    digest, pages = _start(prompt.request.tenant), list[tuple[bytes, float]]()
    each = tokens / max(1, sum(segment.size for segment in prompt.segments if segment.kind != "params"))
    for segment in prompt.segments:
        digest = _chained(digest, f"{segment.kind} {segment.name}".encode())
        content = segment.text.encode("utf-8", "surrogatepass")
        for at in range(0, len(content), _BYTES):
            part = content[at : at + _BYTES]
            digest = _chained(digest, part)
            if segment.kind != "params":
                pages.append((digest, len(part) * each))
        digest = _chained(digest, segment.digest) if segment.kind != "params" else digest
    return pages


def _start(tenant: str | None) -> bytes:
    return b"" if tenant is None else tenant.encode("utf-8", "surrogatepass")


def _chained(digest: bytes, content: bytes) -> bytes:
    return blake2b(digest + content, digest_size=16, person=b"eval").digest()
