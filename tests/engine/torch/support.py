"""Small random models of every served shape, as Hugging Face directories and as GGUF files, and helpers to run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("safetensors")

from torch import Tensor  # noqa: E402 - after the skips

from cachespec.engine.runtimes.base import Span  # noqa: E402 - after the skips
from cachespec.engine.runtimes.torch import TorchRuntime  # noqa: E402

__all__ = ["Tensor", "torch", "transformers"]

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
WORDS = 256 + len(SPECIALS)
ROWS = 272  # of the embedding: more than there are tokens
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama grouped, untied": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama 3 scaling, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama all heads their own": (
        "llama",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
    ),
    "llama one head of keys": ("llama", {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2 biases": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3 norms, tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 yarn": ("qwen3", {"head_dim": 32, "rope_parameters": {**YARN, "attention_factor": 1.2}}),
}


def model(kind: str, **more: Any) -> Any:
    """A random model, float32, large enough weights that its logits differ, norms and biases not trivial."""
    sizes = {
        "vocab_size": ROWS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **more})
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
    return made


def save(made: Any, folder: Path, **more: Any) -> Path:
    """As transformers saves it, with a tokenizer of bytes."""
    made.save_pretrained(folder, **more)
    tokenizer(folder / "tokenizer.json")
    return folder


def tokenizer(file: Path) -> None:
    """A byte-level tokenizer.json without merges: token i is byte i."""
    letters = byte_letters()
    added = [
        {"id": 256 + i, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, text in enumerate(SPECIALS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []},
    }
    file.write_text(json.dumps(data), encoding="utf-8")


def byte_letters() -> list[str]:
    """The letter of each byte in the byte-level alphabet."""
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain = {i: split.pre_tokenize_str(chr(i))[0][0] for i in range(128)}
    rest: dict[int, str] = {}
    for character in (chr(c) for c in range(128, 0x2000)):
        for byte, letter in zip(character.encode(), split.pre_tokenize_str(character)[0][0], strict=True):
            rest.setdefault(byte, letter)
    free = iter(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(plain.values()) - set(rest.values())))
    return [plain.get(i) or rest.get(i) or next(free) for i in range(256)]


def expected(made: Any, tokens: list[int]) -> NDArray[np.float32]:
    """transformers' logits of every position."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = made(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def load(path: Path, **more: Any) -> TorchRuntime:
    options = {"context": 256, "sequences": 3, "device": "cpu", "dtype": "float32", "threads": 1}
    return TorchRuntime.load(path, **{**options, **more})


def put(runtime: TorchRuntime, tokens: list[int], sequence: int = 0, rows: int | None = None) -> NDArray[np.float32]:
    """Logits of the last `rows` of these tokens, of all by default, evaluated at the end of the sequence."""
    wanted = len(tokens) if rows is None else rows
    span = Span(sequence=sequence, start=runtime.length(sequence), tokens=tokens, rows=wanted)
    return runtime.rows(runtime.evaluate([span]))


def numbers(count: int, seed: int = 0, below: int = WORDS) -> list[int]:
    """Random token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, below, count)]
