"""Architectures of speculators, and of the drafters that SwiftKV cannot serve. Importing this does
not import JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Method = Literal["sum_rnn", "sum_lstm"]
GATES: dict[Method, int] = {"sum_rnn": 1, "sum_lstm": 4}
"""Matrices that a step has side by side: of an LSTM forget, input, output and cell."""


@dataclasses.dataclass(frozen=True)
class SpeculatorConfig:
    """The architecture of a speculator."""

    method: Method
    n_predict: int
    """Tokens that it was trained to draft."""
    vocab_size: int
    hidden_dim: int
    """Width of the model's hidden state (D)."""
    inner_dim: int
    """Width of its own state (I)."""
    tie_weights: bool = True
    """True where all steps share their weights, but for the first matrix of the model's state."""
    scale_input: bool = False

    @property
    def steps(self) -> int:
        """Steps that have weights of their own."""
        return 1 if self.tie_weights else self.n_predict

    @property
    def embedding_scale(self) -> float:
        """The factor a of embeddings."""
        state = 0.5 ** (0.5 / self.n_predict)
        return math.sqrt((1 - state**2) * self.inner_dim / 2) / state


_ATTENDS = "attends to hidden states of the prompt's tokens that SwiftKV does not compute"
_REFUSED = {
    "eagle": _ATTENDS,
    "dflash": _ATTENDS,
    "mtp": _ATTENDS,
    "medusa": "is not supported: its drafts do not depend on one another",
}
"""Part of the name of a drafter: why it is refused. Those that attend read upper layers, or the
last, at every token of the prompt."""


def refused_drafter(name: str) -> str | None:
    """Why a drafter of this name is refused; None for an unknown one."""
    return next((why for part, why in _REFUSED.items() if part in name.lower()), None)
