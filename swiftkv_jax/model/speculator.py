"""Speculators: small recurrent heads that draft the tokens after the next from one hidden state.

A head needs nothing of a prompt but the final hidden state of the token before the last, so it
works where a prompt has run through the lower layers alone. `sum_rnn` is IBM's MLP speculator
(arXiv 2404.19124), `sum_lstm` the LSTM of Snowflake's ArcticTraining.

With h the state, c the cell, z the embedding of the last token and n = `n_predict`, a step is

    sum_rnn   h' = gelu(norm(P h + a z))
    sum_lstm  f, i, o = sigmoid(P_f h + a z), sigmoid(P_i h + a z), sigmoid(P_o h + a z)
              c' = f c + i gelu(cell_norm(P_c h + a z)),  h' = o gelu(norm(c'))

with s = 2^(-1 / 2n), a = ((1 - s^2) I / 2)^(1/2) / s, gelu by erf, norm(x) = w x / rms(x) + b,
c = 0 at first, and h the model's state after its final norm; with `scale_input` it is divided by
2^(1/2) rms(h) first.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from .speculator_config import GATES, SpeculatorConfig

EPSILON = 1e-6


@struct.dataclass
class Norm:
    """Scale and shift after a division by the root mean square."""

    weight: Any  # I
    bias: Any  # I

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
        return self.weight * divided_by_rms(x) + self.bias


@struct.dataclass
class Speculator:
    """Weights of each step, in order. Steps beyond the last entry use that one again."""

    config: SpeculatorConfig = struct.field(pytree_node=False)
    embed: tuple[Any, ...]  # V I
    proj: tuple[Any, ...]  # GI D of the first step, then GI I; G of `GATES`
    head: tuple[Any, ...]  # V I
    norm: tuple[Norm, ...]
    cell_norm: tuple[Norm, ...] = ()  # of an LSTM only


def speculator_shapes(config: SpeculatorConfig, dtype: Any) -> Speculator:
    """The `ShapeDtypeStruct` of every weight."""
    inner, rows = config.inner_dim, GATES[config.method] * config.inner_dim
    steps = config.steps

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    norms = (Norm(leaf(inner), leaf(inner)),) * steps
    inputs = [config.hidden_dim] + [inner] * (min(2, config.n_predict) - 1)
    if not config.tie_weights:
        inputs += [inner] * (config.n_predict - len(inputs))
    return Speculator(
        config,
        embed=(leaf(config.vocab_size, inner),) * steps,
        proj=tuple(leaf(rows, columns) for columns in inputs),
        head=(leaf(config.vocab_size, inner),) * steps,
        norm=norms,
        cell_norm=norms if config.method == "sum_lstm" else (),
    )


def divided_by_rms(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`x` over its root mean square, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON)


State = tuple[Array, Array]
"""(h, c), float32 *B D or I, and *B I; c is None but in an LSTM."""


def first_state(speculator: Speculator, hidden: Float[Array, "*B D"]) -> State:
    """The state before the first step, from the model's hidden state after its final norm."""
    config = speculator.config
    scaled = hidden.astype(jnp.float32)
    if config.scale_input:
        scaled = divided_by_rms(hidden) / math.sqrt(2)
    return scaled, jnp.zeros((*hidden.shape[:-1], config.inner_dim), jnp.float32)


def advance(speculator: Speculator, step: int, state: State, token: Int[Array, "*B"]) -> State:
    """The state after one more token, the last before the one that `step` (from 0 on) drafts."""
    h, c = state
    embed, proj, norm = (
        _of_step(leaves, step) for leaves in (speculator.embed, speculator.proj, speculator.norm)
    )
    products = jnp.einsum(
        "...D,GD->...G", h.astype(proj.dtype), proj, preferred_element_type=jnp.float32
    )
    added = speculator.config.embedding_scale * embed[token].astype(jnp.float32)
    gates = products.reshape(*added.shape[:-1], -1, added.shape[-1]) + added[..., None, :]
    if speculator.config.method == "sum_rnn":
        return _gelu(norm(gates[..., 0, :])), c
    forget, take, out = (jax.nn.sigmoid(gates[..., gate, :]) for gate in range(3))
    new = _gelu(_of_step(speculator.cell_norm, step)(gates[..., 3, :]))
    c = forget * c + take * new
    return out * _gelu(norm(c)), c


def speculator_logits(speculator: Speculator, step: int, state: State) -> Float[Array, "*B V"]:
    """Logits of the token that `step` drafts, from the state after it; float32."""
    head = _of_step(speculator.head, step)
    return jnp.einsum(
        "...I,VI->...V", state[0].astype(head.dtype), head, preferred_element_type=jnp.float32
    )


def draft_tokens(
    speculator: Speculator, hidden: Float[Array, "B D"], token: Int[Array, " B"], count: int
) -> Int[Array, "B N"]:
    """The likeliest `count` tokens, one after the other, after the last `token`, which the model
    chose from `hidden`."""
    state, drafted = first_state(speculator, hidden), []
    for step in range(count):
        state = advance(speculator, step, state, token)
        token = jnp.argmax(speculator_logits(speculator, step, state), axis=-1).astype(jnp.int32)
        drafted.append(token)
    return jnp.stack(drafted, axis=-1)


def _of_step(leaves: tuple[Any, ...], step: int) -> Any:
    return leaves[min(step, len(leaves) - 1)]


def _gelu(x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
    return jax.nn.gelu(x, approximate=False)
