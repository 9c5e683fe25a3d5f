"""Attention as the model calls it: the two ops of `pallas_kernels`, on one device or on a mesh.

XLA's partitioner cannot split a kernel and would gather its operands on every device. On a mesh the
ops therefore run under `jax.shard_map`: rows are split over `data` and `fsdp`, heads over `model`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Num

from .. import pallas_kernels
from ..pallas_kernels import (
    ATTENTION_OUTPUT,
    PLAIN_SCORES,
    AttentionOperands,
    DecodePlan,
    Implementation,
    ScoreOptions,
)
from .mesh import MODEL, dp_size, row_axes

__all__ = [
    "ATTENTION_OUTPUT",
    "DEFAULT",
    "PLAIN_SCORES",
    "Attention",
    "ScoreOptions",
    "merge_attention",
]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The mesh and the implementation of attention. Hashable: a static argument of every compiled
    function that calls attention."""

    mesh: Mesh | None = None
    """Mesh to run on. None is the default device; XLA then shards plain XLA attention itself."""
    implementation: Implementation | None = None
    """Name of the implementation; None chooses for the platform of `mesh`."""
    shard_sequence: bool = False
    """True if the hidden states between layers are split along the sequence, over `model`.
    Attention itself gets whole rows."""

    def prefill(
        self,
        q: Float[Array, "B T N H"],
        k: Num[Array, "B K S H"] | Num[Array, "X K page H"],
        v: Num[Array, "B K S H"] | Num[Array, "X K page H"],
        *,
        q_offset: Int[Array, ""] | Int[Array, " B"] | int | np.integer = 0,
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        k_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
        v_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
        page_table: Int[Array, "B P"] | None = None,
        kv_lengths: Int[Array, " B"] | None = None,
        window: Int[Array, ""] | int | None = None,
        score_options: ScoreOptions = PLAIN_SCORES,
        return_lse: bool = False,
    ) -> Float[Array, "B T N H"] | Any:
        """`pallas_kernels.prefill_attention` on this mesh. With a `page_table` the pool is split
        over the data-parallel shards: see `decode`."""
        op = functools.partial(
            pallas_kernels.prefill_attention,
            implementation=self.implementation,
            **score_options.given,
            return_lse=return_lse,
        )
        options: dict[str, Any] = {
            "lengths": lengths,
            "segment_ids": segment_ids,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "page_table": page_table,
            "kv_lengths": kv_lengths,
        }
        if self.mesh is None:
            return op(q, k, v, q_offset=q_offset, window=window, **options)
        operands = pallas_kernels.check_prefill(q, k, v, q_offset=q_offset, **options)
        q_offset = operands.q_offset
        rows: dict[str, Any] = {
            "lengths": operands.lengths,
            "segment_ids": operands.segment_ids,
            "page_table": operands.page_table,
            "kv_lengths": operands.kv_lengths,
        }
        # Only a static offset tells the kernels that rows start where their keys start.
        if isinstance(q_offset, int):
            op = functools.partial(op, q_offset=q_offset)
        else:
            rows["q_offset"] = q_offset
        if isinstance(window, jax.Array):
            rows["window"] = window
        else:
            op = functools.partial(op, window=window)
        return self._per_device(self.mesh, op, operands, rows, return_lse=return_lse)

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
        plan: DecodePlan | None = None,
        window: int | None = None,
        score_options: ScoreOptions = PLAIN_SCORES,
        return_lse: bool = False,
    ) -> Float[Array, "B T N H"] | Any:
        """`pallas_kernels.decode_attention` on this mesh; `plan` is the result of `plan_decode`.

        With a `page_table` the pool is split like the rows, over the D data-parallel shards: rows
        from `d * B / D` on use pages from `d * X / D` on, and an entry counts from the first page
        of its row's shard. Raises `ValueError` if B or X is not a multiple of D.
        """
        op = functools.partial(
            pallas_kernels.decode_attention,
            implementation=self.implementation,
            window=window,
            **score_options.given,
            return_lse=return_lse,
        )
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        if self.mesh is None:
            return op(q, k, v, length, **scales, page_table=page_table, plan=plan)
        operands = pallas_kernels.check_decode(q, k, v, length, **scales, page_table=page_table)
        rows = {"length": operands.length, "page_table": operands.page_table, "plan": plan}
        return self._per_device(self.mesh, op, operands, rows, return_lse=return_lse)

    def plan_decode(
        self,
        q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct,
        k: Num[Array, "_ K S H"] | jax.ShapeDtypeStruct,
        length: Int[Array, " B"],
        *,
        page_table: Int[Array, "B P"] | None = None,
        window: int | None = None,
        score_options: ScoreOptions = PLAIN_SCORES,
    ) -> DecodePlan | None:
        """`pallas_kernels.plan_decode` on this mesh. Make the plan once a step and pass it to
        `decode` in all layers with this window. Only the shapes and dtypes of `q` and `k` are used.

        Each data-parallel shard plans its own rows, for the heads that one of its devices has: the
        plans of the shards follow one another, and an entry counts from its shard's first row.
        """
        op = functools.partial(
            pallas_kernels.plan_decode,
            implementation=self.implementation,
            window=window,
            **score_options.given,
        )
        if self.mesh is None:
            return op(q, k, length, page_table=page_table)
        split = _Split.of(self.mesh, q, k, page_table)
        local_q, local_k = split.local_shapes(q, k)

        def local(length, page_table):
            return op(local_q, local_k, length, page_table=page_table)

        spec = P(split.rows)
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
        )(length, page_table)

    def widens_pool(
        self,
        q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct,
        k: Num[Array, "X K page H"] | jax.ShapeDtypeStruct,
        page_table: Int[Array, "B P"] | jax.ShapeDtypeStruct,
    ) -> bool:
        """`pallas_kernels.widens_pool` on this mesh."""
        op = functools.partial(pallas_kernels.widens_pool, implementation=self.implementation)
        if self.mesh is None:
            return op(q, k, page_table)
        local_q, local_k = _Split.of(self.mesh, q, k, page_table).local_shapes(q, k)
        local_table = (local_q.shape[0], page_table.shape[1])
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return op(local_q, local_k, jax.ShapeDtypeStruct(local_table, page_table.dtype))

    @staticmethod
    def _per_device(mesh, op, operands: AttentionOperands, per_row, *, return_lse: bool):
        """`op` on each device's shard of the queries, keys and values of `operands`, and of
        `per_row`: trees of B ... or scalars. `op` returns B T N H, with `return_lse` and B T N."""
        kv = {name: getattr(operands, name) for name in ("k", "v", "k_scale", "v_scale")}
        kv, per_row = (
            {name: value for name, value in arrays.items() if value is not None}
            for arrays in (kv, per_row)
        )
        split = _Split.of(mesh, operands.q, operands.k, operands.page_table)

        def local(q, kv, per_row):
            # A kernel takes whole arrays: each call copies the one head's keys and values.
            if split.share_kv:
                head = jax.lax.axis_index(MODEL) // (split.head_shards // split.kv_heads)
                kv = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1), kv)
            return op(q, **kv, **per_row)

        q_spec = P(split.rows, None, MODEL if split.split_kv or split.share_kv else None)
        kv_spec = P(split.rows, MODEL if split.split_kv else None)
        row_specs = jax.tree.map(lambda leaf: P(split.rows) if leaf.ndim else P(), per_row)
        # The kernels do not declare over which axes their results vary: there is nothing to check.
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(q_spec, kv_spec, row_specs),
            out_specs=(q_spec, q_spec) if return_lse else q_spec,
            check_vma=False,
        )(operands.q, kv, per_row)


