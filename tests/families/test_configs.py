"""Fields of a `config.json` that no family reads, or that say what cannot be: one line each."""

import pytest

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.hf_config import config_from_hf

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def longrope(**fields):
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    return {"rope_scaling": scaling | fields, "original_max_position_embeddings": 16}


REFUSED = {
    "too few factors": ("phi3", longrope(short_factor=[1.0]), "short_factor has 1 entries"),
    "factors that are none": ("phi3", longrope(long_factor=["a"] * 8), "'a' must be a positive"),
    "no pretraining length": (
        "phi3",
        longrope() | {"original_max_position_embeddings": 1},
        "original_max_position_embeddings=1",
    ),
    "yarn of theta 1": (
        "qwen3",
        {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "theta=1 must be above 1",
    ),
    "a list for a rope type": ("qwen3", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type="),
    "layer types of lists": ("qwen3", {"layer_types": [["full_attention"]] * 4}, "layer_types="),
    "too few layer types": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types="),
    "a window that is off": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
        "layer_types has sliding_attention",
    ),
    "rotations of lists": ("smollm3", {"no_rope_layers": [[1], 0, 0, 1]}, "no_rope_layers="),
    "rotations beyond 1": ("smollm3", {"no_rope_layers": [2, 0, 0, 1]}, "no_rope_layers="),
    "no interval": ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    "no pattern": ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    "a window below one": ("mistral", {"sliding_window": 0}, "window=0"),
    "text for a rope": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": "default"}},
        "full_attention='default'",
    ),
    "an unknown layer type": (
        "olmo3",
        {"rope_parameters": {"chunked_attention": {}}},
        "unknown layer types chunked_attention",
    ),
    "no scale of scores": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    "another activation": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    "attention both ways": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True",
    ),
    "next to no rotation": ("phi3", {"partial_rotary_factor": 0.01}, "of head_dim=16"),
    "rotation in part": ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "no divisor": ("granite", {"logits_scaling": 0}, "logit_divisor=0"),
    "NaN": ("granite", {"residual_multiplier": float("nan")}, "residual_scale=nan"),
    "clipped projections": ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    "sections of positions": ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    "another family's field": ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    "experts": ("qwen3_moe", {}, "model_type='qwen3_moe'"),
    "endless layers": ("gemma3_text", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    family, fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        config_from_hf(BASE | {"model_type": family} | fields)
    assert "\n" not in str(error.value)


def test_longrope_goes_by_the_longest_text():
    config = config_from_hf(BASE | {"model_type": "phi3"} | longrope())
    for length, long in ((16, False), (17, True)):
        (rope,) = config.at_length(length).ropes
        assert rope.scaling is not None and rope.scaling.long is long


def test_a_window_that_hides_nothing_is_none():
    config = config_from_hf(BASE | {"model_type": "mistral", "sliding_window": 8})
    assert config.kinds[0].window == config.at_length(9).kinds[0].window == 8
    assert config.at_length(8).kinds[0].window is None
