"""The keys and values that the upper layers of every cut start from, for `sweep`.

For every cut this is a stack of projections with as many entries as the lowest cut has upper
layers. The upper layers of the cut come first, each with separate keys and values, which it makes
from its group's. With these it needs only the teacher's queries
(`calibration.delta.FittedGroup.expanded`). The same for the prompt layers of a cut and for taps is
in `cut_boundary`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float, Int

from ...calibration import LayerFit
from ...calibration.delta import (
    delta_shardings,
    fit_layers,
    output_metrics,
    own_projections,
    share_layers,
)
from ...calibration.moments import (
    LayerQueries,
    Moments,
    add_layer,
    fitted_tokens,
    layer_moments,
    layer_queries,
    moment_shapes,
    moment_shardings,
    regressors,
    zero_moments,
)
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config, GeneratedKV
from ...model.initialization import Start
from ...model.params import Llama, SwiftKV
from ...model.rope import paired_dims, rope_tables, scanned_kinds
from ...model.sharding import all_gather_fsdp, from_host
from ...plan.memory import sharded_bytes
from .sweep_programs import PromptLayers, boundary_states, layer_of

MOMENTS_BYTES = 2**33
"""Bytes of the second moments on one device, unless those of a single K are more."""

States = tuple[Batch, Float[Array, "L B T D"], Float[Array, "B T D"]]
"""A batch, the hidden state that enters each of its layers, and the output of the last one."""


class CutKV(NamedTuple):
    """The start of the upper layers of a cut."""

    kv: SwiftKV
    """k, v, their biases, taps and the norms of k, of every upper layer."""
    layers: tuple[LayerFit, ...]
    """How well they are fitted; None for copies."""
    prompt: PromptLayers | None = None


Student = tuple[int, int, GeneratedKV]
"""K, g, and where generated tokens take their keys and values from."""
Sums = tuple[int, int]
"""K and the `Config.exact_tail` that moments are for."""


def copied_kv(
    config: Config,
    llama: Llama,
    students: Sequence[Student],
    start: Start,
    mesh: Mesh | None,
) -> Iterator[tuple[Student, CutKV]]:
    """The start of each student, as `initialization.init_swiftkv` makes it."""
    size = config.num_layers - min(k for k, _, _ in students)
    where = _shardings(config, size, mesh, llama)
    for student in students:
        k, g, _ = student
        members = np.zeros((size, config.num_layers), bool)
        for layer in range(k, config.num_layers):
            leader = layer - (layer - k) % g
            members[layer - k, leader : leader + (g if start == "authors" else 1)] = True
        stacks = {name: getattr(llama.lower_qkv, name) for name in ("k", "v")}
        optional = ("k_bias", "v_bias", "k_norm")
        stacks |= {name: getattr(llama.lower_qkv, name) for name in optional}
        means = {
            name: _means(stack, members, getattr(where, name))
            for name, stack in stacks.items()
            if stack is not None
        }
        yield student, CutKV(SwiftKV(**{"norm": None, "q": None, **means}), ())


def calibrated_kv(
    fitter: Fitter, students: Sequence[Student], states: Callable[[], Iterable[States]]
) -> Iterator[tuple[Student, CutKV]]:
    """The start of each student in closed form, fitted to `states`.

    States are run through once for as many K as `plan_passes` puts together. Host memory holds the
    float64 keys and values of one K's layers, and the second moments of one layer at a time. Raises
    `ValueError` if `states` hold no token.
    """
    config = fitter.config
    of_sums = dict[Sums, list[Student]]()
    for student in students:
        k, _, generated = student
        of_sums.setdefault((k, fitter.tail(generated)), []).append(student)
    for entries, chosen in plan_passes(config, list(of_sums), fitter.attention.mesh):
        moments = fitter.gather(config, entries, chosen, states())
        for sums, entry in chosen.items():
            for k, g, generated in of_sums[sums]:
                cut = config.cut(k, g)
                yield (k, g, generated), fitter.start(cut, generated, moments, entry)


class Fitter:
    """Makes starts in closed form from the moments of one text, which it gathers."""

    def __init__(
        self,
        config: Config,
        llama: Llama,
        attention: Attention,
        *,
        lowest: int,
        exact_tail: int,
    ):
        """The stacks have as many entries as a cut at `lowest` has upper layers. `exact_tail` is
        that of students whose generated tokens keep their own keys and values."""
        self.config = config
        self.llama = llama
        self.attention = attention
        self.size = config.num_layers - lowest
        self.exact_tail = exact_tail
        self.metrics = output_metrics(llama.lower.o, config.num_kv_heads)
        self.pairs = paired_dims(config)
        self._tails = tuple(dict.fromkeys((0, exact_tail)))
        self._queries: dict[int, LayerQueries] = {}
        """Number of a batch -> its queries, which are the same for all cuts."""

    def tail(self, generated: GeneratedKV) -> int:
        return self.exact_tail if generated == "own" else 0

    def gather(
        self,
        config: Config,
        entries: int,
        chosen: Mapping[Sums, int],
        states: Iterable[States],
        prompt: PromptLayers | None = None,
    ) -> Moments:
        """The moments of each of `chosen` from its entry on, in a stack of `entries`, with the taps
        and exact head of `config`. Raises `ValueError` if `states` hold no token."""
        moments = zero_moments(config, self.attention.mesh, entries)
        tokens = 0.0
        for number, (batch, inputs, _) in enumerate(states):
            if number not in self._queries:
                self._queries[number] = teacher_queries(
                    self.config, self.attention, self._tails, self.llama, batch, inputs
                )
            for (k, tail), entry in chosen.items():
                moments = add_cut(
                    config,
                    self.attention,
                    moments,
                    self.llama,
                    batch,
                    inputs,
                    self._queries[number],
                    jnp.int32(self._tails.index(tail)),
                    jnp.int32(k),
                    jnp.int32(entry),
                    prompt,
                )
            tokens += float(fitted_tokens(config, batch.segment_ids).sum())
        if not tokens:
            raise ValueError("there is no token to calibrate on")
        return dataclasses.replace(moments, tokens=jnp.float32(tokens))

    def start(
        self,
        cut: Config,
        generated: GeneratedKV,
        moments: Moments,
        entry: int,
        prompt: PromptLayers | None = None,
    ) -> CutKV:
        """The start at `cut`, whose prompt layers have the maps of `prompt`, from the moments from
        `entry` on."""
        qkv = self.llama.lower_qkv
        alone = cut.prompt_attention_layers
        first = cut.first_projected_layer
        group = cut.key_value_group_size
        single = dataclasses.replace(cut, key_value_group_size=1, generated_kv=generated)
        layers = fit_layers(
            single if group == 1 else dataclasses.replace(single, generated_kv="boundary"),
            qkv,
            self.metrics,
            moments,
            first=first,
            entry=entry,
        )
        shared, fits = zip(*share_layers(layers, group, moments, self.pairs), strict=True)
        expanded = [
            np.split(own_projections(cut, qkv, layer).transpose(1, 2, 0), 2)
            for layer in range(first - alone, first)
        ]
        expanded += [kv for each in shared for kv in each.expanded()]
        kv = _put(cut, expanded, self.size, self.llama, self.attention.mesh)
        if qkv.k_norm is not None:  # then without groups
            norms = np.zeros((self.size, cut.num_layers), bool)
            upper = cut.num_upper_layers
            norms[:upper, cut.num_lower_layers :] = np.eye(upper, dtype=bool)
            where = _shardings(cut, self.size, self.attention.mesh, self.llama).k_norm
            kv = dataclasses.replace(kv, k_norm=_means(qkv.k_norm, norms, where))
        return CutKV(kv, tuple(fit for each in fits for fit in each), prompt)


def plan_passes(
    config: Config, wanted: Sequence[Sums], mesh: Mesh | None
) -> Iterator[tuple[int, dict[Sums, int]]]:
    """How the moments `wanted` are gathered in stacks of at most `MOMENTS_BYTES` on each device, or
    of one K: for each pass over the data the entries of the stack, the same in all, and the first
    entry of each."""
    one = moment_shapes(config, 1)
    if mesh is None:
        layer_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(one))
    else:
        layer_bytes = int(sharded_bytes(one, moment_shardings(config, mesh)))
    upper = [config.num_layers - k for k, _ in wanted]
    entries = max(max(upper), min(sum(upper), MOMENTS_BYTES // layer_bytes))
    chosen = {}
    used = 0
    for sums, layers in zip(wanted, upper, strict=True):
        if used + layers > entries:
            yield entries, chosen
            chosen = {}
            used = 0
        chosen[sums] = used
        used += layers
    yield entries, chosen


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def teacher_queries(
    config: Config,
    attention: Attention,
    tails: tuple[int, ...],
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
) -> LayerQueries:
    """The queries of all layers, stacked, for students with each of `tails`."""
    config = config.at_length(batch.tokens.shape[1])
    mesh = attention.mesh
    tables = rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))

    def of_layer(_, layer):
        x, *weights, kind = layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        segment_ids = batch.segment_ids
        return None, layer_queries(
            config, block, qkv, x, kind_of(kind), segment_ids, tails=tails, mesh=mesh
        )

    return jax.lax.scan(of_layer, None, (inputs, llama.lower, llama.lower_qkv, kinds))[1]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def add_cut(
    config: Config,
    attention: Attention,
    moments: Moments,
    llama: Llama,
    batch: Batch,
    inputs: Float[Array, "L B T D"],
    queries: LayerQueries,
    tail: Int[Array, ""],
    first_upper: Int[Array, ""],
    entry: Int[Array, ""],
    prompt: PromptLayers | None = None,
) -> Moments:
    """`moments` with those of one more batch for the upper layers of one cut that follow its prompt
    layers, from `entry` on; not the number of tokens. With the taps and the exact head of `config`,
    and the tail of that number among those of `queries`, which are all layers'."""
    mesh = attention.mesh
    x = layer_of(inputs, first_upper)
    first = first_upper
    if prompt is not None:
        states = boundary_states(config, attention, llama, batch, inputs, first_upper, prompt)
        x = layer_of(states, prompt.number)
        first = first_upper + prompt.number
    norm = layer_of(llama.lower.attn_norm, first)
    s = regressors(config, x, norm, batch.segment_ids)

    def step(index, moments):
        block, qkv = (
            all_gather_fsdp(mesh, layer_of(stack, index), layer=True)
            for stack in (llama.lower, llama.lower_qkv)
        )
        found = layer_of(queries, index)
        added = layer_moments(
            config,
            block,
            qkv,
            layer_of(inputs, index),
            s,
            batch.segment_ids,
            layer_of(found.received, tail),
            layer_of(found.counted, tail),
            found.energy,
        )
        return add_layer(config, mesh, moments, added, entry + index - first)

    return jax.lax.fori_loop(first, config.num_layers, step, moments)


