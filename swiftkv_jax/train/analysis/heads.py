"""Previous-token heads and induction heads of a model, found on repeated random tokens.

An induction head attends to the token that followed the last occurrence of the current one. It
finds that by a key that says which token came before, and such a key needs a previous-token head in
a lower layer (Olsson et al. 2022, arXiv 2209.11895). If that head's attention is not run on the
prompt, the hidden state that enters layer K does not hold what the keys of prompt tokens need, and
no projection of it does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...calibration.token_weights import attention_scores
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.decoder_layers import self_layer
from ...model.layers import embed
from ...model.packed_attention import head_major, packed_reader, score_options
from ...model.params import Llama
from ...model.rope import rope_tables, scanned_kinds
from ...model.sharding import (
    all_gather_fsdp,
    all_gather_vocabulary,
    constrain_activations,
    replicate,
)

PREVIOUS_TOKEN = 0.5
"""Share of a head's attention on the token before above which it is a previous-token head."""
INDUCTION = 0.1
"""Share on the token after the last occurrence above which it is an induction head."""
PERIOD = 64
"""Random tokens that are repeated once."""
ROWS = 8


@dataclasses.dataclass(frozen=True)
class LayerHeads:
    """Mean shares of attention of one layer's query heads on repeated random tokens."""

    layer: int
    previous_token: list[float]
    """[N]: on the token before."""
    induction: list[float]
    """[N]: in the second half, on the token after the same one in the first."""

    @property
    def has_previous_token(self) -> bool:
        return max(self.previous_token) > PREVIOUS_TOKEN

    @property
    def has_induction(self) -> bool:
        return max(self.induction) > INDUCTION


def head_scores(
    config: Config, llama: Llama, attention: Attention, *, rows: int = ROWS
) -> list[LayerHeads]:
    """The scores of every layer; `llama` has all its layers in the lower stack. `rows` must suit
    the mesh of `attention`."""
    period = min(PERIOD, config.max_position_embeddings // 2)
    tokens = jax.random.randint(jax.random.key(0), (rows, period), 0, config.vocab_size)
    previous, induction = jax.device_get(
        _scores(config, attention, llama, jnp.concatenate([tokens, tokens], 1))
    )
    return [
        LayerHeads(layer, *(part.tolist() for part in parts))
        for layer, parts in enumerate(zip(previous, induction, strict=True))
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scores(
    config: Config, attention: Attention, llama: Llama, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "L N"], Float[Array, "L N"]]:
    length = tokens.shape[1]
    config = config.at_length(length)
    mesh = attention.mesh
    at = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    batch = Batch(tokens, at, jnp.ones_like(tokens), jnp.ones(tokens.shape, jnp.float32))
    tables = rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))
    period = length // 2

    def step(x, layer):
        *weights, kind = layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        read = packed_reader(config, attention, batch.segment_ids, window)

        def attend(q, k, v):
            shares = _shares(config, q, k, window, period)
            return read(q, head_major(k), head_major(v)), shares

        x, shares = self_layer(config, block, qkv, x, rope, attend, attention)
        return constrain_activations(mesh, x), shares

    x = embed(config, all_gather_vocabulary(mesh, llama.embed), tokens)
    x = constrain_activations(mesh, x)
    _, found = jax.lax.scan(step, x, (llama.lower, llama.lower_qkv, kinds))
    return replicate(mesh, found)


def _shares(config: Config, q, k, window, period: int):
    """[N] each: the mean share of attention on the token before, and in the second half on the
    token `period - 1` before."""
    scores = score_options(config).applied(attention_scores(q, k))
    length = scores.shape[-1]
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    visible = back >= 0
    if window is not None:
        visible &= back < window
    probabilities = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    before, repeated = (
        jnp.diagonal(probabilities, -distance, axis1=-2, axis2=-1) for distance in (1, period - 1)
    )
    # The diagonal's entry i is of query i + distance.
    return tuple(part.mean((0, -1)).reshape(-1) for part in (before, repeated[..., 1:]))


def cut_off(heads: Sequence[LayerHeads], first_skipped: int) -> tuple[list[int], list[int]]:
    """(layers from `first_skipped` on with previous-token heads, layers above the first of them
    with induction heads), both empty unless there are both: then a prompt does without heads that
    the keys of others need. Prompt tokens run the attention of the layers below
    `first_skipped`."""
    previous = [each.layer for each in heads[first_skipped:] if each.has_previous_token]
    first = min(previous, default=len(heads))
    induction = [each.layer for each in heads[first + 1 :] if each.has_induction]
    return [layer for layer in previous if layer < max(induction, default=0)], induction


def describe_heads(heads: Sequence[LayerHeads]) -> str:
    """One line for each kind of head: layer, number of the head and its share."""
    kinds = (
        ("previous-token heads", "previous_token", PREVIOUS_TOKEN),
        ("induction heads", "induction", INDUCTION),
    )
    return "\n".join(
        f"{title} (share above {limit:g}): {_named(heads, name, limit)}"
        for title, name, limit in kinds
    )


def _named(heads: Sequence[LayerHeads], name: str, limit: float) -> str:
    layers = []
    for each in heads:
        found = [(head, share) for head, share in enumerate(getattr(each, name)) if share > limit]
        if found:
            shares = ", ".join(f"head {head} {share:.2f}" for head, share in found)
            layers.append(f"layer {each.layer} ({shares})")
    return ", ".join(layers) or "none"
