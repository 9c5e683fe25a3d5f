"""Block sizes and schedule of the prefill kernel, and the operands that it does not take."""

from __future__ import annotations

import dataclasses

from ..operands import AttentionSpec, page_size

CONSUMERS = 2  # warpgroups of a thread block that multiply, each for half of its queries
CLUSTER = 2  # thread blocks that load keys and values together with `multicast`
_REGISTERS = 192  # of a consumer's thread, beside those for addresses and counters
_SHARED_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes and schedule; more stages hide more of the loads' latency.

    `persistent` starts as many thread blocks as there are SMs, each of which works on many tiles:
    the first keys and the queries of a tile are loaded while the tile before is finished. Its
    output then has shared memory of its own, the size of 2 `block_q` rows, which at head dim 128
    leaves room for two stages of 128 keys and at 256 for none.

    `multicast` pairs the thread blocks of two query heads of one key/value head: each loads half of
    every block of keys and values into the shared memory of both, which halves what is read from
    the L2. It needs an even number of query heads to a key/value head.
    """

    block_q: int = 64  # queries of one consumer warpgroup; a thread block has twice as many
    block_kv: int = 128
    stages: int = 2
    ping_pong: bool = True
    persistent: bool = False
    multicast: bool = False

    def __post_init__(self):
        if self.block_q < 64 or self.block_q % 64:
            raise ValueError(f"{self.block_q=} must be a multiple of 64")
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(f"{self.block_kv=} must be a multiple of 64, at most 256")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")


def unsupported_reason(spec: AttentionSpec, tuning: Tuning) -> str | None:
    """Why the kernel cannot run such a call; None if it can. Head dim and dtype are right."""
    q = spec.q
    k = spec.k
    heads, head_dim = q.shape[2:]
    kv_heads, page = k.shape[1:3]
    if spec.page_table is not None and page % 64:
        return f"takes pages of a multiple of 64 positions, got {page} with {k.shape=}"
    tuning = fit(tuning, page_size(spec))
    block_q = tuning.block_q
    block_kv = tuning.block_kv
    if tuning.multicast and heads // kv_heads % CLUSTER:
        return (
            f"with multicast takes an even number of query heads to a key/value head, got "
            f"{heads // kv_heads} with {q.shape=}, {k.shape=}"
        )
    registers = block_q // 64 * (head_dim // 2 + 3 * block_kv // 4) + block_kv // 4
    if registers > _REGISTERS:
        return (
            f"needs {registers} registers for O, S, P and the mask with {tuning} and "
            f"{q.shape=}, at most {_REGISTERS} fit"
        )
    if (size := _shared_bytes(tuning, head_dim)) > _SHARED_BYTES:
        return (
            f"needs {size} bytes of shared memory with {tuning} and {q.shape=}, at most "
            f"{_SHARED_BYTES} fit"
        )
    return None


def _shared_bytes(tuning: Tuning, head_dim: int) -> int:
    """Shared memory of a thread block, with log-sum-exps and 1 KiB for barriers and alignment."""
    queries = CONSUMERS * tuning.block_q
    rows = (1 + tuning.persistent) * queries + 2 * tuning.stages * tuning.block_kv
    return 2 * rows * head_dim + 4 * queries + 1024


def fit(tuning: Tuning, page: int | None = None) -> Tuning:
    """`tuning` with blocks of keys that divide `page`, a multiple of 64. Smaller blocks get as many
    more stages."""
    if page is None or page % tuning.block_kv == 0:
        return tuning
    block_kv = max(block for block in range(64, tuning.block_kv, 64) if page % block == 0)
    return dataclasses.replace(
        tuning, block_kv=block_kv, stages=tuning.stages * tuning.block_kv // block_kv
    )


def for_heads(tuning: Tuning, q, k) -> Tuning:
    """An entry of the table, which is for any number of heads, for those of q and k: without
    `multicast` where that number is odd."""
    pairs = q.shape[2] // k.shape[1] % CLUSTER == 0
    return tuning if pairs else dataclasses.replace(tuning, multicast=False)
