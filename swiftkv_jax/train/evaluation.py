"""Teacher and student on held-out rows, and the rule of early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..batch import Batch
from ..config import Config
from ..sharding import batch_sharding
from .batch_sharder import BatchSharder
from .data.loader import DatasetMixture, first_batches
from .distill import Sums
from .metrics import EVAL_LOSS
from .recipe import Recipe
from .setup import own_tail


def held_out_batches(
    recipe: Recipe, config: Config, data: DatasetMixture, mesh: Mesh
) -> Iterator[Batch]:
    """The first rows of `data` on the mesh, as many as the recipe evaluates, fields B T."""
    sharder = BatchSharder(batch_sharding(mesh), (recipe.micro_batch_size,))
    for local in first_batches(
        data,
        sharder.num_rows,
        positions=sharder.positions,
        limit=recipe.eval_batches,
        own_tail=own_tail(config),
    ):
        yield sharder.shard(local.batch)


def evaluate(
    step: Callable[[Batch], Sums], batches: Iterable[Batch], hidden_weight: float
) -> dict[str, float]:
    """Perplexities, agreement, divergence and hidden loss per token, under names that begin with
    `eval_`.

    They are means over the predictions of targets (`hidden_loss`: over tokens). The recipe's
    `loss_average` and `loss_mask` affect only the training loss.
    """
    means = {name: float(value) for name, value in sums(step, batches).means().items()}
    return {
        EVAL_LOSS: means["logits_loss"] + hidden_weight * means["hidden_loss"],
        "eval_teacher_perplexity": math.exp(means.pop("teacher_loss")),
        "eval_student_perplexity": math.exp(means.pop("student_loss")),
        **{f"eval_{name}": value for name, value in means.items()},
    }


def sums(step: Callable[[Batch], Sums], batches: Iterable[Batch]) -> Sums:
    """Sums over the predictions in all batches that their `loss_mask` keeps."""
    parts = [step(batch) for batch in batches]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves).sum(), *parts)


def evaluations_since_best(losses: Sequence[float]) -> int:
    """Number of evaluations after the one with the lowest held-out loss; 0 if there is none."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
