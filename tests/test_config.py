"""Reading and writing `config.json`: the published models, both spellings of transformers, and
everything that must be refused."""

import pytest
from transformers import LlamaConfig, MistralConfig

from swiftkv_jax import CheckpointError, Config, ConfigError, LayerKind, Rope
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from tests.published import (
    CONFIG_8B,
    LLAMA3_SCALING,
    MISTRAL_7B_V03,
    PUBLISHED,
    SCALING,
    SWIFTKV_8B_AUG_2025,
    SWIFTKV_8B_DEC_2024,
    SWIFTKV_8B_TRANSFORMERS5,
)
from tests.tiny import hf_config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    hf, expected = PUBLISHED[name]
    assert config_from_hf(hf) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_round_trip(name):
    config = PUBLISHED[name][1]
    written = config_to_hf(config)
    assert config_from_hf(written) == config
    assert written["model_type"] == ("llama_swiftkv" if "SwiftKV" in name else "llama")
    if "SwiftKV" in name:  # the authors' spelling (spec 2.4), field by field
        assert {k: v for k, v in SWIFTKV_8B_AUG_2025.items() if k in written} == written


def test_round_trip_of_a_grouped_cut():
    config = config_from_hf(
        hf_config(
            key_value_group_size=4,
            attention_bias=True,
            rope_scaling={"type": "linear", "factor": 2.0},
        )
    )
    assert config.key_value_group_size == 4
    assert config_from_hf(config_to_hf(config)) == config


def test_hashable():
    """A `Config` is a static argument of jitted functions: equal ones must hash alike."""
    a, b = config_from_hf(SWIFTKV_8B_DEC_2024), config_from_hf(SWIFTKV_8B_TRANSFORMERS5)
    assert hash(a) == hash(b)
    assert len({a, b, a.cut(8), a.cut(16, 2)}) == 3


@pytest.mark.parametrize("absent", [None, 0, "missing"])
def test_absent_swiftkv_fields(absent):
    """Null or 0 for K is every layer, and for the group size 1 (spec 1.1)."""
    hf = dict(SWIFTKV_8B_DEC_2024)
    for name in "num_key_value_layers", "key_value_group_size":
        if absent == "missing":
            del hf[name]
        else:
            hf[name] = absent
    config = config_from_hf(hf)
    assert (config.num_key_value_layers, config.key_value_group_size, config.num_upper_layers) == (
        32,
        1,
        0,
    )


def test_derived_sizes():
    config = CONFIG_8B.cut(16, 4)
    assert (
        config.num_lower_layers,
        config.num_upper_layers,
        config.num_kv_groups,
        config.num_cache_layers,
    ) == (16, 16, 4, 20)
    assert config_from_hf(hf_config(head_dim=None, num_key_value_heads=None)).num_kv_heads == 4


# What is refused --------------------------------------------------------------

