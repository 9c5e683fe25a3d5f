"""The configurations of kernels: those that a model needs, a standard set, and each as a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from ..model.attention import split_heads
from ..model.config import Config
from ..model.mesh import MODEL
from ..pallas_kernels import choose
from ..pallas_kernels.choice import FROM_ROWS, Choice, choose_product
from ..pallas_kernels.device import HEAD_DIMS, Device
from ..pallas_kernels.selfcheck import Case, Row

PAGE_SIZE = 128
"""Page size of the standard set, the engine's default."""
EIGHT_BITS = ("float8_e4m3fn", "int8")
POSITIONS = 1100
"""Positions of a row: several blocks of every kernel, the last of them cut."""
KV_HEADS = 2
DTYPES = {
    "hopper": ("bfloat16", "float16"),
    "tpu": ("bfloat16", "float32"),
    "cudnn": ("bfloat16", "float16"),
}
"""Dtypes of queries that each implementation takes, the usual one first."""


@dataclasses.dataclass(frozen=True, order=True)
class KernelConfig:
    """Properties for which a kernel is compiled, but for the sizes of the batch."""

    op: Literal["prefill", "decode", "gradient", "experts", "fp8_product", "fp8_rows"]
    """Attention, or the products of experts or FP8 matrices and the rows of the latter, which have
    widths and no heads."""
    head_dim: int
    queries_per_kv_head: int
    dtype: str
    """Dtype of the queries."""
    cache_dtype: str
    """Dtype of the keys and values as they are stored."""
    page_size: int | None = None
    """Positions of a page; None for keys and values row by row."""
    packed: bool = False
    """True if rows hold several documents (`segment_ids`)."""
    windowed: bool = False
    """True if there is a window, of any size: in the check it has one of its own."""
    parts: bool = False
    """True if attention is to a part of the keys: the log-sum-exp is returned, and prefill takes
    `kv_lengths`."""
    embed_dim: int = 0
    """Width of the model and of its, or an expert's, MLP."""
    mlp_dim: int = 0

    @property
    def description(self) -> str:
        """All but the op, for people."""
        if not self.head_dim:
            return f"width {self.embed_dim}, MLP {self.mlp_dim}, {self.dtype}"
        heads = f"{self.queries_per_kv_head} queries per key/value head"
        words = [f"head dim {self.head_dim}", heads, self.dtype]
        if self.cache_dtype != self.dtype:
            words.append(f"{self.cache_dtype} cache")
        if self.page_size is not None:
            words.append(f"pages of {self.page_size}")
        kinds = {"packed": self.packed, "with a window": self.windowed, "in parts": self.parts}
        return ", ".join(words + [word for word, applies in kinds.items() if applies])

    def __str__(self) -> str:
        return f"{self.op} ({self.description})"


def serving_configs(
    config: Config,
    dtype: Any,
    cache_dtype: Any,
    page_size: int,
    mesh: Mesh | None = None,
    *,
    fp8_products: bool = False,
) -> list[KernelConfig]:
    """Return the configurations that an engine needs for a model with weights of `dtype`, with
    `fp8_products` also of float8 by float8. Upper layers with two caches attend to each in
    parts."""
    kinds: list[dict[str, Any]] = [{"windowed": windowed} for windowed in _windowed(config)]
    if config.has_two_caches:
        kinds.append({"parts": True})  # these layers have no windows
    found = [
        _of(op, config, dtype, cache_dtype, mesh, page_size=page_size, **kind)
        for kind in kinds
        for op in ("prefill", "decode")
    ] + _experts(config, dtype)
    if fp8_products:
        found += _fp8(jnp.dtype(dtype).name, config.embed_dim, config.mlp_dim)
    return found


