"""The second kernel of decode attention: the results of the splits of each row, weighed and summed.

A thread block has one row and one key/value head. It reads 4 (H + 1) C bytes a split, just written
and so in the L2, in groups large enough to hide the latency; a batch whose rows are one split each
costs little more than the launch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

UNSEEN = -1e30
"""Logarithm of the sum of no exponentials. Finite: the difference of two of them is 0, not NaN."""
_LAYOUT = plgpu.Layout.WGMMA
_STORE = getattr(plgpu, "store", None)
"""Function of JAX 0.12 and later, where an assignment is refused unless it stores whole lines
without conflicts; None in earlier versions, in which Pallas falls back by itself."""
_HELD = 8192  # numbers that a thread block reads at once: 64 registers a thread


def combine(
    o: Float[Array, "W K H C"],
    lse: Float[Array, "W K C"],
    row_entries: Int[Array, "B 2"],
    *,
    queries: int,
    dtype: Any,
    return_lse: bool = False,
) -> tuple[Float[Array, "B K Q H"], Float[Array, "B K Q"] | None]:
    """The attention of the first Q = `queries` columns: of each row the mean of its entries `o`,
    weighed by exp(`lse`). Zeros for a row without entries.

    With `return_lse` also the logarithm of the sum of all exp(`lse`) of a row, -inf for one without
    entries."""
    (_, K, H, C), B = o.shape, row_entries.shape[0]
    # Pallas stores 64 head dims at a time transposed into plain rows, of which any number can be
    # copied. Other head dims need rows in tiles of 8: then padding is written too.
    rows, transforms = (queries, ()) if H % 64 == 0 else (C, tile_transforms(H, 2))
    lse_type = jax.ShapeDtypeStruct((B, K, C), jnp.float32) if return_lse else None
    out, row_lse = plgpu.kernel(
        _kernel,
        out_type=[jax.ShapeDtypeStruct((B, K, rows, H), dtype), lse_type],
        scratch_types=[plgpu.SMEM((C, H), dtype, transforms=transforms)],
        grid=(B, K),
        grid_names=("row", "head"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="hopper_decode_combine",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(o, lse, row_entries)
    return out[:, :, :queries], None if row_lse is None else row_lse[:, :, :queries]


def _kernel(
    # Inputs
    o_gmem,  # W K H C
    lse_gmem,  # W K C
    row_entries_gmem,  # B 2
    # Outputs
    out_gmem,  # B K Q H, or B K C H
    row_lse_gmem,  # B K C, or None
    # Scratch
    out_smem,  # C H
):
    C, H = out_smem.shape
    row = lax.axis_index("row")
    head = lax.axis_index("head")
    first = row_entries_gmem[row, 0]
    end = row_entries_gmem[row, 1]

    for turn, parts in enumerate(parts_together(H, C)):
        group = max(1, min(8, _HELD // (sum(part.size for part in parts) * C)))

        def step(i, carry, parts=parts, group=group):
            o, m, total = carry
            indices = [first + i * group + j for j in range(group)]
            # Past the end the last entry is read again, with the weight 0.
            lse = [
                _load(lse_gmem, (lax.min(index, end - 1), head), _LAYOUT.reduce(0))
                + jnp.where(index < end, 0.0, UNSEEN)
                for index in indices
            ]
            m_new = functools.reduce(jnp.maximum, lse, m)
            weights = [jnp.exp(x - m_new) for x in lse]
            correction = jnp.exp(m - m_new)
            o = [x * to_columns(correction, x.shape[0]) for x in o]
            for index, weight in zip(indices, weights, strict=True):
                at = lax.min(index, end - 1), head
                o = [
                    x + _load(o_gmem, (*at, part), _LAYOUT) * to_columns(weight, part.size)
                    for x, part in zip(o, parts, strict=True)
                ]
            return o, m_new, sum(weights, start=total * correction)

        o = [plgpu.layout_cast(jnp.zeros((part.size, C), jnp.float32), _LAYOUT) for part in parts]
        m, total = (
            plgpu.layout_cast(jnp.full((C,), value, jnp.float32), _LAYOUT.reduce(0))
            for value in (UNSEEN, 0.0)
        )
        steps = lax.div(end - first + (group - 1), jnp.int32(group))
        o, m, total = lax.fori_loop(0, steps, step, (o, m, total))
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        for x, part in zip(o, parts, strict=True):
            x = (x * to_columns(inverse, part.size)).astype(out_smem.dtype)
            if H % 64 == 0:
                store_plain(out_smem.at[:, part].T, x)
            else:
                out_smem.at[:, part].T[...] = x
        if row_lse_gmem is not None and turn == 0:  # the same for all head dims
            # Entries that saw nothing count as one another: their weight is exp(0).
            row_lse = jnp.where(m > UNSEEN / 2, m + jnp.log(total), -jnp.inf)
            store_plain(row_lse_gmem.at[row, head], row_lse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_gmem.shape[2])], out_gmem.at[row, head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def head_dim_parts(head_dim: int) -> list[Any]:
    """All head dims, as wgmma has them on the rows of a product, 64 at a time. Where they are no
    multiple of 64 the last 64 overlap the first."""
    if head_dim % 64 == 0:
        return [pl.ds(0, head_dim)]
    return [pl.ds(0, 64), pl.ds(head_dim - 64, 64)]


def parts_together(head_dim: int, columns: int) -> list[list[Any]]:
    """Parts of 64 head dims, those together whose sums a thread block can hold and still read
    others."""
    parts = head_dim_parts(head_dim)
    if head_dim * columns * 2 <= _HELD:
        return [parts]
    if head_dim % 64 == 0:
        parts = [pl.ds(start, 64) for start in range(0, head_dim, 64)]
    return [[part] for part in parts]


def tile_transforms(head_dim: int, itemsize: int):
    """How a tile lies in shared memory. 8-bit rows of 16 are too narrow to swizzle; wgmma does not
    read those itself."""
    width = math.gcd(head_dim, 64)
    if width * itemsize == 16:
        return ()
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(width * itemsize)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def store_plain(ref, x):
    """`x` into rows that lie as they are: less than a line of the L2, or over banks in conflict."""
    if _STORE is None:
        ref[...] = x
    else:
        _STORE(ref, x, optimized=False)


def _load(ref, index, layout):
    return plgpu.layout_cast(plgpu.load(ref.at[index], optimized=False), layout)


def to_columns(x, rows: int):
    """x[C] as rows x C."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])
