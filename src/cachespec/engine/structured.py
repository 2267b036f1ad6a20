"""Answers that follow a grammar: JSON, a JSON schema, a regular expression or a Lark grammar, through llguidance.

A `Vocabulary` belongs to a runtime and is made once (about a second for a large one). `compile` makes a `Grammar`, which
any number of requests may use; each has its own `GrammarState`. What the library cannot honour is refused: a keyword of a
schema is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from cachespec.engine.runtimes.base import Runtime
from cachespec.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind: TypeAlias = Literal["json", "schema", "regex", "lark"]

_WHITESPACE: Final = r"[ \n\r\t]{0,64}"
"""Room for deep indentation, and an end to a model that writes blanks for ever."""


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

    def compile(self, kind: Kind, source: str | Mapping[str, Any] | None = None) -> Grammar:
        """A grammar: ``json`` (any object), ``schema`` (a JSON schema), ``regex`` or ``lark`` (its text). A regular
        expression is matched whole, its ``\\d`` and ``\\w`` being those of ASCII, as in JavaScript and JSON schemas.

        Raises InputError: not valid, or something in it is not supported.
        """
        matcher = self._lib.LLMatcher
        if kind in ("json", "schema"):
            schema = {"type": "object"} if kind == "json" else source
            try:
                text = matcher.grammar_from_json_schema(
                    schema if isinstance(schema, str) else json.dumps(schema),
                    overrides={"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "lenient": False},
                )
            except ValueError as error:
                raise InputError(f"not a JSON schema: {error}", field="response_format") from error
        elif not isinstance(source, str):
            raise InputError(f"a {kind} grammar is a text", field="response_format")
        else:
            lark = f"start: /{self._lib.regex_to_lark(source, 'dw')}/" if kind == "regex" else source
            text = matcher.grammar_from_lark(lark)
        wrong, messages = matcher.validate_grammar_with_warnings(text, self._tokenizer)
        if wrong:
            raise InputError(f"not a grammar that can be followed: {'; '.join(messages)}", field="response_format")
        made = matcher(self._tokenizer, text, log_level=0)
        if made.is_error():
            raise InputError(f"not a grammar that can be followed: {made.get_error()}", field="response_format")
        return Grammar(made, self, tuple(messages))


class Grammar:
    """A compiled grammar. `warnings` are the library's, for the user."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, warnings: tuple[str, ...]) -> None:
        self._matcher, self._vocabulary, self.warnings = matcher, vocabulary, warnings

    def start(self) -> GrammarState:
        """At the beginning of an answer."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)


class GrammarState:
    """How far an answer is in its grammar; a `processors.Mask`. Belongs to one thread."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher, self._size, self._ends = matcher, vocabulary.size, frozenset(vocabulary.ends)

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow: the answer is over, without drawing one."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """The answer may end here: what there is follows the whole grammar."""
        return bool(self._matcher.is_accepting())

    def valid(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows, end tokens never."""
        stop = next((i for i, token in enumerate(drafts) if token in self._ends), len(drafts))
        return 0 if self.finished else int(self._matcher.validate_tokens(list(drafts[:stop])))

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.uint32]]:
        """What is allowed at each position before and after these drafts, all of them valid; changes nothing."""
        matcher, result = self._matcher, [self._bits()]
        done = 0
        try:
            for token in drafts:
                self._consume(token)
                done += 1
                result.append(self._bits())
        finally:
            if done and not matcher.rollback(done):
                raise RuntimeError(f"llguidance cannot take {done} tokens back: {matcher.get_error()}")
        return result

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on over committed tokens, end tokens not among them.

        Raises ArithmeticError for one that the grammar does not allow: it was not drawn under its mask.
        """
        for token in tokens:
            self._consume(token)

    def _consume(self, token: int) -> None:
        if self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
            raise ArithmeticError(f"token {token} does not follow the grammar")

    def _bits(self) -> NDArray[np.uint32]:
        import numpy as np

        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise ArithmeticError(f"the grammar cannot be followed further: {self._matcher.get_error()}")
        return words[: (self._size + 31) // 32]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("structured output of a local model needs llguidance", extra="llamacpp") from error
    return llguidance
