"""What shape a model has, read from a Hugging Face ``config.json`` or from GGUF metadata; refused when it is another shape.

One decoder serves Llama 2/3, Mistral, SmolLM2, and Qwen2/2.5/3 (dense): RMS norms, rotary positions, grouped-query
attention, a SiLU-gated MLP. They differ in sizes, biases (Qwen2), norms on queries and keys (Qwen3), the scaling of
rotary frequencies, and whether the output matrix is the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cachespec.errors import ConfigError

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
_QK_NORM: Final = frozenset({"qwen3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: ``default``, ``linear`` (all slower by `factor`), ``llama3`` or ``yarn`` (the slow ones by `factor`, the
            fast ones not, a ramp between them).
        original: tokens the model was first trained for; needed by ``llama3`` and ``yarn``.
        low, high: ``llama3``: turns within `original` below which a frequency is slow, above which it is fast.
            ``yarn``: the same as beta_slow and beta_fast.
        attention: ``yarn``: what cosines and sines are multiplied by; None: 0.1 ln(factor) + 1.
        truncate: ``yarn``: the ramp begins and ends at whole dimensions.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    attention: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. `window`: attention looks no further back; None: as far as there is something.

    `trained_context` is None when the file does not say; `qk_norm`: queries and keys are normalised per head.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope: Rope
    trained_context: int | None = None
    tied: bool = False
    window: int | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        positive = (self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim, self.vocab)
        if min(positive) < 1 or self.heads % self.kv_heads or self.head_dim % 2 or not self.eps > 0:
            raise ConfigError(f"the model's sizes do not fit together: {self}", key="model")

    @property
    def groups(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def packed_heads(self) -> int:
        """Heads of queries, keys and values together, in this order: what one projection makes of a token."""
        return self.heads + 2 * self.kv_heads


def from_hugging_face(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The shape in a ``config.json``. Raises ConfigError for an architecture or an option that is not served."""
    kind = str(raw.get("model_type", "unknown"))
    if kind not in ARCHITECTURES:
        raise _unsupported(kind, where)
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{where}: activation {activation!r} is not supported, only silu", key="model")
    hidden, heads = _number(raw, "hidden_size", where), _number(raw, "num_attention_heads", where)
    return ModelConfig(
        architecture=kind,
        layers=_number(raw, "num_hidden_layers", where),
        hidden=hidden,
        intermediate=_number(raw, "intermediate_size", where),
        heads=heads,
        kv_heads=_number(raw, "num_key_value_heads", where, heads),
        head_dim=_number(raw, "head_dim", where, hidden // heads),
        vocab=_number(raw, "vocab_size", where),
        eps=_real(raw, "rms_norm_eps", where, 1e-6),
        rope=_hugging_face_rope(raw, where),
        trained_context=_number(raw, "max_position_embeddings", where, 0) or None,
        tied=bool(raw.get("tie_word_embeddings", False)),
        window=_hugging_face_window(raw, kind, where),
        qk_norm=kind in _QK_NORM,
    )


def _hugging_face_rope(raw: Mapping[str, Any], where: str) -> Rope:
    # transformers 5 writes `rope_parameters`; before it was `rope_theta` beside `rope_scaling`.
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: rotary scaling is {given!r}, not an object", key="model")
    theta = _real({**raw, **given}, "rope_theta", where, 10000.0)
    kind = str(given.get("rope_type", given.get("type", "default")))
    if _real({**raw, **given}, "partial_rotary_factor", where, 1.0) != 1.0:
        raise ConfigError(f"{where}: rotary positions on a part of each head are not supported", key="model")
    if kind == "default":
        return Rope(theta=theta)
    factor = _real(given, "factor", where, 1.0)
    trained = _number(raw, "max_position_embeddings", where, 0)
    original = _number(given, "original_max_position_embeddings", where, trained)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        low, high = _real(given, "low_freq_factor", where), _real(given, "high_freq_factor", where)
        return Rope(theta=theta, kind=kind, factor=factor, original=original, low=low, high=high)
    if kind == "yarn":
        if given.get("mscale") or given.get("mscale_all_dim"):
            raise ConfigError(f"{where}: yarn with mscale is not supported", key="model")
        return Rope(
            theta=theta,
            kind=kind,
            factor=factor,
            original=original,
            low=_real(given, "beta_slow", where, 1.0),
            high=_real(given, "beta_fast", where, 32.0),
            attention=_real(given, "attention_factor", where, 0.0) or None,
            truncate=bool(given.get("truncate", True)),
        )
    raise _unsupported_rope(kind, where)


def _hugging_face_window(raw: Mapping[str, Any], kind: str, where: str) -> int | None:
    window = raw.get("sliding_window")
    if window is None or (kind != "mistral" and not raw.get("use_sliding_window", False)):
        return None
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"{where}: sliding_window is {window!r}", key="model")
    return window


