"""Pages of the prefix cache in host memory: the programs that copy them there and back, and the
arrays that hold them.

With `EngineOptions.prefix_cache_form`=boundary a page has the lower layers' keys and values, and
the boundary state of each token: all that its upper keys and values come from. They are made again
when the page is loaded. Per token of Llama-3.1-8B that is 72 KiB instead of 128.

Each page is a few arrays in pinned host memory, which a device reads and writes at the speed of its
bus. Programs return and take them like any other arrays, so a page that is loaded waits for the
copy that saves it, and the host for neither.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from ... import __version__
from ...errors import UsageError
from ...model.boundary import project_fused_kv
from ...model.cache import KVCache, Pool, cache_shapes, keys_carry_nan
from ...model.config import Config
from ...model.mesh import dp_size, num_devices
from ...model.params import Leaf
from ...model.rope import group_table, rope_tables
from ...plan.hardware import GIB
from ...process.files import private_directory
from ..engine.host_tier import PageMove
from ..engine.options import EngineOptions
from ..engine.page_store import FINGERPRINT_BYTES, MAX_UNWRITTEN, PageStore
from ..engine.shapes import Shapes
from .exit import wait_at_exit
from .layout import Layout
from .memory import bytes_per_device, host_memory, size_of
from .prefill_chunk import INVALID_PAGE
from .serving_form import Weights

SIZES = (8, 1)
"""Numbers of pages that one program moves, descending."""
LEAST_PAGES = 16
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable with the GiB of pinned memory that JAX may take on a GPU, by default 64."""
WARM_UP = [
    PageMove(saves, INVALID_PAGE, slot) for saves in (True, False) for slot in range(sum(SIZES))
]
"""Moves that run each program once, and change no page."""


@dataclasses.dataclass(frozen=True)
class MoveProgram:
    """Copies pages of the cache to host memory, or back."""

    saves: bool
    pages: int

    def __str__(self) -> str:
        return f"{'save' if self.saves else 'load'} of {self.pages} pages"


PAGE_FORMAT = 1
"""Part of the name of a page on disk besides the version of this package. Raise it with each commit
after which a page with the same key has other bytes or means another thing: another order or dtype
of its arrays, another arithmetic of keys, values, scales or taps."""


@struct.dataclass
class HostPage:
    """One page of all cache layers, or of the lower ones and the states for the others."""

    pools: Pool  # values 2C K page H, scale f32[2C, K, page]; keys of the C layers, then values
    tap: Leaf = None  # f32[D]; see `KVCache.tap`
    boundary: Leaf = None  # 1 K page D/K; see `KVCache.boundary`


def keeps_boundary(options: EngineOptions, config: Config, dtype: Any) -> bool:
    """Return whether a page of the host has boundary states. Raises `UsageError` where they do not
    suffice for the upper keys and values of `config`, as it is served, or are no smaller."""
    if (form := options.prefix_cache_form) == "full":
        return False
    remedies = ("prompt_attention_layers", "boundary_taps", "exact_head")
    found = [name for name in remedies if getattr(config, name)]
    size, heads = config.embed_dim, config.num_kv_heads
    upper = 2 * config.num_projected_groups * heads * config.head_dim
    if form != "boundary":
        reason = " is not one of full, boundary"
    elif not config.num_upper_layers:
        reason = " needs a student: the layers of a teacher have no state in common"
    elif found:
        reason = f": upper keys and values need more than the state, by `{found[0]}`"
    elif options.enable_lora and not options.lora_upper_only:
        reason = " needs `lora_upper_only`: adapters may change what is made of the state"
    elif dtype.itemsize == 1:
        reason = f" does not go with `kv_cache_dtype`={dtype}: what is made again would differ"
    elif size >= upper:
        reason = f": a state has {size} numbers, the upper keys and values of a token {upper}"
    elif size % heads:
        reason = f": the {size} numbers of a state are no multiple of the {heads} key/value heads"
    else:
        return True
    raise _refusal(f"={form}{reason}", "prefix_cache_form")


def num_host_pages(options: EngineOptions, layout: Layout, platform: str) -> int:
    """Pages that `EngineOptions.prefix_cache_host` has room for. Raises `UsageError`."""
    size = options.prefix_cache_host
    if size is None:
        return 0
    if (shards := dp_size(layout.mesh)) > 1:
        raise _refusal(f" is for one data-parallel shard, the mesh has {shards}")
    if jax.process_count() > 1:
        raise _refusal(f" is for one process, there are {jax.process_count()}")
    page = _page_bytes(layout, options.page_size)
    unwritten = 0 if options.prefix_cache_dir is None else MAX_UNWRITTEN
    for name, least in (
        ("prefix_cache_host", LEAST_PAGES + unwritten),
        ("prefix_cache_disk", LEAST_PAGES),
    ):
        if (given := getattr(options, name)) is not None and given < least * page:
            needed = f"{least} pages of this model are {size_of(least * page)}"
            raise _refusal(f"={size_of(given)} is too small: {needed}", name)
    if size > (most := host_memory()):
        text = f"={size_of(size)} exceeds the memory of this machine, {size_of(most)}"
        raise _refusal(text)
    if platform == "gpu" and size > (most := _pinned_limit()) * GIB:
        most = f"the {most} GiB that JAX may pin: raise the variable {PINNED_LIMIT}"
        raise _refusal(f"={size_of(size)} exceeds {most}")
    return size // page - unwritten


