"""Teacher and student on held-out rows, and the rule of early stopping."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ...checkpoints.loss_notes import FAR, PERPLEXITY, Step, with_notes
from ...model.attention import Attention
from ...model.batch import Batch
from ...model.config import Config
from ...model.cut import ungrouped
from ...model.model import AuxiliaryFiles
from ...model.params import Llama
from ...model.sharding import batch_sharding, to_host
from ..data.loader import DatasetMixture, first_batches
from ..data.loader import batches as shuffled_batches
from ..loss.distill import Sums
from ..loss.far_tokens import mark_own, only_far
from ..loss.quality import (
    MIN_FAR_TOKENS,
    FarLoss,
    PerplexityLoss,
    StudentLoss,
    describe_count,
    perplexity_loss,
)
from ..run_options import RunOptions
from .batch_sharder import BatchSharder
from .metrics import (
    EVAL_FAR_KL,
    EVAL_FAR_NATS,
    EVAL_FAR_TOKENS,
    EVAL_LOSS,
    EVAL_PERPLEXITY_ERROR,
    METRICS,
    loss_of,
    read_metrics,
)
from .progress import track
from .setup import own_tail

logger = logging.getLogger(__name__)


EvalStep = Callable[[Batch, tuple[jax.Array, ...]], Sums]
"""`step.make_eval_step` with the models given."""


class HeldOut(NamedTuple):
    """Held-out rows on a mesh, fields B T."""

    batches: list[Batch]
    far_batches: list[Batch]
    """The same rows with a `loss_mask` that keeps only the far-dependent predictions."""


def load_held_out(
    options: RunOptions,
    config: Config,
    llama: Llama,
    data: DatasetMixture,
    mesh: Mesh,
    chosen: range | None = None,
) -> HeldOut:
    """The first rows of `data`, as many as the options say, or those `chosen` of the shuffled
    ones. The teacher runs on them twice to find the far-dependent predictions. Logs a warning if
    the exact tail covers the prompts."""
    if config.exact_tail >= options.max_length // 2:
        logger.warning(
            "`exact_tail`=%d: a measured prompt, half of `max_length`=%d, keeps all of its own "
            "keys and values, so nothing can be lost",
            config.exact_tail,
            options.max_length,
        )
    batches = list(held_out_batches(options, config, data, mesh, chosen))
    # The same rows with all predictions: far tokens are found by halves of a row, whatever the
    # roles of its tokens are.
    boundary = dataclasses.replace(config, generated_kv="boundary", exact_tail=0)
    whole: Iterable[Batch] = batches
    if boundary != config:
        whole = held_out_batches(options, boundary, data, mesh, chosen)
    attention = Attention(mesh, options.attention, options.shard_sequence)
    far = []
    for batch in track(whole, "finding far tokens", len(batches)):
        # The teacher's program is that of all cuts: what students keep is marked after it.
        found = only_far(ungrouped(boundary), attention, llama, batch)
        far.append(mark_own(config, found))
        jax.block_until_ready(far[-1])
    return HeldOut(batches, far)


def held_out_batches(
    options: RunOptions,
    config: Config,
    data: DatasetMixture,
    mesh: Mesh,
    chosen: range | None = None,
) -> Iterator[Batch]:
    """Rows on the mesh, as many as the options say, or those `chosen` of the shuffled ones."""
    sharder = BatchSharder(batch_sharding(mesh), (options.micro_batch_size,))
    count = sharder.num_rows
    positions = sharder.positions
    tail = own_tail(config)
    if chosen is None:
        limit = options.eval_micro_batches
        found = first_batches(data, count, positions=positions, limit=limit, own_tail=tail)
    else:
        found = shuffled_batches(
            data,
            count,
            positions=positions,
            seed=options.seed,
            rows=chosen,
            own_tail=tail,
        )
    for local in found:
        yield sharder.shard(local.batch)


def evaluate(step: EvalStep, rows: HeldOut, hidden_weight: float) -> dict[str, float]:
    """Perplexities, agreement, KL, distillation loss and hidden loss per token, the number of far
    tokens, if there are any the nats lost on them and the KL divergence there, and with two batches
    or more the standard error of the perplexity that is lost, under names that begin with `eval_`.

    They are means over the predictions of targets (`hidden_loss`: over tokens). The recipe's
    `loss_average` and `loss_mask` affect only the training loss.
    """
    total, lost = compare_rows(step, rows)
    means = {name: float(value) for name, value in total.means().items()}
    results = {
        EVAL_LOSS: means["logits_loss"] + hidden_weight * means["hidden_loss"],
        "eval_teacher_perplexity": math.exp(means.pop("teacher_loss")),
        "eval_student_perplexity": math.exp(means.pop("student_loss")),
        **{f"eval_{name}": value for name, value in means.items()},
    }
    measured = {
        EVAL_FAR_TOKENS: lost.far.tokens,
        EVAL_FAR_NATS: lost.far.nats,
        EVAL_FAR_KL: lost.far.kl,
        EVAL_PERPLEXITY_ERROR: lost.perplexity.error,
    }
    return results | {name: value for name, value in measured.items() if value is not None}


def compare_rows(step: EvalStep, rows: HeldOut) -> tuple[Sums, StudentLoss]:
    """Sums over all predictions in `rows`, and what the student loses on them and on the
    far-dependent ones."""
    parts = []
    for batch, far in track(zip(*rows, strict=True), "evaluating", len(rows.batches)):
        if far.own is None:
            runs = [step(batch, (batch.loss_mask, far.loss_mask))]
        else:  # other tokens keep their own
            runs = [step(each, (each.loss_mask,)) for each in (batch, far)]
        parts.append(jax.tree.map(lambda *sums: np.concatenate([*map(to_host, sums)]), *runs))
    by_batch: Sums = jax.tree.map(lambda *of_batches: np.stack(of_batches), *parts)
    lost, lost_far = np.transpose(by_batch.student_nll - by_batch.teacher_nll)
    targets, far = np.transpose(by_batch.targets)
    far_loss = FarLoss()
    if tokens := int(far.sum()):
        nats, kl = (float(sums.sum()) / tokens for sums in (lost_far, by_batch.kl[:, 1]))
        far_loss = FarLoss(tokens, nats, kl)
    total = jax.tree.map(lambda leaf: leaf[:, 0].sum(0), by_batch)
    return total, StudentLoss(PerplexityLoss(*perplexity_loss(lost, targets)), far_loss)


def noted(files: AuxiliaryFiles, step: Step, lost: StudentLoss) -> AuxiliaryFiles:
    """The files of a student that is exported after `step`, with notes for those who serve it on
    what it loses too much of. What is trained without being measured keeps the notes that it
    had."""
    notes = {
        name: each.facts | {"step": step} if each.is_too_much else None
        for name, each in ((PERPLEXITY, lost.perplexity), (FAR, lost.far))
        if each.is_known or step == "calibration"
    }
    return with_notes(files, notes)


def warn_of_loss(lost: StudentLoss, what: str, remedy: str) -> None:
    """Log a warning if `what` loses too much."""
    if lost.too_much:
        logger.warning("%s loses %s: %s", what, lost.too_much, remedy)


def log_loss(folder: Path, step: int) -> StudentLoss:
    """Log what a run in `folder` lost on far tokens before its first step and after `step`, if it
    was measured, with a warning if that student loses too much. Returns what it loses."""
    rows = {row["step"]: row for row in read_metrics(folder / METRICS) if EVAL_LOSS in row}
    if step not in rows:
        return StudentLoss()
    lost = loss_of(rows[step])
    after = lost.far
    before = rows.get(0, {}).get(EVAL_FAR_NATS)
    if 0 < after.tokens < MIN_FAR_TOKENS:
        logger.info(
            "far tokens: %s (%d are needed); measure on more held-out rows (`eval_batches`) or on "
            "longer ones",
            describe_count(after.tokens),
            MIN_FAR_TOKENS,
        )
    elif before is not None and after.nats is not None:
        logger.info(
            "far tokens: %+.3f nats lost before training, %+.3f after, on %s",
            before,
            after.nats,
            describe_count(after.tokens),
        )
    warn_of_loss(
        lost,
        "the student",
        "train it longer, keep more layers (`num_key_value_layers`), or make smaller groups "
        "(`key_value_group_size`)",
    )
    return lost


def evaluations_since_best(losses: Sequence[float]) -> int:
    """Number of evaluations after the one with the lowest held-out loss; 0 if there is none."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
