"""From text to tokens and back, on the `tokenizers` library: from ``tokenizer.json``, or built from GGUF metadata."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cachespec.errors import ConfigError, MissingDependencyError

_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")
"""Control tokens that end an answer in every model that has them, whatever else it names as its end."""

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTES = range(1, 7)  # tokenizer.ggml.token_type

# How words are cut before pairs are merged, by `tokenizer.ggml.pre`. Digits: one by one, in threes, or with their run.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final = {
    "llama-bpe": _CONTRACTIONS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|\p{N}" + _REST,
}
_SAME_AS: Final = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "default": "gpt-2"}
_BEGINS: Final = frozenset({"llama-bpe"})  # prompts start with bos although the file does not say so


class Vocabulary:
    """Tokens of one model. `encode` and `piece` may be called from any thread.

    Attributes:
        size: one more than the highest token id.
        controls: text and id of the control tokens, which never stand for text.
        ends: ids that end an answer.
        bos, eos: their text, empty when there is none; `add_bos`: prompts start with bos.
    """

    def __init__(
        self, tokenizer: Any, *, bos: str, eos: str, add_bos: bool, ends: Iterable[int], extra_controls: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        texts = {i: text for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.size = max(texts) + 1
        added = tokenizer.get_added_tokens_decoder()
        silent = {i for i, token in added.items() if token.special} | set(extra_controls)
        self.controls: Mapping[str, int] = {texts[i]: i for i in sorted(silent) if i in texts}
        self.bos, self.eos, self.add_bos = bos, eos, add_bos
        named = [self.controls[text] for text in (*_ENDS, eos) if text in self.controls]
        self.ends = frozenset([*ends, *named])
        self._pieces = _pieces(texts, self.size, {i: token.content for i, token in added.items()}, silent)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens of `text` without bos or eos. `special`: the text of a control token becomes that token."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be in UTF-8
        with self._lock:
            self._tokenizer.encode_special_tokens = not special  # the library's name for "as ordinary text"
            ids: list[int] = self._tokenizer.encode(clean, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; empty for a control token and for an id without a token."""
        return self._pieces[token] if 0 <= token < self.size else b""

    def identity(self) -> bytes:
        """Bytes that differ where two vocabularies do."""
        return b"\0".join(self._pieces) + repr(sorted(self.controls.items())).encode()


def from_tokenizer_json(
    file: Path, *, rows: int, bos: str | None, eos: str | None, ends: Iterable[int], bos_id: int | None
) -> Vocabulary:
    """The vocabulary of a ``tokenizer.json``. Added tokens that have no row of the embedding (`rows`) are left out."""
    library = _library()
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        data["added_tokens"] = [t for t in data.get("added_tokens") or () if t["id"] < rows]
        tokenizer = library.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{file}: not a tokenizer that can be read: {error}", key="model") from error
    first = tokenizer.encode("a", add_special_tokens=True).ids[:1]
    start = bos or (tokenizer.id_to_token(bos_id) if isinstance(bos_id, int) else None) or ""
    add_bos = bool(start) and first == [tokenizer.token_to_id(start)]
    return Vocabulary(tokenizer, bos=start, eos=eos or "", add_bos=add_bos, ends=ends)