def _page_bytes(layout: Layout, page_size: int) -> int:
    """Bytes of a page in host memory: each device has a part, or a copy."""
    return num_devices(layout.mesh) * bytes_per_device(host_page(layout, page_size))


def _pinned_limit() -> int:
    """GiB of host memory that JAX may pin."""
    text = os.environ.get(PINNED_LIMIT, "64")
    if not text.isdecimal():
        raise UsageError(f"the variable {PINNED_LIMIT}={text!r} is not a whole number of GiB")
    return int(text)


def _refusal(text: str, name: str = "prefix_cache_host") -> UsageError:
    return UsageError(f"`{name}`{text}", option=name)


# Programs ---------------------------------------------------------------------


def move_programs(
    layout: Layout, shapes: Shapes, weights: Weights
) -> Iterator[tuple[MoveProgram, Any, tuple]]:
    """(program, jitted function, operands) of each program; none without host memory."""
    if not shapes.host_pages:
        return
    cache, page = layout.cache(shapes), host_page(layout, shapes.page_size)
    placed = jax.tree.map(lambda leaf: leaf.sharding, cache)
    load = jax.jit(
        load_pages, static_argnames="config", donate_argnames="cache", out_shardings=placed
    )
    for count in SIZES:
        save = jax.jit(
            save_pages, static_argnames="config", out_shardings=(_host_sharding(layout),) * count
        )
        ints = layout.array((count,), jnp.int32)
        yield MoveProgram(True, count), save, (layout.config, cache, ints)
        operands = layout.config, weights, cache, ints, ints, (page,) * count
        yield MoveProgram(False, count), load, operands


def host_page(layout: Layout, page_size: int) -> HostPage:
    """The `ShapeDtypeStruct` of every array of a page."""
    cache = cache_shapes(layout.config, 1, page_size, layout.cache_dtype, boundary=layout.boundary)
    save = functools.partial(save_pages, layout.config)
    (page,) = jax.eval_shape(save, cache, jax.ShapeDtypeStruct((1,), jnp.int32))

    def placed(sharding, part):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
        )

    return jax.tree.map(placed, _host_sharding(layout), page)


def save_pages(config: Config, cache: KVCache, pages: Int[Array, " N"]) -> tuple[HostPage, ...]:
    """Each of these pages."""

    def gather(leaf):
        return leaf.at[pages].get(mode="clip")

    layers = slice(None if cache.boundary is None else config.num_lower_layers)
    pools, tap, boundary = jax.tree.map(
        gather, ((*cache.k[layers], *cache.v[layers]), cache.tap, cache.boundary)
    )
    joined = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *pools)
    found = HostPage(joined, tap, boundary and boundary.values[:, None])
    each = tuple(jax.tree.map(lambda leaf, n=n: leaf[n], found) for n in range(len(pages)))
    return jax.device_put(each, jax.memory.Space.Host)


def load_pages(
    config: Config,
    weights: Weights,
    cache: KVCache,
    pages: Int[Array, " N"],
    numbers: Int[Array, " N"],
    saved: tuple[HostPage, ...],
) -> KVCache:
    """The cache with `saved` in these pages, which have these `numbers` in their sequences. Nothing
    is written for page numbers past the pool. Without boundary states neither the weights nor
    `numbers` are read."""
    saved = jax.device_put(saved, jax.memory.Space.Device)
    joined = jax.tree.map(lambda *leaves: jnp.stack(leaves), *saved)
    layers = joined.pools.values.shape[1] // 2
    new = [jax.tree.map(lambda leaf, n=n: leaf[:, n], joined.pools) for n in range(2 * layers)]
    k, v, boundary = new[:layers], new[layers:], None
    if cache.boundary is not None:
        boundary = Pool(joined.boundary[:, 0])
        for pools, upper in zip((k, v), _upper_kv(config, weights, boundary, numbers), strict=True):
            pools += map(Pool, upper)
    return jax.tree.map(
        lambda leaf, new: leaf.at[pages].set(new, mode="drop"),
        cache,
        KVCache(tuple(k), tuple(v), joined.tap, boundary),
    )


def _upper_kv(config: Config, weights: Weights, boundary: Pool, numbers: Int[Array, " N"]):
    """The keys and values of each group in whole pages, J N K page H, as `run_boundary` makes
    them."""
    count, _, size, _ = boundary.values.shape
    s = jnp.swapaxes(boundary.values, 1, 2).reshape(count, size, config.embed_dim)
    tables = rope_tables(config, numbers[:, None] * size + jnp.arange(size))
    rope = group_table(config, tables)
    kv = project_fused_kv(config, weights.kv, weights.kv_bias, weights.k_norm_swiftkv, s, rope)
    return keys_carry_nan(*kv)


