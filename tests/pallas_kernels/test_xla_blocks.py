"""Attention in XLA in the blocks that suit a GPU: their sizes, and the same results. The programs
are traced for a GPU and run on the CPU."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import prefill_attention
from swiftkv_jax.pallas_kernels.selfcheck import Case, Row, compare
from swiftkv_jax.pallas_kernels.xla_blocks import decode_keys, prefill_blocks
from tests.pallas_kernels import cases
from tests.pallas_kernels.interpreted import under

BF16 = 2


@pytest.mark.parametrize(
    ("platform", "batch", "queries", "heads", "blocks"),
    [
        ("cpu", 1, 128, 32, (256, 256)),
        ("tpu", 1, 128, 32, (256, 256)),
        ("gpu", 1, 128, 32, (128, 2048)),  # a page of queries of Llama-3.1-8B
        ("gpu", 1, 128, 4, (128, 16384)),  # the same on one of 8 devices
        ("gpu", 2, 128, 32, (128, 1024)),  # two rows that are walked together
        ("gpu", 4, 8192, 32, (512, 512)),  # training
        ("cuda", 1, 70, 1, (70, 119837)),
    ],
)
def test_blocks_of_prefill(platform, batch, queries, heads, blocks):
    assert prefill_blocks(platform, batch, queries, heads) == blocks


@pytest.mark.parametrize(
    ("platform", "rows", "keys"),
    [("cpu", 64, 128), ("tpu", 64, 512), ("gpu", 64, 512), ("gpu", 8, 2048), ("gpu", 1, 16384)],
)
def test_blocks_of_decode(platform, rows, keys):
    assert decode_keys(platform, rows * 8 * 128 * BF16) == keys


CASES = {
    "gradient of documents": Case(  # two blocks of queries and of keys
        "gradient", (Row(documents=(310, 20, 200)),), 600, 32, 2, 600, 8
    ),
    # Two blocks of 9 pages, of which the second row sees one.
    "chunks in a pool": Case(
        "prefill", (Row(2100, 128), Row(0, 100)), 128, 32, 2, 2304, 8, page_size=128
    ),
    **{
        name: cases.CASES[name]
        for name in (
            "decode idle rows",
            "decode several tokens",
            "decode pages, most of them unused",
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_results(name):
    case = dataclasses.replace(CASES[name], dtype="float32")
    with under("A100"):
        assert compare(case, "xla", runs=1).right


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_pool_stays_where_it_is(dtype):
    """XLA reads one block of pages after the other: there is no copy of the pool, nor of a row's
    pages."""
    batch, queries, pool, page, pages, N, K, H = 4, 128, 1024, 128, 64, 4, 2, 64
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
