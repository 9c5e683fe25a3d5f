"""Llama, and the models of its architecture with a window, biases, or layers that rotate nothing:
Mistral, Seed-OSS, SmolLM3."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...model.config import Config, LayerKind
from .fields import COMMON, SILU, Family, Fields, Kind, biases, shown
from .gguf import Architecture, Metadata, attention_bias
from .layers import (
    one_kind,
    read_kind,
    read_layer_types,
    rope_from_hf,
    rope_to_hf,
    types_of,
    window_of,
)


def read_llama(hf: Fields) -> dict[str, Any]:
    (kind,) = one_kind(hf)
    if kind.window is not None:
        raise ConfigError(
            f"sliding_window={hf['sliding_window']} below max_position_embeddings="
            f"{hf['max_position_embeddings']} is not supported for this model_type"
        )
    return {"layer_kinds": (kind,), **biases(hf)}


def read_mistral(hf: Fields) -> dict[str, Any]:
    (kind,) = one_kind(hf)
    options = {"layer_kinds": (kind,), **biases(hf)}
    return options if kind.window is not None else options | {"family": "llama"}


def write_llama(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    bias = {"attention_bias": config.qkv_bias, "mlp_bias": False}
    return {"hidden_act": "silu"} | rope_to_hf(rope) | bias


def write_window(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return {"hidden_act": "silu", "sliding_window": window_of(config)} | rope_to_hf(rope)


def read_seed_oss(hf: Fields) -> dict[str, Any]:
    return {
        "layer_kinds": one_kind(hf),
        "qkv_bias": hf["attention_bias"],
        "o_bias": hf["attention_out_bias"],
    }


def write_seed_oss(config: Config) -> dict[str, Any]:
    return write_llama(config) | {"attention_out_bias": config.o_bias}


def read_smollm3(hf: Fields) -> dict[str, Any]:
    """Layers whose entry of `no_rope_layers` is 0 rotate nothing."""
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    count = hf["num_hidden_layers"]
    every = hf["no_rope_layer_interval"]
    rotated = hf.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(count)]
    if len(rotated) != count or any(
        type(entry) is not int or entry not in (0, 1) for entry in rotated
    ):
        raise ConfigError(
            f"no_rope_layers={shown(rotated)} must have 0 or 1 for each of the {count} layers"
        )
    if not any(rotated):
        raise ConfigError(f"no_rope_layers={shown(rotated)}: some layers must rotate")
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window") is not None
    types = read_layer_types(hf, lambda layer: bool(windowed and not rotated[layer]))
    ropes = (None, rope)
    kinds = [read_kind(hf, ropes[turns], here) for turns, here in zip(rotated, types, strict=True)]
    return {"layer_kinds": tuple(kinds), **biases(hf)}


def write_smollm3(config: Config) -> dict[str, Any]:
    kinds: list[LayerKind] = [config.kind(layer) for layer in range(config.num_layers)]
    window = window_of(config)
    return write_llama(config) | {
        "no_rope_layers": [int(kind.rope is not None) for kind in kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types_of(config),
    }


# `max_window_layers` stands in files of families that do not read it.
_WINDOW: dict[str, Kind] = {
    "sliding_window": "integer",
    "layer_types": "list",
    "max_window_layers": "integer",
}

FAMILIES = {
    "llama": Family(
        "Llama",
        read_llama,
        write_llama,
        fields={"attention_bias": "flag", **_WINDOW},
        # SmolLM2's: the split halves that this package computes, and a mark of conversion scripts.
        neutral=SILU
        | {
            "rope_interleaved": (False, None),
            "is_llama_config": (True, None),
            "activation": ("swiglu", None),
        },
        defaults=COMMON,
    ),
    "mistral": Family(
        "Mistral",
        read_mistral,
        write_window,
        fields={"attention_bias": "flag", **_WINDOW},
        neutral=SILU,
        # transformers reads a file without the field as one with a window of 4096; null is none.
        defaults=COMMON
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        # Mistral Small 3.1 and 3.2.
        inside={
            "mistral3": {
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
            }
        },
    ),
    "seed_oss": Family(
        "SeedOss",
        read_seed_oss,
        write_seed_oss,
        fields={"attention_bias": "flag", "attention_out_bias": "flag"},
        neutral=SILU,
        defaults=COMMON
        | {
            "max_position_embeddings": 524288,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
    "smollm3": Family(
        "SmolLM3",
        read_smollm3,
        write_smollm3,
        fields={
            "attention_bias": "flag",
            "no_rope_layers": "list",
            "no_rope_layer_interval": "size",
            "use_sliding_window": "flag",
            **_WINDOW,
        },
        neutral=SILU,
        defaults=COMMON
        | {
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
}


# GGUF -------------------------------------------------------------------------


def _gguf_llama(found: Metadata) -> dict[str, Any]:
    window = found.get("attention.sliding_window") or None
    model_type = "llama" if window is None else "mistral"
    return attention_bias(found) | {"model_type": model_type, "sliding_window": window}


def _gguf_seed_oss(found: Metadata) -> dict[str, Any]:
    output = found.has("blk.0.attn_output.bias")
    return attention_bias(found) | {"model_type": "seed_oss", "attention_out_bias": output}


def _gguf_smollm3(found: Metadata) -> dict[str, Any]:
    return attention_bias(found) | {"model_type": "smollm3", "no_rope_layer_interval": 4}


ARCHITECTURES = {
    "llama": Architecture(_gguf_llama, permuted=True),
    "seed_oss": Architecture(_gguf_seed_oss, {"post_attention_layernorm": "post_attention_norm"}),
    "smollm3": Architecture(_gguf_smollm3, permuted=True),
}