def from_gguf(metadata: Mapping[str, Any], vocab: int, *, tied: bool, freq_factors: bool, where: str) -> ModelConfig:
    """The shape in GGUF metadata. `vocab`: rows of the embedding. `freq_factors`: the file has a tensor of factors by
    which rotary frequencies are divided (Llama 3 scaling); the caller applies it.

    Raises ConfigError as `from_hugging_face` does.
    """
    kind = str(metadata.get("general.architecture", "unknown"))
    if kind not in ARCHITECTURES:
        raise _unsupported(kind, where)

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{name}", default)

    def size(name: str, default: int | None = None) -> int:
        value = get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise ConfigError(f"{where}: {kind}.{name} is {value!r}, not one number", key="model")
        return _number({f"{kind}.{name}": value}, f"{kind}.{name}", where, default)

    if get("expert_count", 0):
        raise ConfigError(f"{where}: mixtures of experts are not supported by the torch runtime", key="model")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{where}: heads of unequal or partly rotated keys and values are not supported", key="model")
    return ModelConfig(
        architecture=kind,
        layers=size("block_count"),
        hidden=hidden,
        intermediate=size("feed_forward_length"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=vocab,
        eps=_real(metadata, f"{kind}.attention.layer_norm_rms_epsilon", where, 1e-6),
        rope=_gguf_rope(get, freq_factors, where),
        trained_context=size("context_length", 0) or None,
        tied=tied,
        window=size("attention.sliding_window", 0) or None,
        qk_norm=kind in _QK_NORM,
    )


def _gguf_rope(get: Any, freq_factors: bool, where: str) -> Rope:
    def real(name: str, default: float) -> float:
        return _real({name: get(name)}, name, where, default)

    theta = real("rope.freq_base", 10000.0)
    kind = get("rope.scaling.type", "none")
    factor = real("rope.scaling.factor", real("rope.scale_linear", 1.0))
    if kind == "none" and get("rope.scale_linear"):
        kind = "linear"
    if kind in ("none", "") or freq_factors:
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        original = {name: get(name) for name in ("rope.scaling.original_context_length", "context_length")}
        trained = _number(original, "context_length", where, 0)
        return Rope(
            theta=theta,
            kind="yarn",
            factor=factor,
            original=_number(original, "rope.scaling.original_context_length", where, trained),
            low=real("rope.scaling.yarn_beta_slow", 1.0),
            high=real("rope.scaling.yarn_beta_fast", 32.0),
            attention=real("rope.scaling.attn_factor", 0.0) or None,
        )
    raise _unsupported_rope(str(kind), where)


def _number(raw: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A whole number above 0; the default, where there is one and the file says nothing, or 0."""
    value = raw.get(name)
    if value in (None, 0) and default is not None and not isinstance(value, bool):
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {name} is {value!r}, not a whole number above 0", key="model")
    return value


def _real(raw: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    """Likewise any number above 0."""
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {name} is {value!r}, not a number above 0", key="model")
    return float(value)


def _unsupported(kind: str, where: str) -> ConfigError:
    served = ", ".join(ARCHITECTURES)
    detail = f"{where}: architecture {kind!r} is not supported by the torch runtime, which serves {served}"
    return ConfigError(detail, key="model")


def _unsupported_rope(kind: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: rotary scaling {kind!r} is not supported (default, linear, llama3 and yarn are)", key="model")
