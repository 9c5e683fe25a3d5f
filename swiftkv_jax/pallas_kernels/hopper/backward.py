"""Gradient of causal attention for training on Hopper: nothing of size T x T is ever stored.

The scores are computed again from `q`, `k` and the forward's `lse`, block by block, and with them P
= exp(S - lse), dP = dO V^T and dS = P (dP - delta), where delta = rowsum(out * dO) comes from XLA.
Two kernels, so that every output has one owner, which sums it in float32 registers and writes it
once: no atomics, no copy per query head, and the same bits on every run.

dq: a thread block owns 64 query rows of one head per compute warpgroup and walks the key blocks
    its rows can see. S = Q K^T, dP = dO V^T, dQ += dS K.
dk, dv: a thread block owns 64 keys of one key/value head per compute warpgroup and walks the query
    blocks that can see them, each for all G query heads of the group. Transposed, so that P and dS
    leave the registers of one product as the left operand of the next: S^T = K Q^T, dP^T = V dO^T,
    dV += P^T dO, dK += dS^T Q. Above head dim 128 dk and dv together exceed the register file, and
    of two warpgroups on the same keys one sums dv, the other dk (S is computed by both).

In both a producer warpgroup, left with few registers, loads through TMA into a ring of stages while
the others multiply (WGMMA) and do the exponentials; one warpgroup's products hide the other's.
Blocks above the diagonal, before the window or of other documents are never loaded, and only blocks
that the diagonal or the edge of a document or of the window crosses are masked. Heavy tiles are
launched first.

Per visible (query, key) pair and query head: 3 products of 2H FLOPs for dq and 4 (above head dim
128: 5) for dk, dv; 5 are the minimum, and a causal batch has T (T + 1) / 2 pairs per head, so the
floor is 5 T^2 H N B / peak seconds. Every input is read from memory a few times at most (the walks
share L2): bytes do not matter from T = 1024 or so.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .backward_block import LOG2E, REGISTERS, ROWS
from .backward_dkv import dkv as gradient_of_kv
from .backward_dq import dq as gradient_of_q
from .padding import pad

_SMEM_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Blocks and ring sizes of the two kernels.

    A stage of the dq kernel holds one block of keys or of values (they alternate); a stage of the
    dk, dv kernel holds a block of queries together with its block of d_out.
    """

    dq_block_kv: int = 128
    dq_stages: int = 4
    dq_warpgroups: int = 2
    dkv_block_q: int = 64
    dkv_stages: int = 2
    dkv_warpgroups: int = 2

    def __post_init__(self):
        for name in ("dq_block_kv", "dkv_block_q"):
            if (block := getattr(self, name)) % 32 or not 32 <= block <= 256:
                raise ValueError(f"{name}={block} must be a multiple of 32 from 32 to 256")
        for name in ("dq_stages", "dkv_stages"):
            if (stages := getattr(self, name)) < 2:
                raise ValueError(f"{name}={stages} must be at least 2")
        for name in ("dq_warpgroups", "dkv_warpgroups"):
            if (warpgroups := getattr(self, name)) not in REGISTERS:
                raise ValueError(f"{name}={warpgroups} must be one of {list(REGISTERS)}")

    def check(self, head_dim: int) -> None:
        """Raise `ValueError` if these blocks do not suit a 16-bit head of this size."""
        multiple = plgpu.find_swizzle(16 * head_dim) // 2
        if self.dq_block_kv % multiple or self.dkv_block_q % multiple:
            raise ValueError(
                f"with {head_dim=} blocks must be multiples of {multiple}, got "
                f"{self.dq_block_kv=}, {self.dkv_block_q=}"
            )
        if head_dim > 128 and self.dkv_warpgroups != 2:
            raise ValueError(f"{self.dkv_warpgroups=} must be 2 with {head_dim=}")
        rows = {"dq": 2 * ROWS * self.dq_warpgroups + self.dq_stages * self.dq_block_kv}
        rows["dkv"] = 2 * (
            ROWS * (1 if head_dim > 128 else self.dkv_warpgroups)
            + self.dkv_stages * self.dkv_block_q
        )
        for kernel, count in rows.items():
            if (
                size := 2 * count * head_dim + 8 * self.dkv_stages * self.dkv_block_q + 1024
            ) > _SMEM_BYTES:
                raise ValueError(
                    f"the {kernel} kernel needs {size} bytes of shared memory of {_SMEM_BYTES} "
                    f"with {head_dim=} and {self}"
                )


def attention_grad(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    segment_ids: Int[Array, "B T"] | None,
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B N T"],
    d_out: Float[Array, "B T N H"],
    *,
    tuning: Tuning,
    window: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """Gradients of causal attention with respect to q, k and v, in their dtype, given that of
    `out`.

    `lse` is the natural logarithm of the sum of exp(scaled scores). With `segment_ids` a query
    attends only to its own document, with `window` only to the last so many positions. TMA needs T
    to be a multiple of 8: q, k, v and d_out are padded (copied) where it is not.
    """
    tuning.check(q.shape[3])
    length = q.shape[1]
    delta = jnp.einsum("BTNH,BTNH->BNT", out, d_out, preferred_element_type=jnp.float32)
    multiple = math.lcm(ROWS * tuning.dq_warpgroups, tuning.dkv_block_q)
    # An infinite lse makes P and so every contribution of a query past the end zero.
    lse = pad(lse * LOG2E, 2, multiple, value=jnp.inf)
    delta = pad(delta, 2, multiple)
    q, k, v, d_out = (pad(x, axis, 8) for x, axis in ((q, 1), (k, 2), (v, 2), (d_out, 1)))
    dq = gradient_of_q(q, k, v, segment_ids, d_out, lse, delta, tuning, window)
    dk, dv = gradient_of_kv(q, k, v, segment_ids, d_out, lse, delta, tuning, window)
    return dq[:, :length], dk[:, :, :length], dv[:, :, :length]
