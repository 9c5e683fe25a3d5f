"""Pages of the prefix cache in host memory: the programs that copy them there and back, and the
arrays that hold them.

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
from ...model.cache import KVCache, Pool, cache_shapes
from ...model.mesh import dp_size, num_devices
from ...model.params import Leaf
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
    """One page of all cache layers."""

    pools: Pool  # values 2C K page H, scale f32[2C, K, page]; keys of the C layers, then values
    tap: Leaf = None  # f32[D]; see `KVCache.tap`


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


def move_programs(layout: Layout, shapes: Shapes) -> Iterator[tuple[MoveProgram, Any, tuple]]:
    """(program, jitted function, operands) of each program; none without host memory."""
    if not shapes.host_pages:
        return
    cache, page = layout.cache(shapes), host_page(layout, shapes.page_size)
    placed = jax.tree.map(lambda leaf: leaf.sharding, cache)
    load = jax.jit(load_pages, donate_argnames="cache", out_shardings=placed)
    for count in SIZES:
        save = jax.jit(save_pages, out_shardings=(_host_sharding(layout),) * count)
        numbers = layout.array((count,), jnp.int32)
        yield MoveProgram(True, count), save, (cache, numbers)
        yield MoveProgram(False, count), load, (cache, numbers, (page,) * count)


def host_page(layout: Layout, page_size: int) -> HostPage:
    """The `ShapeDtypeStruct` of every array of a page."""
    cache = cache_shapes(layout.config, 1, page_size, layout.cache_dtype)
    (page,) = jax.eval_shape(save_pages, cache, jax.ShapeDtypeStruct((1,), jnp.int32))
    host = _host_sharding(layout)

    def placed(sharding):
        return lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return HostPage(
        jax.tree.map(placed(host.pools), page.pools), jax.tree.map(placed(host.tap), page.tap)
    )


def save_pages(cache: KVCache, pages: Int[Array, " N"]) -> tuple[HostPage, ...]:
    """Each of these pages of all layers."""

    def gather(leaf):
        return leaf.at[pages].get(mode="clip")

    pools = [jax.tree.map(gather, pool) for pool in (*cache.k, *cache.v)]
    joined = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *pools)
    found = HostPage(joined, None if cache.tap is None else gather(cache.tap))
    each = tuple(jax.tree.map(lambda leaf, n=n: leaf[n], found) for n in range(len(pages)))
    return jax.device_put(each, jax.memory.Space.Host)


def load_pages(cache: KVCache, pages: Int[Array, " N"], saved: tuple[HostPage, ...]) -> KVCache:
    """The cache with `saved` in these pages. Nothing is written for page numbers past the pool."""
    saved = jax.device_put(saved, jax.memory.Space.Device)
    joined = jax.tree.map(lambda *leaves: jnp.stack(leaves), *saved)

    def scatter(leaf, new):
        return leaf.at[pages].set(new, mode="drop")

    pools = [
        jax.tree.map(lambda leaf, new, n=number: scatter(leaf, new[:, n]), pool, joined.pools)
        for number, pool in enumerate((*cache.k, *cache.v))
    ]
    layers = len(cache.k)
    tap = None if cache.tap is None else scatter(cache.tap, joined.tap)
    return KVCache(tuple(pools[:layers]), tuple(pools[layers:]), tap)


def _host_sharding(layout: Layout) -> HostPage:
    """The shardings of a page's arrays: heads are split as those of the cache are."""
    pools: Any = layout.cache_sharding
    tap = pools
    if layout.mesh is not None:
        heads = (*pools.spec, None, None)[1]
        pools = NamedSharding(layout.mesh, PartitionSpec(None, heads))
        tap = NamedSharding(layout.mesh, PartitionSpec())
    return HostPage(pools.with_memory_kind("pinned_host"), tap.with_memory_kind("pinned_host"))


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

    def move(self, cache: KVCache, moves: Sequence[PageMove]) -> KVCache:
        """Start these moves; returns the cache after them."""
        for saves, some in itertools.groupby(moves, lambda move: move.saves):
            rest = [*some]
            while rest:
                count = next(size for size in SIZES if size <= len(rest))
                cache = self._call(cache, MoveProgram(saves, count), rest[:count])
                rest = rest[count:]
        return cache

    def _call(self, cache: KVCache, program: MoveProgram, moves: Sequence[PageMove]) -> KVCache:
        pages = np.array([move.page for move in moves], np.int32)
        if not program.saves:
            saved = tuple(self._slots[move.slot] for move in moves)
            return self._compiled[program](cache, pages, saved)
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
        str(layout.cache_dtype),
        options.page_size,
        options.quantize_activations,
        sorted({device.device_kind for device in places.device_set}),
        layout.mesh and dict(layout.mesh.shape),
        [(leaf.shape, str(leaf.dtype), digest(leaf)) for leaf in leaves],
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=FINGERPRINT_BYTES).digest()
