"""Attention in XLA in the blocks that suit a GPU: their sizes, and the same results. The programs
are traced for a GPU and run on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention, reference
from swiftkv_jax.pallas_kernels.xla_blocks import decode_keys, prefill_blocks
from tests.pallas_kernels.interpreted import under
from tests.pallas_kernels.operands import (
    check,
    chunk_inputs,
    decode_inputs,
    inputs,
    prefill_mask,
    segments,
)
from tests.pallas_kernels.shapes import DECODE, Chunks, Prefill

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


ROWS = Prefill(1, 600, 32, 2, 600, 8)  # two blocks of queries and of keys


def run(op, *operands, **options):
    with under("A100"):
        return jax.jit(functools.partial(op, implementation="xla"))(*operands, **options)


def test_documents_and_their_gradient():
    q, k, v = inputs(ROWS, "float32")
    q /= 4
    ids = jnp.asarray(segments(ROWS, ((310, 20, 200),)))
    mask = jnp.asarray(prefill_mask(ROWS) & np.asarray(ids[:, :, None] == ids[:, None, :]))
    d_out = jnp.asarray(np.random.default_rng(2).normal(size=q.shape), "float32")

    def gradient(q, k, v, implementation):
        def attend(q, k, v):
            return prefill_attention(q, k, v, segment_ids=ids, implementation=implementation)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    out, *found = run(gradient, q, k, v)
    check(out, q, k, v, mask)
    expected = jax.vjp(functools.partial(reference.attention, mask=mask), q, k, v)[1](d_out)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_chunks_in_a_pool():
    """Two blocks of 9 pages, of which the second row sees one."""
    shape = Chunks(2, 128, 32, 2, 2304, 8, (2100, 0), (128, 100), 128, (0, 1))
    operands, options, expected = chunk_inputs(shape, "float32", "float32")
    check(run(prefill_attention, *operands, **options), *expected)


@pytest.mark.parametrize("name", ["idle rows", "several tokens", "page table, most of it unused"])
def test_decode(name):
    operands, options, expected = decode_inputs(DECODE[name], "float32", "float32")
    check(run(decode_attention, *operands, **options), *expected)
