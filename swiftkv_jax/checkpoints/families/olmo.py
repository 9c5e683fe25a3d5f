"""OLMo 2, and OLMo 3, which has windows and two rotary embeddings."""

from __future__ import annotations

from typing import Any

from ...model.config import Config
from .fields import COMMON, QK_NORM, SILU, Family, Fields, biases
from .gguf import HEAD_NORMS, POST_NORMS, Architecture, Metadata, attention_bias, layer_types
from .layers import one_kind, two_ropes, write_two_ropes
from .llama import write_llama

_NORMS = {"qk_norm": "all", "norm_order": "post", "norm_wide": True}


def read_olmo2(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf), **biases(hf)} | _NORMS


def _has_window(layer: int) -> bool:
    return (layer + 1) % 4 != 0


def read_olmo3(hf: Fields) -> dict[str, Any]:
    kinds = two_ropes({**hf, "rope_local_base_freq": hf["rope_theta"]}, _has_window)
    return {"layer_kinds": kinds, **biases(hf)} | _NORMS


def write_olmo3(config: Config) -> dict[str, Any]:
    bias = {"hidden_act": "silu", "attention_bias": config.qkv_bias}
    return bias | write_two_ropes(config)


FAMILIES = {
    "olmo2": Family(
        "Olmo2",
        read_olmo2,
        write_llama,
        fields={"attention_bias": "flag"},
        neutral=SILU | QK_NORM,
        defaults=COMMON | {"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3",
        read_olmo3,
        write_olmo3,
        fields={"attention_bias": "flag", "sliding_window": "integer", "layer_types": "list"},
        neutral=SILU | QK_NORM,
        defaults=COMMON | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
}


def _gguf_olmo(found: Metadata) -> dict[str, Any]:
    window = found.get("attention.sliding_window") or None
    if window is None:
        return attention_bias(found) | {"model_type": "olmo2"}
    return attention_bias(found) | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(found, _has_window),
    }


ARCHITECTURES = {"olmo2": Architecture(_gguf_olmo, HEAD_NORMS | POST_NORMS)}
