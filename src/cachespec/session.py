"""A conversation: an append-only history in memory, on one backend as long as that one is there.

Nothing is stored anywhere else. The history only ever grows at its end, so each request extends the prefix of the one
before it, and what is cached stays of use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from cachespec.choices import check_tool_choice, parse_tool_choice
from cachespec.errors import InputError, StreamStateError
from cachespec.events import Completion, Event
from cachespec.messages import Message, MessageInput, SystemInput, ToolInput
from cachespec.request import Request, build_request
from cachespec.signatures import takes
from cachespec.usage import Usage, exact, money_text
from cachespec.why import Why, why

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cachespec.client import Client
    from cachespec.decision import Decision
    from cachespec.stream import ResponseStream


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTurn:
    """What the cache did for one turn of a session, against the turn before it. Tokens; None where nobody reported.

    Attributes:
        turn: counted from 0.
        expected_read: what the decision expected to be read; `read` and `written` are the vendor's counts.
        reusable: tokens of the turn before, all of which a cache could have had.
        lost: of those, what was not read.
        why: where this turn's prompt parts from the last one's (`cachespec.why`), with the vendor's reason where it was asked.
        price: what the loss cost, in USD: those tokens at the price they were billed at, less the price of reading them.
    """

    turn: int
    backend: str
    model: str
    expected_read: int | None
    read: int | None
    written: int | None
    reusable: int | None
    lost: int | None
    why: Why | None
    price: Decimal | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "backend": self.backend,
            "model": self.model,
            "expected_read": self.expected_read,
            "read": self.read,
            "written": self.written,
            "reusable": self.reusable,
            "lost": self.lost,
            "why": None if self.why is None else self.why.to_dict(),
            "price": money_text(self.price),
        }


class Session:
    """Keeps the history of one conversation. One turn at a time; a turn that fails or is left changes nothing.

    ``session.messages`` is the history so far; given to `Client.session` it goes on from there. Tool results are sent as the
    next turn's messages. System prompt, tools and tenant are the session's: they stand before every turn.
    """

    def __init__(
        self,
        client: Client,
        *,
        messages: Sequence[MessageInput] | None,
        system: SystemInput | None,
        tools: Sequence[ToolInput] | None,
        model: str | None,
        tenant: str | None,
        session_id: str,
        tags: Sequence[str] | None,
    ) -> None:
        self.session_id = session_id
        self._client = client
        self._own = build_request(
            messages or "-",
            system=system,
            tools=tools,
            model=model,
            tenant=tenant,
            session_id=session_id,
            tags=tags,
            memory=client._memory,
        )
        self._messages: tuple[Message, ...] = tuple(self._own.messages) if messages else ()
        self._busy = False
        self._turns: list[tuple[Request, Completion]] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history: every finished turn's messages and answer."""
        return self._messages

    def cache_report(self) -> tuple[CacheTurn, ...]:
        """What the cache did for each turn, and where one turn's prompt parted from the last one's."""
        return tuple(self._report(i) for i in range(len(self._turns)))

    def _report(self, i: int) -> CacheTurn:
        request, done = self._turns[i]
        usage, offer = done.usage, next((c for c in done.decision.candidates if c.backend == done.backend), None)
        read, written = (None, None) if usage is None else (usage.cache_read, usage.written)
        reusable = lost = None
        found, price = None, None
        if i > 0:
            earlier, before = self._turns[i - 1]
            said = done.cache_diagnosis
            reason = None if said is None else said.reason
            found = why(earlier, request, vendor_reason=reason)
            same = before.backend == done.backend
            reusable = before.usage.input_tokens if same and before.usage is not None else None if same else 0
            lost = None if reusable is None or read is None else max(reusable - read, 0)
            price = self._price(done, lost)
        return CacheTurn(
            turn=i,
            backend=done.backend,
            model=done.model,
            expected_read=None if offer is None else offer.tokens.cache_read,
            read=read,
            written=written,
            reusable=reusable,
            lost=lost,
            why=found,
            price=price,
        )

    def _price(self, done: Completion, lost: int | None) -> Decimal | None:
        """What `lost` tokens cost beyond reading them: they were written anew as far as anything was, else just read in."""
        backend, usage = self._client.backends.get(done.backend), done.usage
        rates = None if backend is None else backend.rates
        if rates is None or usage is None or lost is None or backend is None or backend.capabilities.local:
            return None
        writes = {ttl: n for ttl, n in (usage.cache_write or {}).items() if n}
        written = min(lost, sum(writes.values()))
        dearest = max(writes, key=lambda ttl: writes[ttl]) if writes else None
        paid = Usage(uncached=lost - written, cache_read=0, cache_write={} if dearest is None else {dearest: written}, output=0)
        read = Usage(uncached=0, cache_read=lost, cache_write={}, output=0)
        amounts = [rates.cost(u, busy_s=None, billing=None).amount for u in (paid, read)]
        if amounts[0] is None or amounts[1] is None:
            return None
        with exact():
            return amounts[0] - amounts[1]

    def stream(
        self,
        turn: str | Sequence[MessageInput],
        *,
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
        tags: Sequence[str] | None = None,
        timeout: float | str | None = None,
        cache: Literal["auto", "off", "no-write"] = "auto",
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> SessionStream:
        """The next turn: a user's text, or messages (tool results, several parts). Read to its end it joins the history.

        The other arguments are those of `Client.stream`, for this turn: `model` instead of the session's, `tags` beside the
        session's. Raises InputError, naming the field.
        """
        own = self._own  # read once
        choice = parse_tool_choice(tool_choice)
        check_tool_choice(choice, own.tools)
        new = build_request(
            turn,
            response_format=response_format,
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            seed=seed,
            reasoning=reasoning,
            model=own.model if model is None else model,
            tenant=own.tenant,
            session_id=self.session_id,
            tags=tags,
            timeout=timeout,
            cache=cache,
            extra=extra,
            memory=self._client._memory,
        )
        new = replace(
            new,
            system=(*own.system, *new.system) if new.system else own.system,
            tools=own.tools,
            tool_choice=choice,
            tags=tuple(dict.fromkeys((*own.tags, *new.tags))),
        )
        return SessionStream(self, new)

    @takes(stream)
    async def complete(self, *args: Any, **kwargs: Any) -> Completion:
        """The next turn's finished answer. Takes what `stream` takes."""
        async with self.stream(*args, **kwargs) as stream:
            return await stream.get_final_completion()

    def _in_place(self, new: Request) -> Request:
        """System messages of a later turn stay where they are: in front of the others they would move the prefix."""
        own = len(self._own.system)
        if not self._messages or len(new.system) == own:
            return new
        late = Message(role="system", parts=new.system[own:])
        return replace(new, system=new.system[:own], messages=(late, *new.messages))


class SessionStream:
    """A `ResponseStream` whose finished turn is added to its session's history."""

    def __init__(self, session: Session, new: Request) -> None:
        self._session, self._new = session, new
        self._stream: ResponseStream | None = None
        self._over = False

    async def __aenter__(self) -> Self:
        session = self._session
        if self._stream is not None:
            raise StreamStateError("a stream can be entered once")
        if session._busy:
            raise StreamStateError("a session takes one turn at a time")
        if not self._new.messages:
            raise InputError("a turn needs a message that is not a system message", field="turn")
        request = self._new = session._in_place(self._new)
        request = replace(request, messages=(*session._messages, *request.messages))
        stream = session._client.stream_request(request)
        session._busy = True
        try:
            await stream.__aenter__()
        except BaseException:
            session._busy = False
            raise
        self._stream = stream
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is None or self._over:
            return
        self._over = True  # leaving a second time must not add the turn again, nor end the next one
        try:
            await self._stream.__aexit__(kind, error, traceback)
        finally:
            done = self._stream.completion
            if done is not None:
                session = self._session
                sent = replace(self._new, messages=(*session._messages, *self._new.messages))
                session._turns.append((sent, done))
                session._messages = (*sent.messages, done.message)
            self._session._busy = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._open.__aiter__()

    @property
    def _open(self) -> ResponseStream:
        if self._stream is None:
            raise StreamStateError("enter the stream first: async with session.stream(...) as stream")
        return self._stream

    @property
    def text_stream(self) -> AsyncIterator[str]:
        """Only the text of the answer, piece by piece."""
        return self._open.text_stream

    @property
    def decision(self) -> Decision:
        """Why this backend."""
        return self._open.decision

    async def get_final_completion(self) -> Completion:
        """Read what is left and return the finished answer."""
        return await self._open.get_final_completion()

    async def get_final_text(self) -> str:
        """Read what is left and return the text of the answer."""
        return await self._open.get_final_text()

    @property
    def completion(self) -> Completion | None:
        """The finished answer; None while the stream is not read to its end."""
        return None if self._stream is None else self._stream.completion

    @property
    def request_id(self) -> str | None:
        """The backend's id of the request; None where it gave none, yet."""
        return None if self._stream is None else self._stream.request_id

    async def aclose(self) -> None:
        """Stop now, as leaving the ``async with`` block does."""
        await self.__aexit__(None, None, None)
