"""Starts in closed form of the cuts with an exact head, whose boundary state may have taps and come
after the attention of some prompt layers, for `sweep`: as `calibration` makes them for one cut."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...calibration import maps
from ...calibration.maps import (
    MapSums,
    add_sums,
    choose_neurons,
    map_inputs,
    solve_sums,
    zero_energy,
    zero_mlps,
    zero_sums,
)
from ...calibration.moments import Moments, inputs_of_values
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config, GeneratedKV
from ...model.cut import quarter_of_neurons
from ...model.layers import norm
from ...model.params import Llama, PromptMLP
from ...model.sharding import all_gather_fsdp, replicated
from .cut_kv import CutKV, Fitter, States
from .sweep_programs import PromptLayers, boundary_states, layer_of, prompt_layer

logger = logging.getLogger(__name__)

MAX_PROMPT_LAYERS = 3
"""Prompt layers that are tried: more brought little (docs/training.md)."""


def boundary_kv(
    fitter: Fitter, k: int, generated: GeneratedKV, states: Callable[[], Iterable[States]]
) -> Iterator[tuple[int, list[CutKV]]]:
    """For M = 0, 1, ... as far as is asked for: the starts with an exact head, without and with a
    tap, at K = `k`. Beside maps run `cut.quarter_of_neurons`.

    Each M costs three runs through `states`, of which M = 0 needs only one. Raises `ValueError` if
    they hold no token.
    """
    config = fitter.config
    llama = fitter.llama
    attention = fitter.attention
    with_tap = config.cut(config.num_layers - fitter.size, boundary_taps=1)
    with_tap = dataclasses.replace(with_tap, exact_head=1)
    neurons = quarter_of_neurons(config)
    fitted = zero_mlps(config, MAX_PROMPT_LAYERS, neurons, llama.embed.dtype)
    for count in range(min(MAX_PROMPT_LAYERS, config.num_layers - k - 1) + 1):
        prompt = None
        logger.info("K=%d: fitting an exact head with %d prompt attention layers", k, count)
        if count:
            layer = k + count - 1
            at = count - 1
            fixed = (with_tap, attention)
            mesh = attention.mesh
            if neurons:
                energy = zero_energy(config, mesh)
                before = _prompt(fitted, at, attention)
                for batch, inputs, _ in states():
                    energy = add_energy(*fixed, energy, llama, batch, inputs, jnp.int32(k), before)
                choose_neurons(llama.lower, layer, energy, fitted, at)
            sums = zero_sums(config, neurons, mesh)
            before = _prompt(fitted, at, attention)
            for batch, inputs, _ in states():
                sums = add_map(*fixed, sums, llama, batch, inputs, jnp.int32(k), before)
            solve_sums(layer, sums, fitted, at)
            prompt = _prompt(fitted, count, attention)
        chosen = {(k, fitter.tail(generated)): 0}
        moments = fitter.gather(with_tap, fitter.size, chosen, states(), prompt)
        students = []
        for taps in (0, 1):
            cut = config.cut(k, prompt_attention_layers=count, boundary_taps=taps)
            sums = moments if taps else _without_taps(with_tap, moments)
            students.append(fitter.start(cut, generated, sums, 0, prompt))
        yield count, students


def _prompt(fitted: PromptMLP, count: int, attention: Attention) -> PromptLayers:
    where = None if attention.mesh is None else replicated(attention.mesh)
    mlps = jax.tree.map(np.copy, fitted)  # which is filled further, and a device may share memory
    return PromptLayers(jax.device_put(mlps, where), jnp.int32(count))


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
    """`sums` with those of one more batch for the map of the layer after those of `prompt`, whose
    neurons are in the next entry there."""
    u, m, index = _mlp_input(config, attention, llama, batch, inputs, first_upper, prompt)
    z = map_inputs(config, m, layer_of(prompt.mlps, prompt.number))
    left = layer_of(inputs, index + 1) - u
    return add_sums(config, attention.mesh, sums, z, left, batch.segment_ids)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def add_energy(
    config: Config,
    attention: Attention,
    energy: Float[Array, " F"],
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
    first_upper: Int[Array, ""],
    prompt: PromptLayers,
) -> Float[Array, " F"]:
    """`maps.add_energy` of one more batch for the layer after those of `prompt`."""
    _, m, index = _mlp_input(config, attention, llama, batch, inputs, first_upper, prompt)
    block = all_gather_fsdp(attention.mesh, layer_of(llama.lower, index), layer=True)
    return maps.add_energy(config, energy, block, m, batch.segment_ids)


def _mlp_input(config, attention, llama, batch, inputs, first_upper, prompt: PromptLayers):
    """(state of a prompt after the attention of the layer after those of `prompt`, what the MLP
    reads of it, number of the layer)."""
    index = first_upper + prompt.number
    states = boundary_states(config, attention, llama, batch, inputs, first_upper, prompt)
    y = layer_of(states, prompt.number)
    u = prompt_layer(config, attention, llama, batch, y, index, None)
    return u, norm(config, u, layer_of(llama.lower.mlp_norm, index)), index
