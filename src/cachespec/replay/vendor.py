"""A simulated vendor: what one session's cache holds, what a request reads and writes, and what that costs.

The rules are those of the format ``replay`` (docs/replay.md). Where its words leave room, this is how they are read; the fixed
policies' published costs on the two public traces come out to the third digit this way:

- A prefix of n whole blocks has n x block size tokens. The own end has all tokens of the prompt, pays for all of them, and is
  found by later requests at its whole blocks; where there is no whole block, nothing is found.
- An entry can be read from its start + 2 s on, and up to and including its start (or last refresh) + lifetime.
- A request reads the deepest readable entry at or before its last mark. That refreshes it and every live entry before it, each
  for its own lifetime; an entry deeper than what was read is not refreshed.
- Marks deeper than what was read are written and paid, with their lifetime, even over a live entry that cannot be read yet;
  such an entry stays readable from when it was. A mark at or before what was read pays nothing: where no live entry is, one
  comes to be with the mark's lifetime; a live one keeps its own.
- A keep-alive reads its prefix where an entry lives exactly there (readable or not), and refreshes as a request does. Else
  it writes the whole prefix with its lifetime.
- A request of a model that writes by default (`CacheTerms.implicit`) and is told nothing marks its own end, and its lookup
  finds every entry on its path (the real one the latest 20 message ends, which a trace does not show). With marks it is in
  explicit mode: only they are written, and where `CacheTerms.lookback` is 1 only entries exactly at them are found. Any other
  look-back is taken to reach every entry, since a trace does not show the blocks of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cachespec.caching import CacheTerms, Lifetime

VENDORS: Mapping[str, CacheTerms] = MappingProxyType(
    {
        "anthropic": CacheTerms(
            lifetimes=(Lifetime(name="5m", seconds=300, write=1.25), Lifetime(name="1h", seconds=3_600, write=2.0)),
            read=0.1,
            source="Anthropic, prompt caching guide; without a minimum length",
            date="2026-11-29",
        ),
        "openai-5.6": CacheTerms(
            lifetimes=(Lifetime(name="30m", seconds=1_800, write=1.25),),
            read=0.1,
            lookback=1,
            implicit="30m",
            opt_out=True,
            source="OpenAI, prompt caching guide, gpt-5.6 and later; without a minimum length",
            date="2026-11-29",
        ),
    }
)


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """Something cached: readable from `ready_at` to `expires_at`, both included (seconds of its session).

    `used` is the number of the request that last read or wrote it.
    """

    lifetime: Lifetime
    ready_at: float
    expires_at: float
    used: int

    def live(self, t: float) -> bool:
        return t <= self.expires_at


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix: `key` names it, `blocks` whole blocks long, `tokens` tokens paid for it."""

    key: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Billed:
    """What one request (or keep-alive) was billed: disjoint input tokens, writes by lifetime."""

    read: int
    uncached: int
    writes: tuple[tuple[str, int], ...] = ()

    @property
    def written(self) -> int:
        return sum(tokens for _, tokens in self.writes)

    def cost(self, terms: CacheTerms) -> float:
        """In input tokens at the full price."""
        paid = sum(tokens * terms.lifetime(ttl).write for ttl, tokens in self.writes)
        return self.read * terms.read + paid + self.uncached


@dataclass(slots=True, kw_only=True)
class VendorCache:
    """What a vendor holds of one session's prefixes. Calls come in the order of time."""

    terms: CacheTerms
    entries: dict[int, Entry] = field(default_factory=dict)

    def request(
        self,
        t: float,
        number: int,
        path: Sequence[Place],
        marks: Sequence[tuple[Place, str]],
        input_tokens: int,
        *,
        implicit: bool = False,
    ) -> Billed:
        """Send a prompt with marks, or without any. `number` counts the session's requests.

        `path` has every place on the prompt's way where an entry may be, as whole blocks, shortest first.
        """
        entries = self.entries
        exact: set[int] | None = None
        if not marks:
            last = -1
        else:
            last = marks[-1][0].blocks
            if self.terms.lookback == 1 and not implicit:
                exact = {place.blocks for place, _ in marks}
        read = found = 0
        on_path: list[Entry] = []
        for place in path:
            if place.blocks > last:
                break
            entry = entries.get(place.key)
            if entry is None or t > entry.expires_at:
                continue
            on_path.append(entry)
            if entry.ready_at <= t and (exact is None or place.blocks in exact):
                read, found = place.tokens, len(on_path)
        for entry in on_path[:found]:
            if entry.ready_at < t:
                entry.ready_at = t  # the same for all, so that they look alike
            entry.expires_at = t + entry.lifetime.seconds
            entry.used = number
        reached = read
        writes: dict[str, int] = {}
        for place, ttl in marks:
            held = entries.get(place.key)
            alive = held is not None and held.live(t)
            if place.tokens > reached:
                writes[ttl] = writes.get(ttl, 0) + place.tokens - reached
                reached = place.tokens
            elif alive:
                continue
            if place.blocks:
                ready = held.ready_at if held is not None and alive else t + self.terms.ready_s
                self._write(place.key, ttl, t, ready, number)
        return Billed(read=read, uncached=input_tokens - reached, writes=tuple(writes.items()))

    def keep_alive(self, t: float, number: int, path: Iterable[Place], place: Place, ttl: str) -> Billed:
        """Send a keep-alive for `place`; `path` has the places before it."""
        held = self.entries.get(place.key)
        if held is None or not held.live(t):
            self._write(place.key, ttl, t, t + self.terms.ready_s, number)
            return Billed(read=0, uncached=0, writes=((ttl, place.tokens),))
        for key in (*(before.key for before in path if before.blocks < place.blocks), place.key):
            entry = self.entries.get(key)
            if entry is not None and entry.live(t):
                entry.expires_at = t + entry.lifetime.seconds
        return Billed(read=place.tokens, uncached=0)

    def _write(self, key: int, ttl: str, t: float, ready_at: float, number: int) -> None:
        lifetime = self.terms.lifetime(ttl)
        self.entries[key] = Entry(lifetime=lifetime, ready_at=ready_at, expires_at=t + lifetime.seconds, used=number)
