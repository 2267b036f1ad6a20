"""What is learned from requests that were sent: what is now cached where, and what the caching policy is told.

`Caching` is the one place through which a planned request goes: `ahead` says whom it should wait for, `sent` before it is
opened, `began` when its response begins, `ended` with what was counted. It keeps the planner's belief (contract P4) and
saves it, with what the policy learned, in the ledger's store.

What a report means, with R tokens read and W written:

- both 0 although something was marked: nothing is cached of it;
- R = 0: whatever was believed readable is not there, but for what this request wrote;
- R > 0: the deepest entry of that length is confirmed, and every shallower one with it; deeper ones were not there;
- with marks, R + W is the exact length of the prefix that ends at the last mark;
- not reported: the belief stays, with less confidence (absent is not zero).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

import anyio

from cachespec.background import Background
from cachespec.cache_keys import CacheKeys
from cachespec.cache_marks import Spot
from cachespec.cache_plan import CachePlanner, Planned
from cachespec.caching import CachingPolicy, Held, KeepAlive, Outcome, Piecewise
from cachespec.errors import LedgerError
from cachespec.fanout import Fanout, Lead
from cachespec.learned import Learned
from cachespec.ledger.base import Ledger
from cachespec.pieces import gathered
from cachespec.telemetry import MarksIgnored, Telemetry
from cachespec.usage import Usage
from cachespec.warmth import Entry, Warmth

SECRET, WARMTH, POLICY, LEARNED = "cache-keys", "warmth", "caching-policy", "learned"
SAVE_EVERY_S = 30.0
_SAVING_SHARE = 200.0  # saving takes at most 1/200 of the time
IGNORED = 3
"""Marked requests in a row that nothing was counted for, before the alarm is raised."""
_LIFETIMES = {"5m": 300.0, "1h": 3_600.0, "30m": 1_800.0, "12h": 43_200.0}
_log = logging.getLogger("cachespec")


@dataclass(slots=True, eq=False)
class Sent:
    """A planned request on its way. `start` is when it went out (Unix seconds): lifetimes count from there."""

    planned: Planned
    start: float
    lead: Lead | None = None
    began: bool = False
    ended: bool = False


class Caching:
    """Planning and learning for one client. Used by the tasks of one event loop; nothing here waits, but for the store.

    `background` is where it is saved beside requests (None: it is not, only by `save`), `secret` the application's own for the
    keys of tenants (None: the ledger's), and `before` what another policy leaves behind, its background included.
    """

    def __init__(
        self,
        policy: CachingPolicy,
        telemetry: Telemetry,
        learned: Learned,
        *,
        background: Background | None = None,
        secret: str | None = None,
        before: Caching | None = None,
    ) -> None:
        self.policy, self._telemetry, self._learned = policy, telemetry, learned
        self._background: Background | None = background if before is None else before._background
        # What is cached where is a fact, whatever policy comes next.
        self.warmth: Warmth = Warmth() if before is None else before.warmth
        self.keys: CacheKeys = CacheKeys() if before is None else before.keys
        self._secret = None if secret is None else blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        self.keys.secret = self._secret or self.keys.secret
        self.fanout: Fanout = Fanout() if before is None else before.fanout
        self.planner = CachePlanner(policy, self.warmth, self.keys, learned.tokens)
        self._ignored: dict[tuple[str, str], int] = {}
        self._told = 0
        self._saved = -1
        self._save_at = 0.0
        self._saving = anyio.Lock()

    # -- a request's way

    def ahead(self, planned: Planned) -> Lead | None:
        """The request under way that is about to write a prefix which this one would write as well; None: nobody."""
        return self.fanout.ahead(self._cold(planned))

    def _cold(self, planned: Planned) -> list[tuple[bytes, bytes]]:
        """What a request will write, shortest prefix first: the marks beyond what is believed readable."""
        warm = {planned.places.keys[place] for place, entry in planned.found if entry.live(self._at(planned))}
        return [planned.filed(spot.key) for spot in self._written(planned) if spot.key not in warm]

    @staticmethod
    def _at(planned: Planned) -> float:
        return 0.0 if planned.ask is None else planned.ask.now

    def sent(self, planned: Planned, now: float) -> Sent:
        """A planned request goes out at `now`."""
        sent = Sent(planned, now, self.fanout.lead(self._cold(planned)))
        if planned.route is not None:
            self.keys.sent(None if planned.ask is None else planned.ask.tenant, planned.route, now)
        if planned.ask is not None:
            # The same ask throughout: a policy knows a request again by it. It was planned milliseconds ago.
            ask = planned.ask
            self._tell("sent", lambda policy: policy.sent(ask, planned.choice))
        return sent

    def began(self, sent: Sent, now: float) -> None:
        """Its response begins: what it writes can be read from now on. Twice is once."""
        if sent.began or sent.ended:
            return
        sent.began = True
        planned = sent.planned
        for spot in self._written(planned):
            old = self.warmth.get(*planned.filed(spot.key))
            if old is not None and old.live(sent.start):
                entry = replace(old, expires_at=max(old.expires_at, sent.start + seconds_of(planned, old.ttl)))
            else:
                entry = Entry(spot.ttl, spot.tokens, now, sent.start + seconds_of(planned, spot.ttl))
            self.warmth.put(*planned.filed(spot.key), entry)
        if sent.lead is not None:
            sent.lead.release()

    def ended(self, sent: Sent, *, usage: Usage | None, stop: str | None, now: float) -> None:
        """It is over, for whatever reason. `usage` is what the vendor counted, None where nothing came. Twice is once."""
        if sent.ended:
            return
        sent.ended = True
        if sent.lead is not None:
            sent.lead.release()
        planned = sent.planned
        read, written = (None, None) if usage is None else (usage.cache_read, usage.written)
        if sent.began and planned.cache is not None:
            self._learn(sent, read, written)
            self._watch(planned, usage)
            if usage is not None and usage.input_tokens:
                self._learned.tokens(planned.tokenizer).learn(planned.places.sizes, usage.input_tokens)
        if planned.ask is not None:
            ask, output = planned.ask, None if usage is None else usage.output
            outcome = Outcome(ended_at=now, stop=stop, output_tokens=output, read=read, written=written)
            self._tell("ended", lambda policy: policy.ended(ask, outcome))

    def held(self, held: Held, now: float) -> KeepAlive | None:
        """Whether and when to keep a prefix alive, as the policy says; a failure of its is logged, and means no."""
        try:
            return self.policy.held(held, now)
        except Exception:  # noqa: BLE001
            _log.exception("%r.held failed", self.policy)
            return None

    def _tell(self, name: str, call: Callable[[CachingPolicy], None]) -> None:
        """Tell the policy. It is somebody else's code, and the request is sent: a failure is logged and goes no further."""
        self._told += name != "load"
        try:
            call(self.policy)
        except Exception:  # noqa: BLE001
            _log.exception("%r.%s failed", self.policy, name)

    # -- belief

    def _written(self, planned: Planned) -> Iterator[Spot]:
        minimum = 0 if planned.cache is None else planned.cache.terms.minimum
        return (spot for spot in planned.spots if spot.tokens >= minimum)

    def _learn(self, sent: Sent, read: int | None, written: int | None) -> None:
        planned, spots = sent.planned, list(self._written(sent.planned))
        marked = planned.cache is not None and planned.cache.control != "routing"
        mine = {spot.key for spot in spots}
        live = [(planned.places.keys[place], entry) for place, entry in planned.found if entry.live(sent.start)]
        if read is None:
            for key in {*mine, *(key for key, _ in live)}:
                self._doubt(planned, key)
            return
        if marked and read == 0 and written == 0:
            for key in {*mine, *(key for key, _ in live)}:
                self._drop(sent, key)
            return
        confirmed = None
        for key, planned_on in live:
            entry = self.warmth.get(*planned.filed(key)) or planned_on  # others may have told of it meanwhile
            if read and entry.tokens <= read + _tolerance(entry, read):
                confirmed = key
                self._renew(sent, key, entry)
            elif key not in mine:
                self._drop(sent, key)
        if read and confirmed is None:
            self._someone_wrote(sent, read)
        for spot in spots:
            made = self.warmth.get(*planned.filed(spot.key))
            if made is None or spot.tokens <= read:
                continue
            if written == 0 and spot.tokens > read + _tolerance(made, read):
                self._drop(sent, spot.key)
            else:
                self.warmth.put(*planned.filed(spot.key), replace(made, sure=1.0 if written else 0.9))
        if marked and written is not None and spots and (last := self.warmth.get(*planned.filed(spots[-1].key))) is not None:
            whole = replace(last, tokens=read + written, exact=True, sure=1.0)
            self.warmth.put(*planned.filed(spots[-1].key), whole)

    def _doubt(self, planned: Planned, key: bytes) -> None:
        entry = self.warmth.get(*planned.filed(key))
        if entry is not None:
            self.warmth.put(*planned.filed(key), replace(entry, sure=entry.sure * 0.7))

    def _drop(self, sent: Sent, key: bytes) -> None:
        """It was not there for this request: forget it, unless one that began later has written or read it."""
        entry = self.warmth.get(*sent.planned.filed(key))
        if entry is not None and entry.expires_at <= sent.start + seconds_of(sent.planned, entry.ttl):
            self.warmth.drop(*sent.planned.filed(key))

    def _renew(self, sent: Sent, key: bytes, entry: Entry) -> None:
        """It was read: it lives on from the start of this request."""
        until = max(entry.expires_at, sent.start + seconds_of(sent.planned, entry.ttl))
        self.warmth.put(*sent.planned.filed(key), replace(entry, expires_at=until, sure=1.0))

    def _someone_wrote(self, sent: Sent, read: int) -> None:
        """Something was read that we knew nothing of: an entry of that length, at the place that fits it best."""
        planned = sent.planned
        prefixes = planned.places.prefixes
        if planned.cache is None or not prefixes:
            return
        place = min(range(len(prefixes)), key=lambda i: abs(prefixes[i].tokens - read))
        key, tokens = planned.places.keys[place], prefixes[place].tokens
        if abs(tokens - read) > 0.1 * read:
            return
        known = self.warmth.get(*planned.filed(key))
        ttl = planned.cache.terms.lifetimes[0].name if known is None else known.ttl
        self.warmth.put(*planned.filed(key), Entry(ttl, tokens, sent.start, sent.start + seconds_of(planned, ttl), 1.0))

    # -- the alarm

    def _watch(self, planned: Planned, usage: Usage | None) -> None:
        """Marks that nothing was ever counted for, although what they mark is long enough, are an alarm."""
        cache = planned.cache
        if cache is None or cache.control == "routing" or not planned.plan.marks or usage is None:
            return
        if usage.cache_read is None or usage.written is None or usage.input_tokens is None:
            return
        key = planned.backend, planned.model
        if usage.cache_read or usage.written:
            self._ignored.pop(key, None)
            return
        tokens = max((mark.tokens or 0 for mark in planned.plan.marks), default=0)
        if min(tokens, usage.input_tokens) < cache.terms.minimum:
            return
        count = self._ignored[key] = self._ignored.get(key, 0) + 1
        if count == IGNORED:
            told = MarksIgnored(
                backend=planned.backend, model=planned.model, requests=count, tokens=tokens, minimum=cache.terms.minimum
            )
            self._telemetry.warn(
                f"{planned.backend}: {count} requests in a row marked about {tokens} tokens for caching, and {planned.model} "
                f"neither read nor wrote any; it should from {cache.terms.minimum} on"
            )
            self._telemetry.tell(told)

    # -- the store

    async def restore(self, ledger: Ledger, now: float, *, policy_only: bool = False) -> None:
        """Take up what an earlier client saved, and the secret of the keys; `policy_only` where everything else lives on here.

        Raises LedgerError.
        """
        self.keys.secret = self._secret or await ledger.secret(SECRET)
        if (data := await ledger.load(self._policy_name)) is not None:
            self._tell("load", lambda policy: policy.load(data))
        if not policy_only:
            if (warm := await ledger.load(WARMTH)) is not None:
                self.warmth.load(warm, now=now)
            if (answers := await ledger.load(LEARNED)) is not None:
                self._learned.load(answers)
        self._saved, self._save_at = self._changes, now + SAVE_EVERY_S

    @property
    def _changes(self) -> int:
        return self.warmth.changes + self._learned.answers + self._told

    def save_soon(self, ledger: Ledger, now: float) -> None:
        """Save in the background, if it is due: no request waits for it, and whoever cancels one does not cancel that."""
        if self._background is not None and now >= self._save_at and self._changes != self._saved:
            self._background.at(now, "save", lambda: self.save(ledger, now))

    async def save(self, ledger: Ledger, now: float, *, at_once: bool = False) -> None:
        """Save what changed, now and then, or `at_once`. A store that fails costs what was learned, and is logged.

        It is made bit by bit, while others run (`cachespec.pieces`): what is learned meanwhile counts as not saved yet, and so
        does everything where it is cancelled.
        """
        if not at_once and (now < self._save_at or self._saving.locked()):
            return
        async with self._saving:  # what is older may not be written last
            changes = self._changes
            if changes == self._saved:
                return
            begin, self._save_at = anyio.current_time(), now + SAVE_EVERY_S
            try:
                await ledger.save(WARMTH, await gathered(self.warmth.pieces()))
                if (data := await self._policy_data()) is not None:
                    await ledger.save(self._policy_name, data)
                await ledger.save(LEARNED, await gathered(self._learned.pieces()))
                self._saved = changes
            except LedgerError as error:
                _log.warning("what was learned could not be saved: %s", error)
            self._save_at = max(self._save_at, now + _SAVING_SHARE * (anyio.current_time() - begin))

    async def _policy_data(self) -> bytes | None:
        """What the policy learned; None where it fails to say, which is logged."""
        try:
            return await gathered(self.policy.pieces() if isinstance(self.policy, Piecewise) else [self.policy.dump()])
        except Exception:  # noqa: BLE001 - somebody else's code
            _log.exception("%r could not be saved", self.policy)
            return None

    @property
    def _policy_name(self) -> str:
        kind = type(self.policy)
        return f"{POLICY}:{kind.__module__}.{kind.__qualname__}"


def seconds_of(planned: Planned, ttl: str) -> float:
    """How long an entry of this lifetime lives: for this model, where it has one of that name (a caller may use others)."""
    for lifetime in () if planned.cache is None else planned.cache.terms.lifetimes:
        if lifetime.name == ttl:
            return lifetime.seconds
    return _LIFETIMES.get(ttl, 0.0)


def _tolerance(entry: Entry, read: int) -> float:
    """How far a report may be off an entry's length: estimates are, and some vendors round down to whole steps."""
    return 64 + read * (0.02 if entry.exact else 0.15)