def _means(stack: jax.Array, members: np.ndarray, sharding: Sharding) -> jax.Array:
    """[size, ...]: for each row of `members` the mean of its layers, zeros where it has none."""
    mean = jax.jit(_row_means, out_shardings=sharding)
    return mean(stack, jnp.asarray(members, stack.dtype))


def _row_means(stack: Float[Array, "L *A"], members: Float[Array, "U L"]) -> Float[Array, "U *A"]:
    sums = jnp.einsum(
        "UL,L...->U...",
        members,
        stack,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    counts = jnp.maximum(members.astype(jnp.float32).sum(1), 1)
    return (sums / counts.reshape(-1, *(1,) * (sums.ndim - 1))).astype(stack.dtype)


def _shardings(config: Config, size: int, mesh: Mesh | None, llama: Llama) -> SwiftKV:
    taps = config.boundary_taps
    cut = config.cut(config.num_layers - size, prompt_attention_layers=0, boundary_taps=taps)
    return delta_shardings(cut, mesh, llama)


def _put(
    config: Config,
    layers: Sequence[Sequence[np.ndarray]],
    size: int,
    llama: Llama,
    mesh: Mesh | None,
) -> SwiftKV:
    """Stacks of `size` entries from each layer's k and v (K H E), zeros behind them."""
    where = _shardings(config, size, mesh, llama)
    width = config.embed_dim
    parts = {"k": [k for k, _ in layers], "v": [v for _, v in layers]}

    def put(arrays: list[np.ndarray], sharding: Sharding) -> jax.Array:
        stack = np.zeros((size, *arrays[0].shape), llama.embed.dtype)
        for entry, array in enumerate(arrays):
            stack[entry] = array
        return from_host(stack, sharding)

    stacks = {
        name: put([x[..., :width] for x in arrays], getattr(where, name))
        for name, arrays in parts.items()
    }
    if config.boundary_taps:
        stacks["k_tap"] = put([k[..., width : 2 * width] for k in parts["k"]], where.k_tap)
    if config.qkv_bias:
        stacks |= {
            f"{name}_bias": put([x[..., -1] for x in arrays], getattr(where, f"{name}_bias"))
            for name, arrays in parts.items()
        }
    return SwiftKV(**{"norm": None, "q": None, **stacks})
