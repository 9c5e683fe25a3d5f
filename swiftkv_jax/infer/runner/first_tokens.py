"""First tokens of texts that keep their own upper keys and values (`Config.exact_head`).

Such a token sees only itself: what attention returns are its values. So a chunk of prefill runs the
upper layers for its first tokens without reading the cache, and puts their keys and values in the
place of those from the boundary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...model.attention import Attention
from ...model.config import Config
from ...model.decoder_layers import self_layer
from ...model.packed_attention import head_major
from ...model.rope import rope_tables, table_of
from .adapters import with_adapters
from .prefill_chunk import QueryTiles
from .serving_form import Weights


class FirstKV(NamedTuple):
    """Output of an upper layer for R first tokens on each of A data-parallel shards."""

    x: Float[Array, "A R D"]
    """Hidden states after the layer."""
    k: Float[Array, "A R K H"]
    v: Float[Array, "A R K H"]


@dataclasses.dataclass(frozen=True)
class FirstTokens:
    """Places of first tokens among the packed tokens of a chunk."""

    index: Int[Array, "A R"]
    """Packed token; a number past the last if there is none."""
    length: int
    """T: number of packed tokens of a shard."""
    adapter: Int[Array, "A R"] | None
    """Their adapters, see `Adapted`; None without adapters."""

    @classmethod
    def of(cls, tiles: QueryTiles, length: int, adapter: Int[Array, "A T"] | None) -> FirstTokens:
        """Return the first tokens of the tiles that begin at position 0. `adapter` are those of all
        tokens."""
        begins = (tiles.page_start + tiles.query_start == 0) & (tiles.query_end > 0)
        index = jnp.where(begins, tiles.source, length).reshape(tiles.tile_index.shape[0], -1)
        if adapter is not None:
            adapter = jnp.take_along_axis(adapter, index, axis=1, mode="clip")
        return cls(index, length, adapter)

    def run(
        self, config: Config, weights: Weights, x: Float[Array, "A T D"], attention: Attention
    ) -> tuple[FirstKV, ...]:
        """Each upper layer's results, from the packed hidden states at the SwiftKV layer; of a
        chunk without first tokens zeros, which are put nowhere."""

        def layers(first: Float[Array, "A R D"]) -> tuple[FirstKV, ...]:
            adapted = with_adapters(config, weights, self.adapter)
            return run_first_tokens(config, adapted, first, attention)

        def nothing(first: Float[Array, "A R D"]) -> tuple[FirstKV, ...]:
            shapes = jax.eval_shape(layers, first)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        first = jax.vmap(lambda x, index: x.at[index].get(mode="clip"))(x, self.index)
        return jax.lax.cond(jnp.any(self.index < self.length), layers, nothing, first)

    def put(self, packed: Float[Array, "A T *B"], new: Float[Array, "A R *B"]):
        """`packed` with the entries of first tokens replaced."""
        return jax.vmap(lambda x, index, new: x.at[index].set(new, mode="drop"))(
            packed, self.index, new
        )

    def put_heads(self, packed: Float[Array, "A K T H"], new: Float[Array, "A R K H"]):
        """`put` of keys or values in the cache's layout."""
        return jax.vmap(lambda x, index, new: x.at[:, index].set(new, mode="drop"))(
            packed, self.index, head_major(new)
        )


def run_first_tokens(
    config: Config, weights: Weights, x: Float[Array, "A R D"], attention: Attention
) -> tuple[FirstKV, ...]:
    """The upper layers for tokens at position 0, which attend to themselves alone."""
    tables = rope_tables(config, jnp.zeros(x.shape[:2], jnp.int32))
    found = []

    @functools.partial(jax.jit, static_argnums=0)
    def layer(kind, block, qkv, x):
        def attend(q, k, v):
            return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), (k, v)

        rope = table_of(config, tables, kind)
        return self_layer(config, block, qkv, x, rope, attend, attention)

    layers = zip(weights.upper, weights.upper_qkv, strict=True)
    for number, (block, qkv) in enumerate(layers, start=config.num_lower_layers):
        x, (k, v) = layer(config.kind(number), block, qkv, x)
        found.append(FirstKV(x, k, v))
    return tuple(found)
