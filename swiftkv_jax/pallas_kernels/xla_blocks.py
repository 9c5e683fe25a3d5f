"""Sizes of the blocks that attention in XLA walks.

Each step of the walk is about ten kernels on a GPU, which the host launches one by one after it has
waited to learn whether there is another step: some 50 us. A block that takes about as long is at
most twice as slow as the best for any length: a larger one would be mostly positions that a short
row does not have. On a CPU a step costs nothing, and a block had better stay in its cache.

The times are reckoned from an A100's bytes per second; no other sizes were tried on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

CPU_QUERIES = 256
CPU_KEYS = 256
"""The fastest forward and backward pass, or close to it, on two CPU cores in float32 with H = 64, T
= 512 and 2048: at 2048 3 to 14 times as fast as whole rows. Blocks of 512 keys gain a tenth in a
long forward pass, and lose a third at T = 512."""
CPU_DECODE_KEYS = 128
"""A page of the default size. On two CPU cores with 64 rows of 101 positions in float32 four times
as fast as blocks of 512 (of which most is padding then), with rows of 1,000 and 8,000 positions as
fast to within a fifth."""

GPU_QUERIES = 512
GPU_KEYS = 512
"""The least keys of a block, for many queries: in a row of 8192, masked halves of the blocks on the
diagonal are 6 % of its work."""
GPU_SCORES = 2**23
"""Scores of a block, of all rows and heads, if the queries are few: 32 MiB in float32, written and
read three times in 80 us."""
DECODE_KEYS = 512
"""The least keys of a block of decoding on other devices."""
GPU_DECODE_BYTES = 2**25
"""Bytes of the keys of a decode block, of all rows and heads, and as many of values: gathered,
written and read again in 100 us."""


class Blocks(NamedTuple):
    """Positions of a block."""

    queries: int
    keys: int


def prefill_blocks(platform: str, batch: int, queries: int, heads: int) -> Blocks:
    """For `batch` rows that are walked together, each of `queries` queries in `heads` heads."""
    if platform not in ("gpu", "cuda"):
        return Blocks(CPU_QUERIES, CPU_KEYS)
    block = min(queries, GPU_QUERIES)
    return Blocks(block, max(GPU_SCORES // (batch * heads * block), GPU_KEYS))


def decode_keys(platform: str, position_bytes: int) -> int:
    """Key positions of a decode block. `position_bytes` are the bytes of the keys at one position
    of all rows, as they are multiplied."""
    if platform == "cpu":
        return CPU_DECODE_KEYS
    if platform not in ("gpu", "cuda"):
        return DECODE_KEYS
    return max(GPU_DECODE_BYTES // position_bytes, DECODE_KEYS)
