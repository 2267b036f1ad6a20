"""Grammars: masks at every position, advanced by committed tokens only, with speculation and without."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.engine.markov import MarkovRuntime, random_logits
from tests.engine.speculate import GuessDrafter, Run, generate

from cachespec.engine.processors import Processing, Processor
from cachespec.engine.sampling import Sampling
from cachespec.engine.structured import GrammarError, GrammarState, Kind, Vocabulary
from cachespec.errors import InputError, MissingDependencyError

pytest.importorskip("llguidance")

# Bytes, some of them joined, a control token, padding, and the end.
PIECES = [*(bytes([i]) for i in range(256)), b'{"', b'":', b', "', b"true", b"", b"", b"ab"]
CONTROL, PADDING, END = 260, 261, 263
VOCAB = 264
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


def runtime(seed: int = 0, spread: float = 2.0) -> MarkovRuntime:
    logits = random_logits(VOCAB, order=3, seed=seed, spread=spread)
    pieces = [*PIECES, b""]
    return MarkovRuntime(logits, VOCAB, ends=[END], pieces=pieces, controls={"<|start|>": CONTROL, "<|end|>": END})


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(runtime())


def allowed(mask: Any) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {int(i) for i in np.flatnonzero(bits)}


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join([*PIECES, b""][token] for token in tokens)


def test_masks_say_what_may_come_and_control_tokens_never_do(vocabulary: Vocabulary) -> None:
    state = vocabulary.compile("schema", SCHEMA).start()
    (first,) = state.masks([])
    assert first.dtype == np.uint32
    assert len(first) == (VOCAB + 31) // 32
    assert allowed(first) == {ord("{"), 256}
    masks = state.masks([256, ord("n"), 257])
    assert len(masks) == 4
    assert allowed(masks[1]) == {ord("n")}
    assert ord("7") in allowed(masks[3])
    assert not {CONTROL, PADDING, END} & allowed(masks[3])
    assert allowed(state.masks([])[0]) == allowed(first)  # asking changed nothing


def test_the_state_moves_with_committed_tokens_only(vocabulary: Vocabulary) -> None:
    """vllm#44297, #34241: rejected drafts leave no trace."""
    state = vocabulary.compile("schema", SCHEMA).start()
    assert state.valid([256, ord("n"), ord("x"), 257]) == 2
    assert state.valid([ord("x")]) == 0
    assert state.valid([256, END, ord("n")]) == 1
    state.masks([256, ord("n")])
    state.accept([ord("{"), ord('"')])
    assert allowed(state.masks([])[0]) == {ord("n")}
    for token in b'n":1, "ok":true':
        state.accept([token])
        assert (state.complete, state.finished) == (False, False)
    state.accept([ord("}")])
    assert (state.complete, state.finished) == (True, True)  # the answer is over: nothing may follow (qwen38-27b#31)
    assert allowed(state.masks([])[0]) == {END}
    assert state.valid([ord(" ")]) == 0


def test_a_token_that_breaks_the_grammar_is_an_error_and_no_crash(vocabulary: Vocabulary) -> None:
    state = vocabulary.compile("regex", "[ab]{2}").start()
    with pytest.raises(ArithmeticError, match="does not follow"):
        state.accept([ord("z")])
    state.accept([262])
    assert state.finished
    with pytest.raises(ArithmeticError):
        state.masks([ord("a")])


