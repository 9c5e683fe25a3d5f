"""Every TPU kernel in every tuning of the table, for three generations."""

import functools

import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS
from tests.compile.compiled import compile_for
from tests.compile.test_hopper import (
    CACHE,
    DECODE,
    TRAINED,
    WINDOW,
    K,
    N,
    chunk_operands,
    decode_operands,
    shape,
    training,
)

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]


def check(topology, function, *shapes, kernels: int):
    """Mosaic's compiler refuses what does not fit VMEM or cannot be laid out, so a program that
    comes out is a proof."""
    compiled, _ = compile_for(topology, function, *shapes)
    assert str(compiled.as_text()).count('custom_call_target="tpu_custom_call"') == kernels
    return compiled


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_chunk(head_dim, topology):
    q, kv, rows = (
        shape(2, 2048, N, head_dim),
        shape(2, K, 8192, head_dim),
        shape(2, dtype=jnp.int32),
    )
    op = functools.partial(prefill_attention, implementation="tpu")
    check(
        topology,
        lambda q, k, v, offset, lengths: op(q, k, v, q_offset=offset, lengths=lengths),
        q,
        kv,
        kv,
        rows,
        rows,
        kernels=1,
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("page", [128, 256, 1024])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_of_chunks_in_a_pool(head_dim, page, topology):
    """The pool is read as it lies there."""
    op = functools.partial(prefill_attention, implementation="tpu")
    *arrays, options = chunk_operands(head_dim, page)
    q, k, v = (
        arrays[0],
        *(shape(2**19 // page, K, page, head_dim) for _ in "kv"),
    )  # 1 GiB with H = 128, for every chip
    memory = check(
        topology, lambda q, k, v, options: op(q, k, v, **options), q, k, v, options, kernels=1
    ).memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < k.size * 2 / 8


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_of_a_part_of_the_keys(head_dim, window, topology):
    """With log-sum-exps."""
    op = functools.partial(prefill_attention, window=window, return_lse=True, implementation="tpu")
    q, _, _, options = chunk_operands(head_dim, 128)
    options["kv_lengths"] = options["lengths"]
    kv = shape(4096, K, 128, head_dim)
    check(topology, lambda q, k, v, options: op(q, k, v, **options), q, kv, kv, options, kernels=1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("cache_format", CACHE)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_with_log_sum_exps(head_dim, paged, cache_format, topology):
    op = functools.partial(decode_attention, return_lse=True, implementation="tpu")
    operands = decode_operands(head_dim, cache_format, 64, 2048, paged)
    check(
        topology,
        lambda q, k, v, length, options: op(q, k, v, length, **options),
        *operands,
        kernels=1,
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_training(head_dim, packed, topology):
    gradient, shapes = training(head_dim, packed, "tpu")
    compiled = check(topology, gradient, *shapes, kernels=3)
    assert f"{TRAINED},{TRAINED}" not in str(compiled.as_text())


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("head_dim", "cache_format", "slots", "length", "paged"), DECODE)
def test_decode(head_dim, cache_format, slots, length, paged, topology):
    """The kernel reads the cache as it lies there: no copy of it, in any format."""
    op = functools.partial(decode_attention, implementation="tpu")
    operands = decode_operands(head_dim, cache_format, slots, length, paged)
    memory = check(
        topology,
        lambda q, k, v, length, options: op(q, k, v, length, **options),
        *operands,
        kernels=1,
    ).memory_analysis()
    assert (
        memory is not None
        and memory.temp_size_in_bytes < operands[1].size * operands[1].dtype.itemsize / 8
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_training_with_a_window(head_dim, packed, topology):
    gradient, shapes = training(head_dim, packed, "tpu", WINDOW)
    check(topology, gradient, *shapes, kernels=3)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("page", [128, 1024])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_with_a_window(head_dim, page, topology):
    op = functools.partial(prefill_attention, window=WINDOW, implementation="tpu")
    q, _, _, options = chunk_operands(head_dim, page)
    kv = shape(2**19 // page, K, page, head_dim)
    check(topology, lambda q, k, v, options: op(q, k, v, **options), q, kv, kv, options, kernels=1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("cache_format", CACHE)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_with_a_window(head_dim, paged, cache_format, topology):
    op = functools.partial(decode_attention, window=WINDOW, implementation="tpu")
    operands = decode_operands(head_dim, cache_format, 64, 2048, paged)
    check(
        topology,
        lambda q, k, v, length, options: op(q, k, v, length, **options),
        *operands,
        kernels=1,
    )
