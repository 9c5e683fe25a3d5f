"""Every device kernel in every tuning of the table, compiled for an H200, a v5e, a v5p and a v6e.

A Hopper kernel that wants more shared memory than the 227 KiB of a block does not lower at all;
Mosaic's compiler for TPUs refuses what does not fit VMEM or cannot be laid out. So a program that
comes out is a proof.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, plan_decode, prefill_attention
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS
from swiftkv_jax.pallas_kernels.hopper.prefill import Tuning
from tests.compile.compiled import compile_for

TARGETS = {"h200:1": "hopper", "v5e:2x2": "tpu", "v5p:2x2x1": "tpu", "v6e:2x2": "tpu"}
N, K = 32, 8  # heads of Llama-3.1-8B
TRAINED = 8192
WINDOW = 1000  # not whole blocks, nor whole pages
CACHE = {"bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn, "int8": jnp.int8}
SPILLED = 48  # bytes of each thread at head dim 256 with documents, once a tile (`test_sass`)


class Program(NamedTuple):
    """A function of arrays, and what its compiled program must be like."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    kernels: int = 1
    most_bytes: float = math.inf
    """Of temporaries: the cache is read as it lies there, and nothing has the size of T x S."""
    spilled: int = 0
    """Bytes of registers that a thread of a Hopper kernel spills."""


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def chunk_operands(head_dim, page, pool=4096):
    """Shapes of (q, k, v, options): chunks of 128 queries in a pool of pages, 64 a row."""
    rows, kv = shape(20, dtype=jnp.int32), shape(pool, K, page, head_dim)
    options = {"q_offset": rows, "lengths": rows, "page_table": shape(20, 64, dtype=jnp.int32)}
    return shape(20, 128, N, head_dim), kv, kv, options


