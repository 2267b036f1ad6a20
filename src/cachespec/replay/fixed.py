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
from cachespec.policies.caching import Always, Caller, LastMessage, Off


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Marks where `places` says, all for `ttl`: what is of use in a replay only."""

    places: Callable[[CacheAsk], set[int]]
    ttl: str

    def plan(self, ask: CacheAsk) -> CachePlan:
        places = sorted(self.places(ask))
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


def previous(ttl: str) -> CachingPolicy:
    """The end of tools and system, the last place before the own end, and the own end."""
    return Fixed(places=_previous, ttl=ttl)


def quarters(ttl: str) -> CachingPolicy:
    """The places before the own end at the quarters of the prompt."""
    return Fixed(places=_quarters, ttl=ttl)


FAMILIES: Mapping[str, Callable[[str], CachingPolicy]] = MappingProxyType(
    {
        "last-message": lambda ttl: LastMessage(ttl=ttl),
        "always": lambda ttl: Always(ttl=ttl),
        "previous": previous,
        "quarters": quarters,
    }
)
BASELINES = frozenset({"always", "last-message", "off", "caller"})
"""Installed policies that are fixed ones; here they go by their names with a lifetime."""


def fixed_policies(terms: CacheTerms) -> dict[str, CachingPolicy]:
    """Every fixed policy that a vendor's terms allow, by its name."""
    made: dict[str, CachingPolicy] = {"off": Off(), "caller": Caller()}
    for family, make in FAMILIES.items():
        for lifetime in terms.lifetimes:
            made[f"{family}:{lifetime.name}"] = make(lifetime.name)
    return made


def _previous(ask: CacheAsk) -> set[int]:
    last = len(ask.prefixes) - 1
    fixed = [index for index, prefix in enumerate(ask.prefixes) if prefix.kind in ("tools", "system")]
    return {*fixed[-1:], max(0, last - 1), last}


def _quarters(ask: CacheAsk) -> set[int]:
    lengths = [prefix.tokens for prefix in ask.prefixes if prefix.kind != "end"]
    found = (bisect_left(lengths, ask.input_tokens * quarter / 4 + 0.5) - 1 for quarter in (1, 2, 3, 4))
    return {index for index in found if index >= 0}


def _with_warm(ask: CacheAsk, places: list[int]) -> list[int]:
    """With the deepest warm prefix that a mark can reach, within the slots there are."""
    for index in range(places[-1] if places else -1, -1, -1):
        warm = ask.prefixes[index].warm
        if warm is not None and warm.ready_at <= ask.now:
            return sorted({*places, index})[-ask.terms.slots :]
    return places
