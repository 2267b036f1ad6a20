"""The engine: one thread that owns a runtime and runs many requests on it at once (contracts E1, E6).

Each turn it lets in what may run, and makes one step of everything that runs: one call of the runtime (`engine.stepping`).
Requests come in the order they were queued, as many at once as there are seats. One whose reader is slow sits out, and gives
its seat up when others wait for it. When room runs out, what is merely kept goes first, then the youngest request starts over
from what is left of it; the text does not change by that.

Of requests that need the same beginning one computes it, and the others begin when it is there.

What goes wrong with one request's own data (its rows, its grammar, the parsing of its text) ends that request; only what
goes wrong with the runtime ends the engine.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Sequence as List
from time import monotonic, perf_counter
from typing import Any, Final

from cachespec.engine.averages import Average, shared_prefix
from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import CostModel
from cachespec.engine.pages import PAGE
from cachespec.engine.prefix import NearMiss
from cachespec.engine.runtimes.base import Interrupted, Runtime
from cachespec.engine.sequence import Job, Sequence
from cachespec.engine.slots import Slots
from cachespec.engine.stepping import Drawn, Part, Stepper
from cachespec.engine.structured import GrammarError
from cachespec.errors import (
    BackendError,
    ContextLengthError,
    EngineStoppedError,
    InputError,
    OutOfPagesError,
    ServerError,
    UnsupportedParameterError,
)
from cachespec.events import Event, Finished, UsageReported

GRACE_S: Final = 0.25
"""How long a paused sequence keeps its seat while others wait; then they go first and it goes on later where it was."""
_SPARE = 32  # tokens of room for each running sequence before another is let in


class Engine:
    """Runs jobs on a runtime, which it owns and closes. `start` it; `submit` and `close` from any thread.

    Args:
        parallel: requests that run at once, at most the runtime's sequences; None: as many as those.
        prefill_chunk: prompt tokens a call, at most.
        width: tokens a call, at most; None is the runtime's.
        max_gap: a step that prefills takes at most so many times longer for those that run beside it.
        host_bytes: memory for KV that had to make room.
        control: speculation; None does without. `costs` are what it goes by.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str = "engine",
        parallel: int | None = None,
        prefill_chunk: int = 128,
        width: int | None = None,
        max_gap: float = 4.0,
        host_bytes: int = 0,
        control: SpeculationControl | None = None,
        costs: CostModel | None = None,
    ) -> None:
        self._runtime, self._name = runtime, name
        width = runtime.width if width is None else min(width, runtime.width)
        self.parallel = min(runtime.sequences, parallel or runtime.sequences)
        self._slots = Slots(runtime, seats=self.parallel, host_bytes=host_bytes)
        self._stepper = Stepper(
            runtime, width=width, chunk=max(1, prefill_chunk), max_gap=max_gap, control=control, costs=costs
        )
        self._control = control
        self._condition = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stepping: tuple[Sequence, ...] = ()
        self._seats = self.parallel  # fewer after a call that found no room, until a request ends
        self._stirs = 0  # grows with everything that the thread may have to look at
        self._closing = False
        self._failure: BaseException | None = None
        self._submitted = self._preempted = 0
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"cachespec-{name}", daemon=True)
        self.prefill_speed, self.decode_speed, self.answer_length = Average(), Average(), Average()

    def start(self) -> None:
        """Start the thread. It ends with `close`, at the latest when the interpreter does."""
        self._process = os.getpid()
        atexit.register(self.close)
        self._thread.start()

    def submit(self, job: Job) -> Sequence:
        """Queue a job. Raises ContextLengthError, InputError for one that cannot be run, EngineStoppedError."""
        self._check_process()
        context = self._runtime.info.context
        job.processing.check(self._runtime.info.vocab)
        if not job.prompt or job.output < 1:
            raise InputError("a prompt needs at least one token, and an answer room for one")
        if len(job.prompt) + job.output > context:
            detail = f"{len(job.prompt)} + {job.output} tokens do not fit a context of {context}"
            raise ContextLengthError(detail, backend=self._name)
        space = None if job.cache == "off" else self._slots.namespace(job.namespace)
        with self._condition:
            if self._closing or self._failure is not None:
                raise self._stopped()
            self._submitted += 1
            drafts = self._control is not None
            sequence = Sequence(job, self._submitted, self._notify, self._cancel, space=space, drafts=drafts)
            self._waiting.append(sequence)
            self._stir()
        return sequence

    def close(self) -> None:
        """Stop within one step, fail what is queued or running with EngineStoppedError, free the model. Idempotent."""
        if self._elsewhere:
            return
        with self._condition:
            self._closing = True
            self._interrupt()
            self._stir()
        if self._thread.ident is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    @property
    def _elsewhere(self) -> bool:
        """Whether this process was forked from the engine's: the thread is not here, and a lock may be held for ever."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._elsewhere:
            raise EngineStoppedError("the engine runs in the process that this one was forked from", backend=self._name)

    @property
    def active(self) -> int:
        """Sequences queued or running."""
        if self._elsewhere:
            return 0
        with self._condition:
            return len(self._waiting) + len(self._running)

    @property
    def backlog(self) -> tuple[int, int]:
        """What is ahead of a new job: prompt tokens to evaluate, and sequences that must end before it gets a seat."""
        if self._elsewhere:
            return 0, 0
        with self._condition:
            ahead = [*self._running, *self._waiting]
            tokens = sum(max(0, s.missing - 1) for s in ahead if not s.text.tokens)
            return tokens, max(0, len(ahead) + 1 - self.parallel)

    @property
    def failure(self) -> BaseException | None:
        """What crashed the engine."""
        return self._failure

    def peek(self, tokens: List[int], tenant: str | None) -> tuple[int, int, NearMiss | None]:
        """Tokens of a prompt that are there, those in host memory, and where it leaves what is kept. From any thread."""
        return (0, 0, None) if self._elsewhere else self._slots.peek(tokens, tenant)

    def report(self) -> dict[str, Any]:
        """Figures since the start: the prefix index, speculation, what was preempted. From any thread."""
        self._check_process()
        control = self._control
        stats = None if control is None else control.stats()
        return {"prefix": self._slots.stats(), "speculation": stats, "preempted": self._preempted}

    def _stopped(self) -> EngineStoppedError:
        why = "was closed" if self._failure is None else f"crashed: {self._failure!r}"
        error = EngineStoppedError(f"the engine {why}", backend=self._name)
        error.__cause__ = self._failure
        return error

    def _stir(self) -> None:
        self._stirs += 1
        self._condition.notify()

    def _notify(self) -> None:
        if self._elsewhere:
            return
        with self._condition:
            self._stir()

    def _cancel(self, sequence: Sequence) -> None:
        if self._elsewhere:
            return
        with self._condition:
            # Only a step that nobody needs any more is interrupted: others would lose their part in it.
            if sequence in self._stepping and all(s.cancelled for s in self._stepping):
                self._interrupt()
            self._stir()

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
            left = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for sequence in left:
            sequence.end([], self._stopped())
        self._release()

    def _release(self) -> None:
        try:
            if self._control is not None:
                self._control.stop()
        finally:
            self._runtime.close()

    def _turn(self) -> bool:
        """One step of everything that runs, or one wait. False: the engine is closed."""
        with self._condition:
            # Taken back before looking for what was cancelled: a cancellation from here on interrupts the step again.
            self._stepping = ()
            self._runtime.resume()
            if self._closing:
                return False
            seen = self._stirs
            gone = [s for s in self._waiting if s.cancelled]
            for sequence in gone:
                self._waiting.remove(sequence)
        for sequence in gone:
            self._stepper.end(sequence, learn=False)
            sequence.end([])
        for sequence in [s for s in self._running if s.cancelled]:
            self._abort(sequence, None)
        deadline = self._let_in()
        ready = [s for s in self._running if s.room]
        parts = self._stepper.parts(ready) if ready else []
        if parts:
            self._step(parts)
        else:
            with self._condition:
                if self._stirs == seen and not self._closing:
                    self._condition.wait(None if deadline is None else max(0.0, deadline - perf_counter()))
        return True

    def _let_in(self) -> float | None:
        """Give seats to those that wait. When to look again at the latest, if somebody waits for a paused one's seat."""
        while True:
            with self._condition:
                ready = next((s for s in self._waiting if s.room and not self._follows(s)), None)
            if ready is None:
                return None
            if len(self._running) >= self._seats:
                deadline = self._yield_seat()
                if deadline is not None:
                    return deadline
                if len(self._running) >= self._seats:
                    return None
            if not self._admit(ready):
                return None

    def _yield_seat(self) -> float | None:
        """Take the seat of a sequence whose reader has kept it waiting long enough; else when that will be, if ever."""
        now, first = perf_counter(), None
        for sequence in self._running:
            if sequence.room:
                sequence.paused_at = None
                continue
            sequence.paused_at = sequence.paused_at or now
            if sequence.paused_at + GRACE_S <= now:
                self._suspend(sequence)
                return None
            first = min(first or sequence.paused_at, sequence.paused_at)
        return None if first is None else first + GRACE_S

    def _follows(self, sequence: Sequence) -> bool:
        """Whether somebody is computing right now what this one begins with, so that waiting is cheaper than computing."""
        if sequence.space is None:
            return False
        if sequence.behind is not None:
            leader, shared = sequence.behind
            if leader in self._running and leader.lease is not None and leader.lease.known < shared and leader.missing > 1:
                return True
            sequence.behind = None
        for leader in self._running:
            lease = leader.lease
            if lease is not None and leader.writes and leader.space == sequence.space and leader.missing > 1:
                shared = min(shared_prefix(leader.tokens, sequence.tokens), len(sequence.tokens) - 1) // PAGE * PAGE
                if lease.known < shared and self.peek(sequence.tokens, sequence.job.namespace)[0] < shared:
                    sequence.behind = leader, shared
                    return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence a slot with what is there of its tokens; False: there is no room now."""
        slots = self._slots
        if sequence.blocked_at == slots.changes and self._running:
            return False
        start = perf_counter()
        spare = _SPARE * len(self._running)
        lease = slots.admit(sequence.tokens, sequence.space, spare=spare)
        if lease is None:
            if self._running:
                sequence.blocked_at = slots.changes
                return False
            with self._condition:
                self._waiting.remove(sequence)
            self._stepper.end(sequence, learn=False)
            sequence.end([], OutOfPagesError(f"no room for {len(sequence.tokens)} tokens", backend=self._name))
            return True
        sequence.lease, sequence.paused_at = lease, None
        failed: Exception | None = None
        if sequence.reused is None:
            sequence.reused = lease.held
            try:
                self._stepper.begin(sequence)
            except Exception as error:  # noqa: BLE001 - its grammar, its penalties
                failed = error
        sequence.busy_s += perf_counter() - start
        with self._condition:
            self._waiting.remove(sequence)
            self._running.append(sequence)
        if failed is not None:
            self._abort(sequence, self._typed(failed))
        return True

    def _suspend(self, sequence: Sequence) -> None:
        """Take a running sequence off its slot; it goes on later, with what is then left of its KV."""
        sequence.paused_at = None
        self._give_back(sequence)
        with self._condition:
            self._running.remove(sequence)
            self._waiting.appendleft(sequence)

    def _step(self, parts: list[Part]) -> None:
        """Evaluate, draw, and hand out what came of it."""
        start = perf_counter()
        parts = self._fit(parts)
        if not parts:
            return
        with self._condition:
            self._stepping = tuple(part.sequence for part in parts)
            if self._closing or all(s.cancelled for s in self._stepping):
                return
        try:
            rows = self._stepper.evaluate(parts)
        except (Interrupted, OutOfPagesError) as error:
            for part in parts:
                self._slots.sync(part.lease)
            self._share(parts, perf_counter() - start)  # it was busy with them, and evaluated nothing
            if isinstance(error, OutOfPagesError) and not self._slots.evict(sum(p.count for p in parts)):
                self._preempt(parts, error)
            if isinstance(error, OutOfPagesError):
                # The count of room was wrong: whoever is let in again at once takes what was just given up, for ever.
                self._seats = max(1, min(self._seats, len(self._running)))
            return
        drawn = self._stepper.draw(parts, rows)
        seconds = perf_counter() - start
        self._share(parts, seconds)
        total = sum(part.count for part in parts)
        for part in parts:
            if len(part.tokens) > 1:
                self.prefill_speed.add(len(part.tokens), seconds * part.count / total)
        self._stepper.settle(drawn, seconds)
        for result in drawn:
            self._conclude(result, seconds)

    def _fit(self, parts: list[Part]) -> list[Part]:
        """Make room for a step: by what is kept, then without drafts, then without the youngest."""
        while parts and not self._slots.make_room(sum(part.count for part in parts)):
            if any(part.drafts for part in parts):
                for part in parts:
                    part.clip(0)
                continue
            gone = self._preempt(parts, OutOfPagesError("no room for more tokens", backend=self._name))
            parts = [part for part in parts if part.sequence is not gone]
        return parts

    def _preempt(self, parts: List[Part], error: OutOfPagesError) -> Sequence:
        """Take the youngest off its slot; one that is alone has had all the room there is, and fails."""
        youngest = max(self._running, key=lambda s: (not s.room, s.number))
        if len(self._running) > 1:
            self._preempted += 1
            self._suspend(youngest)
            youngest.blocked_at = self._slots.changes
        else:
            self._abort(youngest, error)
        return youngest

    def _share(self, parts: List[Part], seconds: float) -> None:
        """Split a step's seconds by the tokens that it was to evaluate."""
        total = sum(part.count for part in parts)
        for part in parts:
            part.sequence.busy_s += seconds * part.count / total

    def _conclude(self, drawn: Drawn, seconds: float) -> None:
        """One sequence's end of a step: its KV cut to what counts, its text handed out."""
        part, sequence, settled = drawn.part, drawn.part.sequence, drawn.settled
        if drawn.error is not None:
            # A row that is no law: this prompt breaks the model, and what it left in the KV is worth nothing.
            spoilt = isinstance(drawn.error, ArithmeticError) and not isinstance(drawn.error, GrammarError)
            self._abort(sequence, self._typed(drawn.error), spoilt=spoilt)
            return
        if settled is None or len(part.tokens) > 1:
            self._prefilled(part)
        if settled is None:
            return
        self._slots.cut(part.lease, part.lease.held - len(part.drafts) + settled.accepted)
        if len(part.tokens) == 1:
            self.decode_speed.add(settled.taken, seconds)
        try:
            events = self._events(sequence, drawn.text, ends=settled.reason is not None)
        except Exception as error:  # noqa: BLE001 - its parser
            self._abort(sequence, self._typed(error))
            return
        if settled.reason is None:
            sequence.put(events)
        else:
            self._finish(sequence, events, settled.reason)

    def _events(self, sequence: Sequence, text: str, *, ends: bool) -> list[Event]:
        """What a reader is told now that there is more text, all of it where the answer ends."""
        parser = sequence.job.parser
        found: list[Event] = list(parser.push(text))
        if ends:
            found += [*parser.push(sequence.text.finish()), *parser.finish()]
        return [*self._stepper.verified(sequence), *found, *sequence.scored()]

    def _typed(self, error: Exception) -> BackendError:
        """What the reader of a request is raised that failed by its own data: it would again."""
        name = self._name
        if isinstance(error, GrammarError):
            found: BackendError = UnsupportedParameterError(f"response_format: {error}", backend=name, retryable=False)
        else:
            text = str(error) if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {error}"
            found = ServerError(text, backend=name, retryable=False)
        found.__cause__ = error
        return found

    def _prefilled(self, part: Part) -> None:
        """Let others share what there is of a prompt."""
        sequence, lease = part.sequence, part.lease
        if not sequence.writes:
            return
        if self._runtime.info.rewinds:
            self._slots.keep(lease, sequence.tokens[: lease.held])
        elif lease.held == (len(sequence.job.prompt) - 1) // PAGE * PAGE:
            sequence.kept = self._slots.checkpoint(lease, sequence.tokens[: lease.held])

    def _finish(self, sequence: Sequence, events: list[Event], reason: str) -> None:
        job, start = sequence.job, perf_counter()
        del sequence.tokens[len(job.prompt) + sequence.text.tokens :]  # nothing of a stop string is kept
        self._leave(sequence)
        self._stepper.end(sequence, learn=True)
        if job.session is not None and job.keep_s > 0 and sequence.writes:
            self._slots.pin((sequence.space, job.session), sequence.tokens, sequence.space, monotonic() + job.keep_s)
        self.answer_length.add(sequence.text.tokens, 1)
        sequence.busy_s += perf_counter() - start
        usage = sequence.counted(sequence.kept)
        if job.parser.calls and reason == "stop":
            reason = "tool_calls"
        finished = Finished(reason=reason, busy_s=sequence.busy_s, warnings=job.warnings)
        sequence.end([*events, UsageReported(usage), finished])

    def _abort(self, sequence: Sequence, error: Exception | None, *, spoilt: bool = False) -> None:
        """End a sequence before its time. What it generated is not kept; what it evaluated of its prompt is."""
        del sequence.tokens[0 if spoilt else len(sequence.job.prompt) :]
        self._leave(sequence)
        self._stepper.end(sequence, learn=False)
        sequence.end([], error)

    def _leave(self, sequence: Sequence) -> None:
        """Give the seat and the slot back."""
        self._give_back(sequence)
        self._seats = self.parallel
        with self._condition:
            if sequence in self._running:
                self._running.remove(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """The slot; what of the prompt was read, and what of it stays in the KV, is noted."""
        lease, sequence.lease = sequence.lease, None
        if lease is not None:
            sequence.read = max(sequence.read, lease.held)
            tokens = sequence.tokens if sequence.writes else sequence.tokens[: sequence.reused]
            stays = self._slots.release(lease, tokens)
            sequence.kept = stays if self._runtime.info.rewinds else max(stays, sequence.kept)
