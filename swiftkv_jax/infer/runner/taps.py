"""The boundary state of the token before each (`Config.boundary_taps`), for tokens over a cache.

Beside its keys and values, each page has the state of the last token that was written to it
(`KVCache.tap`). It is right wherever a sequence goes on: in a full page it is that of the page's
last token, for all that share it, and a page that is partly filled belongs to one sequence, or is a
copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from .prefill_chunk import QueryTiles

States = Float[Array, "X D"]
TokenBefore = Callable[[States, Float[Array, "A T D"]], tuple[Float[Array, "A T D"], States]]
"""The states of the tokens before, from the states in the cache and those of the tokens that run;
and the cache's with those of the tokens."""


def chunk_before(
    tiles: QueryTiles, gathered_pages, page_size: int, sharding: NamedSharding | None
) -> TokenBefore:
    """`TokenBefore` of the packed tokens of a chunk; zeros before position 0. `sharding` is that of
    the states, on a mesh."""

    def before(states, s, tiles: QueryTiles, gathered):
        s = jnp.squeeze(s, 0)  # one shard
        size = tiles.query_end - tiles.query_start
        last = jnp.maximum(tiles.source + size - 1, 0)
        written = states.at[tiles.page].set(s[last].astype(states.dtype), mode="drop")
        # A tile that begins inside its page goes on where an earlier chunk ended. One that begins a
        # page follows the page before it, which this chunk may write: for this request, or for
        # another one that begins with the same tokens.
        number = jnp.maximum(tiles.page_start // page_size - 1, 0)
        page = jnp.take_along_axis(tiles.page_table, number[:, None], axis=1)[:, 0]
        page = page if gathered is None else gathered[page]
        begins_page = (tiles.query_start == 0)[:, None]
        first = jnp.where(
            begins_page, written.at[page].get(mode="clip"), states.at[tiles.page].get(mode="clip")
        )
        first = jnp.where((tiles.page_start + tiles.query_start > 0)[:, None], first, 0)
        source = jnp.where(size > 0, tiles.source, s.shape[0])
        shifted = jnp.roll(s, 1, axis=0).at[source].set(first.astype(s.dtype), mode="drop")
        return shifted[None], written

    run = _on_each_device(before, sharding)
    return lambda states, s: run(states, s, tiles, gathered_pages)


def decode_before(
    page: Int[Array, " B"],
    page_before: Int[Array, " B"],
    length: Int[Array, " B"],
    sharding: NamedSharding | None,
) -> TokenBefore:
    """`TokenBefore` of one token of each sequence, at position `length`: `page` is where it is
    written, or a number past the pool, and `page_before` has the position before it."""

    def before(states, s, page, page_before, length):
        first = jnp.where((length > 0)[:, None], states.at[page_before].get(mode="clip"), 0)
        written = states.at[page].set(s[:, 0].astype(states.dtype), mode="drop")
        return first.astype(s.dtype)[:, None], written

    run = _on_each_device(before, sharding)
    return lambda states, s: run(states, s, page, page_before, length)


def _on_each_device(before: Callable[..., Any], sharding: NamedSharding | None):
    """Run `before` on each device's part of the states; page numbers count within that part."""
    if sharding is None:
        return before
    spec = sharding.spec
    return lambda *operands: jax.shard_map(
        before, mesh=sharding.mesh, in_specs=(spec,) * len(operands), out_specs=spec
    )(*operands)
