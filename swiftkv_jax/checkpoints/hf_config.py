"""Hugging Face `config.json`, read strictly into a `Config`, and written back.

A field that could change the model and is not implemented is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..model.config import MAX_LAYERS, Config
from .families import FAMILIES, IRRELEVANT, Family
from .hf_rope import check_spellings
from .hf_values import MAX_NUMBER, check_integer, shown, unknown_field
from .quantization_config import read_quantization_config
from .wrapped import WRAPPED, is_wrapped, text_fields

SWIFTKV = "_swiftkv"
SHARED_BASIS = "_swiftkv_shared_basis"
EXTENDED = "_swiftkv_extended"
"""Endings of a student's model type; the second where it has `SwiftKV.mix`, the third where it has
prompt attention layers or taps: types that the authors' classes do not know, because they would
load the model and leave those out."""
MODEL_TYPES = tuple(
    name + end for name in FAMILIES for end in ("", SWIFTKV, SHARED_BASIS, EXTENDED)
)

# Fields whose only supported value does not change the computation, for all families.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "logit_scale": (1.0, None),
    "rotary_pct": (1.0, None),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "bias": (False, None),
    "use_bias": (False, None),
    "mlp_bias": (False, None),
    "lm_head_bias": (False, None),
    "qkv_bias": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "alibi": (False, None),
    "parallel_attn": (False, None),
    "use_parallel_residual": (False, None),
    "use_bidirectional_attention": (False, None),
    "num_nextn_predict_layers": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "num_shared_experts": (0, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}

_USED = frozenset(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters
    max_position_embeddings tie_word_embeddings num_key_value_layers key_value_group_size
    shared_kv_heads generated_kv exact_tail exact_head prompt_attention_layers
    prompt_mlp_neurons boundary_taps quantization_config
    """.split()
)
# Null is a value of these, and the family's default of all others.
_NULLABLE = frozenset(
    """
    sliding_window attn_logit_softcapping final_logit_softcapping head_dim num_key_value_heads
    """.split()
)

# Types of the fields that are used; null is also allowed.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "an integer": (
        (int,),
        """
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim max_position_embeddings sliding_window num_key_value_layers
        key_value_group_size exact_tail exact_head prompt_attention_layers
        prompt_mlp_neurons boundary_taps max_window_layers
        no_rope_layer_interval sliding_window_pattern original_max_position_embeddings num_experts
        num_local_experts num_experts_per_tok moe_intermediate_size shared_intermediate_size
        sliding_window_size
        """,
    ),
    "a number": (
        (int, float),
        """
        rms_norm_eps rope_theta rope_local_base_freq partial_rotary_factor embedding_multiplier
        residual_multiplier attention_multiplier logits_scaling query_pre_attn_scalar
        attn_logit_softcapping final_logit_softcapping
        """,
    ),
    "true or false": (
        (bool,),
        "attention_bias attention_out_bias tie_word_embeddings use_sliding_window norm_topk_prob",
    ),
    "a string": ((str,), "generated_kv hidden_activation position_embedding_type"),
    "a list": ((list,), "shared_kv_heads layer_types layers_block_type no_rope_layers"),
    "an object": ((Mapping,), "rope_scaling rope_parameters"),
}

# Integers that are 1 or more.
_SIZES = """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
    max_position_embeddings original_max_position_embeddings no_rope_layer_interval
    sliding_window_pattern moe_intermediate_size shared_intermediate_size
    """.split()


