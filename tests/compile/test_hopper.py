"""Every Hopper kernel in every tuning of the table, down to machine code for an H200.

A kernel that wants more shared memory than the 227 KiB of a block does not lower at all.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import candidates, inputs, shapes
from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS
from swiftkv_jax.pallas_kernels.hopper.prefill import Tuning
from tests.compile.compiled import compile_for

N, K = 32, 8  # heads of Llama-3.1-8B
TRAINED = 8192
CACHE = {"bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn, "int8": jnp.int8}


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


SPILLED = 48  # bytes of each thread, at head dim 256 with documents


def check(function, *shapes, kernels: int, spilled: int = 0):
    compiled, found = compile_for("h200:1", function, *shapes)
    print(*found, sep="\n")
    assert len(found) == kernels
    for kernel in found:
        assert kernel.target == "sm_90a"
        assert kernel.spilled <= spilled
        if "combine" not in kernel.name:  # that one multiplies nothing, and copies plain rows
            assert kernel.wgmma > 0
            assert kernel.tma > 0
        assert not kernel.warned
    return compiled


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_chunk(head_dim):
    q, kv, rows = (
        shape(2, 2048, N, head_dim),
        shape(2, K, 8192, head_dim),
        shape(2, dtype=jnp.int32),
    )
    op = functools.partial(prefill_attention, implementation="hopper")
    check(
        lambda q, k, v, offset, lengths: op(q, k, v, q_offset=offset, lengths=lengths),
        q,
        kv,
        kv,
        rows,
        rows,
        kernels=1,
    )


def chunk_operands(head_dim, page):
    """Shapes of (q, k, v, options): chunks of 128 queries in a pool of 4096 pages, 64 a row."""
    rows, kv = shape(20, dtype=jnp.int32), shape(4096, K, page, head_dim)
    return (
        shape(20, 128, N, head_dim),
        kv,
        kv,
        {"q_offset": rows, "lengths": rows, "page_table": shape(20, 64, dtype=jnp.int32)},
    )


@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_of_chunks_in_a_pool(head_dim, page):
    """The pool is read as it lies there."""
    op = functools.partial(prefill_attention, implementation="hopper")
    operands = chunk_operands(head_dim, page)
    memory = check(
        lambda q, k, v, options: op(q, k, v, **options), *operands, kernels=1
    ).memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < operands[1].size * 2 / 8


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_of_a_part_of_the_keys(head_dim, window):
    """With log-sum-exps."""
    op = functools.partial(
        prefill_attention, window=window, return_lse=True, implementation="hopper"
    )
    q, k, v, options = chunk_operands(head_dim, 128)
    options["kv_lengths"] = options["lengths"]
    check(lambda q, k, v, options: op(q, k, v, **options), q, k, v, options, kernels=1)


def training(head_dim, packed, implementation, window=None):
    """(gradient, shapes of its operands) of the attention of one row of `TRAINED` tokens."""

    def gradient(q, k, v, ids):
        op = functools.partial(
            prefill_attention,
            segment_ids=ids if packed else None,
            window=window,
            implementation=implementation,
        )
        return jax.grad(
            lambda *operands: op(*operands).astype(jnp.float32).sum(), argnums=(0, 1, 2)
        )(q, k, v)

    kv = shape(1, K, TRAINED, head_dim)
    return gradient, (shape(1, TRAINED, N, head_dim), kv, kv, shape(1, TRAINED, dtype=jnp.int32))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_training(head_dim, packed):
    """Forward and backward, 8k tokens: three kernels, and nothing of the size of T x S around
    them. With documents and head dim 256 registers are spilled once a tile (`test_sass`)."""
    gradient, (q, *others) = training(head_dim, packed, "hopper")
    compiled = check(
        gradient, q, *others, kernels=3, spilled=SPILLED if packed and head_dim == 256 else 0
    )
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 8 * q.size * 2
    assert f"{TRAINED},{TRAINED}" not in str(compiled.as_text())


@pytest.mark.parametrize(("persistent", "multicast"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_in_tunings_beyond_the_table(head_dim, persistent, multicast):
    """With documents and log-sum-exps, which take the most registers and shared memory; at head dim
    256 without the latter, and persistent blocks do not fit there."""
    wide = head_dim == 256
    tuning = Tuning(
        block_kv=64 if wide else 128,
        ping_pong=not wide,
        persistent=persistent,
        multicast=multicast,
    )

    def forward(q, k, v, ids):
        op = functools.partial(
            prefill_attention, segment_ids=ids, implementation="hopper", tuning=tuning
        )
        return op(q, k, v) if wide else jax.vjp(op, q, k, v)[0]

    kv = shape(1, K, TRAINED, head_dim)
    ids = shape(1, TRAINED, dtype=jnp.int32)
    spilled = SPILLED if wide else 0
    refused = pytest.raises(NotImplementedError, match="bytes of shared memory")
    with refused if wide and persistent else contextlib.nullcontext():
        check(forward, shape(1, TRAINED, N, head_dim), kv, kv, ids, kernels=1, spilled=spilled)


DECODE = [
    (head_dim, cache_format, slots, length, paged)
    for head_dim in HEAD_DIMS
    for cache_format in CACHE
    for slots, length, paged in [(64, 2048, False), (1, 32768, False), (64, 2048, True)]
    if head_dim == 128 or slots == 64 and not paged
]


def decode_operands(head_dim, cache_format, slots, length, paged, page=256):
    """Shapes of (q, k, v, lengths, options)."""
    pages, positions = (slots * length // page, page) if paged else (slots, length)
    kv = shape(pages, K, positions, head_dim, dtype=CACHE[cache_format])
    scale = shape(pages, K, positions, dtype=jnp.float32)
    options = {} if cache_format == "bfloat16" else {"k_scale": scale, "v_scale": scale}
    if paged:
        options["page_table"] = shape(slots, length // page, dtype=jnp.int32)
    return shape(slots, 1, N, head_dim), kv, kv, shape(slots, dtype=jnp.int32), options


@pytest.mark.parametrize(("head_dim", "cache_format", "slots", "length", "paged"), DECODE)
def test_decode(head_dim, cache_format, slots, length, paged):
    """The kernel reads the cache as it lies there: no copy of it, in any format."""
    op = functools.partial(decode_attention, implementation="hopper")
    operands = decode_operands(head_dim, cache_format, slots, length, paged)
    memory = check(
        lambda q, k, v, length, options: op(q, k, v, length, **options), *operands, kernels=2
    ).memory_analysis()
    assert (
        memory is not None
        and memory.temp_size_in_bytes < operands[1].size * operands[1].dtype.itemsize / 8
    )


@pytest.mark.parametrize("cache_format", CACHE)
def test_decode_in_long_tables(cache_format):
    """Results of splits of rows take memory by their number, not by the room of the table."""
    op = functools.partial(decode_attention, implementation="hopper")
    q, k, v, length, options = decode_operands(128, cache_format, 64, 2048, True)
    options["page_table"] = shape(64, 131_072 // 256, dtype=jnp.int32)
    memory = check(
        lambda q, k, v, length, options: op(q, k, v, length, **options),
        *(q, k, v, length, options),
        kernels=2,
    ).memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 8 * 2**20


@pytest.mark.parametrize("cache_format", CACHE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_with_log_sum_exps(head_dim, cache_format):
    op = functools.partial(decode_attention, return_lse=True, implementation="hopper")
    operands = decode_operands(head_dim, cache_format, 64, 2048, True)
    check(lambda q, k, v, length, options: op(q, k, v, length, **options), *operands, kernels=2)


WINDOW = 1000  # not whole blocks, nor whole pages


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_training_with_a_window(head_dim, packed):
    """With documents and head dim 256 no more is spilled than without a window, once a tile."""
    gradient, shapes = training(head_dim, packed, "hopper", WINDOW)
    check(gradient, *shapes, kernels=3, spilled=SPILLED if packed and head_dim == 256 else 0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_with_a_window(head_dim):
    op = functools.partial(prefill_attention, window=WINDOW, implementation="hopper")
    operands = chunk_operands(head_dim, 128)
    check(lambda q, k, v, options: op(q, k, v, **options), *operands, kernels=1)


@pytest.mark.parametrize("cache_format", CACHE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_with_a_window(head_dim, cache_format):
    op = functools.partial(decode_attention, window=WINDOW, implementation="hopper")
    operands = decode_operands(head_dim, cache_format, 64, 2048, True)
    check(lambda q, k, v, length, options: op(q, k, v, length, **options), *operands, kernels=2)


@pytest.mark.parametrize("name", ["decode 64x2k fp8 paged", "decode 1x32k bf16"])
def test_decode_as_the_benchmark_times_it(name):
    """With a plan made beforehand."""
    (row,) = (row for row in shapes.FULL if row.name == name)
    drawn = jax.eval_shape(lambda: inputs.draw_one(row, jax.random.key(0)))
    prepare, call = candidates.planned(row, "hopper"), candidates.op(row, "hopper")
    check(lambda drawn: call(prepare(drawn)), drawn, kernels=2)