DEFAULT = Attention()
"""Attention on the default device, by the implementation that suits it."""


def split_heads(mesh: Mesh, heads: int, kv_heads: int) -> tuple[bool, bool]:
    """(whether each device has some of the key/value heads, whether several devices share each).
    If neither, each device has all query heads and all key/value heads."""
    devices = mesh.shape[MODEL]
    split_kv = kv_heads % devices == 0
    return split_kv, not split_kv and devices % kv_heads == 0 and heads % devices == 0


def merge_attention(
    a: Float[Array, "B T N H"],
    a_lse: Float[Array, "B T N"],
    b: Float[Array, "B T N H"],
    b_lse: Float[Array, "B T N"],
) -> Float[Array, "B T N H"]:
    """Merge attention to two sets of keys from the attention to each and the log-sum-exp of its
    scores, which is -inf for an empty set. If both are empty, the result is zero."""
    largest = jnp.maximum(a_lse, b_lse)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    a_weight = jnp.exp(a_lse - largest)[..., None]
    b_weight = jnp.exp(b_lse - largest)[..., None]
    total = jnp.maximum(a_weight + b_weight, jnp.finfo(jnp.float32).tiny)
    return ((a * a_weight + b * b_weight) / total).astype(a.dtype)


class _Split(NamedTuple):
    """How a mesh divides rows and heads."""

    rows: tuple[str, ...] | None
    """Axes that rows are split over; None where the shards do not divide them."""
    row_shards: int
    """Parts of the rows, and of the pages of a pool; 1 where `rows` is None."""
    split_kv: bool
    """True if each device has some of the key/value heads."""
    share_kv: bool
    """True if several devices share each key/value head."""
    head_shards: int
    """Parts of the query heads; 1 where each device has all."""
    kv_heads: int

    @property
    def local_kv_heads(self) -> int:
        return 1 if self.share_kv else self.kv_heads // self.head_shards

    def local_shapes(self, q, k) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of one device's parts of `q` B T N H and of `k` B K S H or X K page
        H."""
        (rows, queries, heads, head_dim), (pages, _, page, _) = q.shape, k.shape
        local_q = rows // self.row_shards, queries, heads // self.head_shards, head_dim
        local_k = pages // self.row_shards, self.local_kv_heads, page, head_dim
        return jax.ShapeDtypeStruct(local_q, q.dtype), jax.ShapeDtypeStruct(local_k, k.dtype)

    @staticmethod
    def of(mesh: Mesh, q, k, page_table) -> _Split:
        """The split of `q` B T N H and `k`. Raises `ValueError` if shards do not divide a pool and
        its rows."""
        shards = dp_size(mesh)
        batch = q.shape[0]
        pages = k.shape[0]
        if page_table is not None and (batch % shards or pages % shards):
            raise ValueError(
                f"with a page_table, rows and pages must be multiples of the mesh's {shards} "
                f"data-parallel shards, got {batch} and {pages}"
            )
        split_kv, share_kv = split_heads(mesh, q.shape[2], k.shape[1])
        split_rows = batch % shards == 0
        return _Split(
            rows=row_axes(mesh) if split_rows else None,
            row_shards=shards if split_rows else 1,
            split_kv=split_kv,
            share_kv=share_kv,
            head_shards=mesh.shape[MODEL] if split_kv or share_kv else 1,
            kv_heads=k.shape[1],
        )