def _check_types(hf: Mapping[str, Any]) -> None:
    for wanted, (types, names) in _TYPES.items():
        for name in names.split():
            value = hf.get(name)
            if value is not None and (
                not isinstance(value, types) or isinstance(value, bool) is not (bool in types)
            ):
                raise ConfigError(f"{name}={shown(value)} must be {wanted}")
    for name in _SIZES:
        if hf.get(name) is not None:
            check_integer(name, hf[name])
    for name in _TYPES["a number"][1].split():
        if abs(hf.get(name) or 0) > MAX_NUMBER:
            raise ConfigError(f"{name}={shown(hf[name])} is too large for float32")
    if hf.get("query_pre_attn_scalar") is not None and hf["query_pre_attn_scalar"] <= 0:
        raise ConfigError(f"query_pre_attn_scalar={hf['query_pre_attn_scalar']!r} must be positive")
    if (hf.get("rms_norm_eps") or 0) >= 1:
        raise ConfigError(f"rms_norm_eps={hf['rms_norm_eps']!r} must be below 1")


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json` of one of `FAMILIES`, of its SwiftKV student, or of a model
    that wraps one of them (`wrapped`).

    Raises `ConfigError` for any field that would change the result and is not implemented.
    """
    if is_wrapped(hf):
        hf = text_fields(hf)
    if hf.get("model_type") not in MODEL_TYPES:
        raise ConfigError(
            f"model_type={shown(hf.get('model_type'))} is not supported; supported: "
            f"{', '.join((*FAMILIES, *WRAPPED))}, and their students"
        )
    name = hf["model_type"]
    for end in (EXTENDED, SHARED_BASIS, SWIFTKV):
        name = name.removesuffix(end)
    family = FAMILIES[name]
    _check_fields(hf, family)
    if hf.get("quantization_config") is not None:
        read_quantization_config(hf["quantization_config"])
    required = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    if family.mlp_dim not in family.defaults:
        required.append(family.mlp_dim)
    if missing := [name for name in required if hf.get(name) is None]:
        raise ConfigError(f"missing fields: {', '.join(missing)}")
    _check_types(hf)
    check_spellings(hf)
    stated = {key: value for key, value in hf.items() if value is not None or key in _NULLABLE}
    hf = {**family.defaults, **stated}
    heads = hf["num_attention_heads"]
    width = hf["hidden_size"]
    if hf.get("head_dim") is None and width % heads:
        raise ConfigError(
            f"hidden_size={width} must be a multiple of num_attention_heads={heads}, or head_dim "
            f"be given"
        )
    if not 1 <= hf["num_hidden_layers"] <= MAX_LAYERS:
        raise ConfigError(
            f"num_layers={shown(hf['num_hidden_layers'])} must be from 1 to {MAX_LAYERS} "
            f"(num_hidden_layers)"
        )
    config = Config(
        vocab_size=hf["vocab_size"],
        embed_dim=width,
        mlp_dim=hf[family.mlp_dim],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or width // heads,
        norm_eps=hf["rms_norm_eps"],
        max_position_embeddings=hf["max_position_embeddings"],
        tie_word_embeddings=hf["tie_word_embeddings"],
        num_key_value_layers=hf.get("num_key_value_layers") or 0,
        key_value_group_size=hf.get("key_value_group_size") or 1,
        shared_kv_heads=_shared_kv_heads(hf.get("shared_kv_heads")),
        generated_kv=hf.get("generated_kv", "boundary"),
        exact_tail=hf.get("exact_tail", 0),
        exact_head=hf.get("exact_head") or 0,
        prompt_attention_layers=hf.get("prompt_attention_layers") or 0,
        prompt_mlp_neurons=hf.get("prompt_mlp_neurons") or 0,
        boundary_taps=hf.get("boundary_taps") or 0,
        family=name,
        **family.read(hf),
    )
    plain = name == "mistral" and all(kind.window is None for kind in config.kinds)
    return dataclasses.replace(config, family="llama") if plain else config


def _check_fields(hf: Mapping[str, Any], family: Family) -> None:
    used = _USED | set(family.fields.split())
    neutral = {name: values for name, values in _NEUTRAL.items() if name not in used}
    neutral |= family.neutral
    for name, value in hf.items():
        if name in neutral and value not in neutral[name]:
            raise ConfigError(
                f"{name}={shown(value)} is not supported; supported: {neutral[name][0]!r}"
            )
        if name not in neutral and name not in IRRELEVANT and name not in used:
            raise unknown_field(name, value)


def _shared_kv_heads(value: list[Any] | None) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if not all(isinstance(row, list) and all(type(head) is int for head in row) for row in value):
        raise ConfigError(f"shared_kv_heads={shown(value)} must be a list of lists of integers")
    return tuple(map(tuple, value))


def config_to_hf(config: Config) -> dict[str, Any]:
    """The fields of a `config.json` that a `Config` determines, in the authors' spelling. The
    `intermediate_size` of a mixture of experts is that of layers which it does not have.

    Raises `ConfigError` for a config with options that its family's files cannot state.
    """
    fields = _fields_of(config)
    again = config_from_hf(fields)
    lost = []
    for field in dataclasses.fields(Config):
        one = getattr(config, field.name)
        other = getattr(again, field.name)
        close = isinstance(one, float) and isinstance(other, float) and math.isclose(one, other)
        if one != other and not close and field.name != "family":
            lost.append(f"{field.name}={shown(one)}")
    if lost:
        raise ConfigError(f"a {config.family} config.json cannot state {', '.join(lost)}")
    return fields


def _fields_of(config: Config) -> dict[str, Any]:
    family = FAMILIES[config.family]
    fields: dict[str, Any] = {
        "architectures": [f"{family.architecture}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        family.mlp_dim: config.mlp_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    } | family.write(config)
    if config.num_upper_layers:
        fields |= {
            "architectures": [f"{family.architecture}SwiftKVForCausalLM"],
            "model_type": config.family + SWIFTKV,
            "swiftkv": True,
            "num_key_value_layers": config.num_key_value_layers,
            "key_value_group_size": config.key_value_group_size,
        }
    if config.shared_kv_heads is not None:
        fields |= {
            "architectures": [f"{family.architecture}SwiftKVSharedBasisForCausalLM"],
            "model_type": config.family + SHARED_BASIS,
            "shared_kv_heads": [list(row) for row in config.shared_kv_heads],
        }
    if config.prompt_attention_layers or config.boundary_taps or config.exact_head:
        fields |= {
            "architectures": [f"{family.architecture}SwiftKVExtendedForCausalLM"],
            "model_type": config.family + EXTENDED,
            "prompt_attention_layers": config.prompt_attention_layers,
            "prompt_mlp_neurons": config.prompt_mlp_neurons,
            "boundary_taps": config.boundary_taps,
            "exact_head": config.exact_head,
        }
    if config.generated_kv == "own":  # not known to the authors' stack, which serves `boundary`
        fields |= {"generated_kv": "own", "exact_tail": config.exact_tail}
    return fields
