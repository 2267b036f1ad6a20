"""Fixed policies: the same places and the same lifetime for every request. What a learning policy has to beat.

They are spelled with their lifetime, ``always:5m``. Families:

- ``last-message``: the own end.
- ``always``: the end of tools and system, and the own end.
- ``previous``: as ``always``, and the last place before the own end: where the longest earlier request ended that is shorter.
- ``quarters``: the places before the own end at the quarters of the prompt: whole blocks, where any may be marked.

Where a vendor finds only entries that end exactly at a mark, they mark the deepest warm prefix as well, as any client would.
Beside them ``off`` (nothing is cached) and ``caller`` (a trace has no marks of a caller's: what the vendor does by itself).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, CachingPolicy, Choice, Held, KeepAlive, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Marks where `places` says, all for `ttl`. With `ttl` None it marks nothing; `opt_out` then says so where that counts."""

    places: Callable[[CacheAsk], tuple[int, ...]]
    ttl: str | None = None
    opt_out: bool = False

    def plan(self, ask: CacheAsk) -> CachePlan:
        if self.ttl is None:
            return CachePlan(opt_out=self.opt_out and ask.terms.opt_out)
        places = self.places(ask)
        if ask.terms.lookback == 1:
            places = _with_warm(ask, places)
        return CachePlan(marks=tuple(Choice(index=index, ttl=self.ttl) for index in places))

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None: ...

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None: ...

    def held(self, held: Held, now: float) -> KeepAlive | None:
        return None

    def dump(self) -> bytes:
        return b""

    def load(self, data: bytes) -> None: ...


def _with_warm(ask: CacheAsk, places: tuple[int, ...]) -> tuple[int, ...]:
    for index in range(places[-1] if places else -1, -1, -1):
        warm = ask.prefixes[index].warm
        if warm is not None and warm.ready_at <= ask.now:
            return tuple(sorted({*places, index})[-ask.terms.slots :])
    return places


def _end(ask: CacheAsk) -> tuple[int, ...]:
    return (len(ask.prefixes) - 1,)


def _start_and_end(ask: CacheAsk) -> tuple[int, ...]:
    fixed = [index for index, prefix in enumerate(ask.prefixes) if prefix.kind in ("tools", "system")]
    return (*fixed[-1:], len(ask.prefixes) - 1)


def _previous(ask: CacheAsk) -> tuple[int, ...]:
    last = len(ask.prefixes) - 1
    return tuple(sorted({*_start_and_end(ask), max(0, last - 1)}))


def _quarters(ask: CacheAsk) -> tuple[int, ...]:
    lengths = [prefix.tokens for prefix in ask.prefixes if prefix.kind != "end"]
    found = {bisect_left(lengths, ask.input_tokens * quarter / 4 + 0.5) - 1 for quarter in (1, 2, 3, 4)}
    return tuple(sorted(index for index in found if index >= 0))


FAMILIES: Mapping[str, Callable[[CacheAsk], tuple[int, ...]]] = MappingProxyType(
    {"last-message": _end, "always": _start_and_end, "previous": _previous, "quarters": _quarters}
)

BASELINES = frozenset({"always", "last-message", "off", "caller"})
"""Installed policies that are fixed ones; here they go by their names with a lifetime."""


def fixed_policies(terms: CacheTerms) -> dict[str, CachingPolicy]:
    """Every fixed policy that a vendor's terms allow, by its name."""
    made: dict[str, CachingPolicy] = {
        "off": Fixed(places=_end, opt_out=True),
        "caller": Fixed(places=_end),
    }
    for family, places in FAMILIES.items():
        for lifetime in terms.lifetimes:
            made[f"{family}:{lifetime.name}"] = Fixed(places=places, ttl=lifetime.name)
    return made
