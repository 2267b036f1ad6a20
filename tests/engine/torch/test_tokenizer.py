"""Tokenizers from GGUF metadata and from ``tokenizer.json``, beside those of transformers and of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.torch.support import SPECIALS, byte_letters, tokenizer, transformers

from cachespec.engine.models import find_model
from cachespec.engine.runtimes.torch.gguf_file import GGUFCheckpoint
from cachespec.engine.runtimes.torch.tokenizer import Vocabulary, from_gguf_metadata, from_tokenizer_json
from cachespec.errors import ConfigError

CORPUS = [
    "Hello world, it's 2024 and we've 3.14159 reasons; I'LL say: don't.",
    "def f(x):\n\treturn x**2  # squared\n\n\n    if x != 0:\r\n\t\tpass\n",
    "naïve café, Zürich; ça va? Ωμέγα, русский текст, 日本語の文章、中文，한국어, العربية, हिन्दी १२३",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and symbols ½ ⅓ Ⅷ ™ € ∑ → ​",
    "  leading and   inner   spaces \t and tabs\t\t\n \n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    '{"key": [1, 2, 3], "nested": {"a": null, "b": true}} SELECT * FROM t WHERE id=42;',
    "a" * 70 + "!?" * 30 + "\n" * 9 + "0" * 40,
    "combining e\u0301 and é, ſ K ẞ İ, nbsp\u00a0and\u3000ideographic\ufeff",
    "",
    " ",
    "\n",
    "x\u0000y",
]
MINI = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["h e", "Ġ he", "1 2", "12 3", "123 4"]}


def mini(pre: str, **more: Any) -> Vocabulary:
    """A byte-level vocabulary with a few merges."""
    tokens = [*byte_letters(), "he", "Ġhe", "12", "123", "1234", *SPECIALS, "<think>"]
    types = [1] * 261 + [3] * 3 + [4]
    given = {"tokens": tokens, "token_type": types, "pre": pre, "bos_token_id": 261, "eos_token_id": 262, **more}
    return from_gguf_metadata(MINI | {f"tokenizer.ggml.{k}": v for k, v in given.items()}, "test")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return find_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def built(smollm2: Path) -> Vocabulary:
    return GGUFCheckpoint(smollm2).vocabulary()


@pytest.mark.model
def test_the_real_vocabulary(built: Vocabulary) -> None:
    assert (built.size, built.bos, built.eos, built.add_bos) == (49152, "<|im_start|>", "<|im_end|>", False)
    assert built.ends == {0, 2}
    assert len(built.controls) == 17


@pytest.mark.model
def test_from_gguf_it_is_that_of_transformers(smollm2: Path, built: Vocabulary) -> None:
    """Digits taken out: those the model's own tokenizer takes one by one, and the one that transformers builds from this
    file does not. There llama.cpp is the judge, below."""
    other = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in CORPUS:
        bare = "".join(character for character in text if not character.isnumeric())
        assert built.encode(bare, special=True) == other.encode(bare, add_special_tokens=False)


@pytest.mark.model
@pytest.mark.parametrize("special", [True, False])
def test_from_gguf_it_is_that_of_llama_cpp(smollm2: Path, built: Vocabulary, special: bool) -> None:
    pytest.importorskip("llama_cpp")
    from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime

    other = LlamaCppRuntime(smollm2, context=64, threads=1)
    for text in CORPUS:
        found = built.encode(text, special=special)
        assert found == other.tokenize(text, special=special)
        if not special:
            assert b"".join(map(built.piece, found)) == text.encode()
    assert all(built.piece(token) == other.piece(token) for token in range(built.size))
    other.close()


def test_digits_are_cut_by_the_pre_tokenizer() -> None:
    def pieces(pre: str, text: str) -> list[bytes]:
        vocabulary = mini(pre)
        return [vocabulary.piece(i) for i in vocabulary.encode(text, special=False)]

    assert pieces("gpt-2", "12345 he") == [b"1234", b"5", b" he"]
    assert pieces("llama-bpe", "12345 he") == [b"123", b"4", b"5", b" he"]
    assert pieces("qwen2", "12345 he") == [b"1", b"2", b"3", b"4", b"5", b" he"]
    assert pieces("smollm", "12 he") == [b"1", b"2", b" he"]
    assert pieces("qwen2", "e\u0301") == [b"\xc3", b"\xa9"]  # composed
    assert pieces("gpt-2", "e\u0301") == [b"e", b"\xcc", b"\x81"]


def test_control_tokens_and_what_users_write() -> None:
    vocabulary = mini("qwen2")
    assert vocabulary.encode("a<|im_end|>", special=True) == [97, 262]
    assert vocabulary.encode("a<|im_end|>", special=False) == list(b"a<|im_end|>")
    assert vocabulary.encode("<think>", special=False) == [264]  # the model writes it too, so it is text
    assert (vocabulary.piece(264), vocabulary.piece(262), vocabulary.piece(99999)) == (b"<think>", b"", b"")
    assert vocabulary.ends == {262, 263}
    assert set(vocabulary.controls) == set(SPECIALS)


def test_begin_tokens() -> None:
    assert not mini("qwen2").add_bos
    assert mini("llama-bpe").add_bos  # known of these, whatever the file leaves out
    assert not mini("llama-bpe", add_bos_token=False).add_bos
    assert mini("qwen2", add_bos_token=True).add_bos
    assert not mini("llama-bpe", bos_token_id=None).add_bos


def test_sentence_piece_merges_by_score() -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "h",
        "e",
        "l",
        "o",
        "he",
        "ll",
        "hell",
        "▁hell",
        "lo",
    ]
    types = [2, 3, 3] + [6] * 256 + [1] * 10
    scores = [0.0] * 264 + [-1.0, -2.0, -3.0, -4.0, -0.5]
    given = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}

    def build(**more: Any) -> Vocabulary:
        return from_gguf_metadata({f"tokenizer.ggml.{k}": v for k, v in {**given, **more}.items()}, "test")

    vocabulary = build()
    pieces = [vocabulary.piece(i) for i in vocabulary.encode("hello hell", special=False)]
    assert pieces == [b" ", b"he", b"l", b"lo", b" hell"]  # "lo" is best, then nothing joins the rest
    assert b"".join(vocabulary.piece(i) for i in vocabulary.encode("é\n", special=False)) == " é\n".encode()
    assert vocabulary.add_bos
    assert vocabulary.ends == {2}
    assert vocabulary.piece(0) == b""
    bare = build(add_space_prefix=False)
    assert [bare.piece(i) for i in bare.encode("hell", special=False)] == [b"hell"]


def test_tokenizer_json(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer(file)

    def read(**more: Any) -> Vocabulary:
        given: dict[str, Any] = {"rows": 300, "bos": None, "eos": "<|im_end|>", "ends": [258], "bos_id": None, **more}
        return from_tokenizer_json(file, **given)

    vocabulary = read()
    assert (vocabulary.size, vocabulary.bos, vocabulary.add_bos) == (259, "", False)
    assert vocabulary.ends == {257, 258}
    assert read(bos_id=256).bos == "<|im_start|>"
    assert read(rows=258).size == 258  # a token without a row of the embedding is none
    assert read(rows=258).encode("<|endoftext|>", special=True) == list(b"<|endoftext|>")
    assert read().identity() != read(rows=258).identity()
    data = json.loads(file.read_text())
    template = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [256], "tokens": ["<|im_start|>"]}}
    data["post_processor"] = {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}
    file.write_text(json.dumps(data))
    assert read(bos="<|im_start|>").add_bos
    assert read(bos="<|im_start|>").encode("a", special=True) == [97]
    file.write_text('{"model": {"type": "Nothing"}}')
    with pytest.raises(ConfigError, match="not a tokenizer"):
        read()
