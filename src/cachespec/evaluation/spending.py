"""What a slice would have cost: every caching policy at one vendor, and every way to route where there is a choice.

The live code decides each request in turn (`decide`, the planner, the policies), on a clock that is the slice's. A vendor is
taken to keep what the client believes it keeps, a local engine all pages of its own. Keep-alives are not simulated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, cast

from cachespec.backends._local import LocalBackend
from cachespec.backends.base import Attempt, Backend, Capabilities, Estimate, Wire
from cachespec.cache_learning import Caching, Sent
from cachespec.caching import CachingPolicy
from cachespec.config import Config, references
from cachespec.decide import Decider, Settings
from cachespec.decision import Belief, Latency, Offer, Plan, Reason, TokenEstimate
from cachespec.errors import CachespecError
from cachespec.evaluation.result import Progress
from cachespec.evaluation.sharing import Pages
from cachespec.learned import Learned
from cachespec.ledger.memory import MemoryLedger
from cachespec.plugins import create, installed
from cachespec.policies.base import RoutingPolicy
from cachespec.policies.routing import Pinned
from cachespec.pricing import Rates
from cachespec.prompt import Prompt, Whole
from cachespec.quotes import EXPECTED_OUTPUT
from cachespec.registry import build_backend
from cachespec.request import Request
from cachespec.telemetry import Telemetry
from cachespec.usage import Usage, exact

APART_S = 10.0
"""Between two requests, where the slice has no times."""
_BEGINS_S = 2.0  # from sending a request until its answer begins, and what it wrote can be read
_EPOCH = 1_700_000_000.0  # added to the slice's times, which may begin at 0
_SMALLEST = Decimal("1e-9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """One request of the slice: when (seconds), and its output tokens; None: not known, what is expected counts."""

    request: Request
    t: float | None
    output: int | None


class PaperEngine:
    """The evaluated local backend as a candidate: its exact token counts, its measured speeds, and pages that it keeps.

    `pages` has the pages and tokens of every prompt of the slice, by digest. The contract is `backends.base.Backend`, but for
    `open`: nothing is generated.
    """

    provider: str | None = None

    def __init__(
        self, backend: Backend, prompts: Mapping[Whole, tuple[int, Pages]], *, prefill: float | None, decode: float | None
    ) -> None:
        self.name, self.model = backend.name, backend.model
        self.rates: Rates | None = backend.rates
        self.capabilities: Capabilities = backend.capabilities
        self._backend, self._prompts, self._prefill, self._decode = backend, prompts, prefill, decode
        self._kept: set[bytes] = set()

    async def start(self) -> None:
        """Nothing is loaded."""

    def check(self, request: Request) -> Sequence[Reason]:
        return self._backend.check(request)

    def estimate(self, prompt: Prompt) -> Estimate:
        found = self._prompts.get(prompt.whole)
        if found is None:
            return self._backend.estimate(prompt)
        tokens, pages = found
        read = min(round(sum(count for digest, count in pages if digest in self._kept)), tokens - 1)
        output = min(prompt.request.max_output_tokens or EXPECTED_OUTPUT, EXPECTED_OUTPUT)
        counts = TokenEstimate(
            input=tokens,
            cache_read=read,
            cache_write=0,
            uncached=tokens - read,
            output_expected=output,
            output_max=prompt.request.max_output_tokens,
            worst_input=tokens,
        )
        return Estimate(
            tokens=counts, belief=Belief(state="partial", tokens=read), latency=self._latency(tokens - read, output)
        )

    def _latency(self, prefill: int, output: int) -> Latency:
        if not self._prefill or not self._decode:
            return Latency(ttft_ms=None, total_ms=None)
        first = prefill / self._prefill
        return Latency(ttft_ms=first * 1e3, total_ms=(first + output / self._decode) * 1e3, evidence="measured")

    def keep(self, prompt: Prompt) -> None:
        """It answered this prompt."""
        self._kept.update(digest for digest, _ in self._prompts.get(prompt.whole, (0, ()))[1])

    def wire(self, request: Request, plan: Plan) -> Wire | None:
        return None

    async def open(self, request: Request, plan: Plan, *, timeout: float | None) -> Attempt:
        """Raises EngineStoppedError: on paper nothing is generated."""
        return await self._backend.open(request, plan, timeout=timeout)

    async def aclose(self) -> None:
        """Nothing is held."""


@dataclass(slots=True, kw_only=True)
class _Till:
    """A client on paper: decides as a live one with one caching and one routing policy, and adds up."""

    config: Config
    backends: Mapping[str, Backend]
    candidates: tuple[str, ...]
    caching: CachingPolicy
    routing: RoutingPolicy
    learned: Learned = field(default_factory=Learned)
    sessions: dict[tuple[str | None, str], str] = field(default_factory=dict)
    under_way: list[tuple[float, Sent, Usage]] = field(default_factory=list)

    def cost(self, requests: Sequence[Spent]) -> Decimal | None:
        """USD for all of them; None where one has no known price, or nobody takes it."""
        caching = Caching(self.caching, Telemetry(()), self.learned)
        alias = "\n"  # no name that a configuration has
        settings = Settings(
            models={alias: self.candidates},
            default_model=alias,
            max_output_tokens=self.config.max_output_tokens,
            drop_unsupported=True,
            rules=self.config.rules,
        )
        decider = Decider(self.backends, self.routing, MemoryLedger(), settings, caching.planner, self.learned)
        total: Decimal | None = Decimal(0)
        for number, spent in enumerate(requests):
            now = _EPOCH + (APART_S * number if spent.t is None else spent.t)
            self._end(caching, now)
            paid = self._one(decider, caching, spent, now)
            if paid is None:
                return None
            with exact():
                total = paid if total is None else total + paid
        return None if total is None else total.quantize(_SMALLEST)

    def _one(self, decider: Decider, caching: Caching, spent: Spent, now: float) -> Decimal | None:
        request = spent.request
        session = None if request.session_id is None else (request.tenant, request.session_id)  # each tenant's are its own
        asked = decider.ask(
            replace(request, model=None, extra={}),
            now=now,
            timeout_s=self.config.timeout,
            previous_backend=None if session is None else self.sessions.get(session),
        )
        verdict = decider.decide(asked)
        if verdict.decision.chosen is None or verdict.planned is None:
            return None
        offer = verdict.decision.candidates[0]
        backend = self.backends[offer.backend]
        usage = _usage(offer, spent.output)
        if session is not None:
            self.sessions[session] = offer.backend
        sent = caching.sent(verdict.planned, now)
        caching.began(sent, now + _BEGINS_S)
        self.under_way.append((now + _BEGINS_S, sent, usage))
        if isinstance(backend, PaperEngine):
            backend.keep(asked.prompt)
        if backend.rates is None or usage.uncached is None:
            return None
        seconds = None if offer.latency.total_ms is None else offer.latency.total_ms / 1e3
        return backend.rates.cost(usage, busy_s=seconds).amount

    def _end(self, caching: Caching, now: float) -> None:
        """The answers that have ended by now."""
        for at, sent, usage in [one for one in self.under_way if one[0] <= now]:
            caching.ended(sent, usage=usage, stop=None, now=at)
        self.under_way = [one for one in self.under_way if one[0] > now]


def _usage(offer: Offer, output: int | None) -> Usage:
    tokens = offer.tokens
    writes = tokens.writes or ({"unspecified": tokens.cache_write} if tokens.cache_write else {})
    return Usage(
        uncached=tokens.uncached if tokens.uncached is not None else tokens.input,
        cache_read=tokens.cache_read,
        cache_write=writes,
        output=tokens.output_expected if output is None else output,
    )


def caching_costs(config: Config, backend: Backend, requests: Sequence[Spent], progress: Progress) -> dict[str, Decimal | None]:
    """The slice's cost at one hosted backend, by installed caching policy, with its defaults (the configured one: its own)."""
    found: dict[str, Decimal | None] = {}
    names = installed("caching")
    for name in names:
        till = _Till(
            config=config,
            backends={backend.name: backend},
            candidates=(backend.name,),
            caching=_caching(config, name),
            routing=Pinned(backend=backend.name),
        )
        found[name] = till.cost(requests)
        progress("caching policies", len(found), len(names))
    return found


