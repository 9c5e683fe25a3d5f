"""How a `config.json` states each family's options: `read_<family>` makes options of a `Config`
from the fields, including defaults, and `write_<family>` makes the fields from a `Config`."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError
from ..model.config import Config, LayerKind
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
from .hf_rope import longrope_attention, rename_longrope, rope_from_hf, rope_to_hf
from .hf_values import agreed, check_integer, shown


def _biases(hf: Fields) -> dict[str, Any]:
    """The biases of all four matrices of attention, of a family that has them together."""
    bias = bool(hf.get("attention_bias"))
    return {"qkv_bias": bias, "o_bias": bias}


def read_llama(hf: Fields) -> dict[str, Any]:
    options = read_mistral(hf)
    if any(kind.window is not None for kind in options["layer_kinds"]):
        raise ConfigError(
            f"sliding_window={hf['sliding_window']} below max_position_embeddings="
            f"{hf['max_position_embeddings']} is not supported for this model_type"
        )
    return options


def read_mistral(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf), **_biases(hf)}


def write_llama(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    bias = {"attention_bias": config.qkv_bias, "mlp_bias": False}
    return {"hidden_act": "silu"} | rope_to_hf(rope) | bias


def write_window(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return {"hidden_act": "silu", "sliding_window": window_of(config)} | rope_to_hf(rope)


def write_qwen2(config: Config) -> dict[str, Any]:
    kinds = write_kinds(config)
    return {"hidden_act": "silu", "use_sliding_window": kinds["sliding_window"] is not None} | kinds


def read_qwen3(hf: Fields) -> dict[str, Any]:
    kinds = windows_above(hf)
    return {"layer_kinds": kinds, "qk_norm": "head", **_biases(hf)}


def read_qwen3_moe(hf: Fields) -> dict[str, Any]:
    counts = {name: hf.get(name) for name in ("num_experts", "num_local_experts")}
    for name, count in {**counts, "num_experts_per_tok": hf["num_experts_per_tok"]}.items():
        if count is not None:
            check_integer(name, count)
    return {
        "layer_kinds": one_kind({**hf, "sliding_window": None}),
        "qk_norm": "head",
        **_biases(hf),
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


def read_seed_oss(hf: Fields) -> dict[str, Any]:
    return {
        "layer_kinds": one_kind(hf),
        "qkv_bias": hf["attention_bias"],
        "o_bias": hf["attention_out_bias"],
    }


def write_seed_oss(config: Config) -> dict[str, Any]:
    return write_llama(config) | {"attention_out_bias": config.o_bias}


def read_granite(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf), **_granite(hf)}


def read_granite4(hf: Fields) -> dict[str, Any]:
    """Raises `ConfigError` unless all layers have attention and none has experts."""
    names = ("layer_types", "layers_block_type")
    types = agreed({name: hf.get(name) for name in names})
    # The class takes every layer for one of Mamba where a file does not say.
    if types is None or any(kind not in ("attention", "full_attention") for kind in types):
        raise ConfigError(
            f"layer_types={shown(types)}: the model is a hybrid with Mamba layers, which are not "
            f"supported; supported: Granite 4.0 with attention in every layer"
        )
    if len(types) != hf["num_hidden_layers"]:
        raise ConfigError(
            f"layer_types={shown(types)} must have a type for each of the "
            f"{hf['num_hidden_layers']} layers"
        )
    if hf["num_local_experts"]:
        raise ConfigError(
            f"num_local_experts={hf['num_local_experts']}: a mixture of experts beside a shared "
            f"MLP is not supported; supported: 0"
        )
    position = hf.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        raise ConfigError(
            f"position_embedding_type={shown(position)} is not supported; supported: 'rope', "
            f"'nope', None"
        )
    rotates = position == "rope"
    kinds = one_kind({**hf, "layer_types": None}) if rotates else (LayerKind(None),)
    return {"layer_kinds": kinds, **_granite(hf)}


def _granite(hf: Fields) -> dict[str, Any]:
    return {
        **_biases(hf),
        "embed_scale": float(hf["embedding_multiplier"]),
        "residual_scale": float(hf["residual_multiplier"]),
        "query_scale": float(hf["attention_multiplier"]),
        "logit_divisor": float(hf["logits_scaling"]),
    }


def write_granite(config: Config) -> dict[str, Any]:
    return write_llama(config) | _granite_scales(config)


def write_granite4(config: Config) -> dict[str, Any]:
    ropes = [rope_to_hf(rope) for rope in config.ropes]
    return {
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "position_embedding_type": "rope" if ropes else None,
        "layer_types": ["attention"] * config.num_layers,
        "num_local_experts": 0,
        **_granite_scales(config),
        **(ropes[0] if ropes else {}),
    }


def _granite_scales(config: Config) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.query_scale,
        "logits_scaling": config.logit_divisor,
    }


def read_smollm3(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": some_unrotated(hf), **_biases(hf)}


def write_smollm3(config: Config) -> dict[str, Any]:
    kinds = [config.kind(layer) for layer in range(config.num_layers)]
    window = window_of(config)
    return write_llama(config) | {
        "no_rope_layers": [int(kind.rope is not None) for kind in kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types_of(config),
    }


def read_phi3(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(rename_longrope(hf), partial=True)}


def write_phi3(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    scaling = rope.scaling
    longest = config.max_position_embeddings
    fields = write_window(config) | {"original_max_position_embeddings": longest}
    if scaling is None or scaling.rope_type != "longrope":
        return fields
    original = scaling.original_max_position_embeddings
    fields["original_max_position_embeddings"] = original
    default = longrope_attention(longest, original)
    if math.isclose(scaling.attention_factor, default, rel_tol=1e-9):
        # transformers 4 reads these three fields and refuses others beside them.
        fields["rope_scaling"] = {
            "type": "longrope",
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    return fields


def read_glm(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf, partial=True), "qkv_bias": hf["attention_bias"]}


def write_glm(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return write_llama(config) | {"partial_rotary_factor": rope.fraction}


def write_ernie(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    return {"hidden_act": "silu", "use_bias": False} | rope_to_hf(rope)


_OLMO = {"qk_norm": "all", "norm_order": "post", "norm_wide": True}


def read_olmo2(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf), **_biases(hf)} | _OLMO


def read_olmo3(hf: Fields) -> dict[str, Any]:
    kinds = two_ropes({**hf, "rope_local_base_freq": hf["rope_theta"]}, lambda i: (i + 1) % 4 != 0)
    return {"layer_kinds": kinds, **_biases(hf)} | _OLMO


def write_olmo3(config: Config) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "sliding_window": window_of(config),
        "layer_types": types_of(config),
    } | write_two_ropes(config)


def read_gemma(hf: Fields, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    if hf["hidden_activation"] != "gelu_pytorch_tanh":
        raise ConfigError(
            f"hidden_activation={shown(hf['hidden_activation'])} is not supported; supported: "
            f"'gelu_pytorch_tanh'"
        )
    return {
        "layer_kinds": kinds,
        **_biases(hf),
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


def read_gemma2(hf: Fields) -> dict[str, Any]:
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    agreed({name: hf.get(name) for name in ("sliding_window", "sliding_window_size")})
    types = read_layer_types(hf, lambda layer: layer % 2 == 0)
    return read_gemma(hf, tuple(read_kind(hf, rope, here) for here in types))


def read_gemma3(hf: Fields) -> dict[str, Any]:
    every = hf["sliding_window_pattern"]
    kinds = two_ropes(hf, lambda layer: (layer + 1) % every != 0)
    return read_gemma(hf, kinds) | {"qk_norm": "head"}


def write_gemma(config: Config) -> dict[str, Any]:
    assert config.query_scale is not None
    scalar = config.query_scale**-2
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def write_gemma3(config: Config) -> dict[str, Any]:
    ropes = write_two_ropes(config)
    local = ropes["rope_parameters"].get(SLIDING, {}).get("rope_theta", 10_000.0)
    return (
        write_gemma(config)
        | ropes
        | {
            "sliding_window": window_of(config),
            "layer_types": types_of(config),
            "rope_local_base_freq": local,
        }
    )
