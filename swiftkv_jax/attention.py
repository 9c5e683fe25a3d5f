"""Attention as the model calls it: the kernels' two ops, each device on its own rows and heads.

A kernel is opaque to XLA's partitioner, which would gather its operands on every device. So on a mesh the ops run
under `shard_map`: rows over `data`, heads over `model`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from . import pallas_kernels
from .pallas_kernels import Implementation
from .sharding import DATA, MODEL


@dataclasses.dataclass(frozen=True)
class Attention:
    """Where and by what attention runs. Hashable: a static argument of every compiled function that attends."""

    mesh: Mesh | None = None
    """None is the default device, and whatever sharding XLA finds for plain XLA attention."""
    implementation: Implementation | None = None
    """None chooses for the platform of `mesh`."""

    def prefill(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S H"],
        *,
        q_offset: Int[Array, ""] | Int[Array, " B"] | int = 0,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """`pallas_kernels.prefill_attention` on this mesh."""
        op = functools.partial(pallas_kernels.prefill_attention, implementation=self.implementation)
        if isinstance(q_offset, int):  # static: only then do the kernels know that rows begin where their keys begin
            return self._per_device(functools.partial(op, q_offset=q_offset), q, k, v, segment_ids=segment_ids)
        return self._per_device(op, q, k, v, q_offset=q_offset, segment_ids=segment_ids)

    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S H"],
        length: Int[Array, " B"],
    ) -> Float[Array, "B T N H"]:
        """`pallas_kernels.decode_attention` on this mesh."""
        op = functools.partial(pallas_kernels.decode_attention, implementation=self.implementation)
        return self._per_device(op, q, k, v, length=length)

    def _per_device(self, op, q, k, v, **per_row):
        """Run `op` on each device's part. `per_row` arrays have a leading B, are scalars, or are None."""
        per_row = {name: value for name, value in per_row.items() if value is not None}
        if self.mesh is None:
            return op(q, k, v, **per_row)
        rows = DATA if q.shape[0] % self.mesh.shape[DATA] == 0 else None
        devices, heads, kv_heads = self.mesh.shape[MODEL], q.shape[2], k.shape[1]
        split_kv = kv_heads % devices == 0
        share_kv = not split_kv and devices % kv_heads == 0 and heads % devices == 0  # several devices to a key/value head

        def local(operands, per_row):
            q, k, v = operands
            if share_kv:
                head = jax.lax.axis_index(MODEL) // (devices // kv_heads)
                k, v = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (k, v))
            return op(q, k, v, **per_row)

        q_spec = P(rows, None, MODEL if split_kv or share_kv else None)
        kv_spec = P(rows, MODEL if split_kv else None)
        row_specs = {name: P(rows) if value.ndim else P() for name, value in per_row.items()}
        specs = ((q_spec, kv_spec, kv_spec), row_specs)
        # The kernels do not say over which axes their results vary, so there is nothing to check.
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=q_spec, check_vma=False)((q, k, v), per_row)