def model_configs(config: Config, implementation: str) -> list[KernelConfig]:
    """Return the configurations that a model needs on one device: for serving with every cache
    format, in FP8 too, and for training."""
    dtype = DTYPES[implementation][0]
    serving = [
        one
        for cache_dtype in (dtype, *EIGHT_BITS)
        for one in serving_configs(config, dtype, cache_dtype, PAGE_SIZE)
    ]
    fp8 = _fp8(dtype, config.embed_dim, config.mlp_dim)
    return [*serving, *training_configs(config, dtype), *fp8]


def training_configs(config: Config, dtype: Any, mesh: Mesh | None = None) -> list[KernelConfig]:
    """Return the configurations that distillation on packed rows needs."""
    return _packed_rows(("prefill", "gradient"), config, dtype, mesh)


def forward_configs(config: Config, dtype: Any, mesh: Mesh | None = None) -> list[KernelConfig]:
    """Return the configurations that a pass over whole rows without a gradient needs."""
    return _packed_rows(("prefill",), config, dtype, mesh)


def standard_configs(implementation: str) -> list[KernelConfig]:
    """Every head dim with every cache format, one and several queries per key/value head, whole
    rows with and without documents, and their gradients; windows and parts at one head dim; experts
    and FP8 products of Qwen3-30B-A3B's widths."""
    dtype, other = DTYPES[implementation]
    caches = (dtype, *EIGHT_BITS)
    found = []
    for head_dim in HEAD_DIMS:
        found += _pages(head_dim, 4, dtype, caches)
        found += _rows(head_dim, dtype)
    for queries in (1, 8):
        found += _pages(128, queries, dtype, (dtype,))
    found += _pages(128, 4, other, (other,))
    found.append(KernelConfig("gradient", 128, 4, other, other, packed=True))
    found += _pages(128, 4, dtype, caches, windowed=True)
    found += _rows(128, dtype, windowed=True)
    found += _pages(128, 4, dtype, caches, parts=True)
    found.append(_product("experts", dtype, 2048, 768))
    return found + _fp8(dtype, 2048, 768)


def _pages(head_dim: int, queries: int, dtype: str, caches: Sequence[str], **kind: bool):
    """Serving from pages with each of these formats."""
    return [
        KernelConfig(op, head_dim, queries, dtype, cache, PAGE_SIZE, **kind)
        for cache in caches
        for op in ("prefill", "decode")
    ]


def _rows(head_dim: int, dtype: str, **kind: bool):
    """Whole rows with and without documents, and their gradients."""
    return [
        KernelConfig(op, head_dim, 4, dtype, dtype, packed=packed, **kind)
        for op in ("prefill", "gradient")
        for packed in (False, True)
    ]


def _packed_rows(ops, config: Config, dtype, mesh) -> list[KernelConfig]:
    """Packed documents; with two caches also heads of twice the size, in which upper layers have
    the queries and keys of both side by side (`packed_attention.two_cache_attention`)."""
    kinds: list[dict[str, Any]] = [{"windowed": windowed} for windowed in _windowed(config)]
    if config.has_two_caches:
        kinds.append({"head_dim": 2 * config.head_dim})  # these layers have no windows
    return [
        _of(op, config, dtype, dtype, mesh, packed=True, **kind) for kind in kinds for op in ops
    ] + _experts(config, dtype)


def _experts(config: Config, dtype: Any) -> list[KernelConfig]:
    """The products of a mixture of experts; nothing for other models."""
    if not config.num_experts:
        return []
    return [_product("experts", jnp.dtype(dtype).name, config.embed_dim, config.mlp_dim)]


def _fp8(dtype: str, embed_dim: int, mlp_dim: int) -> list[KernelConfig]:
    return [_product(op, dtype, embed_dim, mlp_dim) for op in ("fp8_product", "fp8_rows")]


def _product(
    op: Literal["experts", "fp8_product", "fp8_rows"], dtype: str, embed_dim: int, mlp_dim: int
) -> KernelConfig:
    return KernelConfig(op, 0, 0, dtype, dtype, embed_dim=embed_dim, mlp_dim=mlp_dim)


