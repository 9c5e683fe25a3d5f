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
from ..model.cut import CUT_FIELDS
from .families import FAMILIES, WRAPPED
from .families.fields import Family, Fields, Kind, agreed, check_kind, shown, unknown_field
from .families.layers import ORIGINAL, check_spellings
from .quantized.config import read_quantization_config

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
    **dict.fromkeys(
        """
        is_encoder_decoder add_cross_attention tie_encoder_decoder use_sliding_window bias use_bias
        mlp_bias lm_head_bias qkv_bias use_qk_norm qk_layernorm alibi parallel_attn
        use_parallel_residual use_bidirectional_attention
        """.split(),
        (False, None),
    ),
    **dict.fromkeys(
        """
        partial_rotary_factor logit_scale rotary_pct embedding_multiplier residual_multiplier
        logits_scaling
        """.split(),
        (1.0, None),
    ),
    **dict.fromkeys(
        """
        num_nextn_predict_layers shared_expert_intermediate_size n_shared_experts num_shared_experts
        num_experts num_local_experts
        """.split(),
        (0, None),
    ),
    **dict.fromkeys(
        "attn_logit_softcapping final_logit_softcapping clip_qkv sliding_window".split(), (None,)
    ),
    "pruned_heads": ({}, None),
}

# Bookkeeping, training-time or generation-time fields: none of them changes the forward pass.
_IRRELEVANT = frozenset(
    """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache
    pretraining_tp attention_dropout initializer_range bos_token_id eos_token_id pad_token_id
    sep_token_id unk_token_id swiftkv _attn_implementation attn_implementation
    swiftkv_far_loss swiftkv_perplexity_loss
    _attn_implementation_autoset auto_map tokenizer_class return_dict return_dict_in_generate
    output_hidden_states output_attentions output_scores torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward cross_attention_hidden_size is_decoder decoder_start_token_id
    finetuning_task id2label label2id num_labels prefix problem_type task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences begin_suppress_tokens
    suppress_tokens exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    remove_invalid_values unsloth_version unsloth_fixed embd_pdrop resid_pdrop
    residual_dropout output_router_logits router_aux_loss_coef cache_implementation
    neftune_noise_alpha transformers.js_config _sliding_window_pattern

    hidden_dropout hidden_dropout_prob attention_probs_dropout_prob attn_pdrop attn_dropout dropout
    classifier_dropout summary_first_dropout initializer_factor router_z_loss_coef loss_type
    gradient_checkpointing use_gradient_checkpointing keys_to_ignore_at_inference

    model_name model_name_or_path base_model_name_or_path base_model
    _commit_hash commit_hash torch_version peft_version trl_version axolotl_version license
    language tags

    _flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attention_2 flash_attention
    _attn_implementation_internal _experts_implementation

    bos_token eos_token pad_token unk_token tokenizer_padding_side tokenizer_model_max_length
    model_max_length max_sequence_length max_seq_len max_seq_length seq_length

    max_new_tokens min_new_tokens max_time min_p epsilon_cutoff eta_cutoff penalty_alpha
    renormalize_logits output_logits guidance_scale low_memory
    """.split()
)

# The fields of all families.
_COMMON: dict[str, Kind] = {
    **dict.fromkeys(
        """
        vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
        max_position_embeddings
        """.split(),
        "size",
    ),
    **dict.fromkeys(
        """
        num_hidden_layers num_key_value_layers key_value_group_size exact_tail exact_head
        prompt_attention_layers prompt_mlp_neurons boundary_taps
        """.split(),
        "integer",
    ),
    "rms_norm_eps": "number",
    "rope_theta": "number",
    "rope_scaling": "object",
    "rope_parameters": "object",
    "tie_word_embeddings": "flag",
    "shared_kv_heads": "list",
    "generated_kv": "text",
    "quantization_config": "unread",
}
# Fields of all families -> those of `Config` with the same value.
_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
}
# Null is a value of these, and the family's default of all others.
_NULLABLE = frozenset(
    """
    sliding_window attn_logit_softcapping final_logit_softcapping head_dim num_key_value_heads
    """.split()
)


