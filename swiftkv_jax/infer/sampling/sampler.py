"""Choosing the next token on the device: each row in its own way, every mixture of ways in one
program."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from ...errors import UsageError
from ...params import Leaf
from ..engine.sampling_params import MAX_BIASES, SamplingParams
from .logprobs import no_report, report

MAX_END_IDS = 24
IN_PROMPT = 1 << 15  # of an entry of `seen`; the bits below count
_COUNT = IN_PROMPT - 1
_NONE = -1
NON_FINITE = -2  # in the place of a token: the logits are not finite numbers, so nothing follows
_DIGIT = 4  # bits found by one pass over the vocabulary


@struct.dataclass
class SamplingMetadata:
    """What each row asks for, all of it in arrays: a change of value never recompiles."""

    temperature: Leaf  # f32[B]; 0 is greedy
    top_k: Leaf  # i32[B]; 0 is off
    top_p: Leaf  # f32[B]; 1 is off
    min_p: Leaf  # f32[B]; 0 is off
    repetition_penalty: Leaf  # f32[B]; 1 is off
    presence_penalty: Leaf  # f32[B]; 0 is off
    frequency_penalty: Leaf  # f32[B]; 0 is off
    seed: Leaf  # u32[B, 2]; high word, low word
    rng_stream: Leaf  # u32[B, 2]; which prompt of a call, which of its samples
    end_ids: Leaf  # i32[B, 24]; tokens that end the row, -1 for none
    # i32[B]; no token of `end_ids` before the row has this many tokens, its prompt among them
    min_length: Leaf
    bias_ids: Leaf  # i32[B, 300]; -1 for none
    bias: Leaf  # f32[B, 300]
    logprobs: Leaf  # i32[B]; -1: none, 0: the chosen token's, k: those of the k likeliest as well


@struct.dataclass
class SamplerOutput:
    """The next token of each row, and log-probabilities for the rows that ask for them.

    They are the model's own: the log-softmax of the float32 logits as they come, before any bias,
    penalty, temperature or filter (vLLM's `raw_logprobs`).
    """

    token: Leaf  # i32[B]; `NON_FINITE` where there is none
    logprob: Leaf  # f32[B]; of `token`; 0 where the row does not ask
    top_ids: (
        Leaf  # i32[B, 20]; the likeliest tokens, best first, as many as the row asks for, then -1
    )
    top_logprobs: Leaf  # f32[B, 20]; theirs, then -inf


def sampling_row(
    params: SamplingParams,
    *,
    rng_stream: tuple[int, int] = (0, 0),
    end_ids: Sequence[int],
    prompt_length: int,
) -> SamplingMetadata:
    """One row in NumPy, without the B axis. `end_ids`: the model's; `stream`: which prompt of a
    call, which of its samples.

    Raises `UsageError` if there are more than 24 end tokens, `stop_token_ids` among them.
    """
    ends = list(dict.fromkeys([*(() if params.ignore_eos else end_ids), *params.stop_token_ids]))
    if len(ends) > MAX_END_IDS:
        raise UsageError(
            f"stop_token_ids and the model's end tokens are {len(ends)} together; at most "
            f"{MAX_END_IDS} are possible"
        )
    return SamplingMetadata(
        temperature=np.float32(params.temperature),
        top_k=np.int32(max(params.top_k, 0)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition_penalty=np.float32(params.repetition_penalty),
        presence_penalty=np.float32(params.presence_penalty),
        frequency_penalty=np.float32(params.frequency_penalty),
        seed=np.array([params.seed >> 32, params.seed & 0xFFFFFFFF], np.uint32),
        rng_stream=np.array(rng_stream, np.uint32),
        end_ids=_padded(ends, MAX_END_IDS, _NONE, np.int32),
        min_length=np.int32(prompt_length + params.min_tokens),
        bias_ids=_padded(list(params.logit_bias), MAX_BIASES, _NONE, np.int32),
        bias=_padded(list(params.logit_bias.values()), MAX_BIASES, 0, np.float32),
        logprobs=np.int32(_NONE if params.logprobs is None else params.logprobs),
    )


def idle_rows(batch: int) -> SamplingMetadata:
    """B rows in NumPy that are greedy and ask for nothing: they cost no more than the largest of
    their logits."""
    row = sampling_row(SamplingParams(), end_ids=(), prompt_length=0)
    return jax.tree.map(lambda leaf: np.stack([leaf] * batch), row)


def _padded(values: Sequence, size: int, fill: float, dtype) -> np.ndarray:
    return np.array([*values, *[fill] * (size - len(values))], dtype)


def seen_in_prompt(prompt: Sequence[int], vocab_size: int) -> np.ndarray:
    """u16[V]: bit 15 is set for the tokens of the prompt; the bits below, how often a token was
    generated, are 0."""
    seen = np.zeros(vocab_size, np.uint16)
    seen[np.asarray(prompt, np.int64)] = IN_PROMPT
    return seen


def count(
    seen: UInt16[Array, "_ V"],
    rows: Int[Array, " B"],
    token: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> UInt16[Array, "_ V"]:
    """One more `token` in each active one of these rows, which are all different; a row past the
    last is none.

    A count stays at 32767 once it is there. Writes one element a row.
    """
    old = seen.at[rows, token].get(mode="clip")
    more = active & (old & _COUNT < _COUNT)
    return seen.at[rows, token].set(old + more.astype(seen.dtype), mode="drop")


def sample(
    logits: Float[Array, "B V"],
    sampling: SamplingMetadata,
    seen: UInt16[Array, "B V"],
    position: Int[Array, " B"],
) -> SamplerOutput:
    """The token that follows the one at `position` of each row; `seen` is read only for rows with
    penalties.

    A draw's randomness is fold_in of the row's stream and `position` into key(seed): the same
    whatever the batch, the row's place in it, the chunking, and the number of steps per call. What
    no row asks for is not computed.
    """
    edits, draws, reports = (
        jnp.any(_asks_edit(sampling, position)),
        jnp.any(sampling.temperature > 0),
        jnp.any(sampling.logprobs >= 0),
    )

    def plain():
        greedy = _greedy(logits)
        return _unless_broken(greedy, greedy, logits), *no_report(len(position))

    def full():
        edited = jax.lax.cond(edits, lambda: edit(logits, sampling, seen, position), lambda: logits)
        greedy = _greedy(edited)
        drawn = jax.lax.cond(draws, lambda: _draw(edited, sampling, position), lambda: greedy)
        token = _unless_broken(jnp.where(sampling.temperature > 0, drawn, greedy), greedy, edited)
        return token, *jax.lax.cond(
            reports, lambda: report(logits, token, sampling.logprobs), lambda: no_report(len(token))
        )

    # One branch around all: on a GPU the host waits for the predicate of each.
    return SamplerOutput(*jax.lax.cond(edits | draws | reports, full, plain))


def _unless_broken(
    token: Int[Array, " B"], greedy: Int[Array, " B"], logits: Float[Array, "B V"]
) -> Int[Array, " B"]:
    """`NON_FINITE` where the largest of the logits, at `greedy`, is no finite number: it is NaN if any
    of them is."""
    largest = jnp.take_along_axis(logits, greedy[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(largest), token, NON_FINITE)


def _greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _has_penalty(sampling: SamplingMetadata) -> Bool[Array, " B"]:
    return (
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )


def _masks_ends(sampling: SamplingMetadata, position: Int[Array, " B"]) -> Bool[Array, " B"]:
    return (position + 1 < sampling.min_length) & jnp.any(sampling.end_ids >= 0, axis=-1)


def _asks_edit(sampling: SamplingMetadata, position: Int[Array, " B"]) -> Bool[Array, " B"]:
    return (
        _masks_ends(sampling, position)
        | jnp.any(sampling.bias_ids >= 0, axis=-1)
        | _has_penalty(sampling)
    )


def edit(
    logits: Float[Array, "B V"],
    sampling: SamplingMetadata,
    seen: UInt16[Array, "B V"],
    position: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """Logits after the mask of `min_tokens`, the bias, and the penalties, in vLLM's order."""
    rows, vocab_size = jnp.arange(len(logits))[:, None], logits.shape[-1]
    masked = (sampling.end_ids >= 0) & _masks_ends(sampling, position)[:, None]
    # An index past the end is dropped; -1 would be the last token.
    logits = logits.at[rows, jnp.where(masked, sampling.end_ids, vocab_size)].set(
        -jnp.inf, mode="drop"
    )
    biased = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, vocab_size)
    logits = logits.at[rows, biased].add(sampling.bias, mode="drop")

    repetition, presence, frequency = (
        penalty[:, None]
        for penalty in (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
    )
    times = (seen & _COUNT).astype(jnp.float32)
    logits = jnp.where(
        seen > 0, jnp.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    return logits - frequency * times - jnp.where(times > 0, presence, 0)


def _draw(
    logits: Float[Array, "B V"], sampling: SamplingMetadata, position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """A draw from each row's distribution: the largest of its log-probabilities with Gumbel noise.

    https://arxiv.org/abs/1411.0030
    """
    # Measured from the largest logit, so that no temperature however small makes an infinity minus
    # an infinity.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.maximum(
        sampling.temperature, 1e-6
    )[:, None]
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

    # Above 0 and below 1. The small ones, which become the largest noise, are the exact ones: hence
    # log1p(-u), not log(u).
    uniform = (
        jax.vmap(bits)(sampling.seed, sampling.rng_stream, position).astype(jnp.float32) + 0.5
    ) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def filtered(scaled: Float[Array, "B V"], sampling: SamplingMetadata) -> Float[Array, "B V"]:
    """Minus infinity for what min-p, then top-k, then top-p of the rest, leave out. `scaled` is 0
    at the largest of each row.

    A token stays if a stable sort, likeliest first, would leave it: of equals the lower ids.
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
