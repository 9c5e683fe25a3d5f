"""Starts in closed form of the cuts with an exact head, whose boundary state may have taps and come
after the attention of some prompt layers, for `sweep`: as `calibration` makes them for one cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..batch import Batch
from ..calibration.maps import MapSums, add_sums, solve_sums, zero_sums
from ..calibration.moments import Moments, inputs_of_values
from ..config import Config, GeneratedKV
from ..layers import norm
from ..params import Llama
from ..sharding import replicated
from .cut_kv import CutKV, Fitter, States, gather
from .sweep_programs import PromptLayers, boundary_states, layer_of, prompt_layer

MAX_PROMPT_LAYERS = 3
"""Prompt layers that are tried: more brought little (docs/training.md)."""


def boundary_kv(
    config: Config,
    fitter: Fitter,
    k: int,
    generated: GeneratedKV,
    states: Callable[[], Iterable[States]],
    attention: Attention,
) -> Iterator[tuple[int, list[CutKV]]]:
    """For M = 0, 1, ... as far as is asked for: the starts with an exact head, without and with a
    tap, at K = `k`.

    Each M costs two runs through `states`, of which M = 0 needs only one. Raises `ValueError` if
    they hold no token.
    """
    llama, mesh = fitter.llama, attention.mesh
    with_tap = config.cut(config.num_layers - fitter.size, boundary_taps=1)
    with_tap = dataclasses.replace(with_tap, exact_head=1)
    shape = MAX_PROMPT_LAYERS, config.embed_dim, config.embed_dim
    maps = np.zeros(shape, llama.embed.dtype)
    for count in range(min(MAX_PROMPT_LAYERS, config.num_layers - k - 1) + 1):
        prompt = None
        if count:
            sums = zero_sums(with_tap, mesh)
            before = _prompt(maps, count - 1, attention)
            for batch, inputs, _ in states():
                args = with_tap, attention, sums, llama, batch, inputs, jnp.int32(k), before
                sums = add_map(*args)
            maps[count - 1], _ = solve_sums(k + count - 1, sums)
            prompt = _prompt(maps, count, attention)
        moments = gather(with_tap, llama, fitter.size, {k: 0}, states(), attention, prompt)
        students = []
        for taps in (0, 1):
            cut = config.cut(k, prompt_attention_layers=count, boundary_taps=taps)
            chosen = moments if taps else _without_taps(with_tap, moments)
            students.append(fitter.start(cut, generated, chosen, 0, prompt))
        yield count, students


def _prompt(maps: np.ndarray, count: int, attention: Attention) -> PromptLayers:
    where = None if attention.mesh is None else replicated(attention.mesh)
    return PromptLayers(jax.device_put(maps, where), jnp.int32(count))


def _without_taps(config: Config, moments: Moments) -> Moments:
    """The moments of the inputs that are not those of the token before."""
    kept = inputs_of_values(config)
    return dataclasses.replace(
        moments, inputs=moments.inputs[:, kept][:, :, kept], cross=moments.cross[:, kept]
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def add_map(
    config: Config,
    attention: Attention,
    sums: MapSums,
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
    first_upper: Int[Array, ""],
    prompt: PromptLayers,
) -> MapSums:
    """`sums` with those of one more batch for the map of the layer after those of `prompt`."""
    index = first_upper + prompt.number
    states = boundary_states(config, attention, llama, batch, inputs, first_upper, prompt)
    y = layer_of(states, prompt.number)
    u = prompt_layer(config, attention, llama, batch, y, index, None)
    m = norm(config, u, layer_of(llama.lower.mlp_norm, index))
    left = layer_of(inputs, index + 1) - u
    return add_sums(config, attention.mesh, sums, m, left, batch.segment_ids)
