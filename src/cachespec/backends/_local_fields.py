"""What a request may ask of a local engine beside the neutral arguments: the fields of ``extra = {backend: {...}}``.

A given Chat body says some of them in its own way; what else only its vendor knows is left out, and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from cachespec.backends._forcing import Forcing
from cachespec.checks import check_bool, check_int, check_keys, check_mapping, check_number
from cachespec.engine.processors import NOTHING, Processing
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling
from cachespec.errors import InputError
from cachespec.messages import ImagePart, Part, ToolResultPart
from cachespec.request import Request
from cachespec.shown import shown

FIELDS: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs")
"""Fields of `extra` that local backends take."""
MOST_LOGPROBS: Final = 20
_DIGITS: Final = 9  # of a token's id, at most
_PENALTIES: Final = FIELDS[:3]
_CHAT: Final = ("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs")


class Tokens:
    """A runtime's tokens by their text. The whole vocabulary is looked through only for what is not written the usual way."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.size = runtime.info.vocab

    def find(self, text: str) -> int | None:
        """The token that stands for exactly this text, or the control token of this name; None: there is none.

        The empty text is that of every control token, and stands for none.
        """
        if not text:
            return None
        control = self._runtime.info.controls.get(text)
        if control is not None:
            return control
        try:
            data = text.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            return None
        usual = self._runtime.tokenize(text, special=False)
        if len(usual) == 1 and self._runtime.piece(usual[0]) == data:
            return usual[0]
        return self._by_bytes.get(data)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {self._runtime.piece(token): token for token in reversed(range(self.size))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What `wanted` read. `warnings` name what was left out of a given body."""

    processing: Processing = NOTHING
    logprobs: int | None = None
    warnings: tuple[str, ...] = ()


_NOTHING: Final = Wanted()


def wanted(request: Request, backend: str, tokens: Tokens | None) -> Wanted:
    """The fields of this request for a local backend; `tokens` None: no model is loaded, and texts are not looked up.

    Raises InputError, naming the field.
    """
    extra = request.extra.get(backend)
    if not extra and not request.passthrough:
        return _NOTHING
    warnings: list[str] = []
    chat: dict[str, Any] = {}
    for vendor, fields in request.passthrough.items():
        chat |= {key: value for key, value in fields.items() if vendor == "openai" and key in _CHAT}
        rest = [key for key in fields if key not in chat]
        if rest:
            warnings.append(f"left out, as they are {vendor}'s own: {', '.join(rest)}")
    where = f"extra.{backend}"
    check_keys(extra or {}, FIELDS, where)
    values = {**_of_chat(chat), **{key: (f"{where}.{key}", value) for key, value in (extra or {}).items() if value is not None}}
    logprobs = values.pop("logprobs", None)
    return Wanted(
        processing=_processing(values, tokens),
        logprobs=None if logprobs is None else check_int(logprobs[1], logprobs[0], low=0, high=MOST_LOGPROBS),
        warnings=tuple(warnings),
    )


_Values = dict[str, tuple[str, Any]]
"""Where a value was given, and the value, by field."""


def _of_chat(given: Mapping[str, Any]) -> _Values:
    """Chat has a switch for log probabilities, and their number apart."""
    values: _Values = {key: (key, value) for key, value in given.items() if key not in ("logprobs", "top_logprobs")}
    on = check_bool(given.get("logprobs", False), "logprobs")
    if "top_logprobs" in given and not on:
        raise InputError("needs logprobs to be true", field="top_logprobs")
    return {**values, "logprobs": ("top_logprobs", given.get("top_logprobs", 0))} if on else values


def _processing(values: _Values, tokens: Tokens | None) -> Processing:
    penalties = {name: check_number(value, field) for name, (field, value) in values.items() if name in _PENALTIES}
    field, bias = values.get("logit_bias", ("logit_bias", {}))
    try:
        return Processing(**penalties, logit_bias=_biases(bias, field, tokens))
    except InputError as error:
        place = values.get(error.field or "")
        if place is None:  # it names the place already
            raise
        raise InputError(str(error).removeprefix(f"{error.field}: "), field=place[0]) from None


def _biases(value: object, field: str, tokens: Tokens | None) -> dict[int, float]:
    """Biases by token. A key of digits is an id, any other a token's text; both may mean the same one, and then add up."""
    found: dict[int, float] = {}
    for key, bias in check_mapping(value, field).items():
        place = f"{field}.{shown(key)}"
        number = check_number(bias, place)
        if key.isascii() and key.isdecimal():
            if len(key) > _DIGITS or (tokens is not None and int(key) >= tokens.size):
                raise InputError("is no token's id" + (f" below {tokens.size}" if tokens else ""), field=place)
            token: int | None = int(key)
        elif tokens is None and key:
            continue
        else:
            token = tokens.find(key) if tokens else None
        if token is None:
            raise InputError("is neither an id nor the whole text of one token", field=place)
        found[token] = found.get(token, 0.0) + number
    return found


def refused_parameters(request: Request) -> list[str]:
    """The parameters that no local engine honours, each with why, as `Backend.check` words it."""
    refused = []
    if request.reasoning is not None and request.reasoning.effort != "none":
        refused.append("reasoning: local models have no setting for it")
    choice = request.tool_choice
    if choice is not None and choice.parallel is False and request.tools:
        refused.append("tool_choice: this engine cannot forbid parallel calls")
    try:
        sampling_of(request, seed=0)
    except InputError as error:
        refused.append(str(error))
    return refused


def refused_forms(request: Request, forcing: Forcing | None) -> list[str]:
    """Likewise, the form of an answer that a model's grammars cannot force; None: it has none."""
    try:
        if forcing is not None:
            forcing.grammar(request)
        elif Forcing.wanted(request):
            return [f"{Forcing.wanted(request)}: forcing the form of an answer needs llguidance"]
    except InputError as error:
        return [str(error)]
    return []


def sampling_of(request: Request, *, seed: int) -> Sampling:
    """The request's own parameters; what it does not say leaves the model's law as it is (temperature 1)."""
    return Sampling(
        seed=seed,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
    )


def has_image(part: Part) -> bool:
    """Whether it is an image, or a tool's result with one."""
    inner = part.content if isinstance(part, ToolResultPart) else (part,)
    return any(isinstance(p, ImagePart) for p in inner)
