"""Models and Hugging Face directories that the tests of checkpoints write, compare and damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swiftkv_jax import CheckpointError, Config, Model, load
from swiftkv_jax.model import transformer
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.layers import unembed
from swiftkv_jax.model.params import llama_shapes, swiftkv_shapes

FIXTURES = Path(__file__).parents[1] / "fixtures"
UNTIED, TIED = FIXTURES / "llama-init-4of8-group1", FIXTURES / "llama-trained-4of8-group2-tied"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BIASED = Config(
    vocab_size=48,
    embed_dim=32,
    mlp_dim=24,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    o_bias=True,
    tie_word_embeddings=True,
)


def biased_model(dtype=jnp.float32) -> Model:
    """Every tensor different from every other, so that a swapped name shows."""
    config, numbers = BIASED.cut(2, 2), np.random.default_rng(0)
    shapes = llama_shapes(config), swiftkv_shapes(config)
    llama, delta = jax.tree.map(
        lambda leaf: jnp.asarray(numbers.standard_normal(leaf.shape), dtype), shapes
    )
    return Model(llama, delta, config=config)


def assert_same(a: Model, b: Model) -> None:
    assert a.config == b.config
    assert jax.tree.structure((a.llama, a.swiftkv)) == jax.tree.structure((b.llama, b.swiftkv))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_same_files(a: Path, b: Path) -> None:
    """Bit for bit, in any sharding."""
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if tensor != theirs[name]]


def message(path: Any, kind: Any = CheckpointError, read: Callable[[Any], Any] = load) -> str:
    """Of the error that reading a path raises, without the path that it begins with. One line."""
    with pytest.raises(kind) as error:
        read(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text
    return text.removeprefix(str(path)).removeprefix(": ")


def student_logits(model: Model) -> jax.Array:
    assert model.swiftkv is not None
    tokens = jax.random.randint(jax.random.key(7), (2, 11), 0, model.config.vocab_size)
    hidden = transformer.student(model.config, model.llama, model.swiftkv, unpacked_batch(tokens))
    return unembed(model.config, model.llama, hidden)


def edit(source: Path, target: Path, change=lambda tensors: None, **config) -> Path:
    """A copy with `change` applied to its tensors and `config` to its config.json."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    fields = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(fields))
    return target


def tensors(path: Path) -> dict[str, tuple]:
    """Name -> dtype, shape and bytes of every tensor in a directory."""
    found = {
        name: t
        for file in sorted(path.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }
    return {name: (t.dtype.name, t.shape, t.tobytes()) for name, t in found.items()}
