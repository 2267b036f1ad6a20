"""Caching policies: what to mark for how long, and when to keep it alive. The contract is `cachespec.caching`.

`ExpectedCost` is the default: it learns how soon prefixes come back (`cachespec.reuse`) and marks what pays by expectation
(`policies._cache_value`). The others are for comparison, and for people who know better.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from cachespec.caching import CacheAsk, CachePlan, CacheTerms, Choice, Held, KeepAlive, Outcome
from cachespec.decision import Reason
from cachespec.errors import InputError
from cachespec.policies._cache_request import FIXED, Line, View, carried, covered, places
from cachespec.policies._cache_value import Candidate, Marks, best_marks, keeping, reaching, thinned
from cachespec.reuse import EDGES, Chain, Gaps, Key, Reuse, Wait

_PATIENCE = 4.0
"""Gaps for which a longer lifetime counts at most."""
_UNREAD = 3
"""Writes without a read after which a prefix is not marked any more."""
_SESSIONS = 10_000
_KEPT = 4_096
_HEAD = b"cachespec expected-cost 1 "


class ExpectedCost:
    """Marks where the expected saving exceeds the premium, for the lifetime where it does so most.

    It starts from the guess that every second prompt goes on within five minutes, learns from every request, and borrows from
    like requests where it has seen few: the same kind of place, traffic, tenant, turn, length, session, and the prefix itself.

    Args:
        keep_alives: how often in a row one prefix is kept alive at most, where that is expected to pay; 0: never.
        places: prefixes remembered; 100,000 take some 50 MB.
    """

    def __init__(self, *, keep_alives: int = 12, places: int = 100_000) -> None:
        if keep_alives < 0:
            raise InputError("is negative", field="keep_alives")
        if places < 1:
            raise InputError("must be at least 1", field="places")
        self._keep_alives = keep_alives
        self._reuse = Reuse(places=places)
        # How often a mark that outlived what stood before it was seen to keep all of it, and not to: as documented, at first.
        self._carried, self._dropped = 4.0, 1.0
        self._latest: OrderedDict[tuple[str | None, str], float] = OrderedDict()
        self._view: View | None = None
        # What was worked out since anything was learned last: the candidates of one decision ask for much the same.
        self._at = -1
        self._chances: dict[tuple[Hashable, ...], list[float]] = {}

    def plan(self, ask: CacheAsk) -> CachePlan:
        terms, prefixes = ask.terms, ask.prefixes
        if not prefixes or not terms.lifetimes or terms.slots < 1:
            return CachePlan(opt_out=terms.opt_out)
        if prefixes[-1].tokens < terms.minimum:
            detail = f"{prefixes[-1].tokens} tokens, this model caches from {terms.minimum} on"
            return CachePlan(opt_out=terms.opt_out, reasons=(Reason("below_minimum", detail),))
        view = self._view = self._look(ask)
        candidates, blocked = self._candidates(view)
        found = best_marks(
            candidates,
            covered(view, terms),
            terms.lifetimes,
            read_tokens=view.read_tokens,
            read=terms.read,
            trust=self._carried / (self._carried + self._dropped),
            patience=_PATIENCE,
        )
        found, marks = _fitted(found, view, terms)
        marks = _anchored(marks, view, terms)
        return CachePlan(
            marks=tuple(marks),
            opt_out=not marks and terms.opt_out,
            reasons=_reasons(view, candidates, found, blocked, terms),
        )

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None:
        now, prefixes, terms = ask.now, ask.prefixes, ask.terms
        if not prefixes:
            return
        view = self._view
        if view is None or view.ask is not ask:
            view = self._look(ask)
        self._view = None
        watched = places(view)
        waits = self._reuse.passed([prefix.key for prefix in prefixes], view.known, now)
        for read in waits[: view.read + 1]:
            if read is not None:
                read.unread = read.credit = 0
        written = {mark.index: mark.ttl for mark in plan.marks if mark.index > view.read}
        seconds = {lifetime.name: lifetime.seconds for lifetime in terms.lifetimes}
        horizon = max(seconds.values(), default=0.0)
        opened: dict[int, Wait] = {}
        for index, role in watched:
            before = waits[index] if index < len(waits) else None
            chain = self._chain(view, role, prefixes[index].tokens)
            wait = self._reuse.watch(prefixes[index].key, chain, now, role, view.turn, before)
            if index in written:
                wait.unread, wait.credit = wait.unread + 1, 0
                wait.carries = bool(view.live) and seconds.get(written[index], 0.0) > seconds.get(view.live[0][1].ttl, 0.0)
            elif before is not None and index > view.read and now - before.opened <= horizon:
                wait.credit += 1
            opened[index] = wait
        line = opened[len(prefixes) - 1].note = Line(view, plan, written, opened)
        if view.read in line.alive and view.read < len(waits):
            line.carried = carried(view, waits[view.read])
        if ask.session is not None:
            self._latest[ask.tenant, ask.session] = now
            self._latest.move_to_end((ask.tenant, ask.session))
            if len(self._latest) > _SESSIONS:
                self._latest.popitem(last=False)

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None:
        line = self._line(ask)
        if line is None:
            return
        self._reuse.advance(outcome.ended_at)
        if line.wait is not None and line.wait.role == "system":  # whoever comes, it is not for how this one ended
            line.stop = line.wait.chain
        elif line.wait is not None:
            line.stop = self._stop_chain(ask, outcome, line.turn)
            self._reuse.join(line.wait, line.stop)
        if line.carried and outcome.read is not None:
            if outcome.read >= line.carried:
                self._carried += 1.0
            else:
                self._dropped += 1.0

    def held(self, held: Held, now: float) -> KeepAlive | None:
        ask, terms, line = held.ask, held.ask.terms, self._line(held.ask)
        most = self._keep_alives - held.pings
        if line is None or line.stop is None or line.wait is None or most <= 0:
            return None
        if ask.session is not None and self._latest.get((ask.tenant, ask.session), ask.now) > ask.now:
            return None  # the session went on another way
        self._reuse.advance(now)
        outlook = self._reuse.outlook(line.stop, line.wait.own if line.stop is line.wait.chain else None)
        for index, ttl, used in line.kept_alive(held):
            lifetime = terms.lifetime(ttl)
            at = used + lifetime.seconds - min(15.0, 0.02 * lifetime.seconds)
            if at <= now:
                continue
            tokens = ask.prefixes[index].tokens
            gone = tokens - (line.anchor if lifetime is not terms.lifetimes[-1] else 0)
            saved = gone * (max(terms.lifetimes[0].write, 1.0) - terms.read)
            since = at - ask.now
            steps = max(1, min(most, int((EDGES[-1] - since) / lifetime.seconds)))
            cost = terms.read * tokens
            worth = keeping(outlook, since=since, seconds=lifetime.seconds, cost=cost, saved=saved, most=steps)
            if worth > 0:
                chance = outlook.within(lifetime.seconds, after=since)
                detail = f"{chance:.0%} chance that {gone} tokens are asked for within {ttl} of then; a read costs {cost:.0f}"
                line.kept = KeepAlive(at=at, index=index, ttl=ttl, reasons=(Reason("expected_reuse", detail),))
                return line.kept
        return None

    def dump(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        yield _HEAD + f"{self._carried} {self._dropped}\n".encode()
        yield from self._reuse.pieces()

    def load(self, data: bytes) -> None:
        head, _, rest = data.partition(b"\n")
        try:
            if not head.startswith(_HEAD):
                return
            carried, dropped = (float(count) for count in head[len(_HEAD) :].split())
        except ValueError:
            return
        if 0 < carried < 1e12 and 0 < dropped < 1e12:
            self._carried, self._dropped = carried, dropped
        self._reuse.load(rest)

    def _look(self, ask: CacheAsk) -> View:
        prefixes = ask.prefixes
        known = len(prefixes) - 1 - self._reuse.new(prefix.key for prefix in reversed(prefixes))
        return View(ask, known, self._reuse.wait(prefixes[known].key) if known >= 0 else None)

    def _line(self, ask: CacheAsk) -> Line | None:
        """What `sent` noted of this request, unless the same prompt was sent again meanwhile."""
        wait = self._reuse.wait(ask.prefixes[-1].key) if ask.prefixes else None
        return wait.note if wait is not None and isinstance(wait.note, Line) and wait.opened == ask.now else None

    def _candidates(self, view: View) -> tuple[list[Candidate], bool]:
        """Where a mark would write, shallowest first; and whether one was left out since what it wrote was never read."""
        terms, prefixes = view.ask.terms, view.ask.prefixes
        least = max(view.read_tokens + 1, terms.minimum)
        found: list[Candidate] = []
        blocked = False
        seconds = tuple([lifetime.seconds for lifetime in terms.lifetimes])
        coming = {index for index, _ in view.coming}
        for index, role in reversed(places(view)):
            tokens = prefixes[index].tokens
            if index <= view.read or tokens < least:
                break
            if index in coming:
                continue
            wait = self._reuse.wait(prefixes[index].key) if index <= view.known else None
            if wait is not None and wait.unread >= _UNREAD and wait.credit < wait.unread:
                blocked = True
                continue
            chances = self._within(view, role, tokens, None if wait is None else wait.own, seconds)
            if found:  # whoever shares the deeper place shares this one
                chances = [max(here, deeper) for here, deeper in zip(chances, found[-1].chances, strict=True)]
            found.append(Candidate(index, tokens, chances))
        found.reverse()
        return found, blocked

    def _within(self, view: View, role: str, tokens: int, own: Gaps | None, seconds: tuple[float, ...]) -> list[float]:
        """P(this place is asked for again) within each of these times, ascending."""
        if self._at != self._reuse.changes or len(self._chances) > _KEPT:
            self._at = self._reuse.changes
            self._chances.clear()
        new, length = _magnitudes(view, tokens)
        name = role, view.like, view.whose, new, length, own, seconds
        found = self._chances.get(name)
        if found is None:
            outlook = self._reuse.outlook(self._chain(view, role, tokens), own, until=seconds[-1])
            found = self._chances[name] = [outlook.within(time) for time in seconds]
        return found

    def _chain(self, view: View, role: str, tokens: int) -> Chain:
        new, length = _magnitudes(view, tokens)

        def classes() -> Iterator[Key]:
            ask, (traffic, types, turn) = view.ask, view.like
            kind = role.partition(":")[0]
            yield (kind,)
            if role != kind:
                yield (role,)
            if traffic:
                yield (role, "traffic", *traffic)
            yield (role, *traffic, types, turn)
            yield (role, *traffic, types, turn, new)
            yield (role, *traffic, types, turn, new, length)
            if ask.tenant is not None:
                yield (role, "tenant", ask.tenant, *traffic, types, turn)
            if ask.session is not None:
                yield (role, "session", ask.tenant or "", ask.session)

        return self._reuse.chain((role, view.like, view.whose, new, length), classes)

    def _stop_chain(self, ask: CacheAsk, outcome: Outcome, turn: int) -> Chain:
        stop = outcome.stop or ""

        def classes() -> Iterator[Key]:
            yield ("stop",)
            yield ("stop", stop)
            yield ("stop", stop, turn)
            if ask.session is not None:
                yield ("stop", stop, "session", ask.tenant or "", ask.session)

        return self._reuse.chain(("stop", stop, turn, ask.tenant, ask.session), classes)


def _magnitudes(view: View, tokens: int) -> tuple[int, int]:
    """How much of a place is new, and how long it is, in powers of two."""
    return max(tokens - view.known_tokens, 0).bit_length(), tokens.bit_length()


def _fitted(found: Marks, view: View, terms: CacheTerms) -> tuple[Marks, list[Choice]]:
    """The marks within the slots, with one from which the deepest entry is found."""
    marks: list[Choice] = []
    for room in (terms.slots, max(terms.slots - 1, 1)):
        found = thinned(found, room, view.read_tokens)
        chosen = [Choice(index=candidate.index, ttl=terms.lifetimes[number].name) for candidate, number in found]
        marks = reaching(chosen, view.ask.prefixes, view.read, terms)
        if len(marks) <= terms.slots:
            return found, marks
    # One slot, and a mark that writes does not read: move on once what is cached is the smaller part.
    return ([], marks[:1]) if 2 * view.read_tokens > view.ask.input_tokens else (found, marks[1:])


def _anchored(marks: list[Choice], view: View, terms: CacheTerms) -> list[Choice]:
    """With a mark at what is cached: at the deepest where none writes, so that it is read; and at the end of tools and
    system, which is nothing to the vendor while all is as believed, and saves most of the loss where it is not."""
    if view.read >= 0 and not marks:
        marks = [Choice(index=view.read, ttl=view.live[0][1].ttl)]
    system = view.system
    if 0 <= system < view.read and marks and marks[0].index > system and len(marks) < terms.slots:
        warm = view.ask.prefixes[system].warm
        alive = warm is not None and warm.ready_at <= view.ask.now < warm.expires_at
        if warm is not None and alive and terms.lifetime(warm.ttl).seconds >= terms.lifetime(marks[0].ttl).seconds:
            return [Choice(index=system, ttl=warm.ttl), *marks]
    return marks


def _reasons(view: View, candidates: Sequence[Candidate], found: Marks, blocked: bool, terms: CacheTerms) -> tuple[Reason, ...]:
    reasons: list[Reason] = []
    if view.read >= 0:
        reasons.append(Reason("warm_prefix", f"about {view.read_tokens} tokens are believed cached"))
    if found:
        deepest, number = found[-1]
        longest = terms.lifetimes[found[0][1]].name
        chance, ttl = deepest.chances[number], terms.lifetimes[number].name
        detail = f"{chance:.0%} chance that {deepest.tokens} tokens are asked for again within {ttl}"
        if longest != ttl:
            detail += f"; the first part is kept for {longest}"
        reasons.append(Reason("expected_reuse", detail))
    elif candidates:
        lifetime = terms.lifetimes[0]
        needed = (lifetime.write - 1.0) / (1.0 - terms.read) if terms.read < 1 else float("inf")
        chance = max(candidate.chances[0] for candidate in candidates)
        detail = f"{chance:.2f} re-reads expected within {lifetime.name}, a write pays from {needed:.2f} on"
        reasons.append(Reason("no_expected_reuse", detail))
    if blocked:
        reasons.append(Reason("write_without_read", f"written {_UNREAD} times or more and never read since"))
    return tuple(reasons)


class _Unlearning:
    """The half of the contract that a fixed policy has no use for."""

    __slots__ = ()

    def sent(self, ask: CacheAsk, plan: CachePlan) -> None:
        """Learns nothing."""

    def ended(self, ask: CacheAsk, outcome: Outcome) -> None:
        """Learns nothing."""

    def held(self, held: Held, now: float) -> KeepAlive | None:
        return None

    def dump(self) -> bytes:
        return b""

    def load(self, data: bytes) -> None:
        """There is nothing to take up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Always(_Unlearning):
    """Marks the end of tools and system and the end of the prompt, whatever comes.

    Args:
        ttl: for how long; a model that does not offer it gets its shortest, as all do where none is named.
    """

    ttl: str | None = None

    def plan(self, ask: CacheAsk) -> CachePlan:
        fixed = [index for index, prefix in enumerate(ask.prefixes) if prefix.kind in FIXED]
        return _marked(ask, [*fixed[-1:], len(ask.prefixes) - 1], self.ttl)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMessage(_Unlearning):
    """Marks the end of the prompt, and nothing else. `ttl` as for `Always`."""

    ttl: str | None = None

    def plan(self, ask: CacheAsk) -> CachePlan:
        return _marked(ask, [len(ask.prefixes) - 1], self.ttl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Off(_Unlearning):
    """Marks nothing, and tells a model that caches by itself not to, where it can be told."""

    def plan(self, ask: CacheAsk) -> CachePlan:
        return CachePlan(opt_out=ask.terms.opt_out, reasons=(Reason("cache_off", "the policy caches nothing"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller(_Unlearning):
    """Adds nothing to the caller's own marks and to what the model does by itself."""

    def plan(self, ask: CacheAsk) -> CachePlan:
        return CachePlan(reasons=(Reason("caller_marks", "the policy adds no marks"),))


def _marked(ask: CacheAsk, indexes: Sequence[int], ttl: str | None) -> CachePlan:
    terms, prefixes = ask.terms, ask.prefixes
    if not terms.lifetimes or not prefixes:
        return CachePlan()
    names = [lifetime.name for lifetime in terms.lifetimes]
    name = ttl if ttl in names else names[0]
    wanted = {index for index in indexes if prefixes[index].tokens >= terms.minimum}
    reasons = (Reason("below_minimum", f"this model caches from {terms.minimum} tokens on"),) if not wanted else ()
    if terms.lookback == 1:  # only what a mark stands on is found
        wanted.update(view.read for view in (View(ask),) if view.read >= 0)
    marks = [Choice(index=index, ttl=name or names[0]) for index in sorted(wanted)]
    return CachePlan(marks=tuple(marks[-terms.slots :] if terms.slots else ()), reasons=reasons)
