"""Hugging Face `config.json`, read strictly into a `Config`, and written back.

A field that could change the model and is not implemented is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import Config, RopeScaling
from ..errors import ConfigError
from .compressed_tensors import check_quantization_config

SHARED_BASIS = "llama_swiftkv_shared_basis"
"""Model type of a student with `SwiftKV.mix`: one that the authors' classes do not know, because
they would load it and leave the mixes out."""
MODEL_TYPES = ("llama", "llama_swiftkv", SHARED_BASIS, "mistral")

# Fields whose only supported value leaves the computation as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "logit_scale": (1.0, None),
    # SmolLM2's: the split halves that this package computes, and a mark of conversion scripts.
    "rope_interleaved": (False, None),
    "is_llama_config": (True, None),
}

# Bookkeeping, training-time or generation-time fields: none of them changes the forward pass.
_IRRELEVANT = frozenset(
    """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache
    pretraining_tp attention_dropout initializer_range bos_token_id eos_token_id pad_token_id
    sep_token_id unk_token_id swiftkv _attn_implementation attn_implementation
    _attn_implementation_autoset auto_map tokenizer_class return_dict return_dict_in_generate
    output_hidden_states output_attentions output_scores torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward cross_attention_hidden_size is_decoder decoder_start_token_id
    finetuning_task id2label label2id num_labels prefix problem_type task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences begin_suppress_tokens
    suppress_tokens exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    remove_invalid_values unsloth_version unsloth_fixed
    """.split()
)

_USED = frozenset(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters
    max_position_embeddings attention_bias tie_word_embeddings num_key_value_layers
    key_value_group_size shared_kv_heads generated_kv exact_tail sliding_window layer_types
    quantization_config
    """.split()
)

# What JSON may hold besides null in the fields that are used.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "an integer": (
        (int,),
        """
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim max_position_embeddings sliding_window num_key_value_layers
        key_value_group_size exact_tail
        """,
    ),
    "a number": ((int, float), "rms_norm_eps rope_theta"),
    "true or false": ((bool,), "attention_bias tie_word_embeddings"),
    "a string": ((str,), "generated_kv"),
    "a list": ((list,), "shared_kv_heads"),
    "an object": ((Mapping,), "rope_scaling rope_parameters"),
}