def routing_costs(
    config: Config, spent: Sequence[Spent], fresh: Callable[[], Mapping[str, Backend]], progress: Progress
) -> dict[str, Decimal | None]:
    """The slice's cost by who answers: ``only:NAME`` for each backend, ``routing:NAME`` for each policy that needs no options
    and the configured one. `fresh` makes the backends as they are at the start, for each."""
    found: dict[str, Decimal | None] = {}
    names = tuple(fresh())
    if len(names) < 2:
        return found
    ways: dict[str, tuple[tuple[str, ...], RoutingPolicy]] = {f"only:{name}": ((name,), Pinned(backend=name)) for name in names}
    for use in dict.fromkeys((config.routing.use, *installed("routing"))):
        options: Mapping[str, Any] = config.routing.options if use == config.routing.use else {}
        try:
            ways[f"routing:{use}"] = names, cast("RoutingPolicy", create("routing", use, options, where="policies.routing"))
        except CachespecError:
            continue  # it cannot do without options
    for way, (candidates, routing) in ways.items():
        caching = _caching(config, config.caching.use)
        till = _Till(config=config, backends=fresh(), candidates=candidates, caching=caching, routing=routing)
        found[way] = till.cost(spent)
        progress("routes", len(found), len(ways))
    return found


def _caching(config: Config, use: str) -> CachingPolicy:
    options = config.caching.options if use == config.caching.use else {}
    return cast("CachingPolicy", create("caching", use, options, where="policies.caching"))


def rivals(config: Config, name: str, paper: Callable[[Backend], Backend]) -> dict[str, Backend]:
    """The backends that an alias makes interchangeable with this one, itself among them; other local ones are not: what they
    would cost is not known before they are evaluated themselves."""
    alias = next((names for names in config.models.values() if name in names), (name,))
    made = (build_backend(config, each, anything(config)) for each in alias)
    return {b.name: paper(b) for b in made if b.name == name or not isinstance(b, LocalBackend)}


def anything(config: Config) -> dict[str, str]:
    """The environment, with something for every variable that is not set: nothing is sent, so no secret is needed."""
    tables = {name: spec.options for name, spec in config.backends.items()}
    return {**{name: "not-set" for _, name in references(tables)}, **os.environ}
