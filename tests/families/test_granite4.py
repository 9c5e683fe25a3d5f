"""Granite 4.0 without Mamba layers: what its `config.json` says, and what is refused."""

from typing import Any

import pytest

import swiftkv_jax as skv
from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from swiftkv_jax.convert import main as convert

from . import models
from .cases import CASES
from .running import logits
from .test_students import student

# As projects that load the published files state their fields.
MICRO: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 8192,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 10,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 80,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 40,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "output_router_logits": False,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_published_micro():
    config = config_from_hf(MICRO)
    assert (config.mlp_dim, config.num_experts, config.head_dim) == (8192, 0, 64)
    assert (config.embed_scale, config.query_scale, config.logit_divisor) == (12.0, 1 / 64, 10.0)
    assert config.ropes[0].theta == 1e7
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("position", [None, "nope"])
def test_no_rotation(position):
    config = config_from_hf(MICRO | {"position_embedding_type": position})
    assert config.ropes == () and config_from_hf(config_to_hf(config)) == config


def test_names_of_layers():
    """transformers 5 writes `full_attention`, and reads `layers_block_type` for the same."""
    config = config_from_hf(MICRO)
    assert config_from_hf(MICRO | {"layer_types": ["full_attention"] * 40}) == config
    fields = {name: value for name, value in MICRO.items() if name != "layer_types"}
    assert config_from_hf(fields | {"layers_block_type": ["attention"] * 40}) == config


REFUSED = {
    "a Mamba layer": (
        {"layer_types": ["mamba"] + ["attention"] * 39},
        "the model is a hybrid with Mamba layers, which are not supported",
    ),
    "the class's layers": ({"layer_types": None}, "a hybrid with Mamba layers"),
    "a layer of no type": ({"layer_types": [["attention"]] * 40}, "a hybrid with Mamba layers"),
    "experts": (
        {"num_local_experts": 62},
        "num_local_experts=62: a mixture of experts beside a shared MLP is not supported",
    ),
    "the class's experts": ({"num_local_experts": None}, "num_local_experts=8: a mixture"),
    "a layer less": ({"num_hidden_layers": 41}, "must have a type for each of the 41 layers"),
    "other positions": ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    "another norm": ({"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
    "no width": ({"shared_intermediate_size": 0}, "shared_intermediate_size=0 must be from 1"),
    "two lists": (
        {"layers_block_type": ["mamba"] * 40},
        "layer_types=.* and layers_block_type=.* say the same and differ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        config_from_hf(MICRO | fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("case", ["granite4", "granite4-unrotated"])
def test_a_student_there_and_back(case, load, tmp_path, capsys):
    """In groups too, where no layer rotates."""
    model = student(load(case), 2)
    skv.save_hf(model, tmp_path / "full")
    again = skv.load(tmp_path / "full", dtype="float32")
    assert again.config == model.config
    assert abs(logits(again) - logits(model)).max() == 0
    assert convert(["inspect", str(models.write(case, tmp_path / "model"))]) == 0
    rope = "no rope" if CASES[case]["position_embedding_type"] is None else "rope, theta 10000"
    assert rope in capsys.readouterr().out
