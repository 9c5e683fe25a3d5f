"""Options of the scores between queries and keys, as one value from the model to the kernels.

To add one: a field here, the same option of the ops and of `Config`, its formula in `applied` and
`gradient` and, written anew, in `reference`. Device kernels refuse options that they do not know.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """A change of each score q k / sqrt(H) before the softmax. The names are those of options of
    the ops, and of fields of `Config`."""

    score_cap: float | None = None
    """A score s becomes c tanh(s / c) (Gemma 2, arXiv:2408.00118)."""

    def __post_init__(self):
        cap = self.score_cap
        if cap is None:
            return
        if isinstance(cap, bool) or not isinstance(cap, int | float) or cap <= 0:
            raise ValueError(f"score_cap must be a number above 0, got {cap!r}")

    @property
    def given(self) -> dict[str, float]:
        """The options that change a score, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def applied(self, scores):
        """The scores as the softmax takes them."""
        if self.score_cap is None:
            return scores
        return self.score_cap * jnp.tanh(scores / self.score_cap)

    def gradient(self, d_applied, applied):
        """The gradient in the scores, from that in the `applied` ones."""
        if self.score_cap is None:
            return d_applied
        return d_applied * (1 - jnp.square(applied / self.score_cap))


PLAIN_SCORES = ScoreOptions()
