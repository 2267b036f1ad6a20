"""Every served shape against transformers, with small random weights; what is not served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.torch import gguf_writer
from tests.engine.torch.support import LLAMA3, SHAPES, WORDS, YARN, expected, load, model, numbers, put, save

from cachespec.errors import ConfigError


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    kind, options = SHAPES[shape]
    made = model(kind, **options)
    runtime = load(save(made, tmp_path))
    tokens = numbers(150)
    found, wanted = put(runtime, tokens), expected(made, tokens)[:, :WORDS]
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max() + 1e-4
    assert (found.argmax(1) == wanted.argmax(1)).all()
    assert runtime.info.vocab == WORDS
    assert runtime.info.parameters == sum(weight.numel() for weight in made.parameters())
    assert np.array_equal(put(runtime, tokens[:70], 1), found[:70])
    runtime.close()


@pytest.mark.parametrize("shape", [s for s in SHAPES if "3 scaling" not in s])
def test_the_same_from_gguf(tmp_path: Path, shape: str) -> None:
    kind, options = SHAPES[shape]
    made = model(kind, **options)
    runtime = load(gguf_writer.write(tmp_path / "model.gguf", made))
    tokens = numbers(120)
    wanted = expected(made, tokens)[:, :WORDS]
    assert np.abs(put(runtime, tokens) - wanted).max() < 1e-4 * np.abs(wanted).max() + 1e-4
    assert runtime.info.vocab == WORDS
    assert runtime.info.chat_template == "{{ messages[0]['content'] }}"


def test_frequency_factors_of_gguf_are_llama_3_scaling(tmp_path: Path) -> None:
    """Converters write what llama3 scaling divides each frequency by as a tensor."""
    made = model("llama", rope_parameters=LLAMA3)
    plain = 500000.0 ** (-np.arange(0, 16, 2, dtype=np.float32) / 16)
    scaled = made.model.rotary_emb.inv_freq.numpy()
    runtime = load(gguf_writer.write(tmp_path / "model.gguf", made, factors=(plain / scaled).astype(np.float32)))
    tokens = numbers(150)
    wanted = expected(made, tokens)[:, :WORDS]
    assert np.abs(put(runtime, tokens) - wanted).max() < 1e-3


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_gguf_is_what_its_weights_decode_to(tmp_path: Path, kind: str) -> None:
    import gguf
    import torch

    made = model("llama")
    runtime = load(gguf_writer.write(tmp_path / "model.gguf", made, kind=kind))
    type_ = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                packed = gguf.quants.quantize(weight.numpy(), type_)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, type_).astype(np.float32)))
    tokens = numbers(40)
    wanted = expected(made, tokens)[:, :WORDS]
    assert np.abs(put(runtime, tokens) - wanted).max() < 1e-3


def test_shards_are_one_model(tmp_path: Path) -> None:
    made = model("qwen2")
    whole, parts = save(made, tmp_path / "whole"), save(made, tmp_path / "parts", max_shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    tokens = numbers(30)
    one, other = load(whole), load(parts)
    assert np.array_equal(put(one, tokens), put(other, tokens))
    assert one.info.fingerprint == other.info.fingerprint
    next(parts.glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(parts)


def test_split_gguf_is_one_model(tmp_path: Path) -> None:
    made = model("llama")
    whole = gguf_writer.write(tmp_path / "m-00001-of-00001.gguf", made)
    assert load(whole).info.vocab == WORDS
    with pytest.raises(ConfigError, match="m-00002-of-00002"):
        load(whole.rename(tmp_path / "m-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {**YARN, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a part of each head"),
        ({"num_hidden_layers": 4}, "lacks 3.attn_norm"),
        ({"num_hidden_layers": 2}, "nobody here knows: 2.attn_norm"),
        ({"intermediate_size": 100}, "0.gate is"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_attention_heads": 3}, "do not fit together"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number above 0"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads is 'two'"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', not a number above 0"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"rope_parameters": "yarn"}, "rotary scaling is 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = save(model("llama"), tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_sliding_windows_are_served_as_far_as_they_make_no_difference(tmp_path: Path) -> None:
    made = model("mistral", sliding_window=64)
    folder = save(made, tmp_path)
    with pytest.raises(ConfigError, match="looks back 64 tokens"):
        load(folder, context=65)
    tokens = numbers(60)
    wanted = expected(made, tokens)[:, :WORDS]
    assert np.abs(put(load(folder, context=64), tokens) - wanted).max() < 1e-3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"qwen2.expert_count": 8}, "mixtures of experts"),
        ({"qwen2.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"qwen2.attention.value_length": 8}, "unequal"),
        ({"qwen2.block_count": [3, 3, 2]}, "not one number"),
        ({"qwen2.attention.head_count": 0}, "head_count is 0, not a whole number above 0"),
        ({"qwen2.rope.freq_base": -1.0}, "rope.freq_base is -1.0"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.merges": ["h e"]}, "`he` out of vocabulary"),
    ],
)
def test_gguf_that_is_not_served_is_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    file = gguf_writer.write(tmp_path / "model.gguf", model("qwen2"), extra=extra)
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_another_architecture_and_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'phi3'"):
        load(gguf_writer.write(tmp_path / "model.gguf", model("llama"), arch="phi3"))
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "missing.gguf")
    (tmp_path / "not.gguf").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        load(tmp_path / "not.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder)
    save(model("llama"), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(folder)


def test_context_is_bounded_by_what_the_model_was_trained_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="513 is more than the 512 tokens"):
        load(save(model("llama"), tmp_path), context=513)
