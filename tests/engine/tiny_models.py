"""Small models with random weights, as files: architectures of which no real model is small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 258
END = 256


def mamba(path: Path, *, layers: int = 2, width: int = 64, padding: int = 0) -> Path:
    """A recurrent model as a GGUF file, with a token for each byte, and probable ids that only fill up its matrices."""
    import gguf

    writer: Any = gguf.GGUFWriter(path, "mamba")
    inner, state, rank, kernel = 2 * width, 8, 4, 4
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(layers)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    _byte_tokens(writer, padding)
    rng = np.random.default_rng(0)

    def put(name: str, *shape: int, scale: float = 0.1) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    put("token_embd.weight", VOCAB + padding, width, scale=1.0)
    head = rng.standard_normal((VOCAB + padding, width)).astype(np.float32)
    head[VOCAB:] *= 30
    writer.add_tensor("output.weight", head)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        at = f"blk.{i}."
        writer.add_tensor(f"{at}attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{at}ssm_a", -np.exp(rng.standard_normal((inner, state)) * 0.1).astype(np.float32))
        shapes: dict[str, tuple[int, ...]] = {
            "ssm_in.weight": (2 * inner, width),
            "ssm_conv1d.weight": (inner, kernel),
            "ssm_conv1d.bias": (inner,),
            "ssm_x.weight": (rank + 2 * state, inner),
            "ssm_dt.weight": (inner, rank),
            "ssm_dt.bias": (inner,),
            "ssm_d": (inner,),
            "ssm_out.weight": (width, inner),
        }
        for name, shape in shapes.items():
            put(at + name, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama(path: Path, *, layers: int = 2, heads: int = 4, context: int = 2048) -> Path:
    """A transformer as a GGUF file, with a token for each byte; one kernel multiplies its weights, however many the rows."""
    import gguf

    writer: Any = gguf.GGUFWriter(path, "llama")
    width, inner = heads * 32, 128
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-5)
    _byte_tokens(writer, 0)
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_1

    def put(name: str, *shape: int, scale: float = 0.15) -> None:
        weights = (rng.standard_normal(shape) * scale).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    put("token_embd.weight", VOCAB, width, scale=1.0)
    put("output.weight", VOCAB, width, scale=1.0)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        at = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{name}.weight", np.ones(width, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            put(f"{at}{name}.weight", width, width)
        for name in ("ffn_gate", "ffn_up"):
            put(f"{at}{name}.weight", inner, width)
        put(f"{at}ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_tokens(writer: Any, padding: int) -> None:
    """GPT-2's alphabet of bytes, an end, and a token of the one merge that the format demands; then nothing but padding."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in shown)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    filling = [f"[PAD{VOCAB + i}]" for i in range(padding)]  # as converters call them
    writer.add_token_list([*(letters[byte] for byte in range(256)), "<|end|>", "th", *filling])
    writer.add_token_types([1] * 256 + [3, 1] + [5] * padding)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(END)
    writer.add_add_bos_token(False)
