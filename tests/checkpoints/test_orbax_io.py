"""Our Orbax directory: exact, verified leaf by leaf, and never half-written. And the digest it
rests on."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from swiftkv_jax import CheckpointError, UsageError, add_swiftkv, checkpoints, load, save
from swiftkv_jax.checkpoints import orbax_io
from swiftkv_jax.checkpoints.digest import digest
from swiftkv_jax.checkpoints.source import from_model
from swiftkv_jax.model.mesh import make_mesh
from tests.checkpoints.hf_models import TIED, assert_same, biased_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "model"
    save(load(TIED), path)
    return path


# Round trips ------------------------------------------------------------------


def test_layout(saved):
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "manifest.json", "weights"]
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], len(manifest["leaves"])) == (
        "swiftkv-jax",
        1,
        24,
    )
    q = manifest["leaves"]["swiftkv.q"]
    assert q["shape"] == [4, 4, 16, 64] and q["dtype"] == "float32"
    delta = load(TIED).swiftkv
    assert delta is not None and q["digest"] == f"{digest(delta.q):08x}"
    assert {p.name for p in (saved / "weights").iterdir()} == manifest["leaves"].keys()


@pytest.mark.short("mesh1")
@pytest.mark.parametrize("mesh", [None, (2, 2), (1, 4)])
def test_load_is_exact_on_any_mesh(saved, mesh: tuple[int, int] | None):
    on = None if mesh is None else make_mesh(mesh)
    model = load(saved, mesh=on)
    assert_same(model, load(TIED))
    assert model.eos_token_ids == (1,)
    if mesh is not None:
        assert model.llama.embed.sharding.mesh == on
        assert model.llama.embed.addressable_shards[0].data.shape == (320 // mesh[1], 64)


def test_dtype_is_cast_after_the_check(saved):
    model = load(saved, dtype="bfloat16")
    assert model.dtype == jnp.bfloat16
    np.testing.assert_array_equal(model.llama.embed, load(TIED).llama.embed.astype(jnp.bfloat16))


def test_a_model_saved_from_a_mesh_has_the_same_digests(tmp_path, saved):
    save(load(TIED, mesh=make_mesh((2, 2))), tmp_path / "sharded")
    assert (tmp_path / "sharded/manifest.json").read_text() == (saved / "manifest.json").read_text()


@pytest.mark.long
def test_empty_stacks_and_half_precision(tmp_path):
    biased = biased_model(jnp.float16)
    save(biased, tmp_path / "biased")
    assert_same(load(tmp_path / "biased", dtype=jnp.float16), biased)
    plain = dataclasses.replace(add_swiftkv(biased, 6), swiftkv=None)
    save(plain, tmp_path / "plain")
    assert not (tmp_path / "plain/weights/upper.gate").exists()
    assert_same(load(tmp_path / "plain", dtype=jnp.float16), plain)


def test_a_student_without_the_teacher(tmp_path):
    model = biased_model()
    slim = dataclasses.replace(model, llama=dataclasses.replace(model.llama, upper_qkv=None))
    save(slim, tmp_path / "slim")
    assert_same(load(tmp_path / "slim"), slim)
    with pytest.raises(
        CheckpointError, match="were dropped: a checkpoint with them is needed to split its layers"
    ):
        checkpoints.load(tmp_path / "slim", config=model.config.cut(1))


@pytest.mark.long
def test_a_cut_without_a_delta(tmp_path):
    cut = dataclasses.replace(biased_model(), swiftkv=None)
    save(cut, tmp_path / "cut")
    assert_same(load(tmp_path / "cut"), cut)


@pytest.mark.short("cut0")
@pytest.mark.parametrize("cut", [(2, 3), (6, 2), (8, 1)])
def test_layers_can_be_split_elsewhere_while_loading(saved, cut):
    whole = load(TIED)
    config = whole.config.cut(*cut)
    model = checkpoints.load(saved, config=config, mesh=make_mesh((1, 2)))
    assert model.config == config and model.swiftkv is None
    both = checkpoints.load(TIED, config=config)
    assert_same(model, both)


# Writing ----------------------------------------------------------------------


def test_an_existing_target_is_left_alone(saved):
    before = (saved / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match=f"{saved}: exists already"):
        save(biased_model(), saved)
    assert (saved / "manifest.json").read_bytes() == before


def test_failing_half_way_leaves_nothing_behind(tmp_path):
    seen = []

    def stop(leaf):
        seen.append(leaf.name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        orbax_io.write_orbax(from_model(biased_model()), tmp_path / "out", progress=stop)
    assert len(seen) == 3 and list(tmp_path.iterdir()) == []


# Digest -----------------------------------------------------------------------


def plain_digest(array: np.ndarray) -> int:
    """The definition, one element at a time."""
    total, unsigned = 0, {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    for position, bits in enumerate(array.reshape(-1).view(unsigned).tolist()):
        x = position
        for multiplier in (0x7FEB352D, 0x846CA68B):
            x = ((x ^ (x >> 16)) * multiplier) % 2**32
        total += bits * ((x ^ (x >> 16)) | 1)
    return total % 2**32


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_]
)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (4, 0), (8, 4, 3, 2)])
def test_digest_is_its_definition(shape, dtype):
    array = (100 * jax.random.normal(jax.random.key(0), shape)).astype(dtype)
    assert digest(array) == plain_digest(np.asarray(array))


def test_digest_in_blocks_on_devices(monkeypatch):
    """Blocks of 3 rows, and 2 left over; and parts of a mesh."""
    array = jax.random.normal(jax.random.key(0), (11, 3, 4))
    sharded = jax.device_put(array, NamedSharding(make_mesh((2, 4)), P(None, None, "model")))
    monkeypatch.setattr(sys.modules[digest.__module__], "_BLOCK_ELEMENTS", 30)
    assert digest(array) == digest(sharded) == plain_digest(np.asarray(array))


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P("model"), P("model", "data"), P(None, ("data", "model"))]
)
def test_digest_does_not_depend_on_sharding(spec):
    array = jax.random.normal(jax.random.key(0), (8, 16, 3))
    sharded = jax.device_put(array, NamedSharding(make_mesh((2, 4)), spec))
    assert digest(sharded) == digest(array) == plain_digest(np.asarray(array))


def test_digest_sees_every_flipped_bit_and_exchanged_rows():
    array = np.asarray(jax.random.normal(jax.random.key(0), (4, 8)))
    whole = digest(jnp.asarray(array))
    for bit in range(32):
        bits = array.view(np.uint32).copy()
        bits[2, 5] ^= np.uint32(1 << bit)
        assert digest(jnp.asarray(bits)) != whole
    assert digest(jnp.asarray(array[[1, 0, 2, 3]])) != whole
