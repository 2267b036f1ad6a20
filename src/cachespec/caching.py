"""Frozen values between the cache planner and a caching policy: what may be marked, what a mark costs, what was chosen.

A caching policy sees a request as the ascending list of the prefixes that may be marked, with what is believed to be cached at
each and a vendor's terms in multiples of the input price. It returns marks. Nothing here knows a vendor's wire format, so
the same policy plans live requests and replayed traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from cachespec.decision import Reason
from cachespec.values import quick

PrefixKind = Literal["tools", "system", "document", "turn", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A lifetime that an entry may be given. `seconds` count from the start of the request that wrote or read it.

    `write` is the price of a written token in multiples of the input price (1.25 for Anthropic's 5m).
    """

    name: str
    seconds: float
    write: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTerms:
    """A vendor's rules for one model, in multiples of its input price.

    Attributes:
        lifetimes: shortest first; empty where nothing can be marked.
        read: price of a token read.
        slots: marks that one request may carry at most.
        minimum: tokens below which a prefix is silently not cached.
        lookback: positions (blocks) that a lookup walks back from a mark, the mark counted; None: no limit.
        implicit: the lifetime that the model writes with when a request says nothing about caching; None: it writes nothing.
        opt_out: whether a request can say that nothing is to be cached.
        ready_s: seconds from a request's start after which what it writes can be read by another.
        source, date: where the rules are from, and of when.
    """

    lifetimes: tuple[Lifetime, ...]
    read: float
    slots: int = 4
    minimum: int = 0
    lookback: int | None = None
    implicit: str | None = None
    opt_out: bool = False
    ready_s: float = 2.0
    source: str = ""
    date: str = ""

    def lifetime(self, name: str) -> Lifetime:
        """The lifetime of this name. Raises KeyError."""
        for lifetime in self.lifetimes:
            if lifetime.name == name:
                return lifetime
        raise KeyError(name)


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """An entry believed to be cached: its lifetime's name, when it is readable and dies (Unix seconds), how sure (0 to 1)."""

    ttl: str
    ready_at: float
    expires_at: float
    sure: float = 1.0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A place where a mark may stand. `key` names the content of everything before it: equal keys are equal prefixes.

    `at` is its segment's name (DESIGN section 5), `tokens` its length, `position` the count of blocks up to it, for the
    look-back. `warm` is the entry believed to be here.
    """

    key: Hashable
    at: str
    kind: PrefixKind
    tokens: int
    position: int = 0
    warm: Warm | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAsk:
    """What a caching policy may know of a request before it is sent. Times are Unix seconds.

    Attributes:
        prefixes: where a mark may stand, shortest first; the last one is the whole prompt where that may be marked.
        input_tokens: tokens of the whole prompt.
        session: the caller's own, None where it named none; a policy then goes by shared prefixes.
        traffic: the class it belongs to beside the tenant: alias, tags, agent; classes borrow from each other.
        input_types: what the newest message holds (``text``, ``tool_result``, ``image``).
    """

    now: float
    prefixes: tuple[Prefix, ...]
    input_tokens: int
    terms: CacheTerms
    tenant: str | None = None
    session: str | None = None
    traffic: tuple[str, ...] = ()
    input_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended: when (Unix seconds), why (``tool_calls``, ``stop``...), and what the vendor counted.

    `read` and `written` are input tokens. None: not known.
    """

    ended_at: float
    stop: str | None = None
    output_tokens: int | None = None
    read: int | None = None
    written: int | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A mark: `index` into the ask's prefixes, and the lifetime's name."""

    index: int
    ttl: str


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What to mark, ascending, lifetimes non-increasing. `opt_out`: tell a model that writes by default to cache nothing."""

    marks: tuple[Choice, ...] = ()
    opt_out: bool = False
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A finished request whose prefix could be kept alive: the ask, its end, and what is cached of it now.

    `index` is the deepest prefix with a live entry, `warm` that entry; `pings` how many keep-alives it had already.
    """

    ask: CacheAsk
    outcome: Outcome
    index: int
    warm: Warm
    pings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Send a keep-alive for the prefix at `index` at time `at` (Unix seconds) unless a request used it before."""

    at: float
    index: int
    ttl: str
    reasons: tuple[Reason, ...] = ()


class CachingPolicy(Protocol):
    """Decides what to mark. It owns what it learns (see `cachespec.reuse`); it has no clock and does no I/O.

    Calls come in the order of time. `plan` is called for every request that is sent, before it is sent, and may be called
    for requests that are only explained, so it must not learn; `sent` says that a planned request went out, `ended` how it
    ended, and `held` is asked after an end and after each keep-alive. None of them may take more than a millisecond.
    """

    def plan(self, ask: CacheAsk) -> CachePlan:
        """The marks for this request. Learns nothing."""

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None:
        """The request went out with this plan, at `ask.now`."""

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None:
        """The request ended."""

    def held(self, held: Held, now: float) -> KeepAlive | None:
        """Whether, and when next, to keep this prefix alive. `now` is Unix seconds."""

    def dump(self) -> bytes:
        """What it learned, to be kept across restarts; empty when there is nothing."""

    def load(self, data: bytes) -> None:
        """Take up what `dump` gave. Data it cannot read is left aside, never an error."""


@runtime_checkable
class Piecewise(Protocol):
    """A caching policy that learns much: it can be saved bit by bit, so that the event loop waits for no more than a bit."""

    def pieces(self) -> Iterator[bytes]:
        """What `dump` gives, in pieces that take well under a millisecond each. The policy is used between two of them."""
