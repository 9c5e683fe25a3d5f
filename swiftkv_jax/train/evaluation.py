"""Teacher and student on held-out rows, and what follows from it: the best state so far, and when
to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .batch_sharder import BatchSharder
from .data.loader import DatasetMixture, first_batches
from .distill import Sums
from .recipe import Recipe

LOSS = "eval_loss"


def evaluate(
    eval_step: Callable[..., Sums],
    delta,
    llama,
    rows: DatasetMixture,
    recipe: Recipe,
    sharder: BatchSharder,
) -> dict[str, float]:
    """Perplexities, agreement, divergence and hidden loss per token on the first rows, under names
    that begin with `eval_`."""
    batches = first_batches(
        rows, sharder.num_rows, positions=sharder.positions, limit=recipe.eval_batches
    )
    parts = [eval_step(delta, llama, sharder.shard(local.batch)) for local in batches]
    totals: Sums = jax.tree.map(lambda *leaves: jnp.stack(leaves).sum(), *parts)
    means = {name: float(value) for name, value in totals.means().items()}
    return {
        LOSS: means["logits_loss"] + recipe.hidden_loss_weight * means["hidden_loss"],
        "eval_teacher_perplexity": math.exp(means.pop("teacher_loss")),
        "eval_student_perplexity": math.exp(means.pop("student_loss")),
        **{f"eval_{name}": value for name, value in means.items()},
    }


def evaluations_since_best(losses: Sequence[float]) -> int:
    """How many evaluations, up to the last, have not lowered the held-out loss since the lowest. 0
    if there is none."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
