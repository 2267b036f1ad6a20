"""Answers that follow a grammar: JSON, a JSON schema, a regular expression or a Lark grammar, through llguidance.

A `Vocabulary` belongs to a runtime and is made once (about a second for a large one). `compile` makes a `Grammar`, which
any number of requests may use; each has its own `GrammarState`. What the library cannot honour is refused: a keyword of a
schema is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from cachespec.engine.runtimes.base import Runtime
from cachespec.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind: TypeAlias = Literal["json", "schema", "regex", "lark"]

_WHITESPACE: Final = r"[ \n\r\t]{0,64}"
"""Room for deep indentation, and an end to a model that writes blanks for ever."""

_EXACT: Final = 2**53  # up to here every integer is a double
_LEAST, _MOST = -(2**63), 2**63 - 1  # what the library makes an integer of
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of names to schemas
_NOTES = ("default", "examples", "example")


class _Tokens:
    """What llguidance's `TokenizerWrapper` asks for. The bytes of a control token are its name."""

    bos_token_id = None

    def __init__(self, runtime: Runtime, end: int) -> None:
        names = {token: text.encode() for text, token in runtime.info.controls.items()}
        self.tokens = [names[token] if token in names else runtime.piece(token) for token in range(runtime.info.vocab)]
        self.special_token_ids, self.eos_token_id, self._runtime = sorted(names), end, runtime

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._runtime.tokenize(plain, special=False)


class Vocabulary:
    """The tokens of a runtime as llguidance needs them. From any thread, while the runtime lives.

    Raises MissingDependencyError; InputError when the model has no token that ends an answer.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._lib = _library()
        self.size = runtime.info.vocab
        self.ends = [token for token in range(self.size) if runtime.is_end(token)]
        if not self.ends:
            raise InputError("the model has no token that ends an answer, so a grammar cannot end one", field="response_format")
        wrapper = self._lib.TokenizerWrapper(_Tokens(runtime, self.ends[0]))
        self._tokenizer = self._lib.LLTokenizer(wrapper, n_vocab=self.size, eos_token=self.ends)

    def compile(self, kind: Kind, source: str | Mapping[str, Any] | None = None, *, field: str = "response_format") -> Grammar:
        """A grammar: ``json`` (any object), ``schema`` (a JSON schema), ``regex`` or ``lark`` (its text). A regular
        expression is matched whole, its ``\\d`` and ``\\w`` being those of ASCII, as in JavaScript and JSON schemas.

        Raises InputError for `field`, which asks for it: not valid, or something in it is not supported.
        """
        try:
            text = self._text(kind, source, field)
            wrong, messages = self._lib.LLMatcher.validate_grammar_with_warnings(text, self._tokenizer)
        except InputError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            name = "JSON schema" if kind == "schema" else f"{kind} grammar"
            raise InputError(f"not a {name}: {error}", field=field) from error
        if wrong:
            raise InputError(f"not a grammar that can be followed: {'; '.join(messages)}", field=field)
        grammar = Grammar(lambda: self._lib.LLMatcher(self._tokenizer, text, log_level=0), self, tuple(messages))
        try:
            grammar.start().masks(())  # some errors show only when the first token is asked for
        except GrammarError as error:
            raise InputError(f"not a grammar that can be followed: {error}", field=field) from error
        return grammar

    def _text(self, kind: Kind, source: str | Mapping[str, Any] | None, field: str) -> str:
        """The grammar as the library takes it."""
        matcher = self._lib.LLMatcher
        if kind in ("json", "schema"):
            schema = {"type": "object"} if kind == "json" else source
            return str(
                matcher.grammar_from_json_schema(
                    schema_text("null" if schema is None else schema, field),
                    overrides={"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "lenient": False},
                )
            )
        if not isinstance(source, str):
            raise InputError(f"a {kind} grammar is a text", field=field)
        lark = f"start: /{self._lib.regex_to_lark(source, 'dw')}/" if kind == "regex" else source
        return str(matcher.grammar_from_lark(lark))


def schema_text(schema: str | Mapping[str, Any], field: str = "response_format") -> str:
    """A JSON schema as the library takes it; for a `lark` grammar, what follows its ``%json``.

    The library computes with doubles and 64-bit integers. It does not say so: a constant beyond them becomes another, some
    end the process. And it lets a key come twice, which then counts as two.

    Raises InputError, for this field of a request, for what it would not keep; ValueError, TypeError, RecursionError for what
    is no JSON.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    _check(json.loads(text), field)
    return text


