"""The sampler: chooses the next token of each row on the device. Rows with different parameters run
in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16, UInt32

from ..engine.sampler_output import NON_FINITE, SamplerOutput
from .logprobs import empty_logprobs, gather_logprobs
from .metadata import SamplingMetadata
from .penalties import apply_penalties, changes_logits


def sample(
    logits: Float[Array, "B V"],
    sampling: SamplingMetadata,
    token_counts: Callable[[], UInt16[Array, "B V"]],
    position: Int[Array, " B"],
    *,
    reported: Float[Array, "B V"] | None = None,
) -> SamplerOutput:
    """The token that follows the one at `position` of each row. `token_counts` makes the rows'
    counts, and is called only for rows with penalties. Log-probabilities are those of the logits
    `reported`, where these are not the ones to choose from.

    The randomness of a draw is fold_in of the row's stream and `position` into key(seed): the same
    for every batch, slot, chunk size and number of steps per call. Features that no row uses are
    not computed.
    """
    changes = jnp.any(changes_logits(sampling, position))
    draws = jnp.any(sampling.temperature > 0)
    reports = jnp.any(sampling.num_logprobs >= 0)

    def penalized():
        counts = token_counts()
        greedy, largest = _likeliest(apply_penalties(logits, sampling, counts, position))
        # Once more from the logits: the changed logits and the weights, one after the other in the
        # same memory.
        again, largest = jax.lax.optimization_barrier((logits, largest))
        weight = apply_penalties(
            again, sampling, counts, position, then=lambda x: _weight(x, largest, sampling)
        )
        return greedy, largest, weight

    def plain():
        greedy, largest = _likeliest(logits)
        return greedy, largest, _weight(logits, largest, sampling)

    def full():
        greedy, largest, weight = jax.lax.cond(changes, penalized, plain)
        drawn = jax.lax.cond(draws, lambda: _draw(weight, sampling, position), lambda: greedy)
        token = jnp.where(sampling.temperature > 0, drawn, greedy)
        token = _mark_non_finite(token, largest)
        logprobs = jax.lax.cond(
            reports,
            lambda: gather_logprobs(
                logits if reported is None else reported, token, sampling.num_logprobs
            ),
            lambda: empty_logprobs(len(token)),
        )
        return SamplerOutput(token, *logprobs)

    # One branch around all of it: on a GPU the host waits for the predicate of each branch.
    return jax.lax.cond(changes | draws | reports, full, lambda: sample_greedy(logits))


def apply_masks(logits: Float[Array, "B V"], masks: UInt32[Array, "B _"]) -> Float[Array, "B V"]:
    """`logits` with minus infinity where a token's bit is 0 (`Matcher.fill_masks`). NaN is kept, so
    that it is noticed."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    bits = bits.reshape(masks.shape[0], -1)[:, : logits.shape[-1]]
    return jnp.where((bits == 1) | jnp.isnan(logits), logits, -jnp.inf)


def sample_greedy(logits: Float[Array, "B V"]) -> SamplerOutput:
    """`sample` for rows that need only the likeliest token."""
    token, largest = _likeliest(logits)
    return SamplerOutput(_mark_non_finite(token, largest), *empty_logprobs(logits.shape[0]))


def _likeliest(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """(likeliest token, its logit, which is NaN if any logit is)."""
    token = _argmax(logits)
    return token, jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]


def _argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _mark_non_finite(token: Int[Array, " B"], largest: Float[Array, " B"]) -> Int[Array, " B"]:
    """`token`, or `NON_FINITE` where the largest logit is not finite."""
    return jnp.where(jnp.isfinite(largest), token, NON_FINITE)


def _weight(
    logits: Float[Array, "..."], largest: Float[Array, " B"], sampling: SamplingMetadata
) -> Float[Array, "..."]:
    """Probabilities at the temperature of the row, relative to that of the likeliest token."""
    # Relative to the largest logit, so that no small temperature gives infinity minus infinity.
    temperature = jnp.maximum(sampling.temperature, 1e-6)
    return jnp.exp((logits - largest[:, None]) / temperature[:, None])


