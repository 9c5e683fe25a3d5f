"""The quality of every SwiftKV cut of a model before distillation, in a few compiled programs.

The weights are one stack of all layers. The teacher runs once per batch and keeps the hidden state
that enters each layer. From those states the student of any cut starts: where its upper layers
begin is an argument of one program, not a shape, so a model of 126 layers compiles as quickly as
one of 8. There every upper layer reads separate keys and values, which it makes from its group's
(see `cut_kv`), so the group size is not a shape either.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..attention import Attention
from ..batch import Batch
from ..boundary import project_kv
from ..cache import bytes_per_token
from ..calibration import LayerFit, check_groups, warn_of_few_tokens
from ..config import Config
from ..cost import prefill_flops
from ..decoder_layers import cross_layer, self_layer
from ..errors import ConfigError
from ..layers import embed, head_weights, norm
from ..packed_attention import packed_attention
from ..params import Llama, SwiftKV
from ..rope import rope_tables, scanned_kinds
from ..sharding import all_gather_fsdp, all_gather_vocabulary, constrain_activations, replicated
from .cut_kv import States, calibrated_kv, copied_kv, layer_of
from .distill import linear_kl
from .far_tokens import only_far
from .progress import track
from .recipe import Init

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CutResult:
    """Measurements of one cut, with a delta that has not been trained. Means are per predicted
    token."""

    num_key_value_layers: int
    key_value_group_size: int
    kl: float
    """KL(teacher || student) at temperature 1, nats."""
    agreement: float
    """Share of positions where teacher and student rank the same token first."""
    student_perplexity: float
    far_nats: float | None
    """Nats lost on the predictions that depend on the far part of the row; None without any."""
    prefill_flops_share: float
    """FLOPs of a prefill as a share of the teacher's."""
    kv_bytes_per_token: int
    kv_bytes_share: float
    """Bytes of the KV cache as a share of the teacher's."""
    layers: list[LayerFit]
    """How well each upper layer's keys and values follow from the input of layer K, for a start in
    closed form."""


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Measurements on one text."""

    init: Init
    """The start of the students."""
    tokens: int
    """Number of predicted tokens."""
    far_tokens: int
    """Number of those that depend on the far part of the row, see `far_tokens`."""
    calibration_tokens: int
    """Number of other tokens that a start in closed form is fitted to."""
    teacher_perplexity: float
    similarity: list[list[float]]
    """[L+1][L+1]: mean cosine between the hidden states that enter layers i and j; L is the output
    of the last layer."""
    cuts: list[CutResult]


def possible_cuts(
    config: Config, lower: Iterable[int], groups: Iterable[int], init: Init
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """(K, g) for every K and each g at which the model can be cut and a student started, sorted;
    and g -> why it cannot, of those that fit at no K."""
    cuts, reasons = [], {}
    for k, g in itertools.product(sorted(set(lower)), sorted(set(groups))):
        try:
            cut = config.cut(k, g)
            if init == "closed-form":
                check_groups(cut)
            cuts.append((k, g))
        except ConfigError as error:
            reasons[g] = str(error)
    fitting = {g for _, g in cuts}
    return cuts, {g: reason for g, reason in reasons.items() if g not in fitting}


def analyze_cuts(
    config: Config,
    llama: Llama,
    batches: Sequence[Batch],
    cuts: Sequence[tuple[int, int]],
    *,
    prompt_length: int,
    attention: Attention,
    init: Init = "closed-form",
    calibration: Sequence[Batch] = (),
) -> Analysis:
    """Run teacher and students over `batches`. `llama` has all its layers in the lower stack, and
    `cuts` are (K, g), sorted.

    A start in closed form is fitted to the tokens of `calibration`, batches of the same shape; if
    they are few, there is a warning. It needs device memory for the second moments, see
    `cut_kv.plan_passes`; every start for the projections of one K, once for each of its g. Far
    tokens cost two more passes of the teacher over `batches` in all, and two more products with the
    output matrix for each cut. `prompt_length` is the number of tokens of the prefill whose FLOPs
    are counted. Raises `ValueError` if there is no token to fit to.
    """
    states = functools.partial(_states, config, attention, llama)
    groups = {k: [g for _, g in found] for k, found in itertools.groupby(cuts, lambda cut: cut[0])}
    calibration_tokens = 0
    if init == "closed-form":
        calibration_tokens = _real_tokens(calibration)
        warn_of_few_tokens(config, calibration_tokens)
        logger.info("calibrating %d cuts on %d tokens", len(cuts), calibration_tokens)
        fitted_to = functools.partial(states, calibration, "calibrating")
        starts = calibrated_kv(config, llama, groups, fitted_to, attention)
    else:
        starts = copied_kv(config, llama, groups, init, attention.mesh)
    far = [only_far(config, attention, llama, batch).loss_mask for batch in batches]
    targets = sum(float(batch.loss_mask.sum()) for batch in batches)
    far_tokens = int(sum(float(mask.sum()) for mask in far))
    counts = np.array([targets] * 4 + [max(far_tokens, 1)])
    results, teacher_nll = [], 0.0
    for k, students in starts:
        sums = np.zeros((len(students), len(counts)))
        for (batch, inputs, last), mask in zip(states(batches, f"K={k}"), far, strict=True):
            first = jnp.int32(k)
            parts = [
                cut_sums(config, attention, llama, batch, mask, inputs, last, first, student.kv)
                for student in students
            ]
            sums += np.array(jax.device_get(parts))
        for g, student, means in zip(groups[k], students, sums / counts, strict=True):
            row = _cut(config, k, g, means, student.layers, prompt_length, llama.embed.dtype)
            results.append(row if far_tokens else dataclasses.replace(row, far_nats=None))
            teacher_nll = float(means[2])
        logger.info("K=%d measured, %d of %d cuts done", k, len(results), len(cuts))
    return Analysis(
        init=init,
        tokens=int(targets),
        far_tokens=far_tokens,
        calibration_tokens=calibration_tokens,
        teacher_perplexity=float(np.exp(teacher_nll)),
        similarity=_similarity(attention, states(batches, "similarity")),
        cuts=results,
    )


def _states(
    config: Config, attention: Attention, llama: Llama, batches: Sequence[Batch], description: str
) -> Iterator[States]:
    for batch in track(batches, description, len(batches)):
        yield batch, *teacher_states(config, attention, llama, batch)


def _similarity(attention: Attention, states: Iterable[States]) -> list[list[float]]:
    sums, tokens = np.zeros(()), 0
    for batch, inputs, last in states:
        sums = sums + np.asarray(cosine_sums(attention, inputs, last, batch.segment_ids))
        tokens += _real_tokens([batch])
    return (sums / tokens).tolist()


def _real_tokens(batches: Iterable[Batch]) -> int:
    return sum(int((batch.segment_ids > 0).sum()) for batch in batches)


def _cut(
    config: Config, k: int, g: int, means, layers: tuple[LayerFit, ...], prompt_length: int, dtype
) -> CutResult:
    kl, agreement, _, student_nll, far_nats = map(float, means)
    cut = config.cut(k, g)
    kv_bytes = bytes_per_token(cut, dtype)
    return CutResult(
        num_key_value_layers=k,
        key_value_group_size=g,
        kl=max(kl, 0.0),  # K = L-1 changes nothing: rounding may then fall below 0
        agreement=agreement,
        student_perplexity=float(np.exp(student_nll)),
        far_nats=far_nats,
        prefill_flops_share=prefill_flops(cut, prompt_length, swiftkv=True)
        / prefill_flops(cut, prompt_length, swiftkv=False),
        kv_bytes_per_token=kv_bytes,
        kv_bytes_share=kv_bytes / bytes_per_token(cut, dtype, swiftkv=False),
        layers=list(layers),
    )


# The programs -----------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def teacher_states(
    config: Config, attention: Attention, llama: Llama, batch: Batch
) -> tuple[Float[Array, "L B T D"], Float[Array, "B T D"]]:
    """The hidden state that enters each layer, and the output of the last one."""
    config = config.at_length(batch.tokens.shape[1])
    mesh, tables = attention.mesh, rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))

    def step(x, layer):
        *weights, kind = layer
        block, qkv = (all_gather_fsdp(mesh, part, layer=True) for part in weights)
        rope, window = kind_of(kind)
        attend = packed_attention(config, attention, batch.segment_ids, window)
        following, _ = self_layer(config, block, qkv, x, rope, attend, attention)
        return constrain_activations(mesh, following), x

    embedding = all_gather_vocabulary(mesh, llama.embed)
    x = constrain_activations(mesh, embed(config, embedding, batch.tokens))
    last, inputs = jax.lax.scan(step, x, (llama.lower, llama.lower_qkv, kinds))
    return inputs, last


@functools.partial(jax.jit, static_argnums=0)
def cosine_sums(
    attention: Attention,
    inputs: Float[Array, "L B T D"],
    last: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "L+1 L+1"]:
    """Sum over real tokens of the cosine between the hidden states of any two layers."""
    real = (segment_ids > 0)[..., None]

    def unit(x):
        length = jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)
        return jnp.where(real, x / length, 0).astype(x.dtype)

    states = jnp.concatenate([unit(inputs), unit(last)[None]])
    sums = jnp.einsum("iBTD,jBTD->ij", states, states, preferred_element_type=jnp.float32)
    return (
        sums
        if attention.mesh is None
        else jax.lax.with_sharding_constraint(sums, replicated(attention.mesh))
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def cut_sums(
    config: Config,
    attention: Attention,
    llama: Llama,
    batch: Batch,
    far: Float[Array, "B T"],
    inputs: Float[Array, "L B T D"],
    last: Float[Array, "B T D"],
    first_upper: Int[Array, ""],
    kv: SwiftKV,
) -> tuple[Array, Array, Array, Array, Array]:
    """`linear_kl` at temperature 1 between the teacher, which is `last`, and the student of one
    cut, whose upper layers' keys and values are projected by the entries of `kv` in turn; and the
    nats that the student loses on the predictions that `far` leaves."""
    config = config.at_length(batch.tokens.shape[1])
    mesh, tables = attention.mesh, rope_tables(config, batch.positions)
    kinds, kind_of = scanned_kinds(config, tables, range(config.num_layers))
    first_x = layer_of(inputs, first_upper)
    first_norm = layer_of(llama.lower.attn_norm, first_upper)

    def run_layer(index, x):
        block, qkv, own = (
            all_gather_fsdp(mesh, layer_of(stack, at), layer=True)
            for stack, at in (
                (llama.lower, index),
                (llama.lower_qkv, index),
                (kv, index - first_upper),
            )
        )
        delta = dataclasses.replace(jax.tree.map(lambda leaf: leaf[None], own), norm=first_norm)
        rope, window = kind_of(layer_of(kinds, index))
        k, v = (heads[0] for heads in project_kv(config, delta, first_x, rope))
        attend = functools.partial(
            attention.prefill,
            k=k,
            v=v,
            segment_ids=batch.segment_ids,
            window=window,
            score_cap=config.score_cap,
        )
        x = cross_layer(config, block, qkv, x, rope, attend, attention)
        return constrain_activations(mesh, x)

    student_x = jax.lax.fori_loop(first_upper, config.num_layers, run_layer, first_x)
    student_x, teacher_x = (norm(config, x, llama.final_norm) for x in (student_x, last))
    compare = functools.partial(
        linear_kl,
        1.0,
        student_x,
        teacher_x,
        head_weights(llama),
        jnp.roll(batch.tokens, -1, axis=1),
        config=config,
        mesh=mesh,
    )
    _, _, teacher_far, student_far, _ = compare(far)
    return *compare(batch.loss_mask)[:4], student_far - teacher_far
