"""The cache's size is its formula, and writes land where they should and nowhere else."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.runner.serving_form import served_config
from swiftkv_jax.model.cache import (
    Pool,
    bytes_per_token,
    cache_dtype,
    cache_shapes,
    gather_pages,
    write_pages,
    write_token,
)
from swiftkv_jax.plan.presets import PRESETS
from tests import tiny

FORMATS = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "fp8": jnp.float8_e4m3fn,
    "int8": jnp.int8,
}


LLAMAS = [name for name in PRESETS if name.startswith("llama")]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("lower", "group", "pools"), [(2, 1, 6), (2, 2, 4), (2, 4, 3), (6, 1, 6), (1, 5, 2)]
)
def test_bytes_are_the_formula(format, lower, group, pools):
    config, dtype = config_from_hf(tiny.hf_config()).cut(lower, group), FORMATS[format]
    for swiftkv in (True, False):
        cache = cache_shapes(served_config(config, swiftkv), pages=3, page_size=16, dtype=dtype)
        assert len(cache.k) == len(cache.v) == (pools if swiftkv else 6)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        assert size == 3 * 16 * bytes_per_token(config, dtype, swiftkv=swiftkv)


@pytest.mark.parametrize("name", LLAMAS)
def test_the_papers_savings(name):
    """Bytes of keys and values, without scales: -25 % and -37.5 % by sharing, with FP8 -62.5 % and
    -68.75 %."""
    layers = PRESETS[name].num_layers
    lower = layers // 2 - layers // 2 % 2  # 62 of 126 layers, so that fours divide the rest
    whole = bytes_per_token(PRESETS[name], jnp.bfloat16, swiftkv=False)
    for group, format, saving in (
        (2, "bfloat16", 0.25),
        (4, "bfloat16", 0.375),
        (2, "fp8", 0.625),
        (4, "fp8", 0.6875),
    ):
        found = (
            1
            - bytes_per_token(PRESETS[name].cut(lower, group), FORMATS[format], scales=False)
            / whole
        )
        assert found == pytest.approx(saving, abs=0.007 if layers % 4 else 0)


def test_the_table_of_the_documentation():
    """Its cells are the formula, and the formula is what is allocated (above)."""
    columns = [
        (group, dtype) for group in (None, 2, 4) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    ]
    lines = (Path(__file__).parents[1] / "docs/serving.md").read_text(encoding="utf-8").splitlines()
    for name in LLAMAS:
        config = PRESETS[name]
        (line,) = [
            line for line in lines if line.lower().startswith(f"| {name} | ") and "KiB" in line
        ]
        lower = config.num_layers // 2 - config.num_layers // 2 % 2
        whole = bytes_per_token(config, jnp.bfloat16, swiftkv=False)
        for cell, (group, dtype) in zip(line.split("|")[2:-1], columns, strict=True):
            found = bytes_per_token(config.cut(lower, group or 1), dtype, swiftkv=group is not None)
            saving = "" if found == whole else f" (-{1 - found / whole:.1%})"
            assert cell.strip() == f"{found / 1024:.1f} KiB{saving}"


def test_llama_8b_takes_the_published_bytes():
    config = PRESETS["llama-3.1-8b"].cut(16)
    assert bytes_per_token(config, jnp.bfloat16) == 128 * 1024
    assert bytes_per_token(config.cut(16, 4), jnp.bfloat16) == 80 * 1024
    assert bytes_per_token(config.cut(16, 4), jnp.bfloat16, swiftkv=False) == 128 * 1024
    assert (
        bytes_per_token(config, jnp.int8) == 64 * 1024 + 32 * 2 * 8 * 4
    )  # a float32 scale for each head of each layer


def test_formats():
    assert cache_dtype("auto", jnp.bfloat16) == jnp.bfloat16
    assert (
        cache_dtype("fp8", jnp.bfloat16) == jnp.float8_e4m3fn
        and cache_dtype("int8", jnp.float32) == jnp.int8
    )
    for format, message in (
        ("fp4", "'fp4' is not one of"),
        ("float32", "needs weights of that dtype"),
    ):
        with pytest.raises(UsageError, match=message):
            cache_dtype(format, jnp.bfloat16)  # pyright: ignore[reportArgumentType]


def pool_of(
    format: str, pages: int = 4, heads: int = 2, size: int = 4, head_dim: int = 8, fill: float = 0.0
) -> Pool:
    values = jnp.full((pages, heads, size, head_dim), fill, FORMATS[format])
    return Pool(values, jnp.ones((pages, heads, size)) if format in ("fp8", "int8") else None)


def read(pool: Pool) -> np.ndarray:
    values = np.asarray(pool.values, np.float32)
    return values if pool.scale is None else values * np.asarray(pool.scale)[..., None]


@pytest.mark.parametrize("format", FORMATS)
def test_write_pages(format):
    """Into pages 2 and 0: parts of each; a page that is nowhere is not written."""
    new = np.random.default_rng(0).normal(0, 3, (3, 2, 4, 8)).astype(np.float32)
    written = np.array([[0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    found = read(
        write_pages(
            pool_of(format, fill=5), jnp.asarray(new), jnp.array([2, 0, 99]), jnp.asarray(written)
        )
    )
    expected = np.full((4, 2, 4, 8), 5.0)
    for page, row in ((2, 0), (0, 1)):
        expected[page] = np.where(written[row][None, :, None], new[row], expected[page])
    tolerance = {"float32": 0, "bfloat16": 2**-8, "fp8": 2**-4, "int8": 1 / 127}[format]
    np.testing.assert_allclose(
        found, expected, atol=tolerance * 10 if format == "int8" else 2**-6, rtol=tolerance
    )
    untouched = np.ones((4, 4), bool)
    untouched[2, 1:] = untouched[0, 0] = False
    np.testing.assert_array_equal(found.transpose(0, 2, 1, 3)[untouched], 5)


@pytest.mark.parametrize("format", FORMATS)
def test_write_token(format):
    new = jnp.ones((3, 2, 1, 8)) * jnp.array([1.0, 2.0, 4.0])[:, None, None, None]
    found = read(write_token(pool_of(format), new, jnp.array([3, 99, 0]), jnp.array([1, 2, 3])))
    expected = np.zeros((4, 2, 4, 8))
    expected[3, :, 1], expected[0, :, 3] = 1, 4  # the row of page 99 writes nothing
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_eight_bits_keep_zeros_and_the_largest_values():
    for format in ("fp8", "int8"):
        new = jnp.concatenate(
            [jnp.zeros((1, 2, 1, 8)), jnp.full((1, 2, 1, 8), 1e30), jnp.full((1, 2, 1, 8), -1e-30)],
            axis=0,
        )
        found = read(write_token(pool_of(format), new, jnp.array([0, 1, 2]), jnp.array([0, 0, 0])))
        np.testing.assert_allclose(found[:3, :, 0], np.asarray(new)[:, :, 0], rtol=1e-6)


@pytest.mark.parametrize("format", ["float32", "fp8"])
def test_gather_pages(format):
    pool = write_token(pool_of(format), jnp.ones((1, 2, 1, 8)), jnp.array([3]), jnp.array([2]))
    np.testing.assert_array_equal(read(gather_pages(pool, jnp.array([3, 1]))), read(pool)[[3, 1]])
