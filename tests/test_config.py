"""Reading and writing `config.json`: the published models, both spellings of transformers, and
everything that must be refused."""

import math

import jax
import pytest
from transformers import LlamaConfig, MistralConfig

from swiftkv_jax import CheckpointError, Config, ConfigError, RopeScaling
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from swiftkv_jax.params import llama_shapes, swiftkv_shapes
from tests.tiny import hf_config

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "use_cache": True,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
}
LLAMA2_7B = {
    **COMMON,
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "vocab_size": 32000,
}
LLAMA3_8B = {
    **COMMON,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
LLAMA31_8B = {
    **LLAMA3_8B,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": LLAMA3_SCALING,
    "transformers_version": "4.42.3",
}
LLAMA32_1B = {
    **LLAMA31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA3_SCALING, "factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA33_70B = {
    **LLAMA31_8B,
    "head_dim": 128,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA31_405B = {
    **LLAMA31_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
MISTRAL_7B_V03 = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
SWIFTKV_8B_DEC_2024 = {
    **LLAMA31_8B,
    "_name_or_path": "/data-fast/llama-3.1-8b-instruct",
    "architectures": ["LlamaSwiftKVForCausalLM"],
    "key_value_group_size": 1,
    "model_type": "llama_swiftkv",
    "num_key_value_layers": 16,
    "swiftkv": True,
    "torch_dtype": "float32",
    "transformers_version": "4.44.2",
}
SWIFTKV_8B_AUG_2025 = {k: v for k, v in SWIFTKV_8B_DEC_2024.items() if k != "_name_or_path"} | {
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0",
}
SWIFTKV_8B_TRANSFORMERS5 = {
    k: v
    for k, v in SWIFTKV_8B_AUG_2025.items()
    if k not in ("torch_dtype", "rope_scaling", "rope_theta")
} | {
    "dtype": "bfloat16",
    "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
    "pad_token_id": None,
    "transformers_version": "5.0.0",
}

SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
CONFIG_8B = Config(
    vocab_size=128256,
    embed_dim=4096,
    mlp_dim=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=SCALING,
    max_position_embeddings=131072,
)
PUBLISHED = {
    "Llama-2-7B": (
        LLAMA2_7B,
        Config(
            32000,
            4096,
            11008,
            32,
            32,
            32,
            128,
            norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=4096,
        ),
    ),
    "Llama-3-8B": (
        LLAMA3_8B,
        Config(
            128256,
            4096,
            14336,
            32,
            32,
            8,
            128,
            norm_eps=1e-5,
            rope_theta=500000.0,
            max_position_embeddings=8192,
        ),
    ),
    "Llama-3.1-8B": (LLAMA31_8B, CONFIG_8B),
    "Llama-3.2-1B": (
        LLAMA32_1B,
        Config(
            *(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 500000.0),
            rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
    ),
    "Llama-3.3-70B": (
        LLAMA33_70B,
        Config(
            128256,
            8192,
            28672,
            80,
            64,
            8,
            128,
            1e-5,
            500000.0,
            rope_scaling=SCALING,
            max_position_embeddings=131072,
        ),
    ),
    "Mistral-7B-v0.3": (
        MISTRAL_7B_V03,
        Config(
            32768,
            4096,
            14336,
            32,
            32,
            8,
            128,
            norm_eps=1e-5,
            rope_theta=1e6,
            max_position_embeddings=32768,
        ),
    ),
    "SwiftKV-8B December 2024": (SWIFTKV_8B_DEC_2024, CONFIG_8B.cut(16)),
    "SwiftKV-8B August 2025": (SWIFTKV_8B_AUG_2025, CONFIG_8B.cut(16)),
    "SwiftKV-8B as transformers 5 writes it": (SWIFTKV_8B_TRANSFORMERS5, CONFIG_8B.cut(16)),
}


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
    "unknown rope type": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
        "rope_scaling.*longrope",
    ),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope_scaling.*yarn"),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}},
        "rope_parameters.*dynamic",
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
    "no theta": ({"rope_theta": float("nan")}, "rope_theta=nan must be positive"),
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
    "another model": ({"model_type": "qwen2"}, "model_type.*qwen2"),
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
    "no heads": ({"num_attention_heads": 0}, "num_heads=0"),
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
    with pytest.raises(ConfigError, match="sliding_window=4096"):
        config_from_hf(hf)


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
        rope_theta=10000.0,
        max_position_embeddings=2048,
    )
    rope = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    scaled = LlamaConfig(max_position_embeddings=131072, rope_parameters=rope)  # pyright: ignore[reportCallIssue]
    assert config_from_hf(written(scaled)).rope_scaling == SCALING
    assert config_from_hf(written(scaled)).rope_theta == 500000.0


@pytest.mark.parametrize("name", ["Llama-2-7B", "Llama-3.1-8B", "Llama-3.2-1B"])
def test_through_transformers(name):
    """An old `config.json` that transformers 5 has read and written again is still the same
    model."""
    hf, expected = PUBLISHED[name]
    assert config_from_hf(LlamaConfig.from_dict(hf).to_dict()) == expected


# Sizes (spec 2.1, 2.2) --------------------------------------------------------


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("hf", "kv_layers", "trainable"),
    [
        (LLAMA31_8B, 16, 402_657_280),
        (LLAMA33_70B, 40, 3_355_451_392),
        (LLAMA31_405B, 63, 19_025_379_328),
    ],
    ids=["8B", "70B", "405B"],
)
def test_trainable_parameters(hf, kv_layers, trainable):
    assert count(swiftkv_shapes(config_from_hf(hf).cut(kv_layers))) == trainable


def test_total_parameters():
    config = CONFIG_8B.cut(16)
    assert count((llama_shapes(config), swiftkv_shapes(config))) == 8_432_918_528
    assert count(llama_shapes(config)) == count(llama_shapes(CONFIG_8B)) == 8_030_261_248


def test_shapes():
    config = config_from_hf(
        hf_config(
            attention_bias=True,
            num_key_value_layers=2,
            key_value_group_size=2,
            tie_word_embeddings=True,
        )
    )
    delta, llama = swiftkv_shapes(config), llama_shapes(config, dtype="bfloat16")
    assert {name: leaf.shape for name, leaf in vars(delta).items()} == {
        "norm": (32,),
        "q": (4, 4, 8, 32),
        "k": (2, 2, 8, 32),
        "v": (2, 2, 8, 32),
        "q_bias": (4, 4, 8),
        "k_bias": (2, 2, 8),
        "v_bias": (2, 2, 8),
    }
    assert llama.lm_head is None
    assert llama.lower.o.shape == (2, 32, 4, 8)
    assert llama.upper.o_bias.shape == (4, 32)
    assert {leaf.dtype for leaf in jax.tree.leaves(llama)} == {jax.numpy.dtype("bfloat16")}
    assert swiftkv_shapes(config_from_hf(hf_config())).k_bias is None
