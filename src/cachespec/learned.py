"""What a client learned from its own traffic, for quotes: tokens by model, lengths by class, speeds and health by backend.

One object for a client. It is asked in every decision, so it does no I/O, and told when an answer ended. What it knows is JSON
that the ledger keeps, so that a restart forgets nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

from cachespec.decision import Ask, Latency, TokenEstimate
from cachespec.health import Health
from cachespec.outputs import OutputLengths
from cachespec.pieces import listed
from cachespec.speeds import HIGH, MEASURED, SpeedModel, Work
from cachespec.tokens import Sizes, TokenModel
from cachespec.turns import Turns
from cachespec.usage import Usage

_Place: TypeAlias = tuple[str, str]
"""A backend's name, and what it stands for."""

_VERSION = 3
_MODELS = 1_000  # models and backends kept; a client has a handful
_LARGEST = 10_000_000  # tokens that no prompt and no answer passes
_OVERHEAD = 4_096  # tokens that a vendor may count beyond what was sent or asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that was read to its end: what was asked, what was used, how long it took.

    `target` is what the backend's name stood for when it was asked (`generations.target_of`). `model` names the tokenizer
    (provider and model); `sizes` is None where the backend counts exactly. `own` is what the backend had said about its time,
    for an answer of `own_output` tokens, when it knows it itself. `load`: other requests it had under way at the start.
    `most_input` and `most_output` are bounds of what the request can have used, where there are.
    """

    ask: Ask
    backend: str
    model: str
    sizes: Sizes | None
    usage: Usage | None
    own: Latency | None
    own_output: int | None
    load: int
    ttft_ms: float | None
    total_ms: float
    most_input: int | None = None
    most_output: int | None = None
    target: str = ""

    @property
    def believable(self) -> bool:
        """Whether the counts can be true: one of a million million tokens would be remembered long after the fault."""
        usage = self.usage
        return usage is None or (
            (usage.input_tokens or 0) <= _reach(self.most_input) and (usage.output or 0) <= _reach(self.most_output)
        )


class Learned:
    """See the module's docstring. Used by the tasks of one event loop."""

    def __init__(self) -> None:
        self.outputs = OutputLengths()
        self.turns = Turns()
        self.health = Health()
        self.answers = 0
        """Answers that it was told of: what was saved at one count need not be saved again at the same."""
        self._tokens: dict[str, TokenModel] = {}
        self._speeds: dict[_Place, SpeedModel] = {}  # the one that was heard of last at the end
        self._unmeasured = SpeedModel()

    def tokens(self, model: str) -> TokenModel:
        """The token densities of a model: ``provider:model``."""
        found = self._tokens.get(model)
        if found is None:
            found = TokenModel()
            if len(self._tokens) < _MODELS:
                self._tokens[model] = found
        return found

    def output_expected(self, ask: Ask) -> int | None:
        """Expected output tokens; None while nothing is known."""
        expected = self.outputs.expected(ask)
        return None if expected is None else round(expected)

    def latency(
        self, backend: str, assumed: Latency, tokens: TokenEstimate, *, local: bool, now: float, target: str = ""
    ) -> Latency:
        """The expected times of an offer: a backend's own estimate, or the prior, corrected by how long answers took.

        Speeds are those of what its name stands for, `target`: another model's are not its own, over restarts and reloads.
        A local backend that cannot say (a server on one's own machine) has no prior either: it is measured, or not known.
        """
        own = own_latency(assumed, local=local)
        model = self._speeds.get((backend, target))
        if local and (model is None or model.own != _basis(own)):
            return assumed
        model = model or self._unmeasured
        load = self.health.load(backend)
        work = _work(tokens.uncached, tokens.cache_read, tokens.cache_write, tokens.output_expected, own, load)
        speed = model.speed(work, now=now)
        if not speed.measured:
            if local and own is None:
                return assumed
            detail = assumed.detail
            if speed.answers >= MEASURED and own is None:
                detail = "its last answer is too long ago"
            elif 0 < speed.answers < MEASURED:
                detail = f"{speed.answers} of {MEASURED} answers that make a measurement"
            return Latency(
                ttft_ms=speed.ttft_ms,
                total_ms=speed.total_ms,
                evidence=assumed.evidence,
                ttft_high_ms=assumed.ttft_high_ms,
                total_high_ms=assumed.total_high_ms,
                detail=detail,
            )
        return Latency(
            ttft_ms=speed.ttft_ms,
            total_ms=speed.total_ms,
            evidence="measured",
            ttft_high_ms=speed.ttft_high_ms,
            total_high_ms=speed.total_high_ms,
            detail=f"{speed.answers} answers; {HIGH:.0%} came by the high figures",
        )

    def answered(self, answer: Answer, *, now: float) -> None:
        """Take up an answer. What was not counted, or cannot be so, teaches no counts, and what was not timed no times."""
        usage = answer.usage
        if usage is None or not answer.believable:
            return
        self.answers += 1
        if answer.sizes is not None and usage.input_tokens is not None:
            self.tokens(answer.model).learn(answer.sizes, usage.input_tokens)
        self.turns.learn(answer.ask, backend=answer.backend, tokens=usage.input_tokens)
        if usage.output is not None:
            self.outputs.learn(answer.ask, usage.output)
        own = _for_length(answer.own, answer.own_output, usage.output)
        place = answer.backend, answer.target
        model = self._speeds.pop(place, None)
        if model is None or model.own != _basis(own):
            model = SpeedModel(own=_basis(own))
        self._speeds[place] = model
        if len(self._speeds) > _MODELS:
            del self._speeds[next(iter(self._speeds))]
        work = _work(usage.uncached, usage.cache_read, usage.written, usage.output, own, answer.load)
        model.learn(work, ttft_ms=answer.ttft_ms, total_ms=answer.total_ms, now=now)

    def forget(self, backend: str) -> None:
        """Another server, account or model answers by this name now: how it is, is not known."""
        self.health.forget(backend)

    def dump(self) -> bytes:
        """What was learned, for `load`; health is not: it is of the moment. All of it is finite: see `load`."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """`dump` in pieces (`cachespec.pieces`)."""
        tokens = listed([name, model.to_dict()] for name, model in list(self._tokens.items()) if model.seen)
        speeds = listed([*place, model.own, model.to_dict()] for place, model in list(self._speeds.items()))
        yield f"[{_VERSION}".encode()
        for part in (tokens, self.outputs.pieces(), self.turns.pieces(), speeds):
            yield b","
            for text in part:
                yield text.encode()
        yield b"]"

    def load(self, data: bytes) -> None:
        """Take up what `dump` gave; what cannot be read, or no answers could have taught, is left aside."""
        try:
            version, tokens, outputs, turns, speeds = json.loads(data, parse_constant=_no_number)
            if version != _VERSION:
                return
            models = {str(name): TokenModel.from_dict(facts) for name, facts in tokens}
            lengths, follow, measured = OutputLengths.from_list(outputs), Turns.from_list(turns), {}
            for name, target, own, facts in speeds:
                model = measured[str(name), str(target)] = SpeedModel(own=None if own is None else str(own))
                model.load(facts)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return
        self._tokens, self.outputs, self.turns = models, lengths, follow
        self._speeds |= measured


def _reach(bound: int | None) -> int:
    """The largest count that may be true: bounds are the vendor's word too, and some add a prompt of their own."""
    return _LARGEST if bound is None else min(_LARGEST, 2 * bound + _OVERHEAD)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def own_latency(assumed: Latency, *, local: bool) -> Latency | None:
    """What a backend says of its own speed: a local engine knows it; of others there is only a prior."""
    return assumed if local and assumed.ttft_ms is not None and assumed.total_ms is not None else None


def _basis(own: Latency | None) -> str | None:
    """What corrections of a backend's own figures refer to: to its assumptions, which it gives up once it has timed itself, or
    to its measurements."""
    return None if own is None else own.evidence


def _for_length(own: Latency | None, expected: int | None, output: int | None) -> Latency | None:
    """What a backend said of its time, for the answer that came: a longer one than expected does not make it slow."""
    if own is None or own.ttft_ms is None or own.total_ms is None or not expected or output is None:
        return own
    return replace(own, total_ms=own.ttft_ms + (own.total_ms - own.ttft_ms) * output / expected)


def _work(
    uncached: int | None, read: int | None, written: int | None, output: int | None, own: Latency | None, load: int
) -> Work:
    first = 0.0 if own is None else own.ttft_ms or 0.0
    total = 0.0 if own is None else own.total_ms or 0.0
    return Work(
        uncached=(uncached or 0) + (written or 0),
        cached=read or 0,
        output=output or 0,
        load=load,
        own_first_ms=first,
        own_rest_ms=max(total - first, 0.0),
    )