def config_from_hf(hf: Fields) -> Config:
    """Read a Hugging Face `config.json` of one of `FAMILIES`, of its SwiftKV student, or of a model
    that takes images too and has one of them inside (`text_fields`).

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
    kinds: dict[str, Kind] = {**_COMMON, **family.fields}
    _check_fields(hf, kinds, family)
    if hf.get("quantization_config") is not None:
        read_quantization_config(hf["quantization_config"])
    required = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    if family.mlp_dim not in family.defaults:
        required.append(family.mlp_dim)
    if missing := [name for name in required if hf.get(name) is None]:
        raise ConfigError(f"missing fields: {', '.join(missing)}")
    for field, kind in kinds.items():
        check_kind(field, hf.get(field), kind)
    if (hf.get("rms_norm_eps") or 0) >= 1:
        raise ConfigError(f"rms_norm_eps={hf['rms_norm_eps']!r} must be below 1")
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
    config = _config_of(hf, name)
    if further := _yarn_positions(config):
        config = _config_of(hf | further, name)
    return config


def _config_of(hf: Fields, name: str) -> Config:
    """The config of the family `name`, whose fields are checked and have their defaults."""
    family = FAMILIES[name]
    stated = {ours: hf[theirs] for theirs, ours in _NAMES.items() if hf.get(theirs) is not None}
    stated |= {
        "mlp_dim": hf[family.mlp_dim],
        "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "shared_kv_heads": _shared_kv_heads(hf.get("shared_kv_heads")),
        "family": name,
    }
    given = {field: hf.get(field) for field in CUT_FIELDS}
    stated |= {field: value for field, value in given.items() if value not in (None, 0)}
    return Config(**stated | family.read(hf))


def _yarn_positions(config: Config) -> dict[str, int]:
    """Fields with all positions that YaRN gives a model, where its file has it switched on beside
    the `max_position_embeddings` that it extends, as Qwen's model cards say. As in vLLM, Gemma 3's
    field counts them already."""
    for rope in config.ropes:
        if rope.scaling is None or rope.scaling.rope_type != "yarn":
            continue
        original = rope.scaling.original_max_position_embeddings
        longest = int(original * rope.scaling.factor)
        if longest > config.max_position_embeddings and config.family != "gemma3_text":
            return {ORIGINAL: original, "max_position_embeddings": longest}
    return {}


def _check_fields(hf: Fields, used: Fields, family: Family) -> None:
    neutral = {name: values for name, values in _NEUTRAL.items() if name not in used}
    neutral |= family.neutral
    for name, value in hf.items():
        if name in neutral and value not in neutral[name]:
            raise ConfigError(
                f"{name}={shown(value)} is not supported; supported: {neutral[name][0]!r}"
            )
        if name not in neutral and name not in _IRRELEVANT and name not in used:
            raise unknown_field(name, value)


def _shared_kv_heads(value: list[Any] | None) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if not all(isinstance(row, list) and all(type(head) is int for head in row) for row in value):
        raise ConfigError(f"shared_kv_heads={shown(value)} must be a list of lists of integers")
    return tuple(map(tuple, value))


# Models that take images too --------------------------------------------------

# Beside `text_config`: what only images use.
_VISION = frozenset(
    """
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    boi_token_id eoi_token_id image_token_id projector_hidden_act vision_feature_layer
    multimodal_projector_bias spatial_merge_size
    """.split()
)
# Beside `text_config`: what goes before the same field there.
_OVER = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
_DTYPES = ("dtype", "torch_dtype")
_TIE = "tie_word_embeddings"
_QUANTIZATION = "quantization_config"


def is_wrapped(hf: Fields) -> bool:
    """True if a `config.json` has its text model's fields under `text_config`: Gemma 3 from 4B on,
    Mistral Small 3.1 and 3.2. Only the text model is read, as if it were one by itself."""
    return isinstance(hf.get("model_type"), str) and hf["model_type"] in WRAPPED


def text_fields(hf: Fields) -> dict[str, Any]:
    """The `config.json` that the text model would have by itself, of one that `is_wrapped`.

    Raises `ConfigError` for fields beside `text_config` that could change the text model.
    """
    name = WRAPPED[hf["model_type"]]
    family = FAMILIES[name]
    text = hf.get("text_config")
    known = _IRRELEVANT | _VISION | {"text_config", _TIE, _QUANTIZATION}
    if unknown := [field for field in hf if field not in known]:
        raise unknown_field(unknown[0], hf[unknown[0]], where=" beside text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config={shown(text)} must be an object")
    if text.get("model_type", name) != name:
        raise ConfigError(
            f"text_config: model_type={shown(text['model_type'])} is not supported; supported: "
            f"{name!r}"
        )
    # transformers 4 goes by the field of `text_config`; 5 by the one beside it, which is true by
    # default, but not where the files have a head of their own. Mistral's have one, and only one
    # of the fields, if any, says so.
    ties = [part[_TIE] for part in (text, hf) if part.get(_TIE) is not None]
    if wrong := [value for value in ties if not isinstance(value, bool)]:
        raise ConfigError(f"{_TIE}={shown(wrong[0])} must be true or false")
    fields = {name: value for name, value in text.items() if name not in _DTYPES}
    fields |= {"model_type": name, _TIE: all(ties or [family.defaults[_TIE]])}
    sizes = family.inside[hf["model_type"]]
    fields |= {name: size for name, size in sizes.items() if text.get(name) is None}
    fields |= {name: hf[name] for name in _OVER if hf.get(name) is not None}
    for part in (text, hf):
        for name in reversed(_DTYPES):
            if part.get(name) is not None:
                fields["torch_dtype"] = part[name]
    places = {_QUANTIZATION: hf, f"text_config: {_QUANTIZATION}": text}
    quantization = agreed({name: part.get(_QUANTIZATION) for name, part in places.items()})
    if quantization is not None:
        fields[_QUANTIZATION] = quantization
    return fields


def ties_without_head(hf: Fields) -> bool:
    """Return whether the head of one that `is_wrapped` is the embedding if the files have no head,
    whatever `text_config` says: transformers 5 goes by the field beside it."""
    return hf.get(_TIE) is True


# Writing ----------------------------------------------------------------------


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
        **{theirs: getattr(config, ours) for theirs, ours in _NAMES.items()},
        family.mlp_dim: config.mlp_dim,
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