def _host_sharding(layout: Layout) -> HostPage:
    """The shardings of a page's arrays: heads are split as those of the cache are."""
    pools: Any = layout.cache_sharding
    tap = pools
    if layout.mesh is not None:
        heads = (*pools.spec, None, None)[1]
        pools = NamedSharding(layout.mesh, PartitionSpec(None, heads))
        tap = NamedSharding(layout.mesh, PartitionSpec())
    pools, tap = (place.with_memory_kind("pinned_host") for place in (pools, tap))
    return HostPage(pools, tap, pools)


# Arrays -----------------------------------------------------------------------


class HostPages:
    """The pages in the slots of `HostTier`, and their files."""

    def __init__(self, layout: Layout, options: EngineOptions, weights: Weights):
        """Open the files of the pages of these weights. Raises `UsageError` for a folder that
        others can read or another process uses, and `OSError` for one that cannot be read."""
        self.store: PageStore | None = None
        """See `HostPagesBase`."""
        self.page_bytes = _page_bytes(layout, options.page_size)
        """See `HostPagesBase`."""
        self._layout = layout
        self._options = options
        self._slots: dict[int, HostPage] = {}
        if (folder := options.prefix_cache_dir) is not None:
            folder = private_directory("prefix_cache_dir", folder)
            if folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    f"`prefix_cache_dir`={folder}: others can read there, and so prompts; chmod "
                    f"700 it, or choose another folder",
                    option="prefix_cache_dir",
                )
            assert options.prefix_cache_disk is not None
            page = host_page(layout, options.page_size)
            self.store = PageStore(
                folder,
                options.prefix_cache_disk,
                self.fingerprint(weights),
                sum(map(_num_bytes, jax.tree.leaves(page))),
                encode=_encode,
                decode=functools.partial(_decode, page),
            )
            wait_at_exit(self.store)

    def start(self, compiled: Mapping[Any, Any]) -> None:
        """Take the programs."""
        self._compiled = compiled

    def move(self, weights: Weights, cache: KVCache, moves: Sequence[PageMove]) -> KVCache:
        """Start these moves; returns the cache after them."""
        for saves, some in itertools.groupby(moves, lambda move: move.saves):
            rest = [*some]
            while rest:
                count = next(size for size in SIZES if size <= len(rest))
                cache = self._call(weights, cache, MoveProgram(saves, count), rest[:count])
                rest = rest[count:]
        return cache

    def _call(
        self, weights: Weights, cache: KVCache, program: MoveProgram, moves: Sequence[PageMove]
    ) -> KVCache:
        pages = np.array([move.page for move in moves], np.int32)
        if not program.saves:
            saved = tuple(self._slots[move.slot] for move in moves)
            numbers = np.array([move.number for move in moves], np.int32)
            return self._compiled[program](weights, cache, pages, numbers, saved)
        for move in moves:  # the memory of those before comes free
            self.drop(move.slot)
        saved = self._compiled[program](cache, pages)
        self._slots.update(zip((move.slot for move in moves), saved, strict=True))
        return cache

    def get(self, slot: int) -> HostPage:
        """See `HostPagesBase`."""
        return self._slots[slot]

    def put(self, slot: int, page: HostPage) -> None:
        """See `HostPagesBase`."""
        self._slots[slot] = page

    def drop(self, slot: int) -> None:
        """See `HostPagesBase`."""
        self._slots.pop(slot, None)

    def fingerprint(self, weights: Weights) -> bytes:
        """See `HostMemory`."""
        return fingerprint(weights, self._layout, self._options)


def _encode(page: HostPage) -> list[np.ndarray]:
    """The bytes of a page; waits for the copy that saves it."""
    return [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(page)]


def _decode(page: HostPage, content: memoryview) -> HostPage:
    """The page of `_encode`, in pinned memory; `page` has the shapes of its arrays."""
    leaves, tree = jax.tree.flatten(page)
    arrays = []
    for leaf, stop in zip(leaves, itertools.accumulate(map(_num_bytes, leaves)), strict=True):
        part = content[stop - _num_bytes(leaf) : stop]
        arrays.append(np.frombuffer(part, leaf.dtype).reshape(leaf.shape))
    places = [leaf.sharding for leaf in leaves]
    return jax.tree.unflatten(tree, jax.device_put(arrays, places))


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def fingerprint(weights: Weights, layout: Layout, options: EngineOptions) -> bytes:
    """A digest of the weights as they are served, the architecture, the cut, the format of the
    cache, the devices, the arithmetic, and the versions of this package and of the format."""
    from ...checkpoints.digest import digest

    places = layout.replicated
    assert places is not None
    # The keys of pages say on which adapter they depend.
    leaves = jax.tree.leaves(dataclasses.replace(weights, adapters=(), speculator=None))
    facts = (
        __version__,
        PAGE_FORMAT,
        layout.config,
        layout.boundary,
        str(layout.cache_dtype),
        options.page_size,
        options.quantize_activations,
        sorted({device.device_kind for device in places.device_set}),
        layout.mesh and dict(layout.mesh.shape),
        [(leaf.shape, str(leaf.dtype), digest(leaf)) for leaf in leaves],
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=FINGERPRINT_BYTES).digest()