def test_states_of_one_grammar_are_apart(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile("lark", 'start: "x" /[0-9]+/')
    one, two = grammar.start(), grammar.start()
    one.accept([ord("x"), ord("1")])
    assert (one.complete, one.finished) == (True, False)
    assert END in allowed(one.masks([])[0])
    assert allowed(two.masks([])[0]) == {ord("x")}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "source", "follows"),
    [
        ("schema", SCHEMA, lambda text: set(json.loads(text)) == {"n", "ok"}),
        ("json", None, lambda text: isinstance(json.loads(text), dict)),
        ("regex", r"[a-c]{3,9}-\d+x", lambda text: re.fullmatch(r"[a-c]{3,9}-\d+x", text.decode()) is not None),
        ("lark", 'start: ("ab" | "true")+ "."', lambda text: re.fullmatch(rb"(ab|true)+\.", text) is not None),
    ],
)
def test_the_answer_follows_the_grammar_and_speculation_does_not_change_it(
    vocabulary: Vocabulary, kind: Kind, source: Any, follows: Any, temperature: float
) -> None:
    """Masks at each verified position and at the bonus; drafts that break the grammar are cut before they are evaluated."""
    grammar, found = vocabulary.compile(kind, source), 0
    for seed in range(6):
        sampling = Sampling(seed=seed, temperature=temperature)
        answers: list[list[int]] = []
        for length in (0, 1, 5):
            state = grammar.start()
            processor = Processor(Processing(frequency_penalty=0.3), prompt=[1, 2], vocab=VOCAB, mask=state)
            before = answers[0] if answers else []

            def guess(tokens: list[int], k: int, before: list[int] = before) -> list[int]:
                right = before[len(tokens) - 2 :][:k]
                return right if len(tokens) % 3 else [*right[:2], ord("?"), *right[3:]]

            run = Run(
                runtime(seed),
                [1, 2],
                sampling,
                output=120,
                drafter=GuessDrafter(guess),
                processor=processor,
                stop=_stopper(grammar.start()),
            )
            answers.append(generate(run, lambda step: length, together=length == 5))  # noqa: B023
            if run.reason == "stop":
                found += 1
                assert follows(text_of(run.answer)), text_of(run.answer)
            if length and len(run.answer) > 8:
                assert run.accepted > 0
        assert answers[0] == answers[1] == answers[2]
    assert found >= 3


def _stopper(state: GrammarState) -> Any:
    """Ends an answer when the grammar does, as the loop may."""

    def stop(token: int) -> str | None:
        state.accept([token])
        return "stop" if state.finished else None

    return stop


def test_what_cannot_be_followed_is_refused(vocabulary: Vocabulary) -> None:
    wrong: list[tuple[Kind, Any, str]] = [
        ("schema", {"type": "objekt"}, "objekt"),
        ("schema", {"type": "string", "not": {"const": "x"}}, "not"),
        ("schema", "{", "not a JSON schema"),
        ("regex", "(", "regex"),
        ("lark", "start: foo", "foo"),
        ("regex", None, "is a text"),
        ("lark", {"a": 1}, "is a text"),
    ]
    for kind, source, says in wrong:
        with pytest.raises(InputError, match=says) as error:
            vocabulary.compile(kind, source)
        assert error.value.field == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**65},
        {"const": 2**53 + 1},
        {"const": -(2**63)},  # it would end the process
        {"enum": [1, {"deep": [2**70]}]},
        {"properties": {"default": {"enum": [2**64]}}},
        {"anyOf": [{"type": "null"}, {"const": 1e300}]},
        {"$defs": {"n": {"const": -(2**60)}}, "$ref": "#/$defs/n"},
        {"type": "integer", "minimum": 99999999999999999999},
        {"type": "integer", "minimum": 2**53 + 1},  # as a double it is one less
        {"type": "integer", "exclusiveMaximum": 2**53 + 3},  # one more
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
        {"type": "integer", "minimum": 1 - 2**63, "maximum": 1 - 2**63},
        {"type": "integer", "multipleOf": 2**60},
        {"type": "object", "minProperties": 2},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 3},
    ],
)
def test_what_the_library_would_not_keep_is_refused(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    for source in (schema, json.dumps(schema)):
        with pytest.raises(InputError, match=r"2\*\*53|64-bit|twice") as error:
            vocabulary.compile("schema", source)
        assert error.value.field == "response_format"


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"const": 2**53}, str(2**53), "1"),
        ({"enum": [-(2**53), True]}, str(-(2**53)), str(-(2**53) + 1)),
        ({"type": "integer", "maximum": 2**63 - 1}, "5", "x"),  # what generators of schemas write
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, str(2**53 + 1), "-1"),
        ({"type": "integer", "default": 2**70, "examples": [2**70], "maximum": 9}, "9", "10"),
        ({"type": "object", "properties": {"minimum": {"const": 1}}, "required": ["minimum"]}, '{"minimum":1}', '{"a"'),
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"type": "object", "required": ["a", "b"], "minProperties": 3}, '{"a":1,"b":1,"c":1}', '{"a":1,"a"'),
    ],
)
def test_what_the_library_keeps_is_taken(vocabulary: Vocabulary, schema: dict[str, Any], yes: str, no: str) -> None:
    state = vocabulary.compile("schema", schema).start()
    assert state.valid(list(no.encode())) < len(no)
    state.accept(list(yes.encode()))
    assert state.complete


