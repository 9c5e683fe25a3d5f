"""Model of the Hopper backward pass with five matrix products of a block instead of seven. Nothing
is run.

    python -m benchmarks.kernels.backward_products

Today dk and dv come from one kernel (S, dP, dV, dK) and dq from another (S, dP, dQ). With five, dQ
takes dS from the first kernel, in one of two ways:

dS in memory: the first kernel writes dS in bfloat16, the second reads it and only multiplies by K.
    Results do not depend on the order of thread blocks.
sums in memory: the first kernel also multiplies dS by K, and TMA adds these float32 parts of dQ to
    a sum in memory, as FlashAttention-3 does. The order of the additions is not the same twice.

A multiprocessor has 4 tensor cores with 4096 FLOPs a clock together, and shared memory of 128 bytes
a clock. The slower of the two decides, and gets `BUSY` of the clocks, the share that the model of
`benchmarks.predict` has from another library's published times. Tiles are taken in their order by
the multiprocessor that is free first; each has clocks that nothing hides. What memory needs counts
where it is longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from swiftkv_jax.plan.cost import train_flops_per_token
from swiftkv_jax.plan.hardware import hardware_of
from swiftkv_jax.plan.presets import LLAMA_8B

from ..markdown import table
from ..predict.attention import makespan
from ..predict.devices import H200 as MODEL

LENGTHS = (2048, 4096, 8192, 16384)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B; one row
KINDS = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}
BANDWIDTH = 0.8  # of the published one

# Clocks of a step: 128 keys x 64 queries in the dk, dv kernel, 128 x 128 in the dq kernel.
PRODUCT = 2 * 128 * 64 * HEAD_DIM / 4096
BUSY = 2 * PRODUCT / MODEL.gradient_product_cycles
DKV = 4 * PRODUCT
DQ = 2 * 3 * PRODUCT
# dS goes through shared memory once: 16 KiB in and out. It makes a step 8 % longer.
DKV_THAT_STORES = 1.08 * DKV
DQ_OF_STORED = 2 * PRODUCT
# Shared memory: 1792 today, and for dQ the store of dS, both operands for two warpgroups, and 32
# KiB of float32 in and out. That is more than the 2560 of 5 products.
DKV_THAT_ADDS = 1792 + 128 + 2 * 256 + 2 * 256


def scheduled(tiles: Iterable[float]) -> float:
    """Seconds until all tiles, in clocks, are done."""
    cycles = (MODEL.gradient_tile_cycles + tile / BUSY for tile in tiles)
    return makespan(cycles, MODEL.multiprocessors) / MODEL.clock


def dkv(length: int, step: float) -> float:
    """Seconds of the dk, dv kernel, whose tiles are 128 keys of a key/value head."""
    tiles = length // 128
    group = HEADS // KV_HEADS
    return scheduled(group * 2 * (tiles - j) * step for j in range(tiles) for _ in range(KV_HEADS))


def dq(length: int, step: float) -> float:
    """Seconds of the dq kernel, whose tiles are 128 queries of a head."""
    tiles = length // 128
    return scheduled((tiles - i) * step for i in range(tiles) for _ in range(HEADS))


def stored_bytes(length: int) -> int:
    """Bytes of dS: bfloat16, the blocks of 128 x 128 that the causal mask leaves."""
    tiles = length // 128
    return tiles * (tiles + 1) // 2 * HEADS * 128 * 128 * 2


def seconds(length: int, chip: str) -> dict[str, float]:
    """Seconds of the backward pass of one row in each way."""
    hardware = hardware_of(KINDS[chip])
    assert hardware is not None
    bandwidth = BANDWIDTH * hardware.bandwidth
    stored = stored_bytes(length) / bandwidth
    sums = length * HEADS * HEAD_DIM * (4 + 4 + 2) / bandwidth  # zeros; read again, and written
    return {
        "today": dkv(length, DKV) + dq(length, DQ),
        "dS in memory": max(dkv(length, DKV_THAT_STORES), stored)
        + max(dq(length, DQ_OF_STORED), stored),
        "sums in memory": dkv(length, DKV_THAT_ADDS) + sums,
    }


def share_of_step(length: int) -> float:
    """The backward pass of attention, as it is today, in a distillation step of Llama-3.1-8B whose
    other operations run at half of the published peak."""
    hardware = hardware_of(KINDS["H200"])
    assert hardware is not None
    backward = LLAMA_8B.num_upper_layers * seconds(length, "H200")["today"]
    whole = train_flops_per_token(LLAMA_8B, length, remat="mlp") * length
    return backward / (whole / (hardware.flops / 2))


def rows() -> str:
    """The table of docs/kernels-internals.md."""
    found = {chip: {n: seconds(n, chip) for n in LENGTHS} for chip in KINDS}
    lines = [["today, ms", *(f"{found['H200'][n]['today'] * 1e3:.2f}" for n in LENGTHS)]]
    for way in ("dS in memory", "sums in memory"):
        for chip, times in found.items():
            change = (times[n][way] / times[n]["today"] - 1 for n in LENGTHS)
            lines.append([f"{way}, {chip}", *(f"{share:+.0%}" for share in change)])
    lines.append(["share of a step today", *(f"{share_of_step(n):.1%}" for n in LENGTHS)])
    lines.append(["dS, GB", *(f"{stored_bytes(n) / 1e9:.2f}" for n in LENGTHS)])
    return table(["", *(f"{n // 1024}k" for n in LENGTHS)], lines)


if __name__ == "__main__":
    print(rows())
