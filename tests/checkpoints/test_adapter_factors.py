"""Factors of adapters: they are those of the merged sum, and what has no place is refused."""

from pathlib import Path

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.adapter_factors import read_factors
from swiftkv_jax.errors import CheckpointError
from tests.checkpoints.hf_models import TIED
from tests.checkpoints.test_adapters import adapter
from tests.families import models

UPPER = "self_attn.o_proj mlp.down_proj".split()


@pytest.mark.parametrize(
    "case, modules",
    [
        ("phi3", [*UPPER, "mlp.gate_up_proj", "self_attn.qkv_proj"]),
        ("glm4", [*UPPER, "self_attn.q_proj", "self_attn.v_proj"]),
    ],
)
def test_factors(case, modules, tmp_path):
    """Of joined matrices, and of heads whose rows are interleaved."""
    base = models.write(case, tmp_path / case)
    plain = skv.load(base, dtype="float32")
    last = plain.config.num_layers - 1
    sizes = {f"model.layers.{last}.{module}": 0.5 for module in modules}
    path = adapter(tmp_path / "adapter", sizes, base)
    merged = skv.load(base, dtype="float32", adapter=path)
    teacher = plain.config.cut(plain.config.num_layers)
    found = read_factors(teacher, path, max_rank=2, upper_only=False, dtype="float32")
    names = set("o down gate up q k v".split() if case == "phi3" else "o down q v".split())
    assert len(found) == last + 1 and found[last].keys() == names and not any(found[:last])
    for name, (a, b) in found[last].items():
        stacks = [
            model.llama.lower_qkv if name in "qkv" else model.llama.lower
            for model in (merged, plain)
        ]
        new, old = (np.asarray(getattr(stack, name)[last]) for stack in stacks)
        np.testing.assert_allclose((b @ a).reshape(new.shape), new - old, atol=1e-5)


def message(path: Path, **fields) -> str:
    given = {"max_rank": 16, "upper_only": False, "dtype": "float32"} | fields
    with pytest.raises(CheckpointError) as error:
        read_factors(skv.load(TIED).config, path, **given)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "module, upper_only, text",
    [
        ("model.layers.3.mlp.up_proj", True, "`lora_upper_only` refuses that, so that all"),
        ("model.layers.4.self_attn.k_proj_swiftkv", True, "depend: `lora_upper_only` refuses"),
        ("model.layers.5.self_attn.v_proj", False, "without a place under SwiftKV"),
        ("model.embed_tokens", False, "not supported (matrices of attention and of dense MLPs"),
    ],
)
def test_what_has_no_place_is_refused(module, upper_only, text, tmp_path):
    path = adapter(tmp_path / "adapter", {module: 1, "model.layers.6.mlp.up_proj": 1})
    found = message(path, upper_only=upper_only)
    assert text in found and module in found and "layers.6" not in found


def test_what_no_place_holds_is_refused(tmp_path):
    large = adapter(tmp_path / "adapter", {"model.layers.6.mlp.up_proj": 1e5}, rank=3)
    assert "rank above --max-lora-rank 2: model.layers.6.mlp.up_proj 3" in message(
        large, max_rank=2
    )
    assert "beyond float16: model.layers.6.mlp.up_proj" in message(large, dtype="float16")
