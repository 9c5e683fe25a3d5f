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
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...calibration import LayerFit, warn_of_few_tokens
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.cache import bytes_per_token
from ...model.config import Config, GeneratedKV
from ...model.cut import CUT_FIELDS, quarter_of_neurons
from ...model.mesh import dp_size
from ...model.params import Llama
from ...model.sharding import to_host
from ...plan.cost import prefill_flops
from ..loss.far_tokens import only_far
from ..loss.quality import mean_and_error, perplexity_loss
from ..recipe import Init
from ..run.progress import track
from .cut_boundary import boundary_kv
from .cut_kv import CutKV, Fitter, States, Student, calibrated_kv, copied_kv
from .heads import LayerHeads, head_scores
from .sweep_programs import cosine_sums, cut_sums, teacher_states

logger = logging.getLogger(__name__)

KEPT_BYTES = 2**32
"""Bytes of the hidden states of some text that stay on one device, so that the teacher runs on it
once; those of longer text are computed again for each pass."""


@dataclasses.dataclass(frozen=True)
class CutResult:
    """Measurements of one cut, with a delta that has not been trained. Means are per predicted
    token: of all tokens, or where generated tokens keep their own keys and values of those in the
    second half of a row, whose first half is the prompt. Errors are standard errors over rows, None
    where a single row counts: they are unknown then."""

    num_key_value_layers: int
    key_value_group_size: int
    prompt_attention_layers: int
    prompt_mlp_neurons: int
    boundary_taps: int
    exact_head: int
    generated_kv: GeneratedKV
    exact_tail: int
    tokens: int
    """Number of predicted tokens."""
    kl: float
    """KL(teacher || student) at temperature 1, nats."""
    agreement: float
    """Share of positions where teacher and student rank the same token first."""
    teacher_perplexity: float
    student_perplexity: float
    perplexity_loss: float
    """Share of the teacher's perplexity that the student's is above it."""
    perplexity_loss_error: float | None
    far_nats: float | None
    """Nats lost on the predictions that depend on the far part of the row; None without any."""
    far_nats_error: float | None
    prefill_flops_share: float
    """FLOPs of a prefill as a share of the teacher's."""
    kv_bytes_per_token: int
    kv_bytes_share: float
    """Bytes of the KV cache as a share of the teacher's."""
    layers: list[LayerFit]
    """How well each upper layer's keys and values are fitted, for a start in closed form; not those
    of prompt attention layers, which are exact."""
    r2: list[LayerR2]
    """How well they follow on the measured text, for the same layers."""


