"""Prefill from a pool of pages: the arguments that are refused, the kernels that take it, and that
the pool is not copied."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import check_prefill, ops, prefill_attention
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS
from swiftkv_jax.pallas_kernels.hopper.prefill import fit as fit_hopper
from swiftkv_jax.pallas_kernels.tpu.schedule import Tuning
from swiftkv_jax.pallas_kernels.tpu.schedule import fit as fit_tpu
from tests.pallas_kernels.interpreted import device_of, under

B, T, N, K, H = 2, 6, 4, 2, 64
X, PAGE, P = 5, 8, 3
DEVICE = {"hopper": "H100", "tpu": "v5e"}


def arguments(**changes) -> dict[str, Any]:
    kv = jnp.zeros((X, K, PAGE, H))
    usual = {"q": jnp.zeros((B, T, N, H)), "k": kv, "v": kv}
    return usual | {"page_table": jnp.zeros((B, P), int)} | changes


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


WRONG = {
    "other rows": ({"page_table": jnp.zeros((3, P), int)}, r"page_table must be B P.*\(3, 3\)"),
    "no pages": ({"page_table": jnp.zeros((B, 0), int)}, r"page_table must be B P.*\(2, 0\)"),
    "fractions": ({"page_table": jnp.zeros((B, P))}, "page_table must be integers"),
    "segments": (
        {"segment_ids": jnp.ones((B, T), int)},
        "segment_ids do not go with a page_table",
    ),
    "an offset beyond the pages": (
        {"q_offset": 25, "lengths": [0, 0]},
        "q_offset must be from 0 to 24, the 24 positions of a row",
    ),
    "queries beyond the pages": (
        {"q_offset": [20, 0], "lengths": [5, 6]},
        "q_offset . lengths must be from 0 to 24.*got 6 to 25",
    ),
    "a sum beyond 8 bits": (
        {
            "q_offset": np.asarray([255, 0], np.uint8),
            "lengths": np.asarray([6, 6], np.uint8),
            "page_table": jnp.zeros((B, 32), int),
        },
        "q_offset . lengths must be from 0 to 256.*got 6 to 261",
    ),
    "without lengths all are real": (
        {"q_offset": [19, 0]},
        "q_offset must be from 0 to 18, the 24 keys less 6 queries",
    ),
    "more queries than positions": (
        {"q": jnp.zeros((B, 25, N, H))},
        "at least as many keys as queries, got 24 keys",
    ),
    "visible keys beyond the pages": (
        {"kv_lengths": [25, 0], "q_offset": 99},
        "kv_lengths must be from 0 to 24, the positions of a row",
    ),
    "scales of another pool": (
        {name: jnp.zeros((X, K, PAGE, H), jnp.int8) for name in "kv"}
        | {f"{name}_scale": jnp.zeros((B, K, 24)) for name in "kv"},
        r"k_scale must be float32 and B K S, got scale.shape=\(2, 2, 24\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        check_prefill(**arguments(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_offset": jnp.asarray([18, 24]), "lengths": jnp.asarray([6, 0])},
        {"q": jnp.zeros((B, 30, N, H)), "lengths": jnp.asarray([24, 1])},
        {"q": jnp.zeros((B, 30, N, H)), "q_offset": 99, "kv_lengths": jnp.asarray([24, 0])},
    ],
)
def test_good_arguments(changes):
    """What the tests above start from; and queries past `lengths` may stand past the last page."""
    assert prefill_attention(**arguments(**changes)).shape[0] == B


@pytest.mark.parametrize("implementation", ["hopper", "tpu"])
def test_pages_as_long_as_the_queries(implementation):
    """A pool with the shape of whole rows is a pool nevertheless."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16)
        for size in ((2, 128, 1, H), (2, 1, 128, H), (2, 1, 128, H))
    )
    table = jnp.asarray([[1], [0]])
    with device_of(implementation):
        found = jax.jit(functools.partial(prefill_attention, implementation=implementation))(
            q, k, v, page_table=table
        )
    expected = prefill_attention(q, k[::-1], v[::-1], implementation="xla")
    # bfloat16 keeps 8 bits.
    np.testing.assert_allclose(np.float32(found), np.float32(expected), atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("options", [{}, {"q_offset": 3, "lengths": jnp.asarray([5, 6])}])
def test_no_gradient(options):
    """Not even where everything fits in one block, which JAX could differentiate."""
    with pytest.raises(
        NotImplementedError, match="scaled or paged keys and values has no gradient"
    ):
        jax.eval_shape(
            jax.grad(lambda q: prefill_attention(**arguments(q=q, **options)).sum()),
            jnp.zeros((B, T, N, H)),
        )


LIMITS = {  # implementation, q, k, table, what the refusal names
    "pages of 96": (
        "hopper",
        like(1, 128, 8, 128),
        like(9, 8, 96, 128),
        like(1, 8),
        "pages of a multiple of 64 positions, got 96",
    ),
    "pages of 64 on a TPU": (
        "tpu",
        like(1, 128, 8, 128),
        like(9, 8, 64, 128),
        like(1, 8),
        "pages of a multiple of 128 positions, got 64",
    ),
    "a table of 2**18 entries": (
        "tpu",
        like(64, 8, 8, 128),
        like(9, 8, 128, 128),
        like(64, 4096),
        "a page_table of 262144 entries",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_of_a_kernel(name):
    """Shapes beyond them go to XLA unless the kernel was asked for by name."""
    implementation, q, k, table, message = LIMITS[name]
    with under(DEVICE[implementation]):
        assert ops.choose_implementation("prefill", None, q, k, page_table=table) == "xla"
        with pytest.raises(
            NotImplementedError, match=f"implementation='{implementation}'.*{message}"
        ):
            ops.choose_implementation("prefill", implementation, q, k, page_table=table)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page", [64, 128, 192, 256, 640])
def test_hopper_takes_pages_of_64(page, head_dim):
    """Blocks of keys longer than a page are shortened, and still cover it, with as many keys in the
    ring."""
    q, k, table = like(20, 128, 32, head_dim), like(9, 8, page, head_dim), like(20, 64)
    with under("H100"):
        assert ops.choose_implementation("prefill", None, q, k, page_table=table) == "hopper"
        tuning = ops.find_tuning("hopper", "prefill", q, k)
    fitted = fit_hopper(tuning, page)
    assert page % fitted.block_kv == 0
    assert fitted.stages * fitted.block_kv == tuning.stages * tuning.block_kv


@pytest.mark.parametrize("pages", [1, 2, 5, 64, 1024])
@pytest.mark.parametrize("page", [128, 256, 384, 640, 1024, 4096])
def test_blocks_on_a_tpu_are_whole_pages_or_parts(page, pages):
    """A step's keys are whole pages, of which each chunk has some, or an even part of one page;
    never more than without pages."""
    tuning = Tuning()
    fitted = fit_tpu(tuning, page, pages)
    assert fitted.block_kv % fitted.block_kv_compute == 0
    assert fitted.block_kv <= min(tuning.block_kv, page * pages)
    assert fitted.block_kv_compute <= tuning.block_kv_compute
    assert fitted.block_kv_compute % page == 0 or page % fitted.block_kv == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_pool_stays_where_it_is(dtype):
    """XLA reads one block of pages after the other: there is no copy of the pool, nor of a row's
    pages."""
    batch, queries, pool, page, pages = 4, 128, 1024, 128, 64
    kv = like(pool, K, page, H, dtype=jnp.dtype(dtype))
    scale = like(pool, K, page, dtype=jnp.float32)
    options: dict[str, Any] = {"page_table": like(batch, pages, dtype=jnp.int32)} | {
        name: like(batch, dtype=jnp.int32) for name in ("q_offset", "lengths")
    }
    if dtype == "int8":
        options |= {"k_scale": scale, "v_scale": scale}
    op = functools.partial(prefill_attention, implementation="xla")
    compiled = jax.jit(op).lower(like(batch, queries, N, H), kv, kv, **options).compile()
    row = K * page * pages * H  # elements
    sizes = [
        math.prod(map(int, shape.split(",")))
        for shape, operation in re.findall(
            r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", str(compiled.as_text())
        )
        if operation not in ("parameter", "get-tuple-element")
    ]
    assert sizes
    assert max(sizes) < row
    memory = compiled.memory_analysis()
    assert (
        memory is not None
        and memory.temp_size_in_bytes < pool * K * page * H * kv.dtype.itemsize / 2
    )
