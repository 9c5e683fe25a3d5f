"""Attention as the model calls it: the two ops of `pallas_kernels`, on one device or on a mesh.

A kernel is opaque to XLA's partitioner, which would gather its operands on every device. So on a
mesh the ops run under `jax.shard_map`: rows are split over `data` and `fsdp`, heads over `model`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Num

from . import pallas_kernels
from .mesh import MODEL, dp_size, row_axes
from .pallas_kernels import ATTENTION_OUTPUT, Implementation

__all__ = ["ATTENTION_OUTPUT", "Attention"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The mesh and the implementation of attention. Hashable: a static argument of every compiled
    function that calls attention."""

    mesh: Mesh | None = None
    """Mesh to run on. None is the default device; XLA then shards plain XLA attention itself."""
    implementation: Implementation | None = None
    """Name of the implementation; None chooses for the platform of `mesh`."""
    shard_sequence: bool = False
    """Whether the hidden states between layers are split along the sequence, over `model`.
    Attention itself gets whole rows."""

    def prefill(
        self,
        q: Float[Array, "B T N H"],
        k: Num[Array, "B K S H"] | Num[Array, "X K page H"],
        v: Num[Array, "B K S H"] | Num[Array, "X K page H"],
        *,
        q_offset: Int[Array, ""] | Int[Array, " B"] | int = 0,
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        k_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
        v_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
        page_table: Int[Array, "B P"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """`pallas_kernels.prefill_attention` on this mesh. With a `page_table` the pool is split
        over the data-parallel shards: see `decode`."""
        op = functools.partial(pallas_kernels.prefill_attention, implementation=self.implementation)
        options: dict[str, Any] = {
            "lengths": lengths,
            "segment_ids": segment_ids,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "page_table": page_table,
        }
        if self.mesh is None:
            return op(q, k, v, q_offset=q_offset, **options)
        q, k, v, q_offset, lengths, segment_ids, k_scale, v_scale, page_table = (
            pallas_kernels.check_prefill(q, k, v, q_offset=q_offset, **options)
        )
        kv = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
        rows = {"lengths": lengths, "segment_ids": segment_ids, "page_table": page_table}
        # Only a static offset tells the kernels that rows start where their keys start.
        if isinstance(q_offset, int):
            op = functools.partial(op, q_offset=q_offset)
        else:
            rows["q_offset"] = q_offset
        return self._per_device(self.mesh, op, q, kv, rows)

    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Num[Array, "B K S H"] | Num[Array, "X K page H"],
        v: Num[Array, "B K S H"] | Num[Array, "X K page H"],
        length: Int[Array, " B"],
        *,
        k_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
        v_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
        page_table: Int[Array, "B P"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """`pallas_kernels.decode_attention` on this mesh.

        With a `page_table` the pool is split like the rows, over the D data-parallel shards: rows
        from `d * B / D` on use pages from `d * X / D` on, and an entry counts from the first page
        of its row's shard. Raises `ValueError` if B or X is not a multiple of D.
        """
        op = functools.partial(pallas_kernels.decode_attention, implementation=self.implementation)
        if self.mesh is None:
            return op(q, k, v, length, k_scale=k_scale, v_scale=v_scale, page_table=page_table)
        q, k, v, length, k_scale, v_scale, page_table = pallas_kernels.check_decode(
            q, k, v, length, k_scale=k_scale, v_scale=v_scale, page_table=page_table
        )
        kv = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
        rows = {"length": length, "page_table": page_table}
        return self._per_device(self.mesh, op, q, kv, rows)

    @staticmethod
    def _per_device(mesh, op, q, kv, per_row):
        """`op` on each device's shard. Arrays of `kv` are B K ..., or X K ... for a pool; those of
        `per_row` are B ... or scalars."""
        kv, per_row = (
            {name: value for name, value in arrays.items() if value is not None}
            for arrays in (kv, per_row)
        )
        shards, batch, pages = dp_size(mesh), q.shape[0], kv["k"].shape[0]
        if "page_table" in per_row and (batch % shards or pages % shards):
            raise ValueError(
                f"with a page_table, rows and pages must be multiples of the mesh's {shards} "
                f"data-parallel shards, got {batch} and {pages}"
            )
        rows = row_axes(mesh) if batch % shards == 0 else None
        devices, heads, kv_heads = mesh.shape[MODEL], q.shape[2], kv["k"].shape[1]
        split_kv = kv_heads % devices == 0
        # Several devices to a key/value head.
        share_kv = not split_kv and devices % kv_heads == 0 and heads % devices == 0

        def local(q, kv, per_row):
            # A kernel takes whole arrays: each call copies the one head's keys and values.
            if share_kv:
                head = jax.lax.axis_index(MODEL) // (devices // kv_heads)
                kv = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1), kv)
            return op(q, **kv, **per_row)

        q_spec = P(rows, None, MODEL if split_kv or share_kv else None)
        kv_spec = P(rows, MODEL if split_kv else None)
        specs = (
            q_spec,
            kv_spec,
            {name: P(rows) if value.ndim else P() for name, value in per_row.items()},
        )
        # The kernels do not declare over which axes their results vary: there is nothing to check.
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=q_spec, check_vma=False)(
            q, kv, per_row
        )
