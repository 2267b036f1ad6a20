"""A Hugging Face directory: ``config.json``, ``*.safetensors`` (one file or shards), ``tokenizer.json``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachespec.engine.runtimes.torch.checkpoint import check_names
from cachespec.engine.runtimes.torch.config import from_hugging_face
from cachespec.engine.runtimes.torch.tokenizer import Vocabulary, from_tokenizer_json
from cachespec.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from torch import Tensor

_TOP: Final = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PARTS: Final = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_NORMS: Final = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}
_DERIVED: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old checkpoints store it


class HuggingFaceCheckpoint:
    """See `checkpoint.Checkpoint`. Raises ConfigError for what is missing, not supported or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        self.config = from_hugging_face(raw, str(path))
        self.description = f"{path.name} ({self.config.architecture})"
        self._raw = raw
        self._tokenizer_config = read_json(path / "tokenizer_config.json", needed=False)
        self.chat_template = self._template()
        self._files: dict[str, Any] = {}
        self._where: dict[str, tuple[str, str]] = {}  # our name -> file, name in the file
        for file in _weight_files(path):
            handle = _open(path / file)
            self._files[file] = handle
            for name in handle.keys():  # noqa: SIM118 - a handle of safetensors, no mapping
                if not _DERIVED.fullmatch(name):
                    self._where[_short(name)] = (file, name)
        check_names(self.config, self._where, str(path))

    def has(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> Tensor:
        import torch

        file, stored = self._where[name]
        found: Tensor = self._files[file].get_tensor(stored)
        if found.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"{self.path}: {stored} is stored as {found.dtype}, which is not supported", key="model")
        return found

    def rope_factors(self) -> Tensor | None:
        return None

    def vocabulary(self) -> Vocabulary:
        generation = read_json(self.path / "generation_config.json", needed=False)
        ends: set[int] = set()
        for value in (generation.get("eos_token_id"), self._raw.get("eos_token_id")):
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{self.path}: has no tokenizer.json", key="model")
        named = {name: _token_text(self._tokenizer_config.get(f"{name}_token")) for name in ("bos", "eos")}
        return from_tokenizer_json(
            file, rows=self.config.vocab, bos=named["bos"], eos=named["eos"], ends=ends, bos_id=self._raw.get("bos_token_id")
        )

    def close(self) -> None:
        self._files.clear()

    def _template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        given = self._tokenizer_config.get("chat_template")
        if isinstance(given, list):  # several, by name
            given = next((t.get("template") for t in given if t.get("name") == "default"), None)
        return given if isinstance(given, str) else None


def read_json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """The object in a JSON file; empty when it is not there and not needed. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise ConfigError(f"{path.parent}: has no {path.name}, so it is no model", key="model") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", key="model") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds no JSON object", key="model")
    return found


def _weight_files(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(read_json(index).get("weight_map", {}).values()))
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if len(found) != 1:
        what = "several *.safetensors files and no index of them" if found else "no *.safetensors file"
        raise ConfigError(f"{path}: has {what}", key="model")
    return found


def _open(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError("the torch backend needs safetensors", extra="torch") from error
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}", key="model") from error


def _short(name: str) -> str:
    """Our name of a tensor; its own where we have none, which is then reported as unknown."""
    if name in _TOP:
        return _TOP[name]
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    layer, rest = found.groups()
    if rest in _NORMS:
        return f"{layer}.{_NORMS[rest]}"
    stem, _, what = rest.rpartition(".")
    if stem not in _PARTS or what not in ("weight", "bias"):
        return name
    return f"{layer}.{_PARTS[stem]}" + (".bias" if what == "bias" else "")


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