def _draw(
    weight: Float[Array, "B V"], sampling: SamplingMetadata, position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """A draw from each row's distribution: the argmax of its log-probabilities with Gumbel noise.

    https://arxiv.org/abs/1411.0030
    """
    noise = gumbel_noise(sampling, position, weight.shape[-1])
    return _argmax(jnp.log(filtered(weight, sampling)) + noise)


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


# Filters ----------------------------------------------------------------------
#
# In the order of a stable sort, the likeliest first and of equals the lowest id, each filter keeps
# the first tokens of a row. So all filters of a row together are one token, the last that stays:
# its rank and its id. Both are found from their bits by sums over the row, and each sum computes
# from the weights anew what it adds up: no other array with a number for each token is in memory.

_ONE = 0x3F800000  # the bits of 1.0
_DIGIT = 3  # bits found by one pass over the vocabulary

_Mass = Callable[[], Int[Array, "B V"]]


class _Last(NamedTuple):
    """The last token that stays in each row."""

    rank: Int[Array, " B"]
    id: Int[Array, " B"]


def filtered(weight: Float[Array, "B V"], sampling: SamplingMetadata) -> Float[Array, "B V"]:
    """`weight`, which is 1 for the likeliest token of each row, with 0 for the tokens that min-p,
    then top-k, then top-p of the rest, leave out.

    The tokens that stay are those that a stable sort would rank first: of equals the lower ids.
    """
    last = _Last(_rank(sampling.min_p), jnp.full(len(weight), weight.shape[-1], jnp.int32))
    draws = sampling.temperature > 0
    for asks, find in (
        (draws & (sampling.top_k > 0), _top_k),
        (draws & (sampling.top_p < 1), _top_p),
    ):

        def tighten(last: _Last, asks=asks, find=find) -> _Last:
            new = find(weight, last, sampling)
            earlier = (new.rank < last.rank) | (new.rank == last.rank) & (new.id < last.id)
            return jax.tree.map(lambda a, b: jnp.where(asks & earlier, a, b), new, last)

        last = jax.lax.cond(jnp.any(asks), tighten, lambda last: last, last)
    return _kept(weight, last)


def _kept(weight: Float[Array, "B V"], last: _Last) -> Float[Array, "B V"]:
    rank = _rank(weight)
    bound = last.rank[:, None]
    stays = (rank < bound) | (rank == bound) & (_ids(weight) <= last.id[:, None])
    return jnp.where(stays, weight, 0)


def _rank(weight: Float[Array, "..."]) -> Int[Array, "..."]:
    """0 for the weight 1, more for a smaller one, below 2**30 for 0. The bits of floats that are
    not negative are, as integers, in the order of the floats."""
    return _ONE - jax.lax.bitcast_convert_type(weight, jnp.int32)


def _ids(weight: Float[Array, "B V"]) -> Int[Array, "B V"]:
    return jax.lax.broadcasted_iota(jnp.int32, weight.shape, 1)


def _top_k(weight: Float[Array, "B V"], last: _Last, sampling: SamplingMetadata) -> _Last:
    enough = jnp.clip(sampling.top_k, 1, weight.shape[-1])
    return _first(weight, lambda: jnp.ones(weight.shape, jnp.int32), enough)


def _top_p(weight: Float[Array, "B V"], last: _Last, sampling: SamplingMetadata) -> _Last:
    total = _kept(weight, last).sum(axis=-1, keepdims=True)

    # Integers, whose sum is the same in any order: so the tokens are those that a sort would find,
    # on any mesh. A unit is 2**-30 of the row, whose sum therefore fits whatever the vocabulary.
    def mass() -> Int[Array, "B V"]:
        return jnp.round(_kept(weight, last) / total * 2.0**30).astype(jnp.int32)

    whole = mass().sum(axis=-1)
    enough = jnp.ceil(sampling.top_p * whole.astype(jnp.float32)).astype(jnp.int32)
    return _first(weight, mass, jnp.clip(enough, 1, whole))


def _first(weight: Float[Array, "B V"], mass: _Mass, enough: Int[Array, " B"]) -> _Last:
    """The last of the fewest tokens, the likeliest first and of equals the lowest id, whose masses
    are `enough` together.

    Without a sort: its rank is found first, and only where its equals are too many, its id.
    """
    rank = _reach(lambda: _rank(weight), mass, enough, bits=30)
    above = jnp.where(_rank(weight) < rank[:, None], mass(), 0).sum(axis=-1)
    equal = jnp.where(_rank(weight) == rank[:, None], mass(), 0).sum(axis=-1)
    bits = weight.shape[-1].bit_length()

    def id_of_equals() -> Int[Array, "B V"]:
        # Others are beyond all ids. Not by a comparison: XLA would keep its result in memory.
        others = jnp.minimum(_rank(weight) ^ rank[:, None], 1)
        return _ids(weight) | others << bits

    last_id = jax.lax.cond(
        jnp.any(equal > enough - above),
        lambda: _reach(id_of_equals, mass, enough - above, bits=bits),
        lambda: jnp.full_like(rank, weight.shape[-1]),
    )
    return _Last(rank, last_id)


def _reach(
    key: Callable[[], Int[Array, "B V"]], mass: _Mass, enough: Int[Array, " B"], *, bits: int
) -> Int[Array, " B"]:
    """The smallest bound of so many bits such that the masses of the keys up to it are `enough`
    together.

    Three bits a pass, the highest first: 7 sums in one reduction, which costs little more than one
    sum.
    """

    def narrow(carry):
        shift, found = carry
        found = found << _DIGIT
        above = (key() >> shift) - found[:, None]
        masses = mass()
        none = jnp.zeros_like(masses)
        parts = [jax.lax.select(above < digit, masses, none) for digit in range(1, 1 << _DIGIT)]
        sums = jax.lax.reduce(
            parts,
            [jnp.int32(0)] * len(parts),
            lambda x, y: [a + b for a, b in zip(x, y, strict=True)],
            (1,),
        )
        return shift - _DIGIT, found + (jnp.stack(sums) < enough).sum(axis=0, dtype=jnp.int32)

    highest = (bits - 1) // _DIGIT * _DIGIT
    begin = jnp.int32(highest), jnp.zeros(enough.shape, jnp.int32)
    return jax.lax.while_loop(lambda carry: carry[0] >= 0, narrow, begin)[1]
