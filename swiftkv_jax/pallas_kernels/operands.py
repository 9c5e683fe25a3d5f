"""The operands of an attention op as one value, and all that an implementation may refuse of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from .gradients import without_gradient
from .score_options import PLAIN_SCORES, ScoreOptions

Op = Literal["prefill", "decode"]


@struct.dataclass
class AttentionOperands:
    """The arrays of a call of `prefill_attention` or `decode_attention`, checked. Integers are
    int32; None stands for what the call does not have.

    Position s of row b lies at `k[b, :, s]`; with a page table, at position `s % page` of page
    `page_table[b, s // page]` of the pool. Query t of row b stands at `q_offset[b] + t`, or in
    decoding at `length[b] - T + t`, and sees the positions up to its own that also lie before
    `kv_lengths[b]` and have its segment id; from `lengths[b]` on it sees nothing. With scales a
    value is what is stored times its scale.
    """

    q: Any  # B T N H
    k: Any  # B K S H, or with a page table X K page H
    v: Any  # as k
    length: Any = None  # B: valid positions of each row; of decode alone
    q_offset: Any = None  # B, or as the caller gave it: an int is static
    lengths: Any = None  # B: real queries of each row
    segment_ids: Any = None  # B T
    k_scale: Any = None  # k without H
    v_scale: Any = None  # k without H
    page_table: Any = None  # B P
    kv_lengths: Any = None  # B: visible positions of each row

    @property
    def keys(self) -> int:
        """Positions of a row: S, or P page."""
        if self.page_table is None:
            return self.k.shape[2]
        return self.k.shape[2] * self.page_table.shape[1]

    def without_gradient(
        self, refusal: str | tuple[str, str], names: tuple[str, ...] = ("q", "k", "v")
    ) -> AttentionOperands:
        """The same operands; differentiating those named raises `NotImplementedError`: see
        `gradients.without_gradient`."""
        arrays: Any = without_gradient(refusal, tuple(getattr(self, name) for name in names))
        changes: dict[str, Any] = dict(zip(names, arrays, strict=True))
        return dataclasses.replace(self, **changes)

    def widened(self) -> AttentionOperands:
        """The same operands with scaled keys and values in the dtype of `q`."""

        def widen(x, scale):
            if scale is None:
                return x
            return (x.astype(jnp.float32) * scale[..., None]).astype(self.q.dtype)

        k = widen(self.k, self.k_scale)
        v = widen(self.v, self.v_scale)
        return dataclasses.replace(self, k=k, v=v, k_scale=None, v_scale=None)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """All that an implementation may refuse of a call: its shapes, dtypes and options."""

    op: Op
    q: jax.ShapeDtypeStruct
    k: jax.ShapeDtypeStruct
    page_table: jax.ShapeDtypeStruct | None = None
    packed: bool = False
    """True if there are `segment_ids`."""
    kv_lengths: bool = False
    window: int | Literal["array"] | None = None
    score_options: ScoreOptions = PLAIN_SCORES
    return_lse: bool = False

    @classmethod
    def of(cls, op: Op, operands: AttentionOperands, window: Any = None, **options: Any):
        """Return the spec of a call with these operands, `window`, and `options`:
        `score_options`, `return_lse`."""
        arrays = operands.q, operands.k, operands.page_table
        return cls(
            op,
            *jax.tree.map(_shape_of, arrays),
            packed=operands.segment_ids is not None,
            kv_lengths=operands.kv_lengths is not None,
            window=window if window is None or isinstance(window, int) else "array",
            **options,
        )


def _shape_of(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def page_size(call: AttentionOperands | AttentionSpec) -> int | None:
    """Positions of a page of the pool; None for a call without a page table."""
    if call.page_table is None:
        return None
    return call.k.shape[2]
