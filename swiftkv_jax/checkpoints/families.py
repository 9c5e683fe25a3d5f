"""The families of models whose checkpoints load: of each, what is its own in `config.json` and
among the names of tensors.

The layer is the same for all (`layers`, `transformer`): a family is the options that it sets in a
`Config`. Fields, class defaults and names are those of transformers 5.23 (`models/<family>/`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..config import Config, LayerKind
from ..errors import ConfigError
from .hf_layer_kinds import (
    SLIDING,
    Fields,
    one_kind,
    read_kind,
    read_layer_types,
    some_unrotated,
    two_ropes,
    types_of,
    window_of,
    windows_above,
    write_kinds,
    write_two_ropes,
)
from .hf_rope import rope_from_hf, rope_to_hf


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    architecture: str
    """The name that its classes begin with."""
    read: Callable[[Fields], dict[str, Any]]
    """The options of a `Config` that its fields say, defaults among them."""
    write: Callable[[Config], dict[str, Any]]
    """The fields that say those options."""
    fields: str = ""
    """Fields that it has besides the common ones, and that change the model."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields of which only these values are supported: they change nothing."""
    defaults: Fields = dataclasses.field(default_factory=dict)
    """What fields stand for that a file leaves out."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field of `params` -> its tensor's name within a layer, where that is not Llama's."""
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Tensor within a layer -> the fields of `params` whose rows it joins."""


# Families ---------------------------------------------------------------------


def _llama(hf: Fields) -> dict[str, Any]:
    options = _mistral(hf)
    if any(kind.window is not None for kind in options["layer_kinds"]):
        raise ConfigError(
            f"sliding_window={hf['sliding_window']} below max_position_embeddings="
            f"{hf['max_position_embeddings']} is not supported for this model_type"
        )
    return options


def _mistral(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {"layer_kinds": one_kind(hf), "qkv_bias": bias, "o_bias": bias}


def _write_llama(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    bias = {"attention_bias": config.qkv_bias, "mlp_bias": False}
    return {"hidden_act": "silu"} | rope_to_hf(rope) | bias


def _write_window(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return {"hidden_act": "silu", "sliding_window": window_of(config)} | rope_to_hf(rope)


def _write_qwen2(config: Config) -> dict[str, Any]:
    kinds = write_kinds(config)
    return {"hidden_act": "silu", "use_sliding_window": kinds["sliding_window"] is not None} | kinds


def _qwen3(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    kinds = windows_above(hf)
    return {"layer_kinds": kinds, "qk_norm": "head", "qkv_bias": bias, "o_bias": bias}


def _granite(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {
        "layer_kinds": one_kind(hf),
        "qkv_bias": bias,
        "o_bias": bias,
        "embed_scale": hf["embedding_multiplier"],
        "residual_scale": hf["residual_multiplier"],
        "query_scale": hf["attention_multiplier"],
        "logit_divisor": hf["logits_scaling"],
    }


def _write_granite(config: Config) -> dict[str, Any]:
    return _write_llama(config) | {
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.query_scale,
        "logits_scaling": config.logit_divisor,
    }


def _smollm3(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {"layer_kinds": some_unrotated(hf), "qkv_bias": bias, "o_bias": bias}


def _write_smollm3(config: Config) -> dict[str, Any]:
    kinds = [config.kind(layer) for layer in range(config.num_layers)]
    window = window_of(config)
    return _write_llama(config) | {
        "no_rope_layers": [int(kind.rope is not None) for kind in kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types_of(config),
    }


def _phi3(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf, partial=True)}


def _write_phi3(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    longrope = rope.scaling is not None and rope.scaling.rope_type == "longrope"
    original = config.max_position_embeddings
    if longrope and rope.scaling is not None:
        original = rope.scaling.original_max_position_embeddings
    return _write_window(config) | {"original_max_position_embeddings": original}


_OLMO = {"qk_norm": "all", "norm_order": "post", "norm_wide": True}


def _olmo2(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {"layer_kinds": one_kind(hf), "qkv_bias": bias, "o_bias": bias} | _OLMO


def _olmo3(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    kinds = two_ropes({**hf, "rope_local_base_freq": hf["rope_theta"]}, lambda i: (i + 1) % 4 != 0)
    return {"layer_kinds": kinds, "qkv_bias": bias, "o_bias": bias} | _OLMO


def _write_olmo3(config: Config) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "sliding_window": window_of(config),
        "layer_types": types_of(config),
    } | write_two_ropes(config)


def _gemma(hf: Fields, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    if hf["hidden_activation"] != "gelu_pytorch_tanh":
        raise ConfigError(
            f"hidden_activation={hf['hidden_activation']!r} is not supported; supported: "
            f"'gelu_pytorch_tanh'"
        )
    return {
        "layer_kinds": kinds,
        "qkv_bias": bias,
        "o_bias": bias,
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


def _gemma2(hf: Fields) -> dict[str, Any]:
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    types = read_layer_types(hf, lambda layer: layer % 2 == 0)
    return _gemma(hf, tuple(read_kind(hf, rope, here) for here in types))


def _gemma3(hf: Fields) -> dict[str, Any]:
    every = hf["sliding_window_pattern"]
    kinds = two_ropes(hf, lambda layer: (layer + 1) % every != 0)
    return _gemma(hf, kinds) | {"qk_norm": "head"}


def _write_gemma(config: Config) -> dict[str, Any]:
    assert config.query_scale is not None
    scalar = config.query_scale**-2
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def _write_gemma3(config: Config) -> dict[str, Any]:
    ropes = write_two_ropes(config)
    local = ropes["rope_parameters"].get(SLIDING, {}).get("rope_theta", 10_000.0)
    return (
        _write_gemma(config)
        | ropes
        | {
            "sliding_window": window_of(config),
            "layer_types": types_of(config),
            "rope_local_base_freq": local,
        }
    )


_COMMON = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {"max_position_embeddings": 32768, "max_window_layers": 28}
_GEMMA = _COMMON | {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_SILU = {"hidden_act": ("silu",), "mlp_bias": (False, None)}
_PRE_FEEDFORWARD = {"mlp_norm": "pre_feedforward_layernorm.weight"}
_WINDOW_SWITCH = "use_sliding_window max_window_layers sliding_window layer_types"

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "Llama",
        _llama,
        _write_llama,
        fields="attention_bias sliding_window layer_types",
        # SmolLM2's: the split halves that this package computes, and a mark of conversion scripts.
        neutral=_SILU
        | {
            "rope_interleaved": (False, None),
            "is_llama_config": (True, None),
            "activation": ("swiglu", None),
        },
        defaults=_COMMON,
    ),
    "mistral": Family(
        "Mistral",
        _mistral,
        _write_window,
        fields="attention_bias sliding_window layer_types",
        neutral=_SILU,
        # transformers reads a file without the field as one with a window of 4096; null is none.
        defaults=_COMMON | {"sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2",
        lambda hf: {"layer_kinds": windows_above(hf), "qkv_bias": True},
        _write_qwen2,
        fields=_WINDOW_SWITCH,
        neutral=_SILU | {"use_mrope": (False, None), "attention_bias": (True, None)},
        defaults=_QWEN,
    ),
    "qwen3": Family(
        "Qwen3",
        _qwen3,
        lambda config: _write_qwen2(config) | {"attention_bias": config.qkv_bias},
        fields=_WINDOW_SWITCH + " attention_bias",
        neutral=_SILU,
        defaults=_QWEN | {"head_dim": 128},
    ),
    "granite": Family(
        "Granite",
        _granite,
        _write_granite,
        fields="attention_bias embedding_multiplier residual_multiplier attention_multiplier "
        "logits_scaling",
        neutral=_SILU,
        defaults=_COMMON
        | {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "smollm3": Family(
        "SmolLM3",
        _smollm3,
        _write_smollm3,
        fields="attention_bias no_rope_layers no_rope_layer_interval use_sliding_window "
        "sliding_window layer_types",
        neutral=_SILU,
        defaults=_COMMON
        | {
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Family(
        "Phi3",
        _phi3,
        _write_phi3,
        fields="sliding_window original_max_position_embeddings partial_rotary_factor",
        neutral=_SILU
        | {
            "attention_bias": (False, None),
            "full_attn_mod": (1, None),
            "interpolate_factor": (1, None),
            "lm_head_bias": (False, None),
        },
        defaults=_COMMON
        | {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        fused={
            "self_attn.qkv_proj.weight": ("q", "k", "v"),
            "mlp.gate_up_proj.weight": ("gate", "up"),
        },
    ),
    "olmo2": Family(
        "Olmo2",
        _olmo2,
        _write_llama,
        fields="attention_bias",
        neutral=_SILU | {"clip_qkv": (None,)},
        defaults=_COMMON | {"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3",
        _olmo3,
        _write_olmo3,
        fields="attention_bias sliding_window layer_types",
        neutral=_SILU | {"clip_qkv": (None,)},
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "gemma2": Family(
        "Gemma2",
        _gemma2,
        lambda config: _write_gemma(config) | write_kinds(config),
        fields="attention_bias hidden_activation query_pre_attn_scalar sliding_window layer_types "
        "attn_logit_softcapping final_logit_softcapping",
        neutral={
            "use_bidirectional_attention": (False, None),
            "hidden_act": ("gelu_pytorch_tanh",),
        },
        defaults=_GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=_PRE_FEEDFORWARD,
    ),
    "gemma3_text": Family(
        "Gemma3",
        _gemma3,
        _write_gemma3,
        fields="attention_bias hidden_activation query_pre_attn_scalar sliding_window layer_types "
        "sliding_window_pattern attn_logit_softcapping final_logit_softcapping "
        "rope_local_base_freq",
        neutral={
            "use_bidirectional_attention": (False, None),
            "hidden_act": ("gelu_pytorch_tanh",),
        },
        defaults=_GEMMA
        | {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        names=_PRE_FEEDFORWARD,
    ),
}
