"""One request in flight: its tokens, its text, and the bounded hand-over to whoever reads it.

The engine's thread writes, one reader takes. Neither waits for the other here: the engine looks at `room` and leaves a
full sequence alone, the reader asks to be called when something is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cachespec.engine.control import Track
from cachespec.engine.pages import PAGE
from cachespec.engine.processors import NOTHING, Processing, Processor
from cachespec.engine.sampling import Sampling
from cachespec.engine.slots import Lease
from cachespec.engine.structured import Grammar, GrammarState
from cachespec.engine.text import TextStream
from cachespec.engine.toolcalls import PlainText, ToolParser
from cachespec.events import Event, LogprobsReported, TokenLogprob
from cachespec.usage import Usage

CAPACITY: Final = 64
"""Events that wait for a reader before its sequence pauses (contract S7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked of the engine.

    Attributes:
        prompt: token ids, at least one.
        output: the most tokens to generate, at least one; prompt and output together fit the context.
        stop: strings that end the answer, never shown.
        cache: ``auto``; ``off`` (neither reuse nor keep); ``no-write`` (reuse, keep nothing new).
        namespace: KV and earlier answers are shared only within one (the tenant).
        session: whose KV stays for `keep_s` seconds after the answer, before others' goes.
        grammar: what the answer has to follow.
        processing: penalties and biases, at every position of the answer.
        logprobs: report each token's log probability, beside those of so many most probable ones; None: do not.
        parser: splits the text into text and tool calls; a new one for each job.
        pieces: bytes of control tokens that this job's parser must see.
        warnings: passed on with the end of the answer.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    output: int
    stop: tuple[str, ...] = ()
    cache: Literal["auto", "off", "no-write"] = "auto"
    namespace: str | None = None
    session: str | None = None
    keep_s: float = 0.0
    grammar: Grammar | None = None
    processing: Processing = NOTHING
    logprobs: int | None = None
    parser: ToolParser = field(default_factory=PlainText)
    pieces: Mapping[int, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """A step with drafts, or why there were none: told when all of `accepted` is certain. `at`: tokens of the answer before."""

    at: int
    drafter: str
    drafted: int
    accepted: int
    reason: str


class Sequence:
    """A job and how far it is. The engine makes them (`Engine.submit`).

    For the reader: `take`, `when_ready`, `cancel`, `done`, `error`, `usage`, `busy_s`; safe from any thread. The rest is
    the engine thread's.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        wake: Callable[[], None],
        cancel: Callable[[Sequence], None],
        *,
        space: bytes | None = None,
        drafts: bool = False,
    ) -> None:
        self.job, self.number = job, number
        self.space = space  # of the KV that it may share; None: of nobody
        self.tokens = list(job.prompt)
        self.text = TextStream(job.stop)
        self.reused: int | None = None  # prompt tokens whose KV was there; None until admitted
        self.kept = 0  # prompt tokens whose KV stayed after the end
        self.read = 0  # prompt tokens that were evaluated or reused, as long as that is not all of them
        self.busy_s = 0.0
        self.drafted = self.accepted = 0
        self.verified: deque[Verified] = deque()  # what is not told yet
        self.cancelled = False
        self.error: Exception | None = None
        self.done = False
        self.lease: Lease | None = None  # where it runs; None: it waits
        self.track: Track | None = None
        self.grammar: GrammarState | None = None
        self.processor: Processor | None = None
        self.scores: list[TokenLogprob] = []  # of the answer's tokens, where they are wanted
        self.reason: str | None = None  # why it drafts as much as it does, when that was last said
        self.paused_at: float | None = None
        self.stepped = 0  # when it last decoded
        self.blocked_at = -1  # `Slots.changes` when there was no room for it
        self.behind: tuple[Sequence, int] | None = None  # who is computing what it needs, and how many tokens that are
        self._drafts = drafts
        self._scored = 0
        self._wake, self._cancel = wake, cancel
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._waiter: Callable[[], object] | None = None

    @property
    def usage(self) -> Usage:
        """What was used until now: exact at any moment, and final once `done`.

        Newly kept prompt tokens are cache writes; until the end, those that will be kept if nothing goes wrong.
        """
        return self.counted(self.kept if self.done else len(self.job.prompt) if self.writes else 0)

    @property
    def writes(self) -> bool:
        """Whether what it computes is kept for others."""
        return self.space is not None and self.job.cache == "auto"

    def counted(self, kept: int) -> Usage:
        """The usage, if `kept` prompt tokens stay in the KV. Only whole pages of the prompt count.

        Of a prompt that was not read to its end only what was read: nobody pays for the rest.
        """
        lease, reused = self.lease, self.reused or 0
        read = max(self.read, 0 if lease is None else lease.held, reused)
        output = self.text.tokens  # once: the engine goes on meanwhile
        prompt = len(self.job.prompt) if output else min(len(self.job.prompt), read)
        written = max(0, min(kept, prompt // PAGE * PAGE) - reused)
        return Usage(
            uncached=prompt - reused - written,
            cache_read=reused,
            cache_write={"kv": written} if written else {},
            output=output,
            drafted=self.drafted if self._drafts else None,
            accepted=min(self.accepted, output) if self._drafts else None,
        )

    def scored(self) -> list[Event]:
        """Log probabilities of tokens that have become certain since this was last asked."""
        count = self.text.certain - self._scored
        if self.job.logprobs is None or not count:
            return []
        found, self.scores = self.scores[:count], self.scores[count:]
        self._scored += count
        return [LogprobsReported(tuple(found))]

    @property
    def missing(self) -> int:
        """Tokens to evaluate before one can be drawn; all of them while it waits."""
        return len(self.tokens) - (0 if self.lease is None else self.lease.held)

    def take(self) -> list[Event]:
        """Everything that is there, in order; empty when there is nothing yet, or nothing more (`done`)."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        if len(events) >= CAPACITY:
            self._wake()
        return events

    def when_ready(self, callback: Callable[[], object]) -> bool:
        """Call back once, from the engine's thread, when `take` has something or the end came; False: it has already."""
        with self._lock:
            if self._events or self.done:
                return False
            self._waiter = callback
            return True

    def cancel(self) -> None:
        """Stop within one step; nothing more comes out. From any thread, any number of times."""
        if not self.cancelled and not self.done:
            self.cancelled = True
            self._cancel(self)

    @property
    def room(self) -> bool:
        """Whether the reader keeps up."""
        return len(self._events) < CAPACITY

    @property
    def pending(self) -> int:
        """Prompt tokens that are still to be evaluated, as far as another thread can tell."""
        return 0 if self.text.tokens else len(self.job.prompt) - (self.reused or 0)

    def put(self, events: list[Event]) -> None:
        """Hand events to the reader."""
        if events:
            self._change(events, done=False)

    def end(self, events: list[Event], error: Exception | None = None) -> None:
        """Hand over the last events; `error` is raised to the reader after them."""
        self.error = error
        self._change(events, done=True)

    def _change(self, events: list[Event], *, done: bool) -> None:
        with self._lock:
            if not self.cancelled:
                self._events.extend(events)
            self.done = self.done or done
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            try:
                waiter()
            except Exception:  # noqa: BLE001 - the reader's event loop is gone, or it is of no use to itself
                self.cancelled = True
