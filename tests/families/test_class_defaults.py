"""Fields that a file leaves out stand for the defaults of transformers' classes."""

from typing import Any

import pytest

from swiftkv_jax.checkpoints.families import FAMILIES
from swiftkv_jax.checkpoints.hf_config import config_from_hf

_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_BIAS = {"attention_bias": False}
_QWEN = _COMMON | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GLM = _COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_GRANITE = (
    _COMMON
    | _BIAS
    | {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
)
_GEMMA = (
    _COMMON
    | _BIAS
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
    }
)
# Recorded from the configuration classes of transformers 5.23. `rope_theta` is their
# `default_theta`, and `partial_rotary_factor` what their `rope_parameters` begin with.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | _BIAS | {"head_dim": None},
    "mistral": _COMMON
    | {
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | _BIAS | {"head_dim": 128},
    "qwen3_moe": _COMMON
    | _BIAS
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "seed_oss": _COMMON
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "granite": _GRANITE,
    "granitemoehybrid": _GRANITE
    | {
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "position_embedding_type": None,
    },
    "smollm3": _COMMON
    | _BIAS
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "phi3": _COMMON
    | {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "ernie4_5": _COMMON
    | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
        "use_bias": False,
    },
    "olmo2": _COMMON | _BIAS | {"rms_norm_eps": 1e-5},
    "olmo3": _COMMON
    | _BIAS
    | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "layer_types": None},
    "gemma2": _GEMMA
    | {
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA
    | {
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
}
REQUIRED = {
    "vocab_size": 100,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}


def test_every_family_is_recorded():
    assert CLASS_DEFAULTS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields(family):
    required, stated = REQUIRED | {"model_type": family}, CLASS_DEFAULTS[family]
    if family == "granitemoehybrid":  # which has Mamba layers and experts by default
        required |= {"layer_types": ["attention"] * 36, "num_local_experts": 0}
    expected = config_from_hf(stated | required)
    assert config_from_hf(required) == expected
    for name in stated:  # one that another field makes idle tells nothing above
        rest = {other: value for other, value in stated.items() if other != name}
        assert config_from_hf(rest | required) == expected, name
    ours = FAMILIES[family].defaults
    assert {name: stated.get(name) for name in ours} == dict(ours)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family):
    """Those above `max_window_layers`; null is none."""
    fields = REQUIRED | {"model_type": family, "use_sliding_window": True}
    config = config_from_hf(fields)
    assert [config.kind(layer).window for layer in (27, 28, 35)] == [None, 4096, 4096]
    (kind,) = config_from_hf(fields | {"sliding_window": None}).kinds
    assert kind.window is None


def test_window_of_mistral():
    (kind,) = config_from_hf(REQUIRED | {"model_type": "mistral"}).kinds
    assert kind.window == 4096
