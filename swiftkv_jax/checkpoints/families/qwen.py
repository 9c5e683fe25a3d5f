"""Qwen2, Qwen3, and Qwen3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from ...model.config import Config, LayerKind
from .fields import COMMON, QK_NORM, SILU, Family, Fields, Kind, agreed, biases, check_integer
from .gguf import HEAD_NORMS, Architecture, Metadata, attention_bias
from .layers import one_kind, read_kind, read_layer_types, rope_from_hf, rope_to_hf, write_kinds


def _windows_above(hf: Fields) -> tuple[LayerKind, ...]:
    """A window, if it is switched on, in the layers from `max_window_layers` on."""
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    on = bool(hf.get("use_sliding_window"))
    first = hf["max_window_layers"]
    if not on:
        hf = {**hf, "sliding_window": None}
    windowed = hf.get("sliding_window") is not None
    types = read_layer_types(hf, lambda layer: windowed and layer >= first)
    return tuple(read_kind(hf, rope, here) for here in types)


def read_qwen2(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": _windows_above(hf), "qkv_bias": True}


def write_qwen2(config: Config) -> dict[str, Any]:
    kinds = write_kinds(config)
    return {"hidden_act": "silu", "use_sliding_window": kinds["sliding_window"] is not None} | kinds


def read_qwen3(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": _windows_above(hf), "qk_norm": "head", **biases(hf)}


def write_qwen3(config: Config) -> dict[str, Any]:
    return write_qwen2(config) | {"attention_bias": config.qkv_bias}


def read_qwen3_moe(hf: Fields) -> dict[str, Any]:
    counts = {name: hf.get(name) for name in ("num_experts", "num_local_experts")}
    for name, count in {**counts, "num_experts_per_tok": hf["num_experts_per_tok"]}.items():
        if count is not None:
            check_integer(name, count)
    return {
        "layer_kinds": one_kind({**hf, "sliding_window": None}),
        "qk_norm": "head",
        **biases(hf),
        "num_experts": agreed(counts) or 128,
        "num_experts_per_token": hf["num_experts_per_tok"],
        "renormalize_experts": hf["norm_topk_prob"],
    }


def write_qwen3_moe(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return rope_to_hf(rope) | {
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "norm_topk_prob": config.renormalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


_WINDOW: dict[str, Kind] = {
    "use_sliding_window": "flag",
    "max_window_layers": "integer",
    "sliding_window": "integer",
    "layer_types": "list",
}
_DEFAULTS = COMMON | {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}

FAMILIES = {
    "qwen2": Family(
        "Qwen2",
        read_qwen2,
        write_qwen2,
        fields=_WINDOW,
        neutral=SILU
        | {"use_mrope": (False, None), "attention_bias": (True, None), "qkv_bias": (True, None)},
        defaults=_DEFAULTS,
    ),
    "qwen3": Family(
        "Qwen3",
        read_qwen3,
        write_qwen3,
        fields={**_WINDOW, "attention_bias": "flag"},
        neutral=SILU | QK_NORM,
        defaults=_DEFAULTS | {"head_dim": 128},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        read_qwen3_moe,
        write_qwen3_moe,
        fields={
            "attention_bias": "flag",
            "num_experts": "integer",
            "num_local_experts": "integer",
            "num_experts_per_tok": "integer",
            "moe_intermediate_size": "size",
            "norm_topk_prob": "flag",
            # They say nothing where the window's switch is off.
            "sliding_window": "integer",
            "max_window_layers": "integer",
        },
        mlp_dim="moe_intermediate_size",
        neutral=SILU
        | QK_NORM
        | {
            "use_sliding_window": (False, None),
            "decoder_sparse_step": (1, None),
            "mlp_only_layers": ([], None),
        },
        defaults=COMMON
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
}


# GGUF -------------------------------------------------------------------------


def _gguf_qwen2(found: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}


def _gguf_qwen3(found: Metadata) -> dict[str, Any]:
    return attention_bias(found) | {"model_type": "qwen3", "use_sliding_window": False}


def _gguf_qwen3_moe(found: Metadata) -> dict[str, Any]:
    return attention_bias(found) | {
        "model_type": "qwen3_moe",
        "num_experts": found.integer("expert_count"),
        "num_experts_per_tok": found.integer("expert_used_count"),
        "moe_intermediate_size": found.integer("expert_feed_forward_length"),
        # llama.cpp always does, where no key says otherwise.
        "norm_topk_prob": bool(found.get("expert_weights_norm", True)),
    }


ARCHITECTURES = {
    "qwen2": Architecture(_gguf_qwen2),
    "qwen3": Architecture(_gguf_qwen3, HEAD_NORMS),
    "qwen3moe": Architecture(_gguf_qwen3_moe, HEAD_NORMS | {"mlp.gate": "ffn_gate_inp"}),
}
