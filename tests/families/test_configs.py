"""Fields of a `config.json` that no family reads, or that say what cannot be: one line each."""

from typing import Any

import pytest

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf

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


def yarn(**fields):
    return {"rope_scaling": {"type": "yarn", "factor": 2.0} | fields}


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
    "no rotation at all": ("smollm3", {"no_rope_layers": [0] * 4}, "some layers must rotate"),
    "a cap that the class leaves out": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0 is not supported",
    ),
    "one rope for two": (
        "olmo3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "an object for each of full_attention, sliding_attention",
    ),
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
        "unknown layer types 'chunked_attention'",
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
    "ERNIE with biases": ("ernie4_5", {"use_bias": True}, "use_bias=True"),
    "compressed positions": ("ernie4_5", {"compression_ratio": 4.0}, "compression_ratio=4.0"),
    "half of ERNIE's heads": (
        "ernie4_5",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5",
    ),
    "an odd part of heads": ("glm4", {"partial_rotary_factor": 0.3125}, "must be an even number"),
    "GLM's images": ("glm4v", {}, "model_type='glm4v'"),
    "GLM's experts": ("glm4_moe", {}, "model_type='glm4_moe'"),
    "clipped projections": ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    "sections of positions": ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    "another family's field": ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    "experts": ("mixtral", {}, "model_type='mixtral'"),
    "endless layers": ("gemma3_text", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "another window beside it": (
        "gemma2",
        {"sliding_window": 8, "sliding_window_size": 16},
        "sliding_window=8 and sliding_window_size=16 say the same and differ",
    ),
    # Ranges.
    "a negative width": ("gemma2", {"hidden_size": -1}, "hidden_size=-1 must be from 1 to"),
    "a huge width": ("gemma3_text", {"hidden_size": 10**400}, "hidden_size=<a number above 1e100>"),
    "a huge scalar": ("gemma2", {"query_pre_attn_scalar": 10**400}, "is too large for float32"),
    "a huge length": (
        "phi3",
        longrope() | {"max_position_embeddings": 10**400},
        "max_position_embeddings=<a number above 1e100> must be from 1",
    ),
    "a huge factor": ("phi3", longrope(long_factor=[10**400] * 8), "must be a positive number"),
    "a huge epsilon": ("llama", {"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300 is too large"),
    "an epsilon of 1": ("llama", {"rms_norm_eps": 1}, "rms_norm_eps=1 must be below 1"),
    "no key heads": ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0 must be from 1"),
    "no heads' width": ("llama", {"head_dim": 0}, "head_dim=0 must be from 1"),
    "Phi's length of 0": (
        "phi3",
        longrope() | {"original_max_position_embeddings": 0},
        "original_max_position_embeddings=0 must be from 1",
    ),
    # Types and lengths.
    "a fraction of a token": (
        "llama",
        yarn(original_max_position_embeddings=1.5),
        "original_max_position_embeddings=1.5 must be an integer",
    ),
    "text for truncate": ("qwen3", yarn(truncate="false"), "truncate='false' must be true or fal"),
    "0 for truncate": ("qwen3", yarn(truncate=0), "truncate=0 must be true or false"),
    "null for truncate": ("qwen3", yarn(truncate=None), "truncate=None must be true or false"),
    "a negative rotation": ("smollm3", {"no_rope_layers": [-1, 0, 1, 1]}, "must have 0 or 1"),
    "true for a rotation": ("smollm3", {"no_rope_layers": [True, 0, 1, 1]}, "must have 0 or 1"),
    "three of four layers": (
        "llama",
        {"layer_types": ["full_attention"] * 3},
        "each of the 4 layers",
    ),
    "chunks": ("mistral", {"layer_types": ["chunked_attention"] * 4}, "each of the 4 layers"),
    "numbers for layer types": ("llama", {"layer_types": [1, {}, [], None]}, "each of the 4 lay"),
    # Two statements.
    "two thetas": (
        "qwen3",
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        "rope_theta=10000.0 and rope_parameters: rope_theta=1000000.0 say the same and differ",
    ),
    "two thetas of full layers": (
        "olmo3",
        {"rope_theta": 1e4, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_theta=10000.0 and rope_parameters: full_attention: rope_theta=1000000.0",
    ),
    "two thetas of windows": (
        "gemma3_text",
        {
            "rope_local_base_freq": 1e4,
            "rope_parameters": {"sliding_attention": {"rope_theta": 1e3}},
        },
        "rope_local_base_freq=10000.0 and rope_parameters: sliding_attention: rope_theta=1000.0",
    ),
    "two rope types": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
        "rope_scaling: rope_type='linear' and rope_scaling: type='yarn' say the same and differ",
    ),
    "two rope types of Phi's": (
        "phi3",
        longrope(type="su", rope_type="linear"),
        "rope_type='linear' and rope_scaling: type='su' say the same and differ",
    ),
    "two parts of heads": (
        "glm4",
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
        "partial_rotary_factor=0.5 and rope_parameters: partial_rotary_factor=1.0 say the same",
    ),
    "two lengths": (
        "phi3",
        longrope(original_max_position_embeddings=32),
        "original_max_position_embeddings=16 and rope_scaling: original_max_position_embeddings=32",
    ),
    "a length beside Phi's default": (
        "phi3",
        longrope(original_max_position_embeddings=32) | {"original_max_position_embeddings": None},
        "original_max_position_embeddings=4096 and rope_scaling: original_max_position_embedding",
    ),
    "two counts of experts": (
        "qwen3_moe",
        {"num_experts": 8, "num_local_experts": 4},
        "num_experts=8 and num_local_experts=4 say the same and differ",
    ),
    # What the line says.
    "Gemma without windows": (
        "gemma3_text",
        {"sliding_window": None},
        "^sliding_window=None is not supported for this model_type without layer_types",
    ),
    "YaRN in Phi's place": (
        "phi3",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope_type='yarn' is longrope for this model_type, and needs long_factor, short_factor",
    ),
    "many layer types": (
        "qwen3",
        {"layer_types": ["chunked_attention"] * 4, "num_hidden_layers": 32},
        r"layer_types=\['chunked_attention', .{1,150}\] must have",
    ),
    "long text": ("llama", {"head_dim": "1" * 4000}, r"head_dim='1{10,40}\.\.\.1{10,40}' must be"),
}
for _name in ("beta_fast", "beta_slow", "original_max_position_embeddings", "factor"):
    for _value in (0, "", [], {}, False):
        REFUSED[f"{_name} {_value!r}"] = ("qwen3", yarn(**{_name: _value}), f"{_name}=.* must be ")
for _value in (0, "", [], {}, False):
    REFUSED |= {
        f"rope_type {_value!r}": ("llama", {"rope_scaling": {"rope_type": _value}}, "rope_type="),
        f"full_attention {_value!r}": (
            "olmo3",
            {"rope_parameters": {"full_attention": _value}},
            "full_attention=.* must be an object",
        ),
        f"LongRoPE's length {_value!r}": (
            "phi3",
            longrope(original_max_position_embeddings=_value),
            "original_max_position_embeddings",
        ),
    }
del REFUSED["full_attention {}"]  # the class's default


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    family, fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        config_from_hf(BASE | {"model_type": family} | fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_longrope_goes_by_the_longest_text():
    config = config_from_hf(BASE | {"model_type": "phi3"} | longrope())
    for length, long in ((16, False), (17, True)):
        (rope,) = config.at_length(length).ropes
        assert rope.scaling is not None and rope.scaling.long is long


def test_a_window_that_hides_nothing_is_none():
    config = config_from_hf(BASE | {"model_type": "mistral", "sliding_window": 8})
    assert config.kinds[0].window == config.at_length(9).kinds[0].window == 8
    assert config.at_length(8).kinds[0].window is None


def test_null_heads_are_derived():
    """As transformers does, whatever the class's default."""
    null = {"head_dim": None, "num_key_value_heads": None}
    config = config_from_hf(BASE | {"model_type": "ernie4_5"} | null)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


# As published, or as projects that load the published files state their fields.
GLM_4_9B_0414 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "use_cache": True,
    "vocab_size": 151552,
}
ERNIE_4_5_03B = {
    "architectures": ["Ernie4_5_ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_ernie4_5.Ernie4_5_Config"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 18,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "use_cache": False,
    "vocab_size": 103424,
    "rope_theta": 500000,
    "use_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_published_glm4():
    config = config_from_hf(GLM_4_9B_0414)
    assert config.ropes[0].rotated(config.head_dim) == 64
    assert (config.qkv_bias, config.o_bias, config.norm_order) == (True, False, "both")
    larger = {
        "attention_bias": False,
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    }
    config = config_from_hf(GLM_4_9B_0414 | larger)
    scaling = config.ropes[0].scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("yarn", 4.0)
    assert config_from_hf(config_to_hf(config)) == config


def test_published_glm():
    """The class's defaults, and heads that rotate whole."""
    fields = {"model_type": "glm", "partial_rotary_factor": None, "head_dim": 16}
    config = config_from_hf(BASE | fields)
    assert (config.ropes[0].fraction, config.qkv_bias, config.norm_order) == (0.5, True, "pre")
    whole = config_from_hf(BASE | fields | {"partial_rotary_factor": 1.0})
    assert whole.ropes[0].fraction == 1.0 and config_from_hf(config_to_hf(whole)) == whole


def test_published_ernie():
    config = config_from_hf(ERNIE_4_5_03B)
    assert (config.ropes[0].theta, config.tie_word_embeddings) == (500000, True)
    assert (config.qkv_bias, config.num_heads * config.head_dim) == (False, 2048)
    # transformers' own class writes neither the tie nor the bias where they are its defaults.
    brief = {
        name: value
        for name, value in ERNIE_4_5_03B.items()
        if name not in ("tie_word_embeddings", "use_bias", "rope_theta", "head_dim")
    }
    assert config_from_hf(brief) == config


@pytest.mark.parametrize("layers", [0, 28, None])
def test_published_smollm3(layers):
    """The class does not read `max_window_layers`, which the published file has."""
    fields = BASE | {"model_type": "smollm3", "use_sliding_window": False}
    assert config_from_hf(fields | {"max_window_layers": layers}) == config_from_hf(fields)


def test_published_gemma2():
    """Both names of the window."""
    fields = BASE | {"model_type": "gemma2", "max_position_embeddings": 8192}
    both = {"sliding_window": 4096, "sliding_window_size": 4096}
    assert config_from_hf(fields | both) == config_from_hf(fields)
    assert config_from_hf(fields | {"sliding_window_size": 4096}) == config_from_hf(fields)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi_as_transformers_5_writes_it(name):
    """`rope_type` beside the older `type`, and what stands beside `rope_scaling` inside it too."""
    fields = BASE | {"model_type": "phi3", "head_dim": None, "hidden_size": 64}
    older: dict[str, Any] = (
        fields | longrope(type=name) | {"partial_rotary_factor": 0.5, "rope_theta": 1e5}
    )
    for factors in ("short_factor", "long_factor"):
        older["rope_scaling"][factors] = [1.0] * 4
    moved = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    newer = {field: older[field] for field in older.keys() - {"rope_scaling", "rope_theta"}}
    inside = {field: older[field] for field in moved}
    newer["rope_parameters"] = older["rope_scaling"] | inside | {"rope_type": "longrope"}
    assert config_from_hf(newer) == config_from_hf(older)