REFUSED = {
    "longrope without its factors": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
        "rope_scaling.*longrope.*long_factor, short_factor",
    ),
    "yarn without a factor": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.*yarn.*factor"),
    "dynamic without a factor": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        "rope_parameters.*dynamic.*factor",
    ),
    "incomplete llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling.*high_freq_factor",
    ),
    "extra rope field": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}},
        "rope_scaling.*mscale",
    ),
    "two scalings": (
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default"},
        },
        "rope_scaling=.* and rope_parameters=.* disagree",
    ),
    "no theta": ({"rope_theta": float("nan")}, "rope_theta=nan must be a positive number"),
    "partial rope": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "llama3 without a middle band": (
        {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}},
        "high_freq_factor",
    ),
    "zero rope factor": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    "rope factor as text": ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
    "rope scaling as text": ({"rope_scaling": "linear"}, "rope_scaling"),
    "rope theta as text": ({"rope_theta": "10000"}, "rope_theta"),
    "zero rope theta": ({"rope_theta": 0}, "rope_theta"),
    "sliding window": ({"sliding_window": 64}, "sliding_window=64"),
    "window of some layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act"),
    "quantised": (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        "quantization_config",
    ),
    "unknown field": ({"logit_softcapping": 30.0}, "logit_softcapping"),
    "another model": ({"model_type": "gpt2"}, "model_type='gpt2'.*qwen3"),
    "no model type": ({"model_type": None}, "model_type"),
    "no width": ({"hidden_size": None}, "hidden_size"),
    "group size does not divide": ({"key_value_group_size": 3}, "key_value_group_size=3"),
    "negative group size": ({"key_value_group_size": -1}, "key_value_group_size=-1"),
    "K above L": ({"num_key_value_layers": 7}, "num_key_value_layers=7"),
    "negative K": ({"num_key_value_layers": -1}, "num_key_value_layers=-1"),
    "K as text": ({"num_key_value_layers": "2"}, "num_key_value_layers"),
    "fractional layers": ({"num_hidden_layers": 6.0}, "num_hidden_layers"),
    "true for a number": ({"vocab_size": True}, "vocab_size"),
    "text for a truth": ({"attention_bias": "no"}, "attention_bias"),
    "heads do not divide": ({"num_key_value_heads": 3}, "num_kv_heads=3"),
    "heads do not divide the width": (
        {"num_attention_heads": 6, "head_dim": None},
        "hidden_size=32.*num_attention_heads=6",
    ),
    "odd heads": ({"head_dim": 7}, "head_dim=7"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0"),
    "endless layers": (
        {"num_hidden_layers": 10**9},
        "num_layers=1000000000 must be from 1 to 1000",
    ),
    "width beyond an index": ({"hidden_size": 2**31}, "hidden_size=2147483648 must be from 1 to"),
    "negative positions": (
        {"max_position_embeddings": -1},
        "max_position_embeddings=-1 must be from 1",
    ),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be from 1"),
    "interleaved rotary pairs": ({"rope_interleaved": True}, "rope_interleaved=True"),
    "no Llama by its own word": ({"is_llama_config": False}, "is_llama_config=False"),
    "no eps": ({"rms_norm_eps": 0}, "norm_eps=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """Whatever would change the result is refused in one line that names the field."""
    fields, names = REFUSED[name]
    with pytest.raises(ConfigError, match=names) as error:
        config_from_hf(hf_config(**fields))
    assert "\n" not in str(error.value)
    assert isinstance(error.value, CheckpointError)  # exit code 4


def test_neutral_values_are_accepted():
    neutral = {
        "sliding_window": 128,  # not below max_position_embeddings
        "layer_types": ["full_attention"] * 6,
        "mlp_bias": False,
        "is_llama_config": True,  # both of SmolLM2
        "rope_interleaved": False,
        "quantization_config": None,
        "rope_scaling": {"rope_type": "default"},
        "partial_rotary_factor": 1.0,
    }
    assert config_from_hf(hf_config(**neutral)) == config_from_hf(hf_config())


def test_mistral_without_a_window_field():
    """transformers gives such a config a window of 4096; only an explicit null means none."""
    hf = {name: value for name, value in MISTRAL_7B_V03.items() if name != "sliding_window"}
    assert (
        MistralConfig(
            **{k: v for k, v in hf.items() if k not in ("torch_dtype", "architectures")}
        ).sliding_window
        == 4096
    )
    assert config_from_hf(hf).kinds == (LayerKind(Rope(1e6), 4096),)
    assert config_from_hf(MISTRAL_7B_V03).family == "llama"


# transformers 5 ---------------------------------------------------------------


@pytest.mark.parametrize(
    "written", [LlamaConfig.to_dict, LlamaConfig.to_diff_dict], ids=["to_dict", "to_diff_dict"]
)
def test_what_transformers_writes(written):
    config = config_from_hf(written(LlamaConfig()))
    assert config == Config(
        32000,
        4096,
        11008,
        32,
        32,
        32,
        128,
        norm_eps=1e-6,
        max_position_embeddings=2048,
    )
    rope = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    scaled = LlamaConfig(  # pyright: ignore[reportCallIssue]
        max_position_embeddings=131072, rope_parameters=rope
    )
    assert config_from_hf(written(scaled)).ropes == (Rope(500000.0, SCALING),)


@pytest.mark.parametrize("name", ["Llama-2-7B", "Llama-3.1-8B", "Llama-3.2-1B"])
def test_through_transformers(name):
    """An old `config.json` that transformers 5 has read and written again is still the same
    model."""
    hf, expected = PUBLISHED[name]
    assert config_from_hf(LlamaConfig.from_dict(hf).to_dict()) == expected
