"""Fields of published files that change nothing: they are read, and with another value refused."""

import math
from typing import Any

import pytest

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from tests.families.test_configs import BASE, longrope

QWEN3_CODER = {  # Qwen3-Coder-30B-A3B-Instruct and 480B-A35B-Instruct
    "decoder_sparse_step": 1,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "qkv_bias": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "use_qk_norm": True,
    "use_sliding_window": False,
}
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
FAMILIES = (
    "llama mistral qwen2 qwen3 qwen3_moe seed_oss granite smollm3 phi3 glm glm4 ernie4_5 olmo2 "
    "olmo3 gemma2 gemma3_text"
).split()


def read(family: str, fields: dict[str, Any]):
    window = {"sliding_window": None} if family == "mistral" else {}
    return config_from_hf(BASE | {"model_type": family} | window | fields)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", [UNSLOTH, OLDER], ids=["unsloth", "older"])
def test_bookkeeping(family, fields):
    assert read(family, fields) == read(family, {})


def test_qwen3_coder():
    bare = {name: QWEN3_CODER[name] for name in ("num_experts", "num_experts_per_tok")}
    bare |= {"norm_topk_prob": True, "moe_intermediate_size": 64}
    assert read("qwen3_moe", QWEN3_CODER) == read("qwen3_moe", bare)


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


def test_llama_made_of_qwen():
    """Its window is switched off, and no layer would have it."""
    fields = {"use_sliding_window": False, "max_window_layers": 2, "sliding_window": 64}
    assert read("llama", fields) == read("llama", {})


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
