"""GLM-4 and ERNIE 4.5, whose rotary embeddings pair neighbouring dimensions of a head."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...model.config import Config
from .fields import COMMON, GATE_UP, SILU, Family, Fields, Kind
from .gguf import GATE_UP_NAME, Architecture, Metadata, attention_bias
from .layers import one_kind, rope_to_hf
from .llama import write_llama


def read_glm(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf, partial=True), "qkv_bias": hf["attention_bias"]}


def read_glm4(hf: Fields) -> dict[str, Any]:
    return read_glm(hf) | {"norm_order": "both"}


def write_glm(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return write_llama(config) | {"partial_rotary_factor": rope.fraction}


def read_ernie(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf)}


def write_ernie(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return {"hidden_act": "silu", "use_bias": False} | rope_to_hf(rope)


_FIELDS: dict[str, Kind] = {"attention_bias": "flag", "partial_rotary_factor": "number"}
_DEFAULTS = COMMON | {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

FAMILIES = {
    "glm": Family(
        "Glm",
        read_glm,
        write_glm,
        fields=_FIELDS,
        neutral=SILU,
        defaults=_DEFAULTS,
        fused=GATE_UP,
        interleaved=True,
    ),
    "glm4": Family(
        "Glm4",
        read_glm4,
        write_glm,
        fields=_FIELDS,
        neutral=SILU,
        defaults=_DEFAULTS,
        names={
            "attn_post": "post_self_attn_layernorm.weight",
            "mlp_post": "post_mlp_layernorm.weight",
        },
        fused=GATE_UP,
        interleaved=True,
    ),
    "ernie4_5": Family(
        "Ernie4_5",
        read_ernie,
        write_ernie,
        # A divisor of positions.
        neutral=SILU | {"compression_ratio": (1.0, None)},
        defaults=COMMON
        | {
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        interleaved=True,
    ),
}


# GGUF -------------------------------------------------------------------------


def _gguf_glm4(found: Metadata) -> dict[str, Any]:
    if found.get("rope.dimension_sections") is not None:
        raise ConfigError(f"{found.prefix}rope.dimension_sections: not supported")
    return attention_bias(found) | {"model_type": "glm4"}


def _gguf_ernie(found: Metadata) -> dict[str, Any]:
    return {"model_type": "ernie4_5", "hidden_act": "silu", "use_bias": False}


ARCHITECTURES = {
    "glm4": Architecture(
        _gguf_glm4,
        GATE_UP_NAME
        | {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "ernie4_5": Architecture(_gguf_ernie),
}
