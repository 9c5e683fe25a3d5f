"""The metadata of a model in a GGUF file, and the fields of a `config.json` that every architecture
makes from it. `gguf_architectures` has the others.

Keys are those of llama.cpp's converter, and what stands for them in a `config.json` is what the
converter reads. A key of the architecture that is not known is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError
from .gguf_file import GgufFile, StoredBlocks
from .hf_rope import longrope_attention
from .hf_values import shown

_ROPE_FREQS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_SHORT = "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_ROPE_FREQS, _LONG, _SHORT})
"""Tensors that say how positions rotate, and are no weights."""

# Keys of every architecture, without its name.
_COMMON = frozenset(
    """
    vocab_size context_length embedding_length block_count feed_forward_length
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned
    rope.scaling.attn_factor rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scale_linear
    """.split()
)
# Keys with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_gating_func": (1,),
    "expert_weights_scale": (1.0, 0.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.finetuned": (True,),
}


class Metadata:
    """The keys of a file's architecture, by their names without it. Those that were not asked for
    are left over."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.tensors: Mapping[str, StoredBlocks] = file.tensors
        self.prefix = f"{architecture}."
        self.known: set[str] = {*_COMMON}
        self.values = {
            key.removeprefix(self.prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self.prefix)
        }

    def get(self, name: str, default: Any = None) -> Any:
        """A value. Numbers of 32 bits have the fewest digits that tell them from others: 1e-05 is
        stored as 9.999999747378752e-06."""
        self.known.add(name)
        value = self.values.get(name, default)
        return shortest(value) if isinstance(value, float) else value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, which may stand once for each layer. Raises `ConfigError` if layers
        differ, or if it is missing and there is no default."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"missing: {self.prefix}{name}")
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise ConfigError(
                    f"{self.prefix}{name}={shown(value.tolist())} differs from layer to layer, "
                    f"which is not supported"
                )
            value = value[0].item()
        if type(value) is not int:
            raise ConfigError(f"{self.prefix}{name}={shown(value)} must be an integer")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def check(self) -> None:
        """Raise `ConfigError` for a key that nothing has read and that could change the model."""
        for name, value in self.values.items():
            if name in self.known:
                continue
            if name not in _NEUTRAL:
                raise ConfigError(
                    f"unknown metadata {self.prefix}{name}={shown(value)}: it could change the "
                    f"model; if it changes nothing, remove it by "
                    f"{removal(self.prefix + name)}"
                )
            if value not in _NEUTRAL[name]:
                raise ConfigError(
                    f"{self.prefix}{name}={shown(value)} is not supported; supported: "
                    f"{_NEUTRAL[name][0]!r}"
                )


def removal(key: str) -> str:
    """The command of the package gguf that copies a file without a key."""
    return f"`gguf-new-metadata --remove-metadata {key} IN OUT`"


def common_fields(found: Metadata) -> dict[str, Any]:
    embedding = found.tensors.get("token_embd.weight")
    heads = found.integer("attention.head_count")
    if embedding is None:
        raise ConfigError("missing: token_embd.weight")
    width = found.integer("embedding_length")
    if heads < 1 or width % heads and found.get("attention.key_length") is None:
        raise ConfigError(f"{found.prefix}attention.head_count={heads} must divide {width}")
    head_dim = found.integer("attention.key_length", width // max(1, heads))
    if found.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{found.prefix}attention.value_length={found.get('attention.value_length')} is not "
            f"supported; supported: {head_dim}, as attention.key_length"
        )
    rows = embedding.shape[0]
    if found.integer("vocab_size", rows) != rows:
        raise ConfigError(
            f"{found.prefix}vocab_size={found.get('vocab_size')}, but token_embd.weight has {rows} "
            f"rows: the file is damaged or badly converted; get or convert it again"
        )
    epsilon = "attention.layer_norm_rms_epsilon"
    if found.get(epsilon) is None:
        raise ConfigError(f"missing: {found.prefix}{epsilon}")
    rotated = found.integer("rope.dimension_count", head_dim)
    return {
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": found.integer("feed_forward_length"),
        "num_hidden_layers": found.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": found.get(epsilon),
        "max_position_embeddings": found.integer("context_length"),
        "tie_word_embeddings": not found.has("output.weight"),
        "rope_theta": found.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(found),
        "partial_rotary_factor": None if rotated == head_dim else rotated / head_dim,
    }


def _rope_scaling(found: Metadata) -> dict[str, Any] | None:
    kind = found.get("rope.scaling.type", "none")
    factor = found.get("rope.scaling.factor", found.get("rope.scale_linear"))
    original = found.get("rope.scaling.original_context_length")
    if found.has(_ROPE_FREQS):
        return _llama3(found)
    if found.has(_LONG) or found.has(_SHORT):
        return _longrope(found, original)
    if kind == "none" or factor in (None, 0.0) or kind == "linear" and factor == 1.0:
        if kind not in ("none", "linear"):
            raise ConfigError(f"{found.prefix}rope.scaling.type={shown(kind)} without its factors")
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(
            f"{found.prefix}rope.scaling.type={shown(kind)} is not supported; supported: none, "
            f"linear, yarn, longrope"
        )
    if found.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise ConfigError(
            f"{found.prefix}rope.scaling.yarn_ext_factor="
            f"{found.get('rope.scaling.yarn_ext_factor')} is not supported; supported: 1.0"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": found.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": found.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": found.get("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _llama3(found: Metadata) -> dict[str, Any]:
    """The scaling whose divisors of frequencies the file has. It does not state their three
    parameters, which are the same in every published model. Raises `ConfigError` if the divisors
    are of others."""
    divisors = found.tensors[_ROPE_FREQS].whole()
    low = 1.0
    high = 4.0
    original = 8192
    dims = 2 * len(divisors)
    theta = found.get("rope.freq_base", 10_000.0)
    frequencies = 1.0 / theta ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    factor = shortest(float(divisors.max()))
    smooth = (original * frequencies / (2 * math.pi) - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    if not np.allclose(1.0 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4):
        raise ConfigError(
            f"{_ROPE_FREQS}: these divisors of frequencies are not those of rope_type llama3 with "
            f"low_freq_factor 1, high_freq_factor 4 and 8192 original positions"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope(found: Metadata, original: int | None) -> dict[str, Any]:
    if not (found.has(_LONG) and found.has(_SHORT)) or original is None:
        raise ConfigError(
            f"{_LONG} and {_SHORT} need each other and {found.prefix}rope.scaling."
            f"original_context_length"
        )
    factors = {
        field: [shortest(value) for value in found.tensors[name].whole().tolist()]
        for field, name in (("short_factor", _SHORT), ("long_factor", _LONG))
    }
    scaling = {"type": "longrope", **factors}
    attention = found.get("rope.scaling.attn_factor")
    default = longrope_attention(found.integer("context_length"), original)
    if attention is not None and not math.isclose(attention, default, rel_tol=1e-6):
        scaling["attention_factor"] = attention
    return scaling


def shortest(value: float) -> float:
    """The number of the fewest digits that is this one in float32, if it is one."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value
