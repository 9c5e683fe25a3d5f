"""The shapes that are measured: one table, in order of importance, with exact counts of their work.

Conventions. FLOPs: a multiply-add is two; only the (query, key) pairs that the mask lets through
count, so a causal square counts as half; a pair costs 4 H N forward (scores and weighted values)
and 3.5 times that forward and backward (two products forward, five backward, the scores computed
again included). Bytes of decoding: keys and values of the valid positions and their scales, each
once; queries, results and page tables are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from swiftkv_jax.plan.roofline import Roofline

BACKWARD = 3.5
"""Operations of forward and backward over those of forward."""


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Causal attention of whole rows, of a chunk at `offset` in a longer cache, or of packed
    documents."""

    name: str
    batch: int
    queries: int  # T
    keys: int  # S
    heads: int = 32  # N
    kv_heads: int = 8  # K
    head_dim: int = 128  # H
    offset: int = 0
    packed: bool = False
    gradient: bool = False
    """Forward and backward, as in training."""

    unit = "TFLOP/s"

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents of every row: one, or many between a 64th and half of the
        row."""
        if not self.packed:
            return [self.queries]
        rng = np.random.default_rng(self.queries)
        lengths = []
        left = self.queries
        while left:
            lengths.append(min(left, max(1, int(self.queries * 2 ** rng.uniform(-6, -1)))))
            left -= lengths[-1]
        return lengths

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that the mask lets through, in all rows."""
        return self.batch * sum(n * (n + 1) // 2 + n * self.offset for n in self.documents)

    @property
    def work(self) -> float:
        """FLOPs."""
        return self.pairs * 4 * self.head_dim * self.heads * (BACKWARD if self.gradient else 1)

    @property
    def input_bytes(self) -> int:
        """Queries, keys and values in bfloat16."""
        return (
            2
            * self.batch
            * self.head_dim
            * (
                self.queries * self.heads * (2 if self.gradient else 1)
                + 2 * self.keys * self.kv_heads
            )
        )


@dataclasses.dataclass(frozen=True)
class Decode:
    """One new token a slot against a cache of `keys` positions."""

    name: str
    batch: int
    keys: int  # S
    cache: str = "bfloat16"
    page: int | None = None
    table: int | None = None
    """Positions that a row's page table has room for; None: `keys`."""
    ragged: bool = False
    """Slots of all lengths instead of full ones."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    unit = "GB/s"
    queries = 1
    gradient = False

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.keys] * self.batch
        return [
            int(n)
            for n in np.random.default_rng(self.keys).integers(
                1, self.keys, self.batch, endpoint=True
            )
        ]

    @property
    def work(self) -> float:
        """Bytes."""
        return sum(self.lengths) * self.position_bytes

    @property
    def input_bytes(self) -> int:
        return self.batch * self.keys * self.position_bytes

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all heads."""
        size = jnp.dtype(self.cache).itemsize
        return 2 * self.kv_heads * (self.head_dim * size + (4 if size == 1 else 0))


Shape = Prefill | Decode


def rate(shape: Shape, seconds: float) -> float:
    """Work per second in `shape.unit`."""
    return shape.work / seconds / (1e12 if shape.unit == "TFLOP/s" else 1e9)


def roof(shape: Shape, roofline: Roofline) -> float:
    """The highest `rate` that the roofline allows: matrix products for prefill, copies for
    decode."""
    return roofline.flops / 1e12 if shape.unit == "TFLOP/s" else roofline.bandwidth / 1e9


def _causal(name: str, length: int, batch: int, **options) -> Prefill:
    return Prefill(name, batch, length, length, **options)


_FP8 = "float8_e4m3fn"
_INT8 = "int8"

FULL: tuple[Shape, ...] = (
    _causal("prefill 8B 8k", 8192, 2),
    Decode("decode 64x2k bf16", 64, 2048),
    Decode("decode 1x32k bf16", 1, 32768),
    Decode("decode 64x2k fp8", 64, 2048, _FP8),
    Decode("decode 1x32k fp8", 1, 32768, _FP8),
    _causal("prefill 8B 4k", 4096, 4),
    _causal("prefill 8B 2k", 2048, 8),
    _causal("prefill 8B 4k, B=1", 4096, 1),
    _causal("prefill 8 heads 4k, B=1", 4096, 1, heads=8, kv_heads=1),
    _causal("train 8B 8k", 8192, 2, gradient=True),
    Prefill("chunk 8B 2k at 6k", 8, 2048, 8192, offset=6144),
    _causal("packed 8B 8k", 8192, 2, packed=True),
    _causal("prefill 8B 16k", 16384, 1),
    _causal("prefill 8B 32k", 32768, 1),
    _causal("train 8B 8k packed", 8192, 2, packed=True, gradient=True),
    _causal("prefill 70B 8k", 8192, 1, heads=64),
    Decode("decode 64x2k paged", 64, 2048, page=256),
    Decode("decode 64x2k in a table of 128k", 64, 2048, page=256, table=131_072),
    Decode("decode 64x2k int8", 64, 2048, _INT8),
    Decode("decode 16x8k bf16", 16, 8192),
    Decode("decode 256x1k bf16", 256, 1024),
    Decode("decode 64x2k ragged", 64, 2048, ragged=True),
    _causal("train 8B 32k", 32768, 1, gradient=True),
    _causal("train 8B 32k packed", 32768, 1, packed=True, gradient=True),
    *(
        _causal(f"prefill H{head_dim} 4k", 4096, 4, head_dim=head_dim)
        for head_dim in (64, 256, 80, 96)
    ),
    Decode("decode 16x8k fp8", 16, 8192, _FP8),
    Decode("decode 256x1k fp8", 256, 1024, _FP8),
    Decode("decode 1x32k int8", 1, 32768, _INT8),
    Decode("decode 1x32k paged", 1, 32768, page=256),
    Decode("decode 16x8k int8", 16, 8192, _INT8),
    Decode("decode 256x1k int8", 256, 1024, _INT8),
    Decode("decode 16x8k paged", 16, 8192, page=256),
    Decode("decode 256x1k paged", 256, 1024, page=256),
    Decode("decode 64x2k fp8 paged", 64, 2048, _FP8, page=256),
    *(_causal(f"prefill 8B {n}k, B=1", 1024 * n, 1) for n in (2, 8)),
    *(_causal(f"prefill 8B {n}k, B=4", 1024 * n, 4) for n in (2, 8, 16)),
    *(_causal(f"prefill 8 heads {n}k, B=1", 1024 * n, 1, heads=8, kv_heads=1) for n in (2, 8, 16)),
    *(
        _causal(f"prefill 8 heads {n}k, B=4", 1024 * n, 4, heads=8, kv_heads=1)
        for n in (2, 4, 8, 16)
    ),
)

SMOKE: tuple[Shape, ...] = (
    _causal("prefill", 128, 2, heads=4, kv_heads=2, head_dim=64),
    Prefill("chunk", 1, 32, 128, 4, 2, 64, offset=96),
    _causal("packed", 128, 1, heads=4, kv_heads=2, head_dim=64, packed=True),
    _causal("train", 128, 1, heads=4, kv_heads=2, head_dim=64, gradient=True),
    _causal("train packed", 128, 1, heads=4, kv_heads=2, head_dim=64, packed=True, gradient=True),
    *(
        Decode(f"decode {cache}", 2, 256, cache, heads=4, kv_heads=2, head_dim=64)
        for cache in ("bfloat16", _FP8, _INT8)
    ),
    Decode("decode paged", 2, 512, page=256, heads=4, kv_heads=2, head_dim=64),
    Decode("decode wide table", 2, 256, page=128, table=1024, heads=4, kv_heads=2, head_dim=64),
    Decode("decode ragged", 3, 256, ragged=True, heads=4, kv_heads=2, head_dim=64),
)

TABLES: dict[str, tuple[Shape, ...]] = {"full": FULL, "smoke": SMOKE}


@dataclasses.dataclass(frozen=True)
class Target:
    """Requirement of a release on one row: at least `value` of `measure`."""

    row: str
    measure: str
    """Field of a result: `ratio_to_cudnn`, `rate` (in the row's unit) or `share_of_roofline`."""
    value: float


TARGETS = (
    *(
        Target(f"prefill {heads} {size}", "ratio_to_cudnn", 1.0)
        for heads in ("8B", "8 heads")
        for size in (f"{n}k, B={batch}" for n in (2, 4, 8) for batch in (1, 4))
        if (heads, size) != ("8B", "4k, B=4")
    ),
    *(
        Target(f"prefill {row}", "ratio_to_cudnn", 1.0)
        for row in ("8B 4k", "8B 16k", "8B 16k, B=4", "8 heads 16k, B=1", "8 heads 16k, B=4")
    ),
    *(Target(f"prefill 8B {size}", "rate", 600.0) for size in ("8k", "16k", "32k")),
    *(
        Target(f"decode {row}", "share_of_roofline", share)
        for row, share in {
            "64x2k bf16": 0.9,
            "64x2k fp8": 0.9,
            "64x2k ragged": 0.9,
            "1x32k bf16": 0.85,
            "1x32k fp8": 0.85,
        }.items()
    ),
)


def required(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(what a release requires of a row, whether its figures meet that), as far as it has them: its
    `name`, `unit`, and fields named like measures of targets."""
    found = []
    for target in TARGETS:
        if target.row == row["name"] and row.get(target.measure) is not None:
            bound = {
                "rate": f"≥ {target.value:g} {row['unit']}",
                "share_of_roofline": f"≥ {target.value:.0%}",
                "ratio_to_cudnn": f"≥ {target.value:g} of cuDNN's speed",
            }[target.measure]
            found.append((bound, row[target.measure] >= target.value))
    return found


def score_bytes(shape: Shape) -> float:
    """Memory that a whole float32 array of scores would need: about two copies forward, four with
    the backward pass."""
    return (
        (4 if shape.gradient else 2)
        * 4
        * math.prod((shape.batch, shape.heads, shape.queries, shape.keys))
    )
