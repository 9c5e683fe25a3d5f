"""Granite 3, and Granite 4.0, of which the models without Mamba layers and experts are
supported."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...model.config import Config, LayerKind
from .fields import COMMON, SILU, Family, Fields, Kind, agreed, biases, shown
from .gguf import Architecture, Metadata, attention_bias
from .layers import one_kind, rope_to_hf
from .llama import write_llama


def read_granite(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(hf), **_read_scales(hf)}


def write_granite(config: Config) -> dict[str, Any]:
    return write_llama(config) | _write_scales(config)


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
    kinds = (LayerKind(None),)
    if position == "rope":
        kinds = one_kind({**hf, "layer_types": None})
    return {"layer_kinds": kinds, **_read_scales(hf)}


def write_granite4(config: Config) -> dict[str, Any]:
    fields = {
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "position_embedding_type": None,
        "layer_types": ["attention"] * config.num_layers,
        "num_local_experts": 0,
        **_write_scales(config),
    }
    for rope in config.ropes:
        fields |= {"position_embedding_type": "rope"} | rope_to_hf(rope)
    return fields


def _read_scales(hf: Fields) -> dict[str, Any]:
    return {
        **biases(hf),
        "embed_scale": float(hf["embedding_multiplier"]),
        "residual_scale": float(hf["residual_multiplier"]),
        "query_scale": float(hf["attention_multiplier"]),
        "logit_divisor": float(hf["logits_scaling"]),
    }


def _write_scales(config: Config) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.query_scale,
        "logits_scaling": config.logit_divisor,
    }


_FIELDS: dict[str, Kind] = {
    "attention_bias": "flag",
    "embedding_multiplier": "number",
    "residual_multiplier": "number",
    "attention_multiplier": "number",
    "logits_scaling": "number",
}
# What Mamba layers and experts would read, and how weights were initialised.
_UNREAD: dict[str, Kind] = dict.fromkeys(
    """
    mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand
    mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit init_method
    """.split(),
    "unread",
)
_DEFAULTS = COMMON | {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}

FAMILIES = {
    "granite": Family(
        "Granite", read_granite, write_granite, _FIELDS, neutral=SILU, defaults=_DEFAULTS
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        read_granite4,
        write_granite4,
        fields={
            **_FIELDS,
            "position_embedding_type": "text",
            "shared_intermediate_size": "size",
            "layer_types": "list",
            "layers_block_type": "list",
            "num_local_experts": "integer",
            "num_experts_per_tok": "integer",
            **_UNREAD,
        },
        neutral=SILU | {"normalization_function": ("rmsnorm", None)},
        defaults=_DEFAULTS | {"shared_intermediate_size": 1024, "num_local_experts": 8},
        names={"down": "shared_mlp.output_linear.weight"},
        fused={"shared_mlp.input_linear.weight": ("gate", "up")},
        mlp_dim="shared_intermediate_size",
    ),
}


def _gguf_granite(found: Metadata) -> dict[str, Any]:
    if not found.get("rope.scaling.finetuned", True):
        raise ConfigError(
            f"{found.prefix}rope.scaling.finetuned=False: a Granite without rotary embeddings is "
            f"not supported in GGUF; get its safetensors"
        )
    return attention_bias(found) | {
        "model_type": "granite",
        "embedding_multiplier": found.get("embedding_scale", 1.0),
        "residual_multiplier": found.get("residual_scale", 1.0),
        "attention_multiplier": found.get("attention.scale"),
        "logits_scaling": found.get("logit_scale", 1.0),
    }


ARCHITECTURES = {"granite": Architecture(_gguf_granite, permuted=True)}