def decode_operands(head_dim, cache_format, slots, length, paged, page=256):
    """Shapes of (q, k, v, lengths, options)."""
    pages, positions = (slots * length // page, page) if paged else (slots, length)
    kv = shape(pages, K, positions, head_dim, dtype=CACHE[cache_format])
    scale = shape(pages, K, positions, dtype=jnp.float32)
    options = {} if cache_format == "bfloat16" else {"k_scale": scale, "v_scale": scale}
    if paged:
        options["page_table"] = shape(slots, length // page, dtype=jnp.int32)
    return shape(slots, 1, N, head_dim), kv, kv, shape(slots, dtype=jnp.int32), options


def prefill(implementation: str, **static: Any):
    op: Any = functools.partial(prefill_attention, implementation=implementation, **static)
    return lambda q, k, v, options: op(q, k, v, **options)


def decode(implementation: str, **static: Any):
    op: Any = functools.partial(decode_attention, implementation=implementation, **static)
    return lambda q, k, v, length, options: op(q, k, v, length, **options)


def gradient(implementation: Any, packed: bool, window: int | None):
    def total(q, k, v, ids):
        out = prefill_attention(
            *(q, k, v),
            segment_ids=ids if packed else None,
            window=window,
            implementation=implementation,
        )
        return out.astype(jnp.float32).sum()

    return jax.grad(total, argnums=(0, 1, 2))


def of_prefill(implementation: str, head_dim: int) -> dict[str, Program]:
    on_hopper, rows = implementation == "hopper", shape(2, dtype=jnp.int32)
    kv = shape(2, K, 8192, head_dim)
    options = {"q_offset": rows, "lengths": rows}
    operands = (shape(2, 2048, N, head_dim), kv, kv, options)
    found = {"prefill chunk": Program(prefill(implementation), operands)}
    for page in (64, 128, 256) if on_hopper else (128, 256, 1024):
        # 1 GiB with H = 128, for every chip.
        operands = chunk_operands(head_dim, page, 4096 if on_hopper else 2**19 // page)
        most = operands[1].size * 2 / 8
        found[f"prefill in pages of {page}"] = Program(
            prefill(implementation), operands, most_bytes=most
        )
        if page in (128, 1024):
            found[f"prefill in pages of {page}, window"] = Program(
                prefill(implementation, window=WINDOW), operands
            )
    for window in (None, WINDOW):
        *arrays, options = chunk_operands(head_dim, 128)
        options = options | {"kv_lengths": options["lengths"]}
        found[f"prefill of a part, window {window}"] = Program(
            prefill(implementation, window=window, return_lse=True), (*arrays, options)
        )
    return found


def of_training(implementation: str, head_dim: int) -> dict[str, Program]:
    """Forward and backward, 8k tokens: three kernels."""
    found, kv = {}, shape(1, K, TRAINED, head_dim)
    q = shape(1, TRAINED, N, head_dim)
    operands = (q, kv, kv, shape(1, TRAINED, dtype=jnp.int32))
    for packed in (False, True):
        for window in (None, WINDOW):
            found[f"training, packed {packed}, window {window}"] = Program(
                gradient(implementation, packed, window),
                operands,
                kernels=3,
                most_bytes=8 * q.size * 2 if implementation == "hopper" else math.inf,
                spilled=SPILLED if packed and head_dim == 256 else 0,
            )
    return found


def of_decode(implementation: str, head_dim: int) -> dict[str, Program]:
    kernels = 2 if implementation == "hopper" else 1
    found = {}
    for cache_format in CACHE:
        for slots, length, paged in ((64, 2048, False), (1, 32768, False), (64, 2048, True)):
            if head_dim != 128 and (slots == 1 or paged):
                continue
            operands = decode_operands(head_dim, cache_format, slots, length, paged)
            most = operands[1].size * operands[1].dtype.itemsize / 8
            found[f"decode {cache_format} {slots}x{length}, paged {paged}"] = Program(
                decode(implementation), operands, kernels, most
            )
        for paged in (True,) if implementation == "hopper" else (False, True):
            operands = decode_operands(head_dim, cache_format, 64, 2048, paged)
            for name, static in (
                ("log-sum-exps", {"return_lse": True}),
                ("window", {"window": WINDOW}),
            ):
                found[f"decode {cache_format}, paged {paged}, {name}"] = Program(
                    decode(implementation, **static), operands, kernels
                )
    return found


def of_hopper_alone() -> dict[str, Program]:
    found = {}
    for cache_format in CACHE:
        # Results of splits of rows take memory by their number, not by the room of the table.
        *arrays, options = decode_operands(128, cache_format, 64, 2048, True)
        options["page_table"] = shape(64, 131_072 // 256, dtype=jnp.int32)
        found[f"decode {cache_format} in long tables"] = Program(
            decode("hopper"), (*arrays, options), 2, 8 * 2**20
        )

        def planned(q, k, v, length, options):
            table = options["page_table"]
            plan = plan_decode(q, k, length, page_table=table, implementation="hopper")
            return decode("hopper", plan=plan)(q, k, v, length, options)

        operands = decode_operands(128, cache_format, 64, 2048, True)
        found[f"decode {cache_format} with a plan"] = Program(planned, operands, 2)
    return found


def programs(implementation: str) -> dict[str, Program]:
    found = {}
    for head_dim in HEAD_DIMS:
        for group in (of_prefill, of_training, of_decode):
            for name, program in group(implementation, head_dim).items():
                found[f"H{head_dim} {name}"] = program
    return found | (of_hopper_alone() if implementation == "hopper" else {})


PROGRAMS = {implementation: programs(implementation) for implementation in ("hopper", "tpu")}


@pytest.mark.parametrize(
    ("target", "name"),
    [(target, name) for target, kernels in TARGETS.items() for name in PROGRAMS[kernels]],
)
def test_kernels(target, name):
    compiled = check(target, PROGRAMS[TARGETS[target]][name])
    assert f"{TRAINED},{TRAINED}" not in str(compiled.as_text())


def check(target: str, program: Program):
    compiled, found = compile_for(target, program.function, *program.shapes)
    if TARGETS[target] == "hopper":
        print(*found, sep="\n")
        assert len(found) == program.kernels
    else:
        calls = str(compiled.as_text()).count('custom_call_target="tpu_custom_call"')
        assert calls == program.kernels
    for kernel in found:
        assert kernel.target == "sm_90a"
        assert kernel.spilled <= program.spilled
        if "combine" not in kernel.name:  # that one multiplies nothing, and copies plain rows
            assert kernel.wgmma > 0
            assert kernel.tma > 0
        assert not kernel.warned
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < program.most_bytes
    return compiled


@pytest.mark.parametrize(("persistent", "multicast"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_on_hopper_in_tunings_beyond_the_table(head_dim, persistent, multicast):
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

    kv, ids = shape(1, K, TRAINED, head_dim), shape(1, TRAINED, dtype=jnp.int32)
    operands = (shape(1, TRAINED, N, head_dim), kv, kv, ids)
    refused = pytest.raises(NotImplementedError, match="bytes of shared memory")
    with refused if wide and persistent else contextlib.nullcontext():
        check("h200:1", Program(forward, operands, spilled=SPILLED if wide else 0))
