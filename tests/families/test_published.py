"""Published `config.json` files, in `fixtures/published`, and what those of a family leave out or
spell in two ways: each is read as transformers reads it."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from swiftkv_jax import Rope
from swiftkv_jax.checkpoints.families import FAMILIES
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from swiftkv_jax.model.rope_config import RopeScaling

from .cases import FIXTURES
from .test_configs import BASE, longrope, read

# File -> options of its `Config`. The files are as projects that load the published models state
# their fields.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm-4-9b-0414": {
        "ropes": (Rope(1e4, fraction=0.5),),
        "rotated_dims": 64,
        "qkv_bias": True,
        "o_bias": False,
        "norm_order": "both",
    },
    "ernie-4.5-0.3b": {
        "ropes": (Rope(5e5),),
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "head_dim": 128,
    },
    "granite-4.0-micro": {
        "ropes": (Rope(1e7),),
        "mlp_dim": 8192,
        "num_experts": 0,
        "head_dim": 64,
        "embed_scale": 12.0,
        "query_scale": 1 / 64,
        "logit_divisor": 10.0,
    },
    "gemma-3-4b-it": {
        "ropes": (Rope(1e4), Rope(1e6, RopeScaling("linear", 8.0))),
        "family": "gemma3_text",
        "vocab_size": 262208,
        "tie_word_embeddings": True,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "query_scale": 1 / 16,
    },
    # By itself it is a model in the shape of Llama.
    "mistral-small-3.1": {
        "ropes": (Rope(1e9),),
        "window": None,
        "family": "llama",
        "tie_word_embeddings": False,
        "num_heads": 32,
        "head_dim": 128,
        "embed_dim": 5120,
    },
}


def fields_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES.parent / "published" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name):
    config = config_from_hf(fields_of(name))
    assert {option: getattr(config, option) for option in PUBLISHED[name]} == PUBLISHED[name]
    assert config_from_hf(config_to_hf(config)) == config


def test_sizes_of_published_models():
    """Other sizes of two of them: GLM-4-32B scales its positions, Gemma 3 27B its scores."""
    larger = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "attention_bias": False}
    config = config_from_hf(fields_of("glm-4-9b-0414") | larger)
    scaling = config.ropes[0].scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("yarn", 4.0)
    assert config_from_hf(config_to_hf(config)) == config
    hf = fields_of("gemma-3-4b-it")
    sizes = {"num_hidden_layers": 62, "head_dim": 128, "query_pre_attn_scalar": 168}
    config = config_from_hf(hf | {"text_config": hf["text_config"] | sizes})
    assert (config.num_layers, config.head_dim, config.query_scale) == (62, 128, 168**-0.5)


REQUIRED = {
    "vocab_size": 100,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
# Fields without which others, or all of a class's defaults, say nothing.
USED: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    # Which has Mamba layers and experts by default.
    "granitemoehybrid": {"layer_types": ["attention"] * 36, "num_local_experts": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_are_the_defaults_of_the_class(family):
    for used in {}, USED.get(family, {}):
        if family == "granitemoehybrid" and not used:
            continue
        given = REQUIRED | used
        stated = AutoConfig.for_model(family, **given).to_dict()
        assert config_from_hf(given | {"model_type": family}) == config_from_hf(stated)


def test_null_is_no_window():
    given = REQUIRED | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None}
    assert config_from_hf(given).window is None


@pytest.mark.parametrize("position", [None, "nope"])
def test_granite_4_without_rotation(position):
    config = config_from_hf(fields_of("granite-4.0-micro") | {"position_embedding_type": position})
    assert config.ropes == () and config_from_hf(config_to_hf(config)) == config


# Spellings --------------------------------------------------------------------


def test_names_of_granites_layers():
    """transformers 5 writes `full_attention`, and reads `layers_block_type` for the same."""
    fields = fields_of("granite-4.0-micro")
    config = config_from_hf(fields)
    assert config_from_hf(fields | {"layer_types": ["full_attention"] * 40}) == config
    fields["layers_block_type"] = fields.pop("layer_types")
    assert config_from_hf(fields) == config


def test_ernie_as_transformers_writes_it():
    """Without what is its class's default."""
    fields = fields_of("ernie-4.5-0.3b")
    config = config_from_hf(fields)
    for name in ("tie_word_embeddings", "use_bias", "rope_theta", "head_dim"):
        del fields[name]
    assert config_from_hf(fields) == config


@pytest.mark.parametrize("layers", [0, 28, None])
def test_smollm3s_window_that_its_class_does_not_read(layers):
    fields = {"use_sliding_window": False}
    assert read("smollm3", fields | {"max_window_layers": layers}) == read("smollm3", fields)


def test_both_names_of_gemmas_window():
    fields = {"max_position_embeddings": 8192}
    both = {"sliding_window": 4096, "sliding_window_size": 4096}
    assert read("gemma2", fields | both) == read("gemma2", fields)
    assert read("gemma2", fields | {"sliding_window_size": 4096}) == read("gemma2", fields)


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


def test_qwen3_coder():
    bare = {name: QWEN3_CODER[name] for name in ("num_experts", "num_experts_per_tok")}
    bare |= {"norm_topk_prob": True, "moe_intermediate_size": 64}
    assert read("qwen3_moe", QWEN3_CODER) == read("qwen3_moe", bare)


def test_experts_as_transformers_5_writes_them():
    """`num_local_experts` for `num_experts`."""
    fields = {"num_experts": None, "num_local_experts": 8}
    assert read("qwen3_moe", fields) == read("qwen3_moe", {})


def test_llama_made_of_qwen():
    """Its window is switched off, and no layer would have it."""
    fields = {"use_sliding_window": False, "max_window_layers": 2, "sliding_window": 64}
    assert read("llama", fields) == read("llama", {})