def from_gguf_metadata(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """The vocabulary in GGUF metadata: byte-level BPE (``gpt2``) or SentencePiece BPE (``llama``). Raises ConfigError."""

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    kind, tokens = get("model"), get("tokens")
    if not isinstance(tokens, list):
        raise ConfigError(f"{where}: has no vocabulary", key="model")
    types: Sequence[int] = get("token_type") or [_NORMAL] * len(tokens)
    while types and types[len(tokens) - 1] == _UNUSED:  # rows that only pad the embedding: never to be emitted
        tokens = tokens[:-1]
    if kind == "gpt2":
        pre = str(get("pre", "default"))
        pre = _SAME_AS.get(pre, pre)
        tokenizer = _byte_level(tokens, get("merges") or [], pre, where)
        begins = pre in _BEGINS
    elif kind == "llama":
        tokenizer, begins = _sentence_piece(tokens, get("scores") or [], types, add_space=get("add_space_prefix", True)), True
    else:
        detail = f"{where}: tokenizer {kind!r} is not supported by the torch runtime (gpt2 and llama are)"
        raise ConfigError(detail, key="model")
    from tokenizers import AddedToken

    for wanted, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER, tokenizer.add_tokens)):
        marked = [t for t, type_ in zip(tokens, types, strict=False) if type_ == wanted]
        add([AddedToken(text, normalized=False, special=wanted == _CONTROL) for text in marked])

    def text(name: str) -> str:
        number = get(f"{name}_token_id")
        return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else ""

    ends = [i for name in ("eos", "eot", "eom") if isinstance(i := get(f"{name}_token_id"), int)]
    unknown = [i for i, type_ in enumerate(types[: len(tokens)]) if type_ == _UNKNOWN]
    add_bos = bool(get("add_bos_token", begins)) and bool(text("bos"))
    return Vocabulary(tokenizer, bos=text("bos"), eos=text("eos"), add_bos=add_bos, ends=ends, extra_controls=unknown)


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str, where: str) -> Any:
    library = _library()
    cut = library.pre_tokenizers
    if pre == "gpt-2":
        splitter: Any = cut.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "smollm":
        splitter = cut.Sequence([cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False, use_regex=True)])
    elif pre in _SPLITS:
        words = cut.Split(library.Regex(_SPLITS[pre]), behavior="isolated")
        splitter = cut.Sequence([words, cut.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        served = ", ".join(sorted({"gpt-2", "smollm", *_SPLITS}))
        raise ConfigError(f"{where}: pre-tokenizer {pre!r} is not supported by the torch runtime ({served} are)", key="model")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        model = library.models.BPE(vocab=ids, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{where}: its tokenizer is damaged: {error}", key="model") from error
    tokenizer = library.Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _sentence_piece(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, add_space: bool) -> Any:
    """SentencePiece's BPE: of all neighbours that together are a token, those with the best score merge first."""
    library = _library()
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, token in enumerate(tokens):
        if types[i] not in (_NORMAL, _USER):
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((-scores[i], ids[left], ids[right], (left, right)))
    found.sort(key=lambda item: item[:3])
    model = library.models.BPE(
        vocab=ids, merges=[pair for *_, pair in found], unk_token=_unknown(tokens, types), fuse_unk=True, byte_fallback=True
    )
    tokenizer = library.Tokenizer(model)
    spaces = library.normalizers.Replace(" ", "▁")
    begin = [library.normalizers.Prepend("▁")] if add_space else []
    tokenizer.normalizer = library.normalizers.Sequence([*begin, spaces])
    decoders = library.decoders
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _unknown(tokens: Sequence[str], types: Sequence[int]) -> str | None:
    return next((token for token, type_ in zip(tokens, types, strict=False) if type_ == _UNKNOWN), None)


def _pieces(texts: Mapping[int, str], size: int, added: Mapping[int, str], silent: set[int]) -> list[bytes]:
    """The bytes of each token. A vocabulary whose letters are all of the byte-level alphabet is a byte-level one."""
    alphabet = {letter: value for value, letter in _byte_alphabet().items()}
    ordinary = (text for i, text in texts.items() if i not in added)
    byte_level = all(letter in alphabet for text in ordinary for letter in text)
    found = [b""] * size
    for i, text in texts.items():
        if i in silent:
            continue
        if i in added:
            found[i] = added[i].encode()
        elif byte_level:
            found[i] = bytes(alphabet[letter] for letter in text)
        elif hexadecimal := _BYTE.fullmatch(text):
            found[i] = bytes([int(hexadecimal[1], 16)])
        else:
            found[i] = text.replace("▁", " ").encode()
    return found


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {value: chr(value) for value in printable}
    hidden = (value for value in range(256) if value not in letters)
    return letters | {value: chr(0x100 + i) for i, value in enumerate(hidden)}


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError("the torch backend needs tokenizers", extra="torch") from error
    return tokenizers
