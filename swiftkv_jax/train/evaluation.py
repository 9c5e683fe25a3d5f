"""Teacher and student on held-out rows, and the rule of early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..transformer import Batch
from .batch_sharder import BatchSharder
from .data.loader import DatasetMixture, first_batches
from .distill import Sums
from .metrics import EVAL_LOSS
from .recipe import Recipe


def evaluate(
    eval_step: Callable[..., Sums],
    delta,
    llama,
    data: DatasetMixture,
    recipe: Recipe,
    sharder: BatchSharder,
    *,
    own_tail: int | None = None,
) -> dict[str, float]:
    """Perplexities, agreement, divergence and hidden loss per token on the first rows of `data`,
    under names that begin with `eval_`.

    They are means over the predictions of targets (`hidden_loss`: over tokens), whatever the
    recipe's `loss_average` and `loss_mask` are: those are about the loss that is trained on.
    `own_tail` as in `PackedRow.fields`.
    """
    totals = sums(eval_step, delta, llama, data, recipe, sharder, own_tail=own_tail)
    means = {name: float(value) for name, value in totals.means().items()}
    return {
        EVAL_LOSS: means["logits_loss"] + recipe.hidden_loss_weight * means["hidden_loss"],
        "eval_teacher_perplexity": math.exp(means.pop("teacher_loss")),
        "eval_student_perplexity": math.exp(means.pop("student_loss")),
        **{f"eval_{name}": value for name, value in means.items()},
    }


def sums(
    eval_step: Callable[..., Sums],
    delta,
    llama,
    data: DatasetMixture,
    recipe: Recipe,
    sharder: BatchSharder,
    *,
    own_tail: int | None = None,
    select: Callable[[Batch], Batch] = lambda batch: batch,
) -> Sums:
    """Sums over the rows of `evaluate`, of the predictions that the `loss_mask` of `select(batch)`
    leaves."""
    batches = first_batches(
        data,
        sharder.num_rows,
        positions=sharder.positions,
        limit=recipe.eval_batches,
        own_tail=own_tail,
    )
    parts = [eval_step(delta, llama, select(sharder.shard(local.batch))) for local in batches]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves).sum(), *parts)


def evaluations_since_best(losses: Sequence[float]) -> int:
    """Number of evaluations after the one with the lowest held-out loss; 0 if there is none."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
