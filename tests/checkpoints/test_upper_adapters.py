"""Adapters of upper layers alone: their factors are those of the merged sum, and all others are
refused."""

from pathlib import Path

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.upper_adapters import read_upper_adapter
from swiftkv_jax.errors import CheckpointError
from tests.checkpoints.hf_models import TIED
from tests.checkpoints.test_adapters import adapter
from tests.families import models

UPPER = "self_attn.o_proj mlp.down_proj".split()


@pytest.mark.parametrize(
    "case, modules",
    [("phi3", [*UPPER, "mlp.gate_up_proj"]), ("glm4", [*UPPER, "self_attn.q_proj"])],
)
def test_factors(case, modules, tmp_path):
    """Of joined matrices, and of heads whose rows are interleaved."""
    base = models.write(case, tmp_path / case)
    plain = skv.load(base, dtype="float32")
    last = plain.config.num_layers - 1
    sizes = {f"model.layers.{last}.{module}": 0.5 for module in modules}
    path = adapter(tmp_path / "adapter", sizes, base)
    merged = skv.load(base, dtype="float32", adapter=path)
    found = read_upper_adapter(plain.config.cut(last), path, max_rank=2, dtype="float32")
    names = {"o": "o", "down": "down"} | (
        {"gate": "gate", "up": "up"} if case == "phi3" else {"q": "q"}
    )
    assert len(found) == 1 and found[0].keys() == names.keys()
    for name, (a, b) in found[0].items():
        stacks = [
            model.llama.lower_qkv if name == "q" else model.llama.lower for model in (merged, plain)
        ]
        new, old = (np.asarray(getattr(stack, name)[last]) for stack in stacks)
        np.testing.assert_allclose((b @ a).reshape(new.shape), new - old, atol=1e-5)


def message(path: Path, *, max_rank: int = 16, dtype="float32") -> str:
    with pytest.raises(CheckpointError) as error:
        read_upper_adapter(skv.load(TIED).config, path, max_rank=max_rank, dtype=dtype)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "module, text",
    [
        ("model.layers.3.mlp.up_proj", "are shared by all adapters (merge this one while the"),
        ("model.layers.4.self_attn.k_proj_swiftkv", "merge this one while the model loads"),
        ("model.layers.5.self_attn.v_proj", "without a place under SwiftKV"),
        ("model.embed_tokens", "not supported (matrices of attention and of dense MLPs are)"),
    ],
)
def test_what_would_change_the_cache_is_refused(module, text, tmp_path):
    found = message(adapter(tmp_path / "adapter", {module: 1, "model.layers.6.mlp.up_proj": 1}))
    assert text in found and module in found and "layers.6" not in found


def test_what_no_place_holds_is_refused(tmp_path):
    large = adapter(tmp_path / "adapter", {"model.layers.6.mlp.up_proj": 1e5}, rank=3)
    assert "rank above --max-lora-rank 2: model.layers.6.mlp.up_proj 3" in message(
        large, max_rank=2
    )
    assert "beyond float16: model.layers.6.mlp.up_proj" in message(large, dtype="float16")
