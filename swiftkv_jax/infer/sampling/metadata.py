"""The sampling parameters of a batch, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from ...model.params import Leaf
from ..engine.sampling_params import MAX_BIASES, MAX_END_TOKENS, SamplingParams

_NONE = -1


@struct.dataclass
class SamplingMetadata:
    """The sampling parameters of each row, all in arrays, so that a changed value never
    recompiles."""

    temperature: Leaf  # f32[B]; 0 is greedy
    top_k: Leaf  # i32[B]; 0 is off
    top_p: Leaf  # f32[B]; 1 is off
    min_p: Leaf  # f32[B]; 0 is off
    repetition_penalty: Leaf  # f32[B]; 1 is off
    presence_penalty: Leaf  # f32[B]; 0 is off
    frequency_penalty: Leaf  # f32[B]; 0 is off
    seed: Leaf  # u32[B, 2]; high word, low word
    rng_stream: Leaf  # u32[B, 2]; number of the prompt in its call, number of the sample
    stop_token_ids: Leaf  # i32[B, 24]; tokens that end the row, -1 for none
    # i32[B]; no token of `stop_token_ids` before the row has this many tokens with its prompt
    min_length: Leaf
    bias_ids: Leaf  # i32[B, 300]; -1 for none
    bias: Leaf  # f32[B, 300]
    # i32[B]; -1: none, 0: the chosen token's, k: those of the k likeliest as well
    num_logprobs: Leaf


def sampling_row(
    params: SamplingParams,
    *,
    rng_stream: tuple[int, int] = (0, 0),
    eos_token_ids: Sequence[int],
    prompt_length: int,
) -> SamplingMetadata:
    """The metadata of one row in NumPy, without the B axis.

    `eos_token_ids` are the model's; `rng_stream` is (number of the prompt in its call, number of
    the sample). Raises `UsageError` as `SamplingParams.end_token_ids` does.
    """
    stops = params.end_token_ids(eos_token_ids)
    return SamplingMetadata(
        temperature=np.float32(params.temperature),
        top_k=np.int32(max(params.top_k, 0)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition_penalty=np.float32(params.repetition_penalty),
        presence_penalty=np.float32(params.presence_penalty),
        frequency_penalty=np.float32(params.frequency_penalty),
        seed=np.array([params.seed >> 32 & 0xFFFFFFFF, params.seed & 0xFFFFFFFF], np.uint32),
        rng_stream=np.array(rng_stream, np.uint32),
        stop_token_ids=_padded(stops, MAX_END_TOKENS, _NONE, np.int32),
        min_length=np.int32(prompt_length + params.min_tokens),
        bias_ids=_padded(list(params.logit_bias), MAX_BIASES, _NONE, np.int32),
        bias=_padded(list(params.logit_bias.values()), MAX_BIASES, 0, np.float32),
        num_logprobs=np.int32(_NONE if params.logprobs is None else params.logprobs),
    )


@functools.lru_cache(maxsize=16)
def empty_sampling(batch: int) -> SamplingMetadata:
    """Metadata in NumPy of B plain greedy rows: sampling them costs no more than an argmax. Made
    once, and not to be written to."""
    row = sampling_row(SamplingParams(), eos_token_ids=(), prompt_length=0)
    return jax.tree.map(lambda leaf: np.stack([leaf] * batch), row)


def _padded(values: Sequence, size: int, fill: float, dtype) -> np.ndarray:
    return np.array([*values, *[fill] * (size - len(values))], dtype)