class Exhausted:
    """A matcher of the library that is at a limit, after so many tokens."""

    def __init__(self, matcher: Any, after: int = 0) -> None:
        self._matcher, self._left, self._deep = matcher, after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> Exhausted:
        return Exhausted(self._matcher.deep_copy(), self._left)

    def is_error(self) -> bool:
        return self._left <= 0

    def is_stopped(self) -> bool:
        return self.is_error() or bool(self._matcher.is_stopped())

    def get_error(self) -> str:
        return "lexer error: too many expressions\n<state>what the user wrote</state>"

    def compute_bitmask(self) -> bytes:
        return bytes(64) if self.is_error() else bytes(self._matcher.compute_bitmask())

    def validate_tokens(self, tokens: list[int]) -> int:
        return 0 if self.is_error() else int(self._matcher.validate_tokens(tokens))

    def consume_token(self, token: int) -> bool:
        self._left -= 1
        return not self.is_error() and bool(self._matcher.consume_token(token))


def test_a_matcher_at_its_limit_is_made_anew_where_the_answer_is(vocabulary: Vocabulary) -> None:
    """What earlier answers, or drafts, made of the lexer that all states of a grammar share is no fault of this one."""

    def state(after: int) -> GrammarState:
        made = vocabulary.compile("schema", SCHEMA).start()
        made.accept([256, ord("n"), 257])
        made._matcher = Exhausted(made._matcher, after)
        return made

    (wanted,) = state(99).masks([])
    assert allowed(state(0).masks([])[0]) == allowed(wanted)
    assert not state(0).finished
    spent = state(0)
    assert spent.valid([ord("7")]) == 0
    assert spent.valid([ord("7")]) == 1
    spent = state(0)
    spent.accept([ord("7"), 258])
    assert allowed(spent.masks([])[0]) == allowed(_after(vocabulary, [256, ord("n"), 257, ord("7"), 258]))
    spent = state(2)
    with pytest.raises(GrammarError):
        spent.masks([ord("7"), ord("7"), ord("7")])
    assert allowed(spent.masks([])[0]) == allowed(wanted)
    assert len(spent.masks([ord("7"), ord("7"), ord("7")])) == 4


def _after(vocabulary: Vocabulary, tokens: Sequence[int]) -> Any:
    state = vocabulary.compile("schema", SCHEMA).start()
    state.accept(tokens)
    return state.masks([])[0]


def test_a_grammar_that_the_library_gives_up_on_says_why_in_short(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile("schema", SCHEMA)
    make = grammar._make
    grammar._make = lambda: Exhausted(make(), 2)
    grammar.renew()
    state = grammar.start()
    state.accept([256])
    with pytest.raises(GrammarError, match="too many expressions") as error:
        state.accept([ord("n")])
    assert "user wrote" not in str(error.value)


def test_blanks_come_to_an_end(vocabulary: Vocabulary) -> None:
    """A small model may love blanks: it is made to go on."""
    state = vocabulary.compile("json").start()
    state.accept([ord("{")])
    state.accept([ord(" ")] * 64)
    assert ord(" ") not in allowed(state.masks([])[0])


def test_a_model_without_an_end_and_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = MarkovRuntime(random_logits(8), 8)
    with pytest.raises(InputError, match="no token that ends"):
        Vocabulary(endless)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match="llguidance"):
        Vocabulary(runtime())
