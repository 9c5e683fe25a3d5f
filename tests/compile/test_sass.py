"""Machine code of the Hopper kernels at head dim 128: what ptxas makes of the inner loops, counted.

The bounds are the counts with nvidia-cuda-nvcc 13.0.88. A kernel that needs more instructions, or
another order of them, is slower without being wrong, and no other test without a GPU shows it.
"""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention
from swiftkv_jax.pallas_kernels.hopper.prefill import Tuning
from tests.compile import sass
from tests.compile.compiled import compile_for
from tests.compile.test_kernels import CACHE, K, N, decode_operands, shape

EXPONENTIALS = 128 * 64 // 128  # a thread's share of a block of 64 queries x 128 keys
# Of a block of 128 keys, without a mask; 506 before tiles had an order of their own.
PREFILL = {
    "table": (None, 505),
    "persistent": (Tuning(persistent=True), 490),
    "multicast": (Tuning(multicast=True), 485),
    "persistent, multicast": (Tuning(persistent=True, multicast=True), 496),
}
# Of a tile, of 64 positions in bfloat16, of 128 in 8 bits; before the work list 165, 985, 1,094.
DECODE = {"bfloat16": 161, "float8_e4m3fn": 634, "int8": 1117}


def code_of(kernel: str, function, *shapes) -> sass.Code:
    """Instructions of the one kernel of that name in a program, after a look that its registers
    suffice."""
    _, kernels = compile_for("h200:1", function, *shapes)
    (found,) = (each for each in kernels if each.name.rsplit("_", 1)[0] == kernel)
    code = sass.disassemble(Path(os.environ["MOSAIC_GPU_DUMP_TO"], f"{found.name}.ptx"))
    assert len(code.instructions) > 500
    assert found.spilled == 0 and not found.warned
    assert not sass.indices(code, "LDL", "STL"), "local memory"
    if sass.indices(code, "USETMAXREG"):
        # The warpgroups then ask for 24 + 240 + 240 registers a thread, as many as three have.
        # Were it fewer, they would wait for each other's without end.
        assert found.registers == 168
    return code


@pytest.fixture(params=PREFILL)
def prefill(request):
    """(name of a tuning, code of prefill of whole rows, bound of its loop)"""
    tuning, bound = PREFILL[request.param]
    op = functools.partial(prefill_attention, implementation="hopper", tuning=tuning)
    q, kv = shape(1, 4096, N, 128), shape(1, K, 4096, 128)
    return request.param, code_of("hopper_prefill", lambda q, k, v: op(q, k, v), q, kv, kv), bound


def test_prefill(prefill):
    name, code, bound = prefill
    assert bool(sass.indices(code, "USETMAXREG"))
    loads = [code.instructions[i].text.split()[0] for i in sass.indices(code, "UTMALDG")]
    assert any("MULTICAST" in load for load in loads) == ("multicast" in name)

    loop = sass.main_loop(code)
    assert len(sass.indices(code, "HGMMA", within=loop)) == 2 * 128 // 16
    block = sass.unmasked(code, loop)
    print(f"{name}: {len(block)} instructions a block, {len(loop)} with a mask")
    assert len(block) <= bound

    # The exponentials run behind O += P V: after the wait for the scores, before that for O.
    waits = [i for i in loop if code.instructions[i].text.startswith("WARPGROUP.DEPBAR")]
    assert [code.instructions[i].text.split()[-1] for i in waits] == ["0x1", "0x0"]
    exponentials = [i for i in loop if code.instructions[i].text.startswith("MUFU.EX2")]
    assert len(exponentials) >= EXPONENTIALS
    assert waits[0] < min(exponentials) and max(exponentials) < waits[1]


@pytest.mark.parametrize(("head_dim", "rows", "block"), [(128, 4, 128), (256, 1, 64), (256, 4, 64)])
def test_packed_rows_with_log_sum_exps(head_dim, rows, block):
    """Training's forward pass: what takes the most registers. A few wait in local memory, once a
    tile; of several rows at head dim 256 one is read back for each block."""

    def forward(q, k, v, ids):
        op = functools.partial(prefill_attention, segment_ids=ids, implementation="hopper")
        return jax.vjp(op, q, k, v)[0]

    q, kv = shape(rows, 8192, N, head_dim), shape(rows, K, 8192, head_dim)
    ids = shape(rows, 8192, dtype=jnp.int32)
    _, (kernel,) = compile_for("h200:1", forward, q, kv, kv, ids)
    code = sass.disassemble(Path(os.environ["MOSAIC_GPU_DUMP_TO"], f"{kernel.name}.ptx"))
    print(f"{kernel.spilled} bytes spilled")
    assert kernel.spilled <= 48 and not kernel.warned
    loop = sass.main_loop(code)
    assert len(sass.indices(code, "HGMMA", within=loop)) == (block + head_dim) // 16
    in_loop = sass.indices(code, "LDL", "STL", within=loop)
    assert len(in_loop) <= (rows > 1 and head_dim == 256), "local memory in the loop"


@pytest.mark.parametrize("cache_format", CACHE)
def test_decode(cache_format):
    *arrays, options = decode_operands(128, cache_format, 64, 2048, True)
    op = functools.partial(decode_attention, implementation="hopper")
    code = code_of("hopper_decode", lambda *given: op(*given[:4], **given[4]), *arrays, options)
    loop = sass.main_loop(code)
    print(f"{cache_format}: {len(loop)} instructions a tile")
    positions = 64 if cache_format == "bfloat16" else 128
    assert len(sass.indices(code, "HGMMA", within=loop)) == 2 * positions * 128 // 64 // 16
    assert len(loop) <= DECODE[cache_format]
    assert arrays[1].dtype == jnp.dtype(CACHE[cache_format])
