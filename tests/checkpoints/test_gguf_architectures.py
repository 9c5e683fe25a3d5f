"""GGUF files of every architecture: the tiny models of the families' tests, stored as llama.cpp's
converter stores them, are the models of their Hugging Face directories."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

import swiftkv_jax as skv
from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.families import ARCHITECTURES
from swiftkv_jax.checkpoints.gguf.config import hf_fields
from swiftkv_jax.checkpoints.gguf.file import read_gguf
from tests.checkpoints import gguf_files
from tests.checkpoints.gguf_files import NONE
from tests.checkpoints.hf_models import assert_same
from tests.families import models
from tests.families.cases import CASES

HEADS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
POST = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA = POST | {"pre_feedforward_layernorm": "ffn_norm"}
FUSED = {"mlp.gate_up_proj": "ffn_up", "self_attn.qkv_proj": "attn_qkv"}
GLM = FUSED | {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
LONG = CASES["phi4-mini"]["rope_scaling"]


class File(NamedTuple):
    """How llama.cpp's converter stores a case of the families."""

    architecture: str
    names: Mapping[str, str] = NONE
    """Names within a layer."""
    options: Mapping[str, Any] = NONE
    """Of the conversion."""
    keys: Mapping[str, Any] = NONE
    """Beyond the common ones."""
    more: Mapping[str, np.ndarray] = NONE
    """Tensors beyond the model's."""
    fields: Mapping[str, Any] = NONE
    """Of the config.json that GGUF cannot state, as llama.cpp has them."""


SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.5}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40}
WINDOW = {"attention.sliding_window": 6}
ORIGINAL = "rope.scaling.original_context_length"
FILES = {
    "qwen2": File("qwen2"),
    "qwen3": File("qwen3", HEADS),
    "qwen3-yarn": File("qwen3", HEADS, keys=YARN),
    "qwen3-moe": File("qwen3moe", HEADS | {"mlp.gate": "ffn_gate_inp"}, keys=EXPERTS),
    "mistral-window": File(
        "llama", options={"permute": True}, keys={"attention.sliding_window": 8}
    ),
    "seed-oss": File("seed_oss", {"post_attention_layernorm": "post_attention_norm"}),
    "granite": File("granite", options={"permute": True}, keys=SCALES | {"logit_scale": 0.4}),
    "smollm3": File(
        "smollm3", options={"permute": True}, fields={"no_rope_layers": [1, 1, 1, 0, 1, 1]}
    ),
    "phi3": File("phi3", FUSED, keys={ORIGINAL: 256, "attention.sliding_window": 12}),
    "phi4-mini": File(
        "phi3",
        FUSED,
        keys={
            ORIGINAL: 16,
            "rope.scaling.attn_factor": np.sqrt(2.0).item(),
            "attention.sliding_window": 262144,
            "rope.dimension_count": 12,  # as the converter rounds: int(fraction * width) // heads
        },
        more={
            "rope_factors_long.weight": np.array(LONG["long_factor"]),
            "rope_factors_short.weight": np.array(LONG["short_factor"]),
        },
    ),
    "glm4": File("glm4", GLM, keys={"rope.dimension_count": 8}),
    "ernie4.5": File("ernie4_5"),
    "olmo2": File("olmo2", HEADS | POST),
    "olmo3": File(
        "olmo2",
        HEADS | POST,
        keys={
            **YARN,
            **WINDOW,
            "rope.freq_base": 1e4,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "attention.sliding_window_pattern": [True, True, True, False] * 2,
        },
    ),
    "gemma2": File(
        "gemma2",
        GEMMA,
        {"norm_offset": 1.0},
        WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        fields={"query_pre_attn_scalar": 16},
    ),
    "gemma3": File(
        "gemma3",
        HEADS | GEMMA,
        {"norm_offset": 1.0},
        {
            **WINDOW,
            "rope.freq_base": 1e3,
            "rope.freq_base_swa": 1e2,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window_pattern": 3,
        },
        fields={"query_pre_attn_scalar": 16},
    ),
}


def write(case, path, keys=NONE, more=NONE):
    """A GGUF file of the case; `keys` and the tensors `more` go over its own."""
    file = FILES[case]
    hf = {"rope_theta": 1e4, **CASES[case]}
    stored = gguf_files.converted(hf, models.tensors(case), names=file.names, **file.options)
    keys = {**gguf_files.common(hf), **file.keys, **keys}
    return gguf_files.write(path, file.architecture, keys, {**stored, **file.more, **more})


def as_read(case) -> dict[str, np.ndarray]:
    """The tensors after the rounding of what the converter adds to norms."""
    offset = np.float32(FILES[case].options.get("norm_offset", 0.0))
    return {
        name: (values + offset) - offset if "norm" in name else values
        for name, values in models.tensors(case).items()
    }


@pytest.mark.parametrize("case", FILES)
def test_an_architecture_is_its_family(case, tmp_path):
    ours = skv.load(write(case, tmp_path / "a.gguf"), dtype="float32")
    theirs = models.write(case, tmp_path / "hf", **FILES[case].fields)
    save_file(as_read(case), theirs / "model.safetensors", {"format": "pt"})
    assert_same(ours, skv.load(theirs, dtype="float32"))
    skv.save_hf(ours, tmp_path / "again")
    assert_same(skv.load(tmp_path / "again", dtype="float32"), ours)


def test_every_architecture_has_a_case():
    assert {file.architecture for file in FILES.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "architecture, layers, scalar",
    [("gemma2", 46, 12), ("gemma2", 6, 16), ("gemma3", 62, 12), ("gemma3", 6, 16)],
)
def test_the_scale_of_gemmas_scores(architecture, layers, scalar, tmp_path):
    """That of the sizes with 27 billion parameters is of the width for each head."""
    keys = gguf_files.common(CASES["gemma2"]) | {"block_count": layers}
    keys |= {"attention.sliding_window": 6}
    embed = {"token_embd.weight": np.zeros((96, 48))}
    path = gguf_files.write(tmp_path / "a.gguf", architecture, keys, embed)
    with pytest.raises(skv.CheckpointError, match="missing: blk.0.attn_norm.weight"):
        open_any(path)
    assert hf_fields(read_gguf(path))["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    "case, keys, text",
    [
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned=False"),
        ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "glm4.rope.dimension_sections"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "has 1 entries for 8 layers"),
        ("qwen3-moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func=2 is not supported"),
        ("qwen3-moe", {"expert_shared_count": 1}, "qwen3moe.expert_shared_count=1"),
        ("qwen3-yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
        ("qwen3-yarn", {"rope.scaling.yarn_log_multiplier": 0.1}, "unknown metadata qwen3.rope"),
        ("qwen2", {"rope.dimension_count": 6}, "partial_rotary_factor=0.5"),
    ],
)
def test_what_is_refused(case, keys, text, tmp_path):
    with pytest.raises(ConfigError) as error:
        open_any(write(case, tmp_path / "a.gguf", keys))
    assert text in str(error.value) and "\n" not in str(error.value)
