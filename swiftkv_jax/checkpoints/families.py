"""The supported families of models: for each, its particular fields of `config.json` and names of
tensors.

The layer is the same for all (`layers`, `transformer`): a family is the options that it sets in a
`Config`. Fields, class defaults and names are those of transformers 5.23 (`models/<family>/`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..model.config import Config
from . import family_fields
from .hf_layer_kinds import Fields, one_kind, windows_above, write_kinds


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    architecture: str
    """The name that its classes begin with."""
    read: Callable[[Fields], dict[str, Any]]
    """Makes the options of a `Config` from its fields, including defaults."""
    write: Callable[[Config], dict[str, Any]]
    """Makes the fields from those options."""
    fields: str = ""
    """Fields beyond the common ones that change the model."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields with the only values that are supported, which do not change the model."""
    defaults: Fields = dataclasses.field(default_factory=dict)
    """Values of fields that are missing in a file."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field of `params` -> its tensor's name within a layer, where that is not Llama's."""
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Tensor within a layer -> the fields of `params` whose rows it joins."""
    mlp_dim: str = "intermediate_size"
    """The field that has the width of its MLP, or of an expert's."""
    interleaved: bool = False
    """Whether its rotary embedding pairs neighbouring dimensions of a head; see `interleaved`."""


_COMMON = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_GRANITE = _COMMON | {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GEMMA = _COMMON | {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GLM = _COMMON | {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_SILU = {"hidden_act": ("silu",)}
# Norms of queries and keys, in families that have them.
_QK_NORM = {"use_qk_norm": (True, None)}
_PRE_FEEDFORWARD = {"mlp_norm": "pre_feedforward_layernorm.weight"}
_GATE_UP = {"mlp.gate_up_proj.weight": ("gate", "up")}
_WINDOW_SWITCH = "use_sliding_window max_window_layers sliding_window layer_types"

# Bookkeeping, training-time or generation-time fields: none of them changes the forward pass.
IRRELEVANT = frozenset(
    """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache
    pretraining_tp attention_dropout initializer_range bos_token_id eos_token_id pad_token_id
    sep_token_id unk_token_id swiftkv _attn_implementation attn_implementation swiftkv_far_loss
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

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "Llama",
        family_fields.read_llama,
        family_fields.write_llama,
        # The last says nothing where no window is switched on.
        fields="attention_bias sliding_window layer_types max_window_layers",
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
        family_fields.read_mistral,
        family_fields.write_window,
        fields="attention_bias sliding_window layer_types max_window_layers",
        neutral=_SILU,
        # transformers reads a file without the field as one with a window of 4096; null is none.
        defaults=_COMMON
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        "Qwen2",
        lambda hf: {"layer_kinds": windows_above(hf), "qkv_bias": True},
        family_fields.write_qwen2,
        fields=_WINDOW_SWITCH,
        neutral=_SILU
        | {"use_mrope": (False, None), "attention_bias": (True, None), "qkv_bias": (True, None)},
        defaults=_QWEN,
    ),
    "qwen3": Family(
        "Qwen3",
        family_fields.read_qwen3,
        lambda config: family_fields.write_qwen2(config) | {"attention_bias": config.qkv_bias},
        fields=_WINDOW_SWITCH + " attention_bias",
        neutral=_SILU | _QK_NORM,
        defaults=_QWEN | {"head_dim": 128},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        family_fields.read_qwen3_moe,
        family_fields.write_qwen3_moe,
        # The window's other fields say nothing where its switch is off.
        fields="attention_bias num_experts num_local_experts num_experts_per_tok "
        "moe_intermediate_size norm_topk_prob sliding_window max_window_layers",
        mlp_dim="moe_intermediate_size",
        neutral=_SILU
        | _QK_NORM
        | {
            "use_sliding_window": (False, None),
            "decoder_sparse_step": (1, None),
            "mlp_only_layers": ([], None),
        },
        defaults=_COMMON
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "seed_oss": Family(
        "SeedOss",
        family_fields.read_seed_oss,
        family_fields.write_seed_oss,
        fields="attention_bias attention_out_bias",
        neutral=_SILU,
        defaults=_COMMON
        | {
            "max_position_embeddings": 524288,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
    "granite": Family(
        "Granite",
        family_fields.read_granite,
        family_fields.write_granite,
        fields="attention_bias embedding_multiplier residual_multiplier attention_multiplier "
        "logits_scaling",
        neutral=_SILU,
        defaults=_GRANITE,
    ),
    # Granite 4.0, of which the models without Mamba layers and experts are supported.
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        family_fields.read_granite4,
        family_fields.write_granite4,
        fields="attention_bias embedding_multiplier residual_multiplier attention_multiplier "
        "logits_scaling position_embedding_type shared_intermediate_size layer_types "
        "layers_block_type num_local_experts "
        # What Mamba layers and experts would read, and how weights were initialised.
        "num_experts_per_tok mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv "
        "mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit init_method",
        neutral=_SILU | {"normalization_function": ("rmsnorm", None)},
        defaults=_GRANITE | {"shared_intermediate_size": 1024, "num_local_experts": 8},
        names={"down": "shared_mlp.output_linear.weight"},
        fused={"shared_mlp.input_linear.weight": ("gate", "up")},
        mlp_dim="shared_intermediate_size",
    ),
    "smollm3": Family(
        "SmolLM3",
        family_fields.read_smollm3,
        family_fields.write_smollm3,
        fields="attention_bias no_rope_layers no_rope_layer_interval use_sliding_window "
        # Its files have `max_window_layers`, which its class does not read.
        "sliding_window layer_types max_window_layers",
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
        family_fields.read_phi3,
        family_fields.write_phi3,
        fields="sliding_window original_max_position_embeddings partial_rotary_factor",
        neutral=_SILU
        | {
            "attention_bias": (False, None),
            "full_attn_mod": (1, None),
            "interpolate_factor": (1, None),
        },
        defaults=_COMMON
        | {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        fused={"self_attn.qkv_proj.weight": ("q", "k", "v")} | _GATE_UP,
    ),
    "glm": Family(
        "Glm",
        family_fields.read_glm,
        family_fields.write_glm,
        fields="attention_bias partial_rotary_factor",
        neutral=_SILU,
        defaults=_GLM,
        fused=_GATE_UP,
        interleaved=True,
    ),
    "glm4": Family(
        "Glm4",
        lambda hf: family_fields.read_glm(hf) | {"norm_order": "both"},
        family_fields.write_glm,
        fields="attention_bias partial_rotary_factor",
        neutral=_SILU,
        defaults=_GLM,
        names={
            "attn_post": "post_self_attn_layernorm.weight",
            "mlp_post": "post_mlp_layernorm.weight",
        },
        fused=_GATE_UP,
        interleaved=True,
    ),
    "ernie4_5": Family(
        "Ernie4_5",
        lambda hf: {"layer_kinds": one_kind(hf)},
        family_fields.write_ernie,
        # A divisor of positions.
        neutral=_SILU | {"compression_ratio": (1.0, None)},
        defaults=_COMMON
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
    "olmo2": Family(
        "Olmo2",
        family_fields.read_olmo2,
        family_fields.write_llama,
        fields="attention_bias",
        neutral=_SILU | _QK_NORM,
        defaults=_COMMON | {"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3",
        family_fields.read_olmo3,
        family_fields.write_olmo3,
        fields="attention_bias sliding_window layer_types",
        neutral=_SILU | _QK_NORM,
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "gemma2": Family(
        "Gemma2",
        family_fields.read_gemma2,
        lambda config: family_fields.write_gemma(config) | write_kinds(config),
        fields="attention_bias hidden_activation query_pre_attn_scalar sliding_window layer_types "
        # The last is `sliding_window` by another name.
        "attn_logit_softcapping final_logit_softcapping sliding_window_size",
        neutral={
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
        family_fields.read_gemma3,
        family_fields.write_gemma3,
        fields="attention_bias hidden_activation query_pre_attn_scalar sliding_window layer_types "
        "sliding_window_pattern final_logit_softcapping rope_local_base_freq",
        neutral={
            **_QK_NORM,
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
