"""What a request may ask of a local engine in `extra`: read, refused by name, and at work at every verified position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from tests.backends.test_llamacpp import ask, available, run, text, usage
from tests.engine.markov import MarkovRuntime, random_logits

from cachespec.backends._local import LocalBackend
from cachespec.backends._local_fields import MOST_LOGPROBS, Tokens, Wanted, wanted
from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.backends.torch import TorchBackend
from cachespec.bodies import request_from_body
from cachespec.decision import Plan
from cachespec.engine.processors import Processing
from cachespec.errors import InputError
from cachespec.events import DraftVerified, Event, Finished, LogprobsReported, TokenLogprob
from cachespec.request import Request

model = pytest.mark.model
one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])

PIECES = [b"a", b"b", b" the", b"\xc3", b"7", b"", b"ab"]


class Odd(MarkovRuntime):
    """It never makes ``ab`` of a text, as vocabularies with a space before every word make none of theirs."""

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return [2] if text == " the" else [PIECES.index(bytes([byte])) for byte in text.encode() if bytes([byte]) in PIECES]


def tokens() -> Tokens:
    size = len(PIECES)
    return Tokens(Odd(random_logits(size), size, pieces=PIECES, controls={"<|end|>": 5}))


def of(**fields: Any) -> Wanted:
    return wanted(ask("x", extra={"laptop": fields}), "laptop", tokens())


def test_fields_are_read() -> None:
    assert wanted(ask("x", extra={"other": {"logprobs": "?"}}), "laptop", None) == Wanted()
    assert of(logprobs=None) == Wanted()
    found = of(repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=1, logprobs=3)
    assert found.processing == Processing(repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=1)
    assert found.logprobs == 3
    assert of(logprobs=0).logprobs == 0


@pytest.mark.parametrize(
    ("key", "token"),
    [("4", 4), ("a", 0), (" the", 2), ("ab", 6), ("<|end|>", 5)],
    ids=["id", "letter", "word", "odd", "control"],
)
def test_a_bias_is_of_an_id_or_of_the_text_of_one_token(key: str, token: int) -> None:
    assert of(logit_bias={key: -2}).processing.logit_bias == {token: -2}
    both = {key: -2, str(token): -1} if key != str(token) else {key: -3}
    assert of(logit_bias=both).processing.logit_bias == {token: -3}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"repetion_penalty": 1.1}, "repetion_penalty", "did you mean 'repetition_penalty'"),
        ({"mirostat": 2}, "mirostat", "known: frequency_penalty, logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty", "must be a number, not a string"),
        ({"presence_penalty": True}, "presence_penalty", "must be a number"),
        ({"logprobs": True}, "logprobs", "must be an integer"),
        ({"logprobs": MOST_LOGPROBS + 1}, "logprobs", "between 0 and 20"),
        ({"logit_bias": [1, 2]}, "logit_bias", "must be an object"),
        ({"logit_bias": {"4": "x"}}, "logit_bias.'4'", "must be a number"),
        ({"logit_bias": {"7": 1}}, "logit_bias.'7'", "no token's id below 7"),
        ({"logit_bias": {"1234567890123": 1}}, "logit_bias.'1234567890123'", "no token's id"),
        ({"logit_bias": {"": 1}}, "logit_bias.''", "neither an id nor the whole text of one token"),
        ({"logit_bias": {"\ud800": 1}}, "logit_bias.'\\ud800'", "neither an id nor the whole text of one token"),
        ({"logit_bias": {"a the": 1}}, "logit_bias.'a the'", "neither an id nor the whole text of one token"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        of(**fields)
    assert caught.value.field == f"extra.laptop.{field}"


def test_before_a_model_is_loaded_what_can_be_told_is_told() -> None:
    assert wanted(ask("x", extra={"b": {"logit_bias": {"no token": 1, "3": 1}}}), "b", None).processing.logit_bias == {3: 1}
    with pytest.raises(InputError):
        wanted(ask("x", extra={"b": {"logit_bias": {"no token": None}}}), "b", None)
    with pytest.raises(InputError, match="neither an id"):
        wanted(ask("x", extra={"b": {"logit_bias": {"": 1}}}), "b", None)
    backend = LlamaCppBackend(name="b", model="smollm2")
    with pytest.raises(InputError, match="presence_penalty"):
        backend.check(ask("x", extra={"b": {"presence_penaltyy": 1}}))


def body(**fields: Any) -> Request:
    return request_from_body({"messages": [{"role": "user", "content": "x"}], "frequency_penalty": 0.5, **fields})


def test_a_chat_body_says_it_in_its_own_way() -> None:
    found = wanted(body(logprobs=True, top_logprobs=2, logit_bias={"1": -1}, user="u", service_tier="flex"), "laptop", tokens())
    assert found.processing == Processing(frequency_penalty=0.5, logit_bias={1: -1})
    assert found.logprobs == 2
    assert found.warnings == ("left out, as they are openai's own: user, service_tier",)
    assert wanted(body(logprobs=True), "laptop", None).logprobs == 0
    assert wanted(body(logprobs=False), "laptop", None).logprobs is None
    for wrong, field in (({"top_logprobs": 2}, "top_logprobs"), ({"logit_bias": {"x": 1}}, "logit_bias.'x'")):
        with pytest.raises(InputError) as caught:
            wanted(body(**wrong), "laptop", tokens())
        assert caught.value.field == field


# With the real model, on both runtimes: drafts change nothing, whatever acts on the rows.


def make(kind: str, **more: Any) -> LocalBackend:
    options: dict[str, Any] = {"name": "laptop", "model": "smollm2", "context": 384, "threads": 1, "parallel": 2, **more}
    if kind == "torch":
        pytest.importorskip("torch")
        return TorchBackend(**options, device="cpu", dtype="float32")
    return LlamaCppBackend(**options, deterministic=True, prefill_chunk=32)


@pytest.fixture(scope="module", params=["llamacpp", "torch"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalBackend, ...]]:
    """One that drafts four tokens at every step, and one that drafts nothing."""
    available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        always = {"use": "fixed", "draft_length": 4}
        made = (make(request.param, draft={"use": "suffix"}, acceptance=always), make(request.param))
        for backend in made:
            anyio.run(backend.start)
    yield made
    for backend in made:
        anyio.run(backend.aclose)


QUESTION = "Repeat this twice: the red cat sat on the red mat, the red cat sat on the red mat."
EXTRAS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 6, "frequency_penalty": 1.5},
    {"logit_bias": {" red": -100, " blue": 6, "<|im_end|>": -3}, "logprobs": 2},
]


def scores(events: list[Event]) -> list[TokenLogprob]:
    return [token for e in events if isinstance(e, LogprobsReported) for token in e.tokens]


@model
@one_loop
@pytest.mark.anyio
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("extra", EXTRAS, ids=["repetition", "presence", "bias"])
async def test_drafts_change_nothing(pair: tuple[LocalBackend, ...], extra: dict[str, Any], temperature: float) -> None:
    drafting, plain = pair
    asked = ask(QUESTION, temperature=temperature, seed=3, max_output_tokens=24, extra={"laptop": extra})
    events, expected = await run(drafting, asked), await run(plain, asked)
    assert text(events) == text(expected)
    assert text(events) != text(await run(plain, ask(QUESTION, temperature=temperature, seed=3, max_output_tokens=24)))
    assert any(e.drafted for e in events if isinstance(e, DraftVerified))
    told = scores(events)
    assert [token.token for token in told] == [token.token for token in scores(expected)]
    assert all(a.logprob == pytest.approx(b.logprob, abs=1e-3) for a, b in zip(told, scores(expected), strict=True)), (
        "in the rows that tokens were drawn from"
    )
    if "logprobs" in extra:
        assert b"".join(token.text for token in told).decode() == text(events)
        assert len(told) == usage(events).output
        assert " red" not in text(events)
        assert all(len(token.top) == 2 and token.top[0].logprob >= token.top[1].logprob for token in told)
        assert all(token.logprob < 0 for token in told)
    else:
        assert told == []


@model
@one_loop
@pytest.mark.anyio
async def test_what_is_no_field_fails_before_any_work(pair: tuple[LocalBackend, ...]) -> None:
    for fields in ({"mirostat": 2}, {"logit_bias": {"two words": 1}}, {"logit_bias": {"99999999": 1}}):
        with pytest.raises(InputError, match=r"extra\.laptop"):
            await pair[0].open(ask("x", extra={"laptop": fields}), Plan(backend="laptop"), timeout=60)
    left_out = await run(pair[0], body(max_tokens=2, user="u"))
    (finished,) = [e for e in left_out if isinstance(e, Finished)]
    assert finished.warnings == ("left out, as they are openai's own: user",)
