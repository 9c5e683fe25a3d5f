"""The sampler: chooses the next token of each row on the device. Rows with different parameters run
in one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from ..engine.model_runner_base import NON_FINITE, SamplerOutput
from .logprobs import empty_logprobs, gather_logprobs
from .metadata import SamplingMetadata
from .penalties import apply_penalties, changes_logits

_DIGIT = 4  # bits found by one pass over the vocabulary


def sample(
    logits: Float[Array, "B V"],
    sampling: SamplingMetadata,
    token_counts: UInt16[Array, "_ V"],
    slots: Int[Array, " B"],
    position: Int[Array, " B"],
) -> SamplerOutput:
    """The token that follows the one at `position` of each row. `token_counts` have a row for each
    slot, and are read only for rows with penalties.

    The randomness of a draw is fold_in of the row's stream and `position` into key(seed): the same
    for every batch, slot, chunk size and number of steps per call. What no row asks for is not
    computed.
    """
    changes = jnp.any(changes_logits(sampling, position))
    draws = jnp.any(sampling.temperature > 0)
    reports = jnp.any(sampling.num_logprobs >= 0)

    def penalized():
        counts = token_counts.at[slots].get(mode="clip")
        return apply_penalties(logits, sampling, counts, position)

    def full():
        changed = jax.lax.cond(changes, penalized, lambda: logits)
        greedy = _greedy(changed)
        drawn = jax.lax.cond(draws, lambda: _draw(changed, sampling, position), lambda: greedy)
        token = jnp.where(sampling.temperature > 0, drawn, greedy)
        token = _mark_non_finite(token, greedy, changed)
        logprobs = jax.lax.cond(
            reports,
            lambda: gather_logprobs(logits, token, sampling.num_logprobs),
            lambda: empty_logprobs(len(token)),
        )
        return SamplerOutput(token, *logprobs)

    # One branch around all: on a GPU the host waits for the predicate of each.
    return jax.lax.cond(changes | draws | reports, full, lambda: sample_greedy(logits))


def sample_greedy(logits: Float[Array, "B V"]) -> SamplerOutput:
    """`sample` for rows that ask for nothing but the likeliest token."""
    greedy = _greedy(logits)
    return SamplerOutput(_mark_non_finite(greedy, greedy, logits), *empty_logprobs(logits.shape[0]))


def _mark_non_finite(
    token: Int[Array, " B"], greedy: Int[Array, " B"], logits: Float[Array, "B V"]
) -> Int[Array, " B"]:
    """`token`, or `NON_FINITE` where the largest logit, at `greedy`, is not finite: it is NaN if
    any logit is."""
    largest = jnp.take_along_axis(logits, greedy[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(largest), token, NON_FINITE)


def _greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(
    logits: Float[Array, "B V"], sampling: SamplingMetadata, position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """A draw from each row's distribution: the argmax of its log-probabilities with Gumbel noise.

    https://arxiv.org/abs/1411.0030
    """
    # Relative to the largest logit, so that no small temperature gives infinity minus infinity.
    temperature = jnp.maximum(sampling.temperature, 1e-6)[:, None]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    return _greedy(filtered(scaled, sampling) + gumbel_noise(sampling, position, logits.shape[-1]))


def gumbel_noise(
    sampling: SamplingMetadata, position: Int[Array, " B"], vocab_size: int
) -> Float[Array, "B V"]:
    """Standard Gumbel noise, up to 22.9, from 32 bits each.

    `jax.random.gumbel` takes 23, and the largest values, which decide a draw, are then few: of
    128,256 tokens equally likely, the two largest would be equal in 1.5 % of draws, and the lower
    id favoured.
    """

    def bits(seed, stream, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for word in (stream[0], stream[1], position):
            key = jax.random.fold_in(key, word)
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    # Above 0 and below 1. Small numbers, which become the largest noise, are exact: hence
    # log1p(-u), not log(u).
    words = jax.vmap(bits)(sampling.seed, sampling.rng_stream, position)
    uniform = (words.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def filtered(scaled: Float[Array, "B V"], sampling: SamplingMetadata) -> Float[Array, "B V"]:
    """`scaled` with minus infinity for the tokens that min-p, then top-k, then top-p of the rest,
    leave out. `scaled` is 0 at the largest of each row.

    The tokens that stay are those that a stable sort would rank first: of equals the lower ids.
    """
    # The logarithm for rows without min-p is minus infinity.
    scaled = jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)
    draws = sampling.temperature > 0
    for asks, keeps in (
        (draws & (sampling.top_k > 0), _top_k),
        (draws & (sampling.top_p < 1), _top_p),
    ):

        def keep(scaled, asks=asks, keeps=keeps):
            return jnp.where(keeps(scaled, sampling) | ~asks[:, None], scaled, -jnp.inf)

        scaled = jax.lax.cond(jnp.any(asks), keep, lambda scaled: scaled, scaled)
    return scaled


def _top_k(scaled: Float[Array, "B V"], sampling: SamplingMetadata) -> Bool[Array, "B V"]:
    return _first(
        scaled, jnp.ones(scaled.shape, jnp.int32), jnp.clip(sampling.top_k, 1, scaled.shape[-1])
    )


def _top_p(scaled: Float[Array, "B V"], sampling: SamplingMetadata) -> Bool[Array, "B V"]:
    # Integers, whose sum is the same in any order: so the tokens are those that a sort would find,
    # on any mesh. A unit is 2**-30 of the row, whose sum therefore fits whatever the vocabulary.
    mass = jnp.round(jax.nn.softmax(scaled, axis=-1) * 2.0**30).astype(jnp.int32)
    total = mass.sum(axis=-1)
    enough = jnp.ceil(sampling.top_p * total.astype(jnp.float32)).astype(jnp.int32)
    return _first(scaled, mass, jnp.clip(enough, 1, total))


def _first(
    scaled: Float[Array, "B V"], weight: Int[Array, "B V"], enough: Int[Array, " B"]
) -> Bool[Array, "B V"]:
    """The fewest tokens, the likeliest first and of equals the lowest id, whose weights are
    `enough` together.

    Without a sort: the value of the last of them is found from its bits, and only where its equals
    are too many, the id of the last.
    """
    # The bits of floats that are not negative are, as integers, in the order of the floats.
    rank = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.uint32)
    last = _reach(rank, weight, enough, bits=32)[:, None]
    above, equals = rank < last, rank == last
    ids = jax.lax.broadcasted_iota(jnp.uint32, scaled.shape, 1)
    missing = enough - jnp.where(above, weight, 0).sum(axis=-1)
    equal_weight = jnp.where(equals, weight, 0)
    last_id = jax.lax.cond(
        jnp.any(equal_weight.sum(axis=-1) > missing),
        lambda: _reach(ids, equal_weight, missing, bits=scaled.shape[-1].bit_length())[:, None],
        lambda: jnp.full_like(last, scaled.shape[-1]),
    )
    return above | equals & (ids <= last_id)


def _reach(
    key: UInt32[Array, "B V"], weight: Int[Array, "B V"], enough: Int[Array, " B"], *, bits: int
) -> UInt32[Array, " B"]:
    """The smallest bound of so many bits such that the weights of the keys up to it are `enough`
    together.

    Four bits a pass: 15 sums in one reduction, which costs little more than one sum.
    """

    def narrow(i, bound):
        step = jnp.uint32(1) << (_DIGIT * (passes - 1 - i)).astype(jnp.uint32)
        parts = [
            jnp.where(key < (bound + digit * step)[:, None], weight, 0)
            for digit in range(1, 1 << _DIGIT)
        ]
        sums = jax.lax.reduce(
            parts,
            [jnp.int32(0)] * len(parts),
            lambda x, y: [a + b for a, b in zip(x, y, strict=True)],
            (1,),
        )
        return bound + step * sum((part < enough).astype(jnp.uint32) for part in sums)

    passes = -(-bits // _DIGIT)
    return jax.lax.fori_loop(0, passes, narrow, jnp.zeros(enough.shape, jnp.uint32))