def _check_types(hf: Mapping[str, Any]) -> None:
    for wanted, (types, names) in _TYPES.items():
        for name in names.split():
            value = hf.get(name)
            if value is not None and (
                not isinstance(value, types) or isinstance(value, bool) is not (bool in types)
            ):
                raise ConfigError(f"{name}={value!r} must be {wanted}")


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json` (Llama, Mistral shape, or the authors' `llama_swiftkv`).

    Raises `ConfigError` for any field that would change the result and is not implemented.
    """
    if hf.get("model_type") not in MODEL_TYPES:
        raise ConfigError(
            f"model_type={hf.get('model_type')!r} is not supported; supported: "
            f"{', '.join(MODEL_TYPES)}"
        )
    for name, value in hf.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise ConfigError(
                f"{name}={value!r} is not supported; supported: {_NEUTRAL[name][0]!r}"
            )
        if name not in _NEUTRAL and name not in _IRRELEVANT and name not in _USED:
            raise ConfigError(
                f"unknown field {name!r} (value {value!r}): it may change the model, so it is not "
                f"ignored"
            )
    if hf.get("quantization_config") is not None:
        check_quantization_config(hf["quantization_config"])
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    if missing := [name for name in required if hf.get(name) is None]:
        raise ConfigError(f"missing fields: {', '.join(missing)}")
    _check_types(hf)
    if (
        not hf.get("head_dim")
        and hf["num_attention_heads"]
        and hf["hidden_size"] % hf["num_attention_heads"]
    ):
        raise ConfigError(
            f"hidden_size={hf['hidden_size']} must be a multiple of "
            f"num_attention_heads={hf['num_attention_heads']}, or head_dim be given"
        )

    max_positions = hf.get("max_position_embeddings")
    max_positions = 2048 if max_positions is None else max_positions
    # transformers reads a Mistral without the field as one with a window of 4096; null is no
    # window.
    window = hf.get("sliding_window", 4096 if hf["model_type"] == "mistral" else None)
    if window is not None and window < max_positions:
        raise ConfigError(
            f"sliding_window={window} below max_position_embeddings={max_positions} is not "
            f"supported"
        )
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise ConfigError(
            f"layer_types={hf['layer_types']!r} is not supported; supported: full_attention "
            f"everywhere"
        )

    theta, scaling = _rope_from_hf(hf)
    return Config(
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        mlp_dim=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        norm_eps=1e-6 if hf.get("rms_norm_eps") is None else hf["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        attention_bias=bool(hf.get("attention_bias")),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
        num_key_value_layers=hf.get("num_key_value_layers") or 0,
        key_value_group_size=hf.get("key_value_group_size") or 1,
        shared_kv_heads=_shared_kv_heads(hf.get("shared_kv_heads")),
        generated_kv="boundary" if hf.get("generated_kv") is None else hf["generated_kv"],
        exact_tail=hf.get("exact_tail") or 0,
    )


def _shared_kv_heads(value: list[Any] | None) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if not all(isinstance(row, list) and all(type(head) is int for head in row) for row in value):
        raise ConfigError(f"shared_kv_heads={value!r} must be a list of lists of integers")
    return tuple(map(tuple, value))


def config_to_hf(config: Config) -> dict[str, Any]:
    """The fields of a `config.json` that a `Config` determines, in the authors' spelling."""
    swiftkv = config.num_upper_layers > 0
    fields: dict[str, Any] = {
        "architectures": ["LlamaSwiftKVForCausalLM" if swiftkv else "LlamaForCausalLM"],
        "model_type": "llama_swiftkv" if swiftkv else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if config.rope_scaling is None
        else _rope_scaling_to_hf(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if swiftkv:
        fields |= {
            "swiftkv": True,
            "num_key_value_layers": config.num_key_value_layers,
            "key_value_group_size": config.key_value_group_size,
        }
    if config.shared_kv_heads is not None:
        fields |= {
            "architectures": ["LlamaSwiftKVSharedBasisForCausalLM"],
            "model_type": SHARED_BASIS,
            "shared_kv_heads": [list(row) for row in config.shared_kv_heads],
        }
    if config.generated_kv == "own":  # not known to the authors' stack, which serves `boundary`
        fields |= {"generated_kv": "own", "exact_tail": config.exact_tail}
    return fields


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling in one spelling, to compare two of them."""
    fields = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    }
    return fields | {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
    (transformers 5)."""
    field = "rope_parameters" if hf.get("rope_parameters") is not None else "rope_scaling"
    if (
        field == "rope_parameters"
        and hf.get("rope_scaling") is not None
        and _scaling(hf["rope_scaling"]) != _scaling(hf[field])
    ):
        raise ConfigError(
            f"rope_scaling={hf['rope_scaling']!r} and rope_parameters={hf[field]!r} disagree"
        )
    rope = dict(hf.get(field) or {})
    theta = rope.pop("rope_theta", None)
    if theta is None:
        theta = 10_000.0 if hf.get("rope_theta") is None else hf["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ConfigError(f"rope_theta={theta!r} must be a number")
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if kind == "default":
        known: frozenset[str] = frozenset()
    elif kind == "linear":
        known = frozenset({"factor"})
    elif kind == "llama3":
        known = frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        )
    else:
        raise ConfigError(
            f"{field}: rope_type={kind!r} is not supported; supported: default, linear, llama3"
        )
    if missing := known - rope.keys():
        raise ConfigError(f"{field}: rope_type={kind!r} needs {', '.join(sorted(missing))}")
    # A rotary factor of one is how transformers 5 spells "all of head_dim".
    if unknown := [
        name for name in rope.keys() - known if (name, rope[name]) != ("partial_rotary_factor", 1.0)
    ]:
        raise ConfigError(
            f"{field}: unknown fields for rope_type={kind!r}: {', '.join(sorted(unknown))}"
        )
    if kind == "default":
        return float(theta), None
    return float(theta), RopeScaling(rope_type=kind, **{name: rope[name] for name in known})


def _rope_scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return dataclasses.asdict(scaling)
