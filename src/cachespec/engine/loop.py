"""The engine: one thread that owns a runtime and runs sequences on it, one at a time, in the order they came.

Everything a sequence needs is the difference between its tokens and those the KV holds: the whole prompt, what a shared
prefix left of it, or one token. So prefill, decode, prefix reuse and going on after a pause are one step: evaluate the
next chunk of the difference, and when nothing is left of it, draw a token.

KV is kept after a request, and the next one of the same namespace reuses the longest common beginning, at most all but its
last token, which must be evaluated to have something to draw from. Only tokens that were evaluated and belong to an
answer count: nothing of a stop string, and nothing that an aborted request generated.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from cachespec.engine.runtimes.base import Interrupted, Runtime, Span
from cachespec.engine.sequence import Job, Sequence
from cachespec.errors import ContextLengthError, EngineStoppedError, InputError, OutOfPagesError, ServerError
from cachespec.events import Event, Finished, UsageReported

GRACE_S: Final = 0.25
"""How long a paused sequence keeps the engine while others wait; then they go first and it starts over where it was."""

_MEMORY = 0.98  # weight of the past in running averages, per measurement


@dataclass(frozen=True, slots=True)
class Kept:
    """What the KV holds for reuse, as of the last change: published whole, so any thread may look."""

    namespace: str | None = None
    tokens: tuple[int, ...] = ()


class Average:
    """A running ratio (tokens a second, tokens an answer) that forgets slowly. `value` is None before any sample."""

    __slots__ = ("_amount", "_weight")

    def __init__(self) -> None:
        self._amount = self._weight = 0.0

    def add(self, amount: float, weight: float) -> None:
        self._amount = self._amount * _MEMORY + amount
        self._weight = self._weight * _MEMORY + weight

    @property
    def value(self) -> float | None:
        return self._amount / self._weight if self._weight > 0 else None


def shared_prefix(a: TokenSequence[int], b: TokenSequence[int]) -> int:
    """How many leading tokens two tuples (or two lists) have in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices compare at C speed, a Python loop over thousands of tokens does not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Engine:
    """Runs jobs on a runtime, which it owns and closes. `start` it; `submit` and `close` from any thread."""

    def __init__(self, runtime: Runtime, *, name: str = "engine", prefill_chunk: int = 128) -> None:
        self._runtime, self._name = runtime, name
        self._chunk = max(1, min(prefill_chunk, runtime.width))
        self._condition = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._current: Sequence | None = None
        self._paused_at: float | None = None
        self._closing = False
        self._failure: BaseException | None = None
        self._submitted = 0
        self._held: list[int] = []  # tokens whose KV sequence 0 of the runtime holds
        self._namespace: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"cachespec-{name}", daemon=True)
        self.kept = Kept()
        self.prefill_speed, self.decode_speed, self.answer_length = Average(), Average(), Average()

    def start(self) -> None:
        """Start the thread. It ends with `close`, at the latest when the interpreter does."""
        atexit.register(self.close)
        self._thread.start()

    def submit(self, job: Job) -> Sequence:
        """Queue a job. Raises ContextLengthError, InputError for one that cannot be run, EngineStoppedError."""
        context = self._runtime.info.context
        if not job.prompt or job.output < 1:
            raise InputError("a prompt needs at least one token, and an answer room for one")
        if len(job.prompt) + job.output > context:
            detail = f"{len(job.prompt)} + {job.output} tokens do not fit a context of {context}"
            raise ContextLengthError(detail, backend=self._name)
        with self._condition:
            if self._closing or self._failure is not None:
                raise self._stopped()
            self._submitted += 1
            sequence = Sequence(job, self._submitted, self._notify, self._cancel)
            self._waiting.append(sequence)
            self._condition.notify()
        return sequence

    def close(self) -> None:
        """Stop within one step, fail what is queued or running with EngineStoppedError, free the model. Idempotent."""
        with self._condition:
            self._closing = True
            self._interrupt()
            self._condition.notify()
        if self._thread.ident is None:
            self._runtime.close()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    @property
    def active(self) -> int:
        """Sequences queued or running."""
        with self._condition:
            return len(self._waiting) + (self._current is not None)

    @property
    def backlog(self) -> tuple[int, int]:
        """What is ahead of a new job: prompt tokens to evaluate, and sequences to finish."""
        with self._condition:
            ahead = [s for s in (self._current, *self._waiting) if s is not None]
            return sum(s.pending for s in ahead), len(ahead)

    @property
    def failure(self) -> BaseException | None:
        """What crashed the engine."""
        return self._failure

    def _stopped(self) -> EngineStoppedError:
        why = "was closed" if self._failure is None else f"crashed: {self._failure!r}"
        error = EngineStoppedError(f"the engine {why}", backend=self._name)
        error.__cause__ = self._failure
        return error

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify()

    def _cancel(self, sequence: Sequence) -> None:
        with self._condition:
            if sequence is self._current:
                self._interrupt()
            self._condition.notify()

    def _interrupt(self) -> None:
        if self._thread.is_alive():
            self._runtime.interrupt()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it was, nobody may be left waiting
            self._failure = error
        with self._condition:
            self._closing = True
            left = [s for s in (self._current, *self._waiting) if s is not None]
            self._current = None
            self._waiting.clear()
        self.kept = Kept()
        for sequence in left:
            sequence.end([], self._stopped())
        self._runtime.close()

    def _turn(self) -> bool:
        """One step of one sequence, or one wait. False: the engine is closed."""
        with self._condition:
            # Taken back before looking for what was cancelled: a cancellation from here on interrupts the step again.
            self._runtime.resume()
            if self._closing:
                return False
            gone = [s for s in self._waiting if s.cancelled]
            for sequence in gone:
                self._waiting.remove(sequence)
            current = self._current
        for sequence in gone:
            sequence.end([])
        if current is not None and current.cancelled:
            self._abort(current, None)
        elif current is None or not current.room:
            self._choose()
        else:
            self._step(current)
        return True

    def _choose(self) -> None:
        """Take the first sequence that can go on, or wait for one. A paused one keeps its place for `GRACE_S`."""
        with self._condition:
            ready = next((s for s in self._waiting if s.room), None)
            current, wait = self._current, None
            if current is not None and ready is not None:
                now = perf_counter()
                self._paused_at = now if self._paused_at is None else self._paused_at
                wait = self._paused_at + GRACE_S - now
            if ready is None or (wait is not None and wait > 0):
                if not self._stirred(current):
                    self._condition.wait(wait)
                return
            self._waiting.remove(ready)
            if current is not None:
                self._waiting.appendleft(current)
            self._current, self._paused_at = ready, None
        start = perf_counter()
        if current is not None:
            self._retain(current)
        self._admit(ready)
        ready.busy_s += perf_counter() - start

    def _stirred(self, current: Sequence | None) -> bool:
        """Whether something changed since it was looked at, so that waiting would miss it."""
        if self._closing or any(s.cancelled for s in self._waiting):
            return True
        return current is not None and (current.cancelled or current.room)

    def _admit(self, sequence: Sequence) -> None:
        """Cut the KV to what this sequence shares with it."""
        job = sequence.job
        shared = 0
        if job.cache != "off" and job.namespace == self._namespace:
            shared = min(shared_prefix(self._held, sequence.tokens), len(sequence.tokens) - 1)
        shared = self._cut(shared)
        self._namespace = job.namespace
        if sequence.reused is None:
            sequence.reused = shared
        self._publish()

    def _step(self, sequence: Sequence) -> None:
        """Evaluate the next chunk; when that was the last, draw a token and hand out its text."""
        self._paused_at = None
        start = perf_counter()
        runtime, done = self._runtime, len(self._held)
        chunk = sequence.tokens[done : done + self._chunk]
        last = done + len(chunk) == len(sequence.tokens)
        try:
            rows = runtime.evaluate([Span(sequence=0, start=done, tokens=chunk, rows=int(last))])
        except Interrupted:
            del self._held[runtime.length(0) :]
            sequence.busy_s += perf_counter() - start
            return
        except OutOfPagesError as error:
            self._cut(runtime.length(0))
            self._abort(sequence, error)
            return
        self._held += chunk
        speed = self.prefill_speed if len(chunk) > 1 else self.decode_speed
        speed.add(len(chunk), perf_counter() - start)
        try:
            token = runtime.draw(rows, [sequence.job.sampling], [len(sequence.tokens)])[0] if last else None
        except ArithmeticError as error:  # this prompt breaks the model; what it left in the KV is worth nothing
            self._cut(0)
            self._abort(sequence, ServerError(str(error), backend=self._name, retryable=False))
            return
        events, reason = ([], None) if token is None else self._accept(sequence, token)
        sequence.busy_s += perf_counter() - start
        if reason is None:
            sequence.put(events)
        else:
            self._finish(sequence, events, reason)

    def _accept(self, sequence: Sequence, token: int) -> tuple[list[Event], str | None]:
        """Take a drawn token into the answer: the events it makes, and why the answer ends with it, if it does."""
        job = sequence.job
        if self._runtime.is_end(token):
            return [], "stop"
        sequence.tokens.append(token)
        piece = job.pieces.get(token)
        shown = sequence.text.push(self._runtime.piece(token) if piece is None else piece)
        events: list[Event] = [*job.parser.push(shown)]
        if sequence.text.stopped is not None:
            return events, "stop"
        full = len(sequence.tokens) - len(job.prompt) >= job.output
        return events, "length" if full else None

    def _finish(self, sequence: Sequence, events: list[Event], reason: str) -> None:
        start = perf_counter()
        job = sequence.job
        events += [*job.parser.push(sequence.text.finish()), *job.parser.finish()]
        del sequence.tokens[len(job.prompt) + sequence.text.tokens :]  # nothing of a stop string is kept
        self._retain(sequence)
        self.answer_length.add(sequence.text.tokens, 1)
        sequence.busy_s += perf_counter() - start
        with self._condition:
            self._current = None
        usage = sequence.counted(sequence.kept)
        if job.parser.calls and reason == "stop":
            reason = "tool_calls"
        finished = Finished(reason=reason, busy_s=sequence.busy_s, warnings=job.warnings)
        sequence.end([*events, UsageReported(usage), finished])

    def _abort(self, sequence: Sequence, error: Exception | None) -> None:
        """End a sequence before its time. What it generated is not kept; what it evaluated of its prompt is."""
        del sequence.tokens[len(sequence.job.prompt) :]
        self._retain(sequence)
        with self._condition:
            self._current = None
        sequence.end([], error)

    def _retain(self, sequence: Sequence) -> None:
        """Cut the KV to what may stay of this sequence, and note how much of its prompt that is."""
        limit = {"auto": len(sequence.tokens), "no-write": sequence.reused or 0, "off": 0}[sequence.job.cache]
        sequence.kept = min(self._cut(min(limit, len(self._held))), len(sequence.job.prompt))
        self._publish()

    def _cut(self, length: int) -> int:
        """Forget KV from `length` on; where the model cannot do that, all of it. How much is left."""
        if length < len(self._held):
            if length == 0 or not self._runtime.truncate(0, length):
                self._runtime.free(0)
                length = 0
            del self._held[length:]
        return len(self._held)

    def _publish(self) -> None:
        self.kept = Kept(self._namespace, tuple(self._held))
