"""The `config.json` that the model of a GGUF file would have, from its metadata: the fields that
every architecture states; `families` has the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import ConfigError
from ..families import ARCHITECTURES
from ..families.fields import shown
from ..families.gguf import Architecture, Metadata, shortest
from ..families.layers import longrope_attention
from .file import GgufFile

_ROPE_FREQS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_SHORT = "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_ROPE_FREQS, _LONG, _SHORT})
"""Tensors that say how positions rotate, and are no weights."""


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """The architecture, and its name. Raises `ConfigError` unless it is one of `ARCHITECTURES`."""
    name = file.metadata.get("general.architecture")
    kind = file.metadata.get("general.type")
    if kind not in (None, "model"):
        raise ConfigError(
            f"general.type={shown(kind)}: not a model; give the GGUF file of the model itself"
        )
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture={shown(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def hf_fields(file: GgufFile) -> dict[str, Any]:
    """The fields of a `config.json`, as transformers 4 spells them. Raises `ConfigError` for
    metadata that would change the model and is not implemented."""
    name, architecture = architecture_of(file)
    found = Metadata(file.metadata, name, file.tensors)
    fields = _common_fields(found) | architecture.read(found)
    found.check()
    return {key: value for key, value in fields.items() if value is not None}


def _common_fields(found: Metadata) -> dict[str, Any]:
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
