"""The compiled program that goes on from the last chunk of a prompt to its first token.

For a prompt that is alone. Its last token has run through the lower layers with the chunk, so the
upper layers and the head are left, where a decode step would read the weights of all layers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...model.attention import DEFAULT, Attention
from ...model.config import Config
from ...model.layers import unembed
from ...model.rope import rope_tables
from ..engine.sampler_output import SamplerOutput
from .adapters import with_adapters
from .cached_layers import run_upper_layers
from .decode_programs import emit, pool_reader
from .decode_state import DecodeState
from .layout import replicate
from .serving_form import Weights


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="state")
def first_token(
    config: Config,
    weights: Weights,
    x: Float[Array, "1 D"],
    slots: Int[Array, "1"],
    state: DecodeState,
    *,
    attention: Attention = DEFAULT,
) -> tuple[DecodeState, SamplerOutput]:
    """The token after a prompt, from the hidden state `x` of its last token at the SwiftKV layer:
    `SamplerOutput` of 1 1, as from the step of `decode` that this replaces. The cache has the keys
    and values of that token."""
    batch = state.batch.gather(slots)
    weights = with_adapters(config, weights, batch.adapter)
    active = batch.remaining > 0
    tables = rope_tables(config, batch.length[:, None])
    lengths = jnp.where(active, batch.length + 1, 0)
    cache = state.cache
    read = pool_reader(config, weights, cache, batch.page_table, lengths, attention=attention)
    x = run_upper_layers(config, weights, x[:, None], tables, cache, read, attention)
    logits = unembed(config, weights, x)[:, 0]
    sampled, token_counts = emit(logits, batch, slots, state.token_counts)
    batch = state.batch.scatter(slots, batch.advance(sampled.token))
    sampled = sampled._replace(token=jnp.where(active, sampled.token, -1))
    sampled = jax.tree.map(lambda leaf: leaf[:, None], sampled)
    state = DecodeState(cache, replicate(batch, attention), replicate(token_counts, attention))
    return state, replicate(sampled, attention)