def _windowed(config: Config) -> list[bool]:
    """True if layers have a window: both where some do and some do not."""
    return list(dict.fromkeys(kind.window is not None for kind in config.kinds))


def _of(
    op, config: Config, dtype, cache_dtype, mesh, *, head_dim: int | None = None, **fields: Any
) -> KernelConfig:
    return KernelConfig(
        op=op,
        head_dim=head_dim or config.head_dim,
        queries_per_kv_head=_queries_per_kv_head(config, mesh),
        dtype=jnp.dtype(dtype).name,
        cache_dtype=jnp.dtype(cache_dtype).name,
        **fields,
    )


def _queries_per_kv_head(config: Config, mesh: Mesh | None) -> int:
    """Query heads for each key/value head on one device: fewer where several devices share one."""
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    if mesh is not None and split_heads(mesh, heads, kv_heads)[1]:
        return heads // mesh.shape[MODEL]
    return heads // kv_heads


# As calls ----------------------------------------------------------------------


def case_of(config: KernelConfig, positions: int = POSITIONS) -> Case:
    """The call of attention that `config` is checked with, on rows of about so many positions.

    A row of whole positions has, packed, three documents and padding. From pages, prefill is a
    chunk as the engine packs it: each row the tokens of a page, here of two prompts, and an idle
    row; in parts the visible positions end inside the page of a row's queries, right before it, one
    before the end of an earlier page, and before the first; and in a row of a third prompt they are
    all that there are. Decoding is a step of the engine, with an idle row.
    """
    window = None
    if config.windowed:  # a part of a row: blocks before it are passed over, others are cut by it
        window = max(1, positions // 3)
    if config.op == "gradient" or config.page_size is None:
        if config.op == "decode":
            raise ValueError(f"{config}: only a cache of pages is checked")
        third = positions // 3
        padding = positions // 16
        documents = (1, third, positions - padding - third - 1)
        rows = (Row(documents=documents if config.packed else ()),)
        queries = keys = positions
    elif config.op == "decode":
        # On TPUs blocks of two heads have up to 32 pages.
        page = config.page_size
        queries = 1
        keys = page * max(3, -(-4 * positions // page))
        lengths = (keys, 0, 1, page + 5, page, keys // 2 + 1, page + 1, keys - 1)
        rows = tuple(Row(length - 1) for length in lengths)
    else:
        queries = page = config.page_size
        pages = max(3, -(-positions // page))
        keys = pages * page
        rows = (
            Row(0, page, page // 2 + 1, 0),
            Row((pages - 2) * page, page, (pages - 2) * page, 0),
            Row((pages - 1) * page, page // 2 + 3, 2 * page - 1, 0),
            Row(0, 1, 0, 1),
            Row(0, 0, page, 1),
            Row(page, page, keys, 2),
        )
        if not config.parts:
            rows = tuple(row._replace(kv_length=None) for row in rows[:-1])
    return Case(
        config.op,  # pyright: ignore[reportArgumentType]
        rows,
        queries,
        KV_HEADS * config.queries_per_kv_head,
        KV_HEADS,
        keys,
        config.head_dim,
        config.dtype,
        config.cache_dtype,
        None if config.op == "gradient" else config.page_size,
        window,
        return_lse=config.parts,
    )


def choose_for(config: KernelConfig, device: Device) -> Choice:
    """The implementation that runs `config` on `device` where none is named, and why that is not
    the device's kernels."""
    widths = config.embed_dim, config.mlp_dim
    calls = (*widths, config.dtype), (*widths[::-1], config.dtype)
    if config.op == "experts":
        return choose_product(device.kernels, "grouped", *calls)
    if config.op == "fp8_product":
        return choose_product(
            device.kernels, "fp8_product", *((FROM_ROWS, *call) for call in calls)
        )
    if config.op == "fp8_rows":
        return choose_product(device.kernels, "fp8_rows", (config.mlp_dim, config.dtype))
    return choose(device, case_of(config).spec)
