"""Writes a transformers model as a GGUF file the way converters do, and tokenizers' metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.torch.support import SPECIALS, byte_letters

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(
    path: Path,
    made: Any,
    *,
    arch: str | None = None,
    kind: str = "F32",
    factors: Any = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """`kind`: how matrices are quantised. `factors`: for ``rope_freqs``. `extra`: metadata, instead of or besides."""
    import gguf
    from gguf.quants import quantize

    config = made.config
    arch = arch or {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer: Any = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    values: dict[str, Any] = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {f"{arch}.rope.scaling.type": rope["rope_type"], f"{arch}.rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "attention_factor" in rope:
            values[f"{arch}.rope.scaling.attn_factor"] = float(rope["attention_factor"])
    values |= byte_tokens() | (extra or {})
    for name, value in values.items():
        if value is not None:
            _put(writer, name, value)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, weight in made.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        stem, what = name.rsplit(".", 1)
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            array = array.reshape(heads, 2, head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        short = _gguf_name(stem) + "." + what
        if array.ndim == 2 and kind != "F32":
            writer.add_tensor(short, quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(short, np.ascontiguousarray(array))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokens() -> dict[str, Any]:
    """A vocabulary of bytes, special tokens, and rows that only pad."""
    tokens = [*byte_letters(), *SPECIALS, *(f"[PAD{i}]" for i in range(13))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIALS) + [5] * 13,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }


def _put(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _gguf_name(stem: str) -> str:
    if stem in NAMES:
        return NAMES[stem]
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"
