"""One delta on every mesh, and in bfloat16 nearly that of float32."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import calibration
from swiftkv_jax.api import Calibrated
from swiftkv_jax.calibration import Fit, calibrate, moments
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.sharding import batch_sharding, llama_shardings, to_host
from swiftkv_jax.model.stacks import split_layers
from tests import tiny

HF = tiny.hf_config(num_key_value_layers=0, num_attention_heads=8, num_key_value_heads=4)
MODEL = tiny.model_of(HF, tiny.tensors_for(HF))
TOKENS = np.random.default_rng(0).integers(0, HF["vocab_size"], (3, 8, 24))


def fit(group: int, layers: int, mesh_shape: str | None) -> Fit:
    """With a tap and neurons where there are prompt attention layers."""
    config = MODEL.config.cut(
        2,
        group,
        prompt_attention_layers=layers,
        prompt_mlp_neurons=8 if layers else 0,
        boundary_taps=int(layers > 0),
    )
    llama = split_layers(config, MODEL.llama)
    batches = [unpacked_batch(jnp.array(rows)) for rows in TOKENS]
    if mesh_shape is None:
        return calibrate(config, llama, batches, attention=Attention())
    mesh = make_mesh(mesh_shape)
    llama = place(llama, llama_shardings(config, mesh))
    batches = [place(batch, batch_sharding(mesh)) for batch in batches]
    return calibrate(config, llama, batches, attention=Attention(mesh))


def place[Tree](tree: Tree, shardings: Any) -> Tree:
    """`tree` on a mesh, of which other processes may hold a part."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def put(leaf, sharding):
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, tree, shardings)


def numbers(found: Fit) -> dict[str, np.ndarray]:
    """All that was found, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(found.delta)
    return {jax.tree_util.keystr(path): to_host(leaf) for path, leaf in leaves} | {
        "heads": np.array(found.config.shared_kv_heads or ()),
        "layers": np.array([dataclasses.astuple(layer) for layer in found.layers]),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 0), marks=pytest.mark.long),
        (2, 0),
        (2, 2),
        pytest.param((1, 1), marks=pytest.mark.long),
    ],
)
def alone(request) -> tuple[tuple[int, int], Fit]:
    group, layers = request.param
    return (group, layers), fit(group, layers, None)


@pytest.mark.short("alone2-2x2")
@pytest.mark.parametrize(
    "mesh",
    [
        *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("1x1", "4x1", "fsdp=4,data=1")),
        "2x2",
        "fsdp=2,model=2",
    ],
)
def test_every_mesh_gives_one_delta(alone, mesh):
    (group, layers), expected = alone
    found = fit(group, layers, mesh)
    assert found.config == expected.config
    rounding = 2e-4 if layers else 1e-5  # maps pass theirs on
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=rounding * np.abs(b).max()),
        found.delta,
        expected.delta,
    )
    for a, b in zip(found.layers, expected.layers, strict=True):
        np.testing.assert_allclose(dataclasses.astuple(a), dataclasses.astuple(b), rtol=rounding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The teacher as a checkpoint."""
    folder = tmp_path_factory.mktemp("calibrate") / "teacher"
    skv.save_hf(dataclasses.replace(MODEL, swiftkv=None), folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("generated_kv", "group", "batch_size"),
    [("own", 2, {}), pytest.param("boundary", 1, {"batch_size": 5}, marks=pytest.mark.long)],
)
def test_the_public_function_gives_one_student_on_every_mesh(
    folder, generated_kv, group, batch_size, monkeypatch
):
    """With rows in no multiple of the devices. The slopes are those of the first two rows,
    whatever the number of rows of padding."""
    monkeypatch.setattr(calibration, "SLOPE_TOKENS", 40)
    rows = [list(row) for row in TOKENS.reshape(-1, 24)[:7]]
    rows[2] = rows[2][:9]

    def fitted(mesh: str | None) -> Calibrated:
        model = skv.load(folder, mesh=None if mesh is None else make_mesh(mesh))
        return skv.calibrate(
            model, rows, 2, group, generated_kv=generated_kv, max_length=24, **batch_size
        )

    expected = fitted(None)
    for mesh in ("1x1", "4x1", "2x2"):
        found = fitted(mesh)
        assert found.model.config == expected.model.config
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
            found.model.swiftkv,
            expected.model.swiftkv,
        )


@pytest.mark.parametrize("size", [0, -4, 2.5, True, "4"])
def test_a_bad_batch_size_is_one_line(folder, size):
    model = skv.load(folder, mesh=make_mesh("4x1"))
    with pytest.raises(skv.UsageError, match=r"^`batch_size`=.* must be a whole number from 1$"):
        skv.calibrate(model, TOKENS[0], 2, batch_size=size)


def test_moments_of_a_bfloat16_model_are_as_good_as_float32():
    """Products in two parts; in one, the control, they are five hundred times as far off."""
    rng = np.random.default_rng(0)
    weighted = jnp.array(rng.normal(size=(2, 64, 24)), jnp.float32)
    other = jnp.array(rng.normal(size=(2, 64, 24)), jnp.bfloat16)
    exact = np.einsum("btd,bte->de", *(np.asarray(x, np.float64) for x in (weighted, other)))

    def error(found) -> float:
        return np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()

    spec = "BTD,BTE->DE"
    products = jax.jit(moments.products, static_argnums=0)(spec, weighted, other)
    one = jnp.einsum(spec, weighted.astype(jnp.bfloat16), other, preferred_element_type=jnp.float32)
    assert error(products) < 1e-5 < 1e-3 < error(one)