def _check(schema: Any, field: str) -> None:
    if isinstance(schema, list):
        for item in schema:
            _check(item, field)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            _check(list(value.values()), field)
        elif key in ("const", "enum", "multipleOf"):
            for number in _numbers(value):
                if abs(number) > _EXACT:
                    raise _cannot(field, key, number, "only numbers up to 2**53 are exact")
        elif key in _UPPER + _LOWER and _is_number(value):
            kept = min(max(value, _LEAST), _MOST)
            kept = min(int(float(kept)), _MOST) if isinstance(value, int) else value
            if kept <= -_MOST or (kept > value if key in _UPPER else kept < value):
                raise _cannot(field, key, value, "a 64-bit integer or a double is not that")
        elif key == "minProperties" and _is_number(value):
            required = schema.get("required")
            if value > 1 + (len(set(map(str, required))) if isinstance(required, list) else 0):
                raise _cannot(field, key, value, "a key may come twice, unless it is required")
        elif key not in _NOTES:
            _check(value, field)


def _numbers(value: Any) -> Iterator[int | float]:
    """All in a JSON value."""
    if _is_number(value):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cannot(field: str, key: str, value: float, why: str) -> InputError:
    shown = f"{value!r:.40}"
    return InputError(f"not a grammar that can be followed: {key} {shown}: {why}", field=field)


class GrammarError(ArithmeticError):
    """An answer cannot go on by its grammar: a token does not follow it, none does, or the library gives up on it."""


class Grammar:
    """A compiled grammar. `warnings` are the library's, for the user.

    The states of a grammar share a lexer, which grows with what they see and may reach a limit of the library; then it is
    made anew. `GrammarError` where it cannot be made at all.
    """

    def __init__(self, make: Callable[[], Any], vocabulary: Vocabulary, warnings: tuple[str, ...]) -> None:
        self._make, self._vocabulary, self.warnings = make, vocabulary, warnings
        self._matcher = make()

    def start(self) -> GrammarState:
        """At the beginning of an answer."""
        return GrammarState(self, self._vocabulary)

    def copy(self) -> Any:
        """A matcher of the library, at the beginning."""
        return self._matcher.deep_copy()

    def renew(self) -> None:
        """The lexer is of no more use."""
        self._matcher = self._make()


class GrammarState:
    """How far an answer is in its grammar; a `processors.Mask`. Belongs to one thread."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self._grammar, self._size, self._ends = grammar, vocabulary.size, frozenset(vocabulary.ends)
        self._matcher = grammar.copy()
        self._tokens: list[int] = []  # of the answer

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow: the answer is over, without drawing one."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """The answer may end here: what there is follows the whole grammar."""
        return bool(self._matcher.is_accepting())

    def valid(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows, end tokens never."""
        stop = next((i for i, token in enumerate(drafts) if token in self._ends), len(drafts))
        found = 0 if self.finished else int(self._matcher.validate_tokens(list(drafts[:stop])))
        if self._matcher.is_error():
            self._recover()
            return 0
        return found

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.uint32]]:
        """What is allowed at each position before and after these drafts, all of them valid; changes nothing.

        Raises GrammarError; where it does for drafts, it may yet answer without them.
        """
        try:
            result = [self._bits()]
        except GrammarError:
            self._recover()
            result = [self._bits()]
        if not drafts:
            return result
        try:
            for token in drafts:
                self._consume(token)
                result.append(self._bits())
        except GrammarError:
            self._recover()
            raise
        if not self._matcher.rollback(len(drafts)):
            self._recover()
        return result

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on over committed tokens, end tokens not among them.

        Raises GrammarError for one that the grammar does not allow: it was not drawn under its mask.
        """
        for token in tokens:
            try:
                self._consume(token)
            except GrammarError:
                if not self._matcher.is_error():
                    raise
                self._recover()
                self._consume(token)
            self._tokens.append(token)

    def _recover(self) -> None:
        """The library's matcher cannot be used after an error: another takes its place, where the answer is."""
        self._grammar.renew()
        self._matcher = self._grammar.copy()
        for token in self._tokens:
            self._consume(token)

    def _consume(self, token: int) -> None:
        matcher = self._matcher
        if matcher.validate_tokens([token]) != 1 or not matcher.consume_token(token) or matcher.is_error():
            raise GrammarError(f"token {token} does not follow the grammar{_why(matcher)}")

    def _bits(self) -> NDArray[np.uint32]:
        import numpy as np

        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: (self._size + 31) // 32]
        if self._matcher.is_error() or not words.any():
            raise GrammarError(f"no token can follow{_why(self._matcher)}")
        return words


def _why(matcher: Any) -> str:
    """What the library says, without the state and the grammar that it repeats."""
    text = matcher.get_error().split("<state>")[0].strip() if matcher.is_error() else ""
    return f" ({text})" if text else ""


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("structured output of a local model needs llguidance", extra="llamacpp") from error
    return llguidance
