"""The client: the only orchestration. It sequences what others decide and do.

``connect()`` reads a configuration, loads what has to be loaded and gives a `Client`; ``Client(...)`` is the same without a
file. One client serves any number of tasks, on asyncio and trio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

import anyio
import anyio.lowlevel
import anyio.to_thread

from cachespec.affinity import Sessions
from cachespec.backends.base import Backend, Wire
from cachespec.background import Background
from cachespec.call import ClientCall
from cachespec.clock import Clock, SystemClock
from cachespec.config import Config, load_config
from cachespec.decide import Asked, Verdict, route_error
from cachespec.decision import Decision
from cachespec.errors import InputError, StreamStateError
from cachespec.events import Completion
from cachespec.generations import FileWatch, Retired, close_backend, generation, read_again, replaced, start_backend
from cachespec.keepalive import KeepAlives, Prewarmed
from cachespec.learned import Learned
from cachespec.leases import Leases
from cachespec.ledger.base import Ledger
from cachespec.messages import MessageInput, SystemInput, ToolInput
from cachespec.middleware import Chain, Middleware
from cachespec.request import Memory, Request, build_request
from cachespec.session import Session
from cachespec.signatures import takes
from cachespec.stream import ResponseStream
from cachespec.telemetry import Hook, Reloaded, ReloadRefused, Telemetry

if TYPE_CHECKING:
    from cachespec.registry import Wired

LOOK_S = 1.0  # seconds between two looks at a watched file


class Client:
    """Decides per request which backend answers, streams the answer, and accounts for it.

    Args:
        backends: by name; each a `Backend`, or a table as in the file (``{"use": "anthropic", "model": ...}``).
        models: aliases: which backends are interchangeable under a name.
        policies: as the file's ``[policies]`` table; ``routing`` may also be an object with a `rank` method.
        ledger: a `Ledger`, or a table as in the file; None keeps the sums in memory.
        model: the default alias or backend.
        timeout: for all attempts of a request together; seconds or text like ``"30s"``.
        max_output_tokens: when a request names none.
        on_unsupported: ``"error"`` takes a backend that cannot honour a parameter out; ``"drop"`` drops the parameter.
        secret: what the cache keys of tenants are made with, the same for all processes that should share them; None leaves it
            to the ledger.
        middleware, hooks: see `cachespec.middleware` and `cachespec.telemetry`.

    Raises: ConfigError and UnknownPluginError for wrong wiring, when it is wired.
    """

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend | Mapping[str, Any]],
        models: Mapping[str, Sequence[str]] | None = None,
        policies: Mapping[str, Any] | None = None,
        ledger: Ledger | Mapping[str, Any] | None = None,
        model: str | None = None,
        timeout: float | str = 600.0,
        max_output_tokens: int = 4096,
        on_unsupported: Literal["error", "drop"] = "error",
        secret: str | None = None,
        middleware: Sequence[Middleware] = (),
        hooks: Sequence[Hook] = (),
        clock: Clock | None = None,
    ) -> None:
        from cachespec.registry import wire

        wired = wire(
            backends=backends,
            models=models,
            policies=policies,
            ledger=ledger,
            model=model,
            timeout=timeout,
            max_output_tokens=max_output_tokens,
            on_unsupported=on_unsupported,
            secret=secret,
        )
        self._setup(wired, middleware=middleware, hooks=hooks, clock=clock)

    def _setup(
        self,
        wired: Wired,
        *,
        middleware: Sequence[Middleware],
        hooks: Sequence[Hook],
        clock: Clock | None,
        watch: bool = False,
    ) -> None:
        self._middleware, self._telemetry = Chain(middleware), Telemetry(hooks)
        self._learned = Learned()
        self._clock = clock or SystemClock()
        self._background = Background(self._clock)
        self._now = generation(wired, learned=self._learned, telemetry=self._telemetry, background=self._background)
        self.ledger = wired.ledger
        self._leases = Leases(self.ledger, self._background, self._clock)
        self._keepalives = KeepAlives(self.ledger, self._background, self._clock, self._telemetry, self._in_use)
        path, text = wired.config.path, wired.config.text
        self._watch = FileWatch(path, text) if watch and path is not None else None
        self._memory = Memory()
        self._sessions = Sessions()
        self._streams: set[ResponseStream] = set()
        self._retired = Retired(self._background, self._clock, self._streams)
        self._started = False
        self._loop: anyio.lowlevel.EventLoopToken | None = None
        self._starting: anyio.Lock | None = None
        self._closed = False

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The backends of the current generation, by name."""
        return self._now.backends

    def _in_use(self, backend: Backend) -> bool:
        return self.backends.get(backend.name) is backend

    @property
    def config(self) -> Config:
        """The configuration of the current generation."""
        return self._now.config

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        middleware: Sequence[Middleware] = (),
        hooks: Sequence[Hook] = (),
        clock: Clock | None = None,
        watch: bool = False,
    ) -> Client:
        """A client for a loaded configuration; `start` loads its local models. With `watch` it follows the file."""
        from cachespec.registry import build

        client = cls.__new__(cls)
        client._setup(build(config), middleware=middleware, hooks=hooks, clock=clock, watch=watch)
        return client

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start every backend (local models load here). Called by ``async with`` and by the first stream otherwise."""
        self._check_open()
        loop = anyio.lowlevel.current_token()
        if self._loop is None:
            self._loop = loop
        elif self._loop != loop:
            raise StreamStateError("a client belongs to the event loop it was first used in; make one for each")
        if self._started:
            return
        if self._starting is None:
            self._starting = anyio.Lock()
        async with self._starting:
            if not self._started:
                for name, backend in self.backends.items():
                    await start_backend(self._now, name)
                    if self._closed:  # meanwhile: what was started after that nobody else closes
                        await close_backend(backend)
                        raise StreamStateError("the client is closed")
                await self._now.caching.restore(self.ledger, self._clock.time())
                self._started = True
                self._look_again()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamStateError("the client is closed")

    async def aclose(self) -> None:
        """Settle what is open, then release every backend and the ledger. Idempotent.

        Whoever still reads a stream gets StreamStateError.
        """
        if self._closed:
            return
        self._closed = True
        failures: list[Exception] = []
        with anyio.CancelScope(shield=True):
            await self._background.aclose()
            for stream in list(self._streams):
                await stream.aclose()
            if self._started:
                await self._now.caching.save(self.ledger, self._clock.time(), at_once=True)
            parts: list[Backend | Ledger] = [*self._retired.backends, *self.backends.values(), self.ledger]
            for part in parts:
                try:
                    await part.aclose()
                except Exception as error:  # noqa: BLE001 - one that fails to close must not keep the others open
                    failures.append(error)
        if failures:
            raise failures[0]

    async def reload(self, config: Config | None = None) -> int:
        """Take up a changed configuration; return its generation.

        Without `config` the file that this one came from is read again. What did not change goes on as it is; requests that
        are under way end under the generation they began with. Raises what loading, making and starting raise (ConfigError
        and its kin, naming file, line and key); then nothing has changed.
        """
        await self.start()
        if self._starting is None:  # pragma: no cover - `start` made it
            raise StreamStateError("the client is not started")
        async with self._starting:
            before = self._now
            number = before.config.generation + 1
            if config is None:
                config = await anyio.to_thread.run_sync(read_again, before.config.path, number, abandon_on_cancel=True)
            from cachespec.registry import rebuild

            wired = rebuild(replace(config, generation=number), before.wired)
            new = [name for name, backend in wired.backends.items() if before.backends.get(name) is not backend]
            try:
                now = generation(wired, learned=self._learned, telemetry=self._telemetry, before=before)
                for name in new:
                    await start_backend(now, name)
                if now.caching is not before.caching:
                    await before.caching.save(self.ledger, self._clock.time(), at_once=True)
                    await now.caching.restore(self.ledger, self._clock.time(), policy_only=True)
                self._check_open()
            except BaseException:
                for name in new:
                    await close_backend(wired.backends[name])
                raise
            self._now = now
            for name in replaced(now, before):
                self._learned.forget(name)
                self._sessions.forget_answers(name)
            self._retired.add([b for b in before.backends.values() if now.backends.get(b.name) is not b])
        self._telemetry.tell(Reloaded(generation=number, path=now.config.path))
        return number

    def _look_again(self) -> None:
        """Look at the configuration's file now and then, if it is watched."""
        watch = self._watch
        if watch is None:
            return

        async def look() -> None:
            try:
                if await anyio.to_thread.run_sync(watch.changed, abandon_on_cancel=True):
                    await self.reload()
            except Exception as error:  # noqa: BLE001 - a bad file changes nothing, whatever is wrong with it
                if not self._closed:
                    number = self.config.generation
                    self._telemetry.tell(ReloadRefused(generation=number, path=watch.path, error=error))
            finally:
                self._look_again()

        self._background.at(self._clock.time() + LOOK_S, "look", look)

    def stream(
        self,
        prompt: str | Sequence[MessageInput] | None = None,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        reasoning: str | Mapping[str, Any] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
        timeout: float | str | None = None,
        cache: Literal["auto", "off", "no-write"] = "auto",
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> ResponseStream:
        """A stream that starts when it is entered: ``async with client.stream("Hi") as stream``.

        Arguments are those of DESIGN section 3: a prompt or `messages`, and what limits and shapes the answer.
        Raises InputError, naming the field, before anything is sent. Entering raises what deciding and opening raise:
        `NoRouteError`, `BudgetExceededError`, `BackendError` and their kinds.
        """
        return self.stream_request(
            build_request(
                prompt,
                messages=messages,
                system=system,
                tools=tools,
                tool_choice=tool_choice,
                response_format=response_format,
                max_output_tokens=max_output_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                stop=stop,
                seed=seed,
                reasoning=reasoning,
                model=model,
                tenant=tenant,
                session_id=session_id,
                tags=tags,
                timeout=timeout,
                cache=cache,
                extra=extra,
                memory=self._memory,
            )
        )

    @takes(stream)
    async def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """The finished answer. Takes what `stream` takes and raises what it raises, and what reading to the end raises."""
        async with self.stream(*args, **kwargs) as stream:
            return await stream.get_final_completion()

    def plan(
        self,
        prompt: str | Sequence[MessageInput] | None = None,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: str | Mapping[str, Any] | type | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        reasoning: str | Mapping[str, Any] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
        timeout: float | str | None = None,
        cache: Literal["auto", "off", "no-write"] = "auto",
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Decision:
        """What `stream` would decide for the same arguments, now. Sends nothing, spends nothing, waits for nothing.

        A request that nobody can take gives a decision whose `chosen` is None, with the reasons by candidate.
        """
        request = build_request(
            prompt,
            messages=messages,
            system=system,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            seed=seed,
            reasoning=reasoning,
            model=model,
            tenant=tenant,
            session_id=session_id,
            tags=tags,
            timeout=timeout,
            cache=cache,
            extra=extra,
            memory=self._memory,
        )
        return self.plan_request(request).decision

    async def prewarm(
        self,
        prompt: str | Sequence[MessageInput] | None = None,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Prewarmed:
        """Have a vendor cache what the coming requests share, before the first of them: tools, system, documents.

        Give it what they have in common, as `stream` takes it; the newest message, where one is given, is not part of it. A
        real request that generates nothing is sent to the backend that would be chosen, where its model has such a request,
        the prefix is cold, and the caching policy expects it to be read again; it goes through the ledger. Otherwise nothing is
        sent, and the answer says why. Raises what `stream` raises when it is entered.
        """
        await self.start()
        request = build_request(
            prompt if prompt is not None or messages is not None else ".",
            messages=messages,
            system=system,
            tools=tools,
            model=model,
            tenant=tenant,
            session_id=session_id,
            tags=tags,
            extra=extra,
            memory=self._memory,
        )
        asked, now = self._ask(request), self._now
        await now.decider.refresh(asked)
        verdict = now.decider.decide(asked)
        if verdict.planned is None:
            raise route_error(verdict)
        return await self._keepalives.prewarm(asked, verdict.planned, now.backends[verdict.planned.backend], now.caching)

    def session(
        self,
        *,
        messages: Sequence[MessageInput] | None = None,
        system: SystemInput | None = None,
        tools: Sequence[ToolInput] | None = None,
        model: str | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> Session:
        """A conversation with an append-only history in memory, which begins with `messages` where it is one that went on
        before; its id keeps it on one backend. See `Session`. Raises InputError, naming the field."""
        return Session(
            self,
            messages=messages,
            system=system,
            tools=tools,
            model=model,
            tenant=tenant,
            session_id=session_id or uuid4().hex,
            tags=tags,
        )

    def stream_request(self, request: Request) -> ResponseStream:
        """`stream` for a request that is built already (`build_request`, `request_from_body`)."""
        self._check_open()
        request = self._middleware.request(request)
        call = ClientCall(
            lambda: self._ask(request),
            lambda: self._now,
            ledger=self.ledger,
            leases=self._leases,
            learned=self._learned,
            keepalives=self._keepalives,
            telemetry=self._telemetry,
            middleware=self._middleware,
            clock=self._clock,
            start=self.start,
            sessions=self._sessions,
        )
        return ResponseStream(call, opened=self._streams)

    def plan_request(self, request: Request) -> Verdict:
        """`plan` for a request that is built already: the decision, and the request as the chosen backend would get it."""
        return self._now.decider.foresee(self._ask(self._middleware.request(request)))

    async def refresh(self, request: Request) -> None:
        """Read, from the ledger, the budgets this request falls under, so that `plan` shows what others spent, too."""
        await self._now.decider.refresh(self._ask(self._middleware.request(request)))

    def wire(self, verdict: Verdict) -> Wire | None:
        """The exact bytes that would be sent for a verdict; None for a local backend or when nobody was chosen.

        Raises InputError where a reload has taken the chosen backend out since.
        """
        plan = verdict.decision.plan
        if plan is None:
            return None
        backend = self.backends.get(plan.backend)
        if backend is None:
            which = f"generation {verdict.decision.generation}, and its backend {plan.backend!r} is gone"
            raise InputError(f"was decided under {which}; plan again", field="verdict")
        return backend.wire(verdict.request, plan)

    def _ask(self, request: Request) -> Asked:
        timeout = request.timeout if request.timeout is not None else self.config.timeout
        resumed = self._sessions.resume(self._memory.known(request), among=self.backends)
        return self._now.decider.ask(
            resumed.request,
            now=self._clock.time(),
            timeout_s=timeout,
            previous_backend=resumed.previous_backend,
            tool_loop=resumed.tool_loop,
            previous_response=resumed.previous_response,
            holder=resumed.holder,
            changed=resumed.changed,
        )


class Connection:
    """What `connect` returns: ``async with`` gives the client, started; leaving closes it."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self.make = make
        self._client: Client | None = None

    async def __aenter__(self) -> Client:
        if self._client is not None:
            raise StreamStateError("a connection can be entered once")
        self._client = self.make()
        return await self._client.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()


def connect(
    path: str | Path | None = None,
    *,
    middleware: Sequence[Middleware] = (),
    hooks: Sequence[Hook] = (),
    watch: bool = True,
) -> Connection:
    """A client from a configuration file; without one, from whatever keys the environment has and a local model.

    ``async with cachespec.connect("cachespec.toml") as client``. The file is read when it is entered; local models load
    then, too. With `watch` the client follows the file: a change is taken up within seconds, a bad one is told and changes
    nothing (`Client.reload`). Raises ConfigError (with file, line and key), UnknownPluginError, MissingDependencyError.
    """

    def make() -> Client:
        from cachespec.config import auto_config

        config = auto_config() if path is None else load_config(path)
        return Client.from_config(config, middleware=middleware, hooks=hooks, watch=watch)

    return Connection(make)
