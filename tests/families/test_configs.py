"""Fields of a `config.json`: those that say what cannot be, or what no family reads, are refused in
one line each; others change nothing; and what is written says what the config says."""

import dataclasses
import math
from typing import Any

import pytest

from swiftkv_jax import Config, ConfigError, LayerKind
from swiftkv_jax.checkpoints.families import FAMILIES
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf

from .cases import CASES

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


def nested(kind: str, theta: float):
    return {"rope_parameters": {f"{kind}_attention": {"rope_theta": theta}}}


def yarn(**fields):
    return {"rope_scaling": {"type": "yarn", "factor": 2.0} | fields}


WHOLE = {"qwen3_moe": CASES["qwen3-moe"], "granitemoehybrid": CASES["granite4"]}
"""Those that `BASE` is too little for."""


def read(family: str, fields: dict[str, Any]) -> Config:
    return config_from_hf(WHOLE.get(family, BASE) | {"model_type": family} | fields)


ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
REFUSED = [  # family, fields, what the error says
    ("phi3", longrope(short_factor=[1.0]), "short_factor has 1 entries"),
    ("phi3", longrope(long_factor=["a"] * 8), "'a' must be a positive"),
    ("phi3", longrope() | {ORIGINAL: 1}, "original_max_position_embeddings=1"),
    ("phi3", {"partial_rotary_factor": 0.01}, "of head_dim=16"),
    ("phi3", longrope() | {"max_position_embeddings": 10**400}, "embeddings=<a number above 1e1"),
    ("phi3", longrope(long_factor=[10**400] * 8), "must be a positive number"),
    ("phi3", longrope() | {ORIGINAL: 0}, "embeddings=0 must be from 1"),
    ("phi3", longrope(type="su", rope_type="linear"), "'linear' and .*type='su' say the"),
    ("phi3", longrope(original_max_position_embeddings=32), "=16 and rope_scaling: .*=32"),
    ("phi3", longrope(original_max_position_embeddings=32) | {ORIGINAL: None}, "=4096 and rope_sc"),
    (
        "phi3",
        yarn(),
        "rope_type='yarn' is longrope for this model_type, and needs long_factor, sho",
    ),
    ("qwen3", yarn() | {"rope_theta": 1}, "theta=1 must be above 1"),
    ("qwen3", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type="),
    ("qwen3", {"layer_types": [["full_attention"]] * 4}, "layer_types="),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types="),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "layer_types has"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen3", yarn(truncate="false"), "truncate='false' must be true or fal"),
    ("qwen3", yarn(truncate=0), "truncate=0 must be true or false"),
    ("qwen3", yarn(truncate=None), "truncate=None must be true or false"),
    ("qwen3", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "=10000.0 and rope_pa"),
    ("qwen3", yarn(rope_type="linear"), "rope_type='linear' and rope_scaling: type='yarn' say the"),
    (
        "qwen3",
        {"layer_types": ["chunked"] * 32, "num_hidden_layers": 32},
        "'chunked', .{1,99} must",
    ),
    ("qwen3", {"num_experts": 8}, "num_experts=8 is not supported"),
    ("smollm3", {"no_rope_layers": [[1], 0, 0, 1]}, "no_rope_layers="),
    ("smollm3", {"no_rope_layers": [2, 0, 0, 1]}, "no_rope_layers="),
    ("smollm3", {"no_rope_layers": [0] * 4}, "some layers must rotate"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    ("smollm3", {"no_rope_layers": [-1, 0, 1, 1]}, "must have 0 or 1"),
    ("smollm3", {"no_rope_layers": [True, 0, 1, 1]}, "must have 0 or 1"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "ing=50.0 is not supported"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ("gemma3_text", {"rope_parameters": {"full_attention": "default"}}, "full_attention='default'"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "attention=True is not s"),
    ("gemma3_text", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("gemma3_text", {"hidden_size": 10**400}, "size=<a number above 1e100>"),
    ("gemma3_text", {"rope_local_base_freq": 1e4} | nested("sliding", 1e3), "0.0 and .*=1000.0 s"),
    ("gemma3_text", {"sliding_window": None}, "^sliding_window=None .* without layer_ty"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "an object for each of full_attention, s"),
    ("olmo3", {"rope_parameters": {"chunked_attention": {}}}, "unknown layer types 'chunk"),
    ("olmo3", {"rope_theta": 1e4} | nested("full", 1e6), "_theta=10000.0 and .*=1000000.0 say"),
    ("mistral", {"sliding_window": 0}, "window=0"),
    ("mistral", {"layer_types": ["chunked_attention"] * 4}, "each of the 4 layers"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma2", {"sliding_window": 8, "sliding_window_size": 16}, "=8 and .*_size=16 say"),
    ("gemma2", {"hidden_size": -1}, "hidden_size=-1 must be from 1 to"),
    ("gemma2", {"query_pre_attn_scalar": 10**400}, "is too large for float32"),
    ("granite", {"logits_scaling": 0}, "logit_divisor=0"),
    ("granite", {"residual_multiplier": float("nan")}, "residual_scale=nan"),
    ("ernie4_5", {"use_bias": True}, "use_bias=True"),
    ("ernie4_5", {"compression_ratio": 4.0}, "compression_ratio=4.0"),
    ("ernie4_5", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("glm4", {"partial_rotary_factor": 0.3125}, "must be an even number"),
    ("glm4", {PARTIAL: 0.5, "rope_parameters": {PARTIAL: 1.0}}, "=0.5 and .*=1.0 say"),
    ("glm4v", {}, "model_type='glm4v'"),
    ("glm4_moe", {}, "model_type='glm4_moe'"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ("llama", {"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300 is too large"),
    ("llama", {"rms_norm_eps": 1}, "rms_norm_eps=1 must be below 1"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0 must be from 1"),
    ("llama", {"head_dim": 0}, "head_dim=0 must be from 1"),
    ("llama", yarn(original_max_position_embeddings=1.5), "embeddings=1.5 must be an int"),
    ("llama", {"layer_types": ["full_attention"] * 3}, "each of the 4 layers"),
    ("llama", {"layer_types": [1, {}, [], None]}, "each of the 4 lay"),
    ("llama", {"head_dim": "1" * 4000}, r"head_dim='1{10,40}\.\.\.1{10,40}' must be"),
    ("mixtral", {}, "model_type='mixtral'"),
    ("gpt_oss", {}, "model_type='gpt_oss'"),
    ("qwen3_moe", {"num_local_experts": 4}, "num_experts=8 and num_local_experts=4 say th"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_token=9 must be from 1"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=.1. is not supported"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "sparse_step=2 is not supported"),
    ("qwen3_moe", {"use_sliding_window": True}, "window=True is not supported"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "='yes' must be true or false"),
    ("granitemoehybrid", {"layer_types": ["mamba"] + ["attention"] * 5}, "a hybrid with Mam"),
    ("granitemoehybrid", {"layer_types": None}, "a hybrid with Mamba layers"),
    ("granitemoehybrid", {"layer_types": [["attention"]] * 6}, "a hybrid with Mamba layers"),
    ("granitemoehybrid", {"num_local_experts": 62}, "s=62: a mixture of experts beside "),
    ("granitemoehybrid", {"num_local_experts": None}, "num_local_experts=8: a mixture"),
    ("granitemoehybrid", {"num_hidden_layers": 7}, "a type for each of the 7 lay"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "type='alibi'"),
    ("granitemoehybrid", {"normalization_function": "layernorm"}, "='layernorm' is"),
    ("granitemoehybrid", {"shared_intermediate_size": 0}, "=0 must be from 1"),
    ("granitemoehybrid", {"layers_block_type": ["mamba"] * 6}, "and layers_block_type=.* sa"),
]
for _value in (0, "", [], {}, False):
    for _name in ("beta_fast", "beta_slow", ORIGINAL, "factor"):
        REFUSED.append(("qwen3", yarn(**{_name: _value}), f"{_name}=.* must be "))
    REFUSED.append(("llama", {"rope_scaling": {"rope_type": _value}}, "rope_type="))
    REFUSED.append(("phi3", longrope(original_max_position_embeddings=_value), ORIGINAL))
    if _value != {}:  # the class's default
        REFUSED.append(("olmo3", {"rope_parameters": {"full_attention": _value}}, "be an object"))


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED)
def test_refused(family, fields, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(family, fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_longrope_goes_by_the_longest_text():
    config = read("phi3", longrope())
    for length, long in ((16, False), (17, True)):
        (rope,) = config.at_length(length).ropes
        assert rope.scaling is not None and rope.scaling.long is long


def test_a_window_that_hides_nothing_is_none():
    config = read("mistral", {"sliding_window": 8})
    assert config.kinds[0].window == config.at_length(9).kinds[0].window == 8
    assert config.at_length(8).kinds[0].window is None


def test_null_heads_are_derived():
    """As transformers does, whatever the class's default."""
    null = {"head_dim": None, "num_key_value_heads": None}
    config = read("ernie4_5", null)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


# Fields that change nothing ----------------------------------------------------

UNSLOTH = {"model_name": "unsloth/x", "unsloth_version": "2026.4.2", "unsloth_fixed": True}
OLDER: dict[str, Any] = {
    "_flash_attn_2_enabled": True,
    "base_model_name_or_path": "x",
    "hidden_dropout": 0.0,
    "max_sequence_length": 2048,
    "model_max_length": 4096,
    "pad_token": "<pad>",
    "seq_length": 4096,
    "tokenizer_padding_side": "right",
    "use_flash_attn": True,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", [UNSLOTH, OLDER], ids=["unsloth", "older"])
def test_bookkeeping(family, fields):
    assert read(family, fields) == read(family, {})


@pytest.mark.parametrize(
    ("family", "field", "neutral", "other"),
    [
        ("qwen3_moe", "qkv_bias", False, True),
        ("qwen3_moe", "use_qk_norm", True, False),
        ("qwen3_moe", "shared_expert_intermediate_size", 0, 64),
        ("qwen3", "use_qk_norm", True, False),
        ("olmo2", "use_qk_norm", True, False),
        ("gemma3_text", "use_qk_norm", True, False),
        ("qwen2", "qkv_bias", True, False),
        ("llama", "qkv_bias", False, True),
        ("llama", "use_qk_norm", False, True),
        ("llama", "bias", False, True),
        ("llama", "use_sliding_window", False, True),
        ("llama", "embedding_multiplier", 1.0, 2.0),
        ("glm4", "sliding_window", None, 8),
        ("llama", "final_logit_softcapping", None, 30.0),
        ("llama", "num_local_experts", 0, 8),
        ("qwen2", "num_nextn_predict_layers", 0, 1),
        ("granite", "mlp_bias", False, True),
        ("gemma2", "mlp_bias", False, True),
        ("ernie4_5", "use_bias", False, True),
        ("phi3", "lm_head_bias", False, True),
    ],
)
def test_neutral_values(family, field, neutral, other):
    assert read(family, {field: neutral}) == read(family, {})
    with pytest.raises(ConfigError, match=f"{field}={other!r} is not supported; supported: "):
        read(family, {field: other})


@pytest.mark.parametrize("fields", [{"finetuned": True}, {"finetuned": False}])
def test_yarn_of_nous(fields):
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    expected = read("llama", {"rope_scaling": scaling})
    assert read("llama", {"rope_scaling": scaling | fields}) == expected
    assert expected.ropes[0].scaling is not None
    both = {"rope_scaling": scaling | fields, "rope_parameters": {"rope_theta": 1e4, **scaling}}
    assert read("llama", both) == expected
    with pytest.raises(ConfigError, match="finetuned=1 must be true or false"):
        read("llama", {"rope_scaling": scaling | {"finetuned": 1}})


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("family", "fields", "positions"),
    [
        ("qwen2", {"rope_scaling": YARN}, 256),
        ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 80}, 256),
        ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 512}, 512),
        ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e6}}, 256),
        ("glm4", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 64),
        ("mistral", {"rope_scaling": YARN, "sliding_window": 100}, 256),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {"type": "yarn", "factor": 4.0, "rope_theta": 5e5},
                    "sliding_attention": PLAIN,
                }
            },
            256,
        ),
        (
            "gemma3_text",
            {"rope_scaling": YARN, "layer_types": ["sliding_attention", "full_attention"] * 2},
            64,
        ),
    ],
)
def test_yarn_gives_the_positions_that_it_reaches(family, fields, positions):
    config = read(family, fields)
    scaling = next(rope.scaling for rope in config.ropes if rope.scaling is not None)
    assert config.max_position_embeddings == positions
    assert scaling.factor == 4.0
    assert scaling.original_max_position_embeddings == 64 or scaling.rope_type == "linear"
    if family == "mistral":  # a window that hides something beyond the stated positions only
        assert config.kinds[0].window == 100
    for written in (config, config.cut(2)):
        assert config_from_hf(config_to_hf(written)) == written


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("original", [None, 64, 128])
def test_dynamic_is_the_identity_up_to_the_models_positions(spelling, original):
    """transformers' base times (factor * length / longest - (factor - 1)) to a power: 1 at the
    longest."""
    scaling = {spelling: "dynamic", "factor": 4.0}
    scaling |= {} if original is None else {"original_max_position_embeddings": original}
    for name, more in (("rope_scaling", {}), ("rope_parameters", {"rope_theta": 1e4})):
        assert read("llama", {name: scaling | more}) == read("llama", {})


