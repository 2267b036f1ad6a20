"""A GGUF file, or the first of several parts of one: parsed and dequantised with the `gguf` package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachespec.engine.runtimes.torch.checkpoint import check_names
from cachespec.engine.runtimes.torch.config import from_gguf
from cachespec.engine.runtimes.torch.tokenizer import Vocabulary, from_gguf_metadata
from cachespec.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from torch import Tensor

_TOP: Final = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PARTS: Final = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "attn_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
}
_FACTORS: Final = "rope_freqs.weight"
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFCheckpoint:
    """See `checkpoint.Checkpoint`. Raises ConfigError for what is missing, not supported or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        readers = [_read(part) for part in _parts(path)]
        self.metadata = {name: field.contents() for name, field in readers[0].fields.items()}
        self._tensors: dict[str, Any] = {}
        self._factors: Any = None
        for tensor in (t for reader in readers for t in reader.tensors):
            if tensor.name == _FACTORS:
                self._factors = tensor
            else:
                self._tensors[_short(tensor.name)] = tensor
        if "embed" not in self._tensors:
            raise ConfigError(f"{path}: holds no model, or only a part of one", key="model")
        self.config = from_gguf(
            self.metadata,
            int(self._tensors["embed"].shape[1]),
            tied="head" not in self._tensors,
            freq_factors=self._factors is not None,
            where=str(path),
        )
        check_names(self.config, self._tensors, str(path))
        self.description = str(self.metadata.get("general.name") or path.stem)
        template = self.metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        found = _dequantised(self._tensors[name], self.path)
        layer, _, part = name.partition(".")
        heads = {"q": self.config.heads, "k": self.config.kv_heads}.get(part.removesuffix(".bias"))
        if heads and layer.isdigit() and self.config.architecture == "llama":
            # Converters put the halves of each head of a llama model side by side, pair by pair: undo that.
            found = found.view(heads, self.config.head_dim // 2, 2, *found.shape[1:]).transpose(1, 2).reshape(found.shape)
        return found

    def rope_factors(self) -> Tensor | None:
        return None if self._factors is None else _dequantised(self._factors, self.path)

    def vocabulary(self) -> Vocabulary:
        return from_gguf_metadata(self.metadata, str(self.path))

    def close(self) -> None:
        self._tensors.clear()
        self._factors = None


def _parts(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    return [path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def _read(path: Path) -> Any:
    try:
        import numpy as np
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError("GGUF files in the torch backend need gguf", extra="torch") from error

    class Reader(GGUFReader):
        """Reads the same bytes as a plain array: a slice of a memory map costs several times as much, and a vocabulary
        takes a million."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    try:
        return Reader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path}: cannot be read as GGUF: {error}", key="model") from error


def _dequantised(tensor: Any, path: Path) -> Tensor:
    """A tensor of the file as float32; GGUF counts its dimensions from the innermost."""
    import torch
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ConfigError(f"{path}: {tensor.name} is quantised as {kind}, which is not supported", key="model") from error
    shape = [int(size) for size in reversed(tensor.shape)]
    return torch.from_numpy(values.astype("float32", copy=True)).view(shape)


def _short(name: str) -> str:
    """Our name of a tensor; its own where we have none, which is then reported as unknown."""
    if name in _TOP:
        return _TOP[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _PARTS:
        return name
    return f"{found[1]}.{_PARTS[found[2]]}" + (".bias" if found[3] == "bias" else "")
