"""Gemma 2, and the text models of Gemma 3."""

from __future__ import annotations

import math
from typing import Any

from ...errors import ConfigError
from ...model.config import Config, LayerKind
from .fields import COMMON, QK_NORM, Family, Fields, Kind, agreed, biases, shown
from .gguf import HEAD_NORMS, POST_NORMS, Architecture, Metadata, layer_types
from .layers import (
    SLIDING,
    read_kind,
    read_layer_types,
    rope_from_hf,
    two_ropes,
    write_kinds,
    write_two_ropes,
)

_ACTIVATION = "gelu_pytorch_tanh"


def _read_gemma(hf: Fields, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    if hf["hidden_activation"] != _ACTIVATION:
        raise ConfigError(
            f"hidden_activation={shown(hf['hidden_activation'])} is not supported; supported: "
            f"{_ACTIVATION!r}"
        )
    if hf["query_pre_attn_scalar"] <= 0:
        raise ConfigError(f"query_pre_attn_scalar={hf['query_pre_attn_scalar']!r} must be positive")
    return {
        "layer_kinds": kinds,
        **biases(hf),
        "norm_order": "both",
        "norm_offset": True,
        "norm_wide": True,
        "activation": "gelu_tanh",
        "embed_scale": math.sqrt(hf["hidden_size"]),
        "round_embed_scale": True,
        "query_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "score_cap": hf.get("attn_logit_softcapping"),
        "logit_cap": hf.get("final_logit_softcapping"),
    }


def _write_gemma(config: Config) -> dict[str, Any]:
    assert config.query_scale is not None
    scalar = config.query_scale**-2
    return {
        "hidden_activation": _ACTIVATION,
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def read_gemma2(hf: Fields) -> dict[str, Any]:
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    agreed({name: hf.get(name) for name in ("sliding_window", "sliding_window_size")})
    types = read_layer_types(hf, lambda layer: layer % 2 == 0)
    return _read_gemma(hf, tuple(read_kind(hf, rope, here) for here in types))


def write_gemma2(config: Config) -> dict[str, Any]:
    return _write_gemma(config) | write_kinds(config)


def read_gemma3(hf: Fields) -> dict[str, Any]:
    every = hf["sliding_window_pattern"]
    kinds = two_ropes(hf, lambda layer: (layer + 1) % every != 0)
    return _read_gemma(hf, kinds) | {"qk_norm": "head"}


def write_gemma3(config: Config) -> dict[str, Any]:
    ropes = write_two_ropes(config)
    local = ropes["rope_parameters"].get(SLIDING, {}).get("rope_theta", 10_000.0)
    return _write_gemma(config) | ropes | {"rope_local_base_freq": local}


_FIELDS: dict[str, Kind] = {
    "attention_bias": "flag",
    "hidden_activation": "text",
    "query_pre_attn_scalar": "number",
    "sliding_window": "integer",
    "layer_types": "list",
    "final_logit_softcapping": "number",
}
_DEFAULTS = COMMON | {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": _ACTIVATION,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_NAMES = {"mlp_norm": "pre_feedforward_layernorm.weight"}

FAMILIES = {
    "gemma2": Family(
        "Gemma2",
        read_gemma2,
        write_gemma2,
        fields={
            **_FIELDS,
            "attn_logit_softcapping": "number",
            "sliding_window_size": "integer",  # `sliding_window` by another name
        },
        neutral={"hidden_act": (_ACTIVATION,)},
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=_NAMES,
    ),
    "gemma3_text": Family(
        "Gemma3",
        read_gemma3,
        write_gemma3,
        fields={
            **_FIELDS,
            "sliding_window_pattern": "size",
            "rope_local_base_freq": "number",
        },
        neutral=QK_NORM | {"hidden_act": (_ACTIVATION,)},
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        names=_NAMES,
        # Gemma 3 from 4B on.
        inside={
            "gemma3": {
                "vocab_size": 262208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
            }
        },
    ),
}


# GGUF -------------------------------------------------------------------------


def _gguf_gemma(found: Metadata, largest: int) -> dict[str, Any]:
    """Fields of Gemma 2 and 3. The largest model, which has `largest` layers, scales its scores by
    the hidden size over the number of heads; all others by the width of a head."""
    heads = found.integer("attention.head_count")
    width = found.integer("embedding_length")
    scalar = found.integer("attention.key_length", width // heads)
    if found.integer("block_count") == largest:
        scalar = width // heads
    return {
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": scalar,
        "attention_bias": False,
    }


def _gguf_gemma2(found: Metadata) -> dict[str, Any]:
    return _gguf_gemma(found, 46) | {
        "model_type": "gemma2",
        "sliding_window": found.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": found.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": found.get("final_logit_softcapping", 30.0),
        "layer_types": layer_types(found, lambda layer: layer % 2 == 0),
    }


def _gguf_gemma3(found: Metadata) -> dict[str, Any]:
    return _gguf_gemma(found, 62) | {
        "model_type": "gemma3_text",
        "sliding_window": found.integer("attention.sliding_window"),
        "rope_theta": found.get("rope.freq_base", 1e6),
        "rope_local_base_freq": found.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": found.get("final_logit_softcapping"),
        "layer_types": layer_types(found, lambda layer: (layer + 1) % 6 != 0),
    }


_GGUF_NORMS = POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
ARCHITECTURES = {
    "gemma2": Architecture(_gguf_gemma2, _GGUF_NORMS, norm_offset=1.0),
    "gemma3": Architecture(_gguf_gemma3, HEAD_NORMS | _GGUF_NORMS, norm_offset=1.0),
}