def test_dynamic_beyond_the_models_positions():
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
    with pytest.raises(ConfigError, match="set max_position_embeddings=64 to .*embeddings=32"):
        read("llama", {"rope_scaling": scaling})
    shorter = {"rope_scaling": scaling, "max_position_embeddings": 32}
    assert read("llama", shorter).ropes[0].scaling is None
    with pytest.raises(ConfigError, match="rope_type='dynamic' needs factor"):
        read("llama", {"rope_scaling": {"type": "dynamic"}})
    with pytest.raises(ConfigError, match="unknown fields for rope_type='dynamic': 'alpha'"):
        read("llama", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1e3}})


@pytest.mark.parametrize(
    "spelling",
    [
        {"type": "longrope"},
        {"type": "su"},
        {"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0},
    ],
)
def test_longrope_of_phi_is_written_as_transformers_4_reads_it(spelling):
    """Three fields; with a fourth its versions 4.44 to 4.57 raise an error."""
    fields = longrope()
    del fields["rope_scaling"]["type"]
    fields["rope_scaling"] |= spelling
    config = read("phi3", fields)
    written = config_to_hf(config)
    assert written["rope_scaling"] == {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
    }
    assert written["original_max_position_embeddings"] == 16
    scaling = config_from_hf(written).ropes[0].scaling
    assert scaling is not None and scaling.attention_factor == math.sqrt(1.5)
    assert config_from_hf(written) == config


def test_a_stated_attention_factor_is_kept():
    config = read("phi3", longrope(attention_factor=1.25))
    assert config_to_hf(config)["rope_scaling"]["attention_factor"] == 1.25
    assert config_from_hf(config_to_hf(config)) == config


# Written ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("window", [63, 64, 512])
def test_a_window_that_hides_nothing_still_chooses_the_rope(family, window):
    """Layers with a window have a rotary embedding of their own, which an export must state."""
    ropes = {"rope_theta": 1e6, "rope_local_base_freq": 1e4} if family != "olmo3" else {}
    if family == "olmo3":
        yarn_of_full = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5}
        yarn_of_full["original_max_position_embeddings"] = 32
        plain = {"rope_type": "default", "rope_theta": 5e5}
        ropes = {"rope_parameters": {"full_attention": yarn_of_full, "sliding_attention": plain}}
    types = ["sliding_attention", "full_attention"] * 2
    config = read(family, {"sliding_window": window, "layer_types": types} | ropes)
    assert len(config.ropes) == 2
    written = config_to_hf(config)
    assert written["layer_types"] == types and written["sliding_window"] == window
    assert config_from_hf(written) == config
    assert {kind.window for kind in config.at_length(64).kinds} == {None} | (
        {63} if window == 63 else set()
    )


def test_what_a_family_cannot_state_is_not_written():
    config = read("llama", {})
    windowed = dataclasses.replace(config, layer_kinds=(LayerKind(window=8),))
    with pytest.raises(ConfigError, match="a llama config.json cannot state layer_kinds="):
        config_to_hf(windowed)
    with pytest.raises(ConfigError, match=r"cannot state logit_cap=30\.0, score_cap|score_cap"):
        config_to_hf(dataclasses.replace(config, score_cap=50.0, logit_cap=30.0))