@dataclasses.dataclass(frozen=True)
class LayerR2:
    """Share of the variance of an upper layer's keys (with their norm, before they rotate) and
    values that the student's have, up to a factor for each head; averaged over key/value heads. Of
    the measured text without the first token of each document: attention sinks, whose states may
    be a hundred times as long as others."""

    layer: int
    r2_k: float
    r2_v: float


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Measurements on one text."""

    init: Init
    """The start of the students."""
    rows: int
    """Number of rows with predicted tokens."""
    tokens: int
    """Number of predicted tokens."""
    far_tokens: int
    """Number of those that depend on the far part of the row, see `far_tokens`."""
    calibration_tokens: int
    """Number of other tokens that a start in closed form is fitted to."""
    teacher_perplexity: float
    similarity: list[list[float]]
    """[L+1][L+1]: mean cosine between the hidden states that enter layers i and j; L is the output
    of the last layer. Like `heads` empty in an analysis that is not finished."""
    heads: list[LayerHeads]
    cuts: list[CutResult]


class Sweep:
    """Some text, the teacher's hidden states on it, and the students that start from those."""

    def __init__(
        self,
        config: Config,
        llama: Llama,
        batches: Sequence[Batch],
        *,
        prompt_length: int,
        attention: Attention,
        init: Init = "closed-form",
        calibration: Sequence[Batch] = (),
        exact_tail: int = 0,
        lowest: int = 1,
    ):
        """`llama` has all its layers in the lower stack. Students are measured on `batches`, and
        fitted to the tokens of `calibration`, batches of the same shape; if they are few, there is
        a warning. `prompt_length` is the number of tokens of the prefill whose FLOPs are counted,
        `exact_tail` that of students whose generated tokens keep their own keys and values. K is
        at least `lowest`."""
        self.config, self.llama, self.attention = config, llama, attention
        self.prompt_length, self.exact_tail = prompt_length, exact_tail
        self.init: Init = init
        self.lowest, self.calibration_tokens = lowest, 0
        if init == "closed-form":
            self.calibration_tokens = _real_tokens(calibration)
            warn_of_few_tokens(config, self.calibration_tokens)
        self._measured = self._states(batches, "measured text")
        self._calibration = self._states(calibration, "calibration text")
        self._far = [only_far(config, attention, llama, batch).loss_mask for batch in batches]
        self._masks = [to_host(batch.loss_mask) for batch in batches]
        self._far_masks = [to_host(mask) for mask in self._far]
        self.tokens = int(sum(mask.sum() for mask in self._masks))
        self.far_tokens = int(sum(mask.sum() for mask in self._far_masks))
        self.rows = sum(int((mask.sum(1) > 0).sum()) for mask in self._masks)
        self.results: list[CutResult] = []
        """Measurements so far, in their order."""
        self.on_result: Callable[[], None] = lambda: None
        """Called after each student."""

    def starts(self, students: Sequence[Student]) -> Iterator[tuple[Student, CutKV]]:
        """The start of each student, in any order."""
        if self.init != "closed-form":
            mesh = self.attention.mesh
            return copied_kv(self.config, self.llama, students, self.init, mesh)
        return calibrated_kv(self._fitter, students, self._calibration)

    @functools.cached_property
    def _fitter(self) -> Fitter:
        arguments = self.config, self.llama, self.attention
        return Fitter(*arguments, lowest=self.lowest, exact_tail=self.exact_tail)

    def improved_starts(self, k: int, generated: GeneratedKV) -> Iterator[tuple[int, list[CutKV]]]:
        """For M = 0, 1, ... the starts with an exact head, without and with a tap, see
        `cut_boundary.boundary_kv`."""
        return boundary_kv(self._fitter, k, generated, self._calibration)

    def at(
        self,
        k: int,
        g: int = 1,
        generated: GeneratedKV = "boundary",
        layers: int = 0,
        taps: int = 0,
        head: int = 0,
    ) -> Config:
        """The architecture of a student. Raises `ConfigError` if the model cannot be cut so."""
        return dataclasses.replace(
            self.config.cut(k, g),
            prompt_attention_layers=layers,
            prompt_mlp_neurons=quarter_of_neurons(self.config) if layers else 0,
            boundary_taps=taps,
            exact_head=head,
            generated_kv=generated,
            exact_tail=self.exact_tail if generated == "own" else 0,
        )

    def cost(self, cut: Config) -> float:
        """FLOPs of a student's prefill as a share of the teacher's."""
        student, teacher = (
            prefill_flops(cut, self.prompt_length, swiftkv=swiftkv) for swiftkv in (True, False)
        )
        return student / teacher

    def measure(self, cut: Config, start: CutKV) -> CutResult:
        """Run the student from `start`, made for `cut`, over the measured text."""
        own_from, parts, counts, explained = None, [], [], []
        # One program for every K: of the cut, it sees only whether there is a head.
        config = dataclasses.replace(self.config.cut(self.lowest), exact_head=cut.exact_head)
        for (batch, inputs, last), far, mask, far_mask in zip(
            self._measured(), self._far, self._masks, self._far_masks, strict=True
        ):
            if cut.generated_kv == "own":
                half = batch.tokens.shape[1] // 2
                own_from = max(0, half - cut.exact_tail)
                mask = mask * _after_prompt(batch, half, own_from)
                placed = jax.device_put(mask, batch.loss_mask.sharding)
                batch = dataclasses.replace(batch, loss_mask=placed)
            first, arguments = jnp.int32(cut.num_lower_layers), (batch, far, inputs, last)
            sums, of_layers = cut_sums(
                config,
                self.attention,
                own_from,
                self.llama,
                *arguments,
                first,
                start.kv,
                start.prompt,
            )
            parts.append(to_host(sums).astype(np.float64))
            explained.append([to_host(leaf).astype(np.float64) for leaf in of_layers])
            counts.append((mask.sum(1), far_mask.sum(1)))
        sums = np.concatenate(parts, 1)
        counted, of_far = (np.concatenate(each) for each in zip(*counts, strict=True))
        r2 = _explained(start.layers, *map(sum, zip(*explained, strict=True)))
        result = self._result(cut, start, r2, sums, counted, of_far)
        self.results.append(result)
        self.on_result()
        return result

    def _result(
        self, cut: Config, start: CutKV, r2: list[LayerR2], sums, counted, far
    ) -> CutResult:
        tokens = counted.sum()
        kl, agreement, teacher, student, _ = sums.sum(1) / max(tokens, 1)
        lost, lost_error = perplexity_loss(sums[3] - sums[2], counted)
        far_nats, far_error = mean_and_error(sums[4], far) if far.sum() else (None, None)
        dtype = self.llama.embed.dtype
        kv_bytes = bytes_per_token(cut, dtype)
        return CutResult(
            **{name: getattr(cut, name) for name in CUT_FIELDS},
            tokens=int(tokens),
            kl=max(float(kl), 0.0),  # K = L-1 changes nothing: rounding may then fall below 0
            agreement=float(agreement),
            teacher_perplexity=math.exp(teacher),
            student_perplexity=math.exp(student),
            perplexity_loss=lost,
            perplexity_loss_error=lost_error,
            far_nats=far_nats,
            far_nats_error=far_error,
            prefill_flops_share=self.cost(cut),
            kv_bytes_per_token=kv_bytes,
            kv_bytes_share=kv_bytes / bytes_per_token(cut, dtype, swiftkv=False),
            layers=list(start.layers),
            r2=r2,
        )

    def similarity(self) -> list[list[float]]:
        """`Analysis.similarity`."""
        sums, tokens = np.zeros(()), 0
        for batch, inputs, last in self._measured():
            arguments = self.attention, inputs, last, batch.segment_ids
            sums = sums + np.asarray(cosine_sums(*arguments))
            tokens += _real_tokens([batch])
        return (sums / tokens).tolist()

    def heads(self) -> list[LayerHeads]:
        """The scores of the teacher's heads."""
        rows = dp_size(self.attention.mesh)
        return head_scores(self.config, self.llama, self.attention, rows=rows * -(-8 // rows))

    def summary(self, cuts: Sequence[CutResult], *, finished: bool = True) -> Analysis:
        """The analysis of which `cuts` are the students. One that is not `finished` has no scores
        of heads and no similarity, which take passes of the teacher."""
        whole = [cut for cut in cuts if cut.generated_kv == "boundary"] or cuts
        similarity = []
        heads = []
        if finished:
            similarity = self.similarity()
            heads = self.heads()
        return Analysis(
            init=self.init,
            rows=self.rows,
            tokens=self.tokens,
            far_tokens=self.far_tokens,
            calibration_tokens=self.calibration_tokens,
            teacher_perplexity=whole[0].teacher_perplexity,
            similarity=similarity,
            heads=heads,
            cuts=list(cuts),
        )

    def _states(self, batches: Sequence[Batch], description: str):
        """A function to run through the teacher's states on `batches`, again and again."""
        kept: list[States] = []

        def run() -> Iterator[States]:
            if kept:
                yield from kept
                return
            states, size = list[States](), 0
            for batch in track(batches, description, len(batches)):
                found = batch, *teacher_states(self.config, self.attention, self.llama, batch)
                size += sum(leaf.nbytes for leaf in found[1:]) // dp_size(self.attention.mesh)
                if size <= KEPT_BYTES:
                    states.append(found)
                else:
                    states.clear()
                yield found
            if size <= KEPT_BYTES:
                kept.extend(states)

        return run


def measure_all(sweep: Sweep, students: Sequence[Student]) -> list[CutResult]:
    """Measurements of students without prompt layers and taps, in their order."""
    if not students:
        return []
    results = {}
    for student, start in sweep.starts(students):
        results[student] = sweep.measure(sweep.at(*student), start)
        logger.info("K=%d measured, %d of %d students", student[0], len(results), len(students))
    return [results[student] for student in students]


def _after_prompt(batch: Batch, half: int, own_from: int) -> np.ndarray:
    """1.0 for the predictions of a row's second half in the document that its prompt belongs to."""
    at = np.arange(batch.tokens.shape[1])
    began = at - to_host(batch.positions)
    return ((at >= half - 1) & (began < own_from)).astype(np.float32)


def _explained(fits: Sequence[LayerFit], means, products, tokens) -> list[LayerR2]:
    """R2 of the fitted layers from sums as in `Explained`."""
    y, ours = means  # L P K H
    own, fitted, both = products - np.stack([y * y, ours * ours, y * ours]).sum(-1) / tokens
    square = np.square(np.maximum(both, 0))
    # keys and values that are constant have nothing to explain
    r2 = np.divide(square, own * fitted, out=np.ones_like(own), where=own * fitted > 0).mean(-1)
    return [LayerR2(fit.layer, *np.minimum(r2[fit.layer], 1.0).tolist()) for fit in fits]


def _real_tokens(batches: Iterable[Batch]) -> int:
    return sum(int((batch.segment_ids > 0).sum()) for batch in batches)
