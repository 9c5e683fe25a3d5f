"""Parts of the loss of a run. Importing this does not import JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

Divergence = Literal["forward", "reverse", "jsd"]
"""forward is KL(teacher || student), reverse KL(student || teacher), jsd the mean of both to their
mixture (Lin, "Divergence measures based on the Shannon entropy", 1991)."""

LossAverage = Literal["targets", "positions"]
"""Divisor of the summed KL divergence: the predictions that count (the sum of `loss_mask`), or all
positions that hold a token, as in the authors' trainer. Padding counts in neither."""

HiddenLoss = Literal["relative", "absolute"]
"""Mean squared difference of the hidden states: for each token relative to the teacher's mean
square, or absolute, as in the authors' trainer."""


LossMask = Literal["shifted", "unshifted"]
"""Predictions that count: shifted, those whose token, the next one, is a target of the same
document; unshifted, those at a target, whatever comes next, as in the authors' trainer."""
Padding = Literal["separate", "joined"]
"""The end of a row that no document fills: separate, segment 0, which counts nowhere; joined, more
tokens of the row's last document that are no targets, as in the authors' trainer."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The terms of the loss. The defaults are the authors' (ArcticTraining
    `projects/swiftkv/train.py`), `average` excepted; those of a run are `recipe.Recipe`'s."""

    temperature: float = 2.0
    """Temperature of both softmaxes; the divergence is multiplied by its square."""
    divergence: Divergence = "forward"
    top_k: int | None = None
    """Number of the teacher's likeliest tokens that are compared, with both distributions
    renormalised over them; None compares all."""
    hidden_weight: float = 1.0
    """Weight of the hidden-state error in the loss."""
    hidden_layer: int = -2
    """Hidden state that is compared, counted as Hugging Face does: 0 is the embedding, j the input
    of layer j, L (or -1) the output of the final norm; -2 is the input of the last layer."""
    average: LossAverage = "targets"
    hidden: HiddenLoss = "absolute"

    def layer_index(self, num_layers: int) -> int:
        """`hidden_layer` counted from 0. Raises `ValueError` if it is out of range or `temperature`
        is not positive."""
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")
        if not -num_layers - 1 <= self.hidden_layer <= num_layers:
            raise ValueError(
                f"hidden_layer={self.hidden_layer} must be from {-num_layers - 1} to {num_layers}"
            )
        return self.hidden_layer % (num_layers + 1)


AUTHORS = Objective()
