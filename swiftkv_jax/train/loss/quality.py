"""Losses of a student against its teacher on held-out text, and how much is too much to serve it
as it is."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

MAX_PERPLEXITY_LOSS = 0.02
"""Share of the teacher's perplexity. Students of real models that recall what a prompt says as
their teacher does lose 0.5 % at most. Gemma 3 270M with half of its layers, in closed form, loses
3.9 +- 1.1 %, and 89 of 95 points of recall, but few nats on far tokens."""
MAX_FAR_LOSS = 0.15
"""Nats on far-dependent predictions, on average."""
MIN_FAR_TOKENS = 64
"""Far-dependent predictions below which no mean over them is shown. Single losses of a student that
loses much deviate by some 1.2 nats (t2 at K = 10: 0.259 +- 0.037 on 4,202 tokens at 95 %), so that
the standard error of the mean of fewer is larger than `MAX_FAR_LOSS`."""


class PerplexityLoss(NamedTuple):
    """The share of the teacher's perplexity that a student loses."""

    share: float | None = None
    """None where nothing was measured."""
    error: float | None = None
    """Its standard error; None where it is unknown, which then counts as none."""

    def exceeds(self, limit: float) -> bool:
        """Say whether the loss is above a limit by more than its error."""
        return self.share is not None and self.share - (self.error or 0.0) > limit

    @property
    def is_known(self) -> bool:
        return self.share is not None

    @property
    def is_too_much(self) -> bool:
        return self.exceeds(MAX_PERPLEXITY_LOSS)

    @property
    def facts(self) -> dict[str, float | None]:
        """The fields of a note in `config.json`."""
        return {
            "share": _rounded(self.share),
            "error": _rounded(self.error),
            "limit": MAX_PERPLEXITY_LOSS,
        }

    @property
    def in_words(self) -> str:
        """`12.7% ± 4.7% of perplexity on held-out text, more than 2%`."""
        return f"{self} of perplexity on held-out text, more than {MAX_PERPLEXITY_LOSS:.0%}"

    def __str__(self) -> str:
        """`12.7% ± 4.7%`."""
        return f"{self.share:.1%}{plus_minus(self.error, '.1%')}"


class FarLoss(NamedTuple):
    """The number of far tokens, and the nats that a student loses on them, on average."""

    tokens: int = 0
    nats: float | None = None
    """None without far tokens."""
    kl: float | None = None
    """KL(teacher || student) on them, nats; None where it was not measured."""

    @property
    def is_known(self) -> bool:
        """Say whether the tokens are enough for a mean."""
        return self.nats is not None and self.tokens >= MIN_FAR_TOKENS

    @property
    def is_too_much(self) -> bool:
        return self.nats is not None and self.is_known and self.nats > MAX_FAR_LOSS

    @property
    def facts(self) -> dict[str, float | None]:
        """The fields of a note in `config.json`."""
        return {"nats": _rounded(self.nats), "tokens": self.tokens, "limit": MAX_FAR_LOSS}

    @property
    def in_words(self) -> str:
        """`0.664 nats on 1,200 tokens that depend on the far prompt, more than 0.15`."""
        where = f"{self.tokens:,} tokens that depend on the far prompt"
        return f"{self.nats:.3f} nats on {where}, more than {MAX_FAR_LOSS:g}"

    @property
    def cell(self) -> str:
        """For a table: `none`, `too few`, or nats."""
        if not self.tokens or self.nats is None:
            return "none"
        if not self.is_known:
            return "too few"
        return f"{self.nats:+.3f}"

    def __str__(self) -> str:
        """`+0.030 (1,200 tokens)`, or only how many there are."""
        if not self.tokens or self.nats is None:
            return "none"
        count = f"({describe_count(self.tokens)})"
        return f"{self.nats:+.3f} {count}" if self.is_known else count


class StudentLoss(NamedTuple):
    """All that is measured of a student's loss."""

    perplexity: PerplexityLoss = PerplexityLoss()
    far: FarLoss = FarLoss()

    @property
    def too_much(self) -> str:
        """The losses above their limits, in words; empty where none is."""
        return ", and ".join(each.in_words for each in self if each.is_too_much)


def mean_and_error(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float | None]:
    """A mean over tokens, from sums over parts of a text, and its standard error over the parts:
    None where fewer than two have tokens."""
    total = max(counts.sum(), 1)
    mean = sums.sum() / total
    parts = int((counts > 0).sum())
    if parts < 2:
        return float(mean), None
    spread = np.square(sums - mean * counts).sum() * parts / (parts - 1)
    return float(mean), float(np.sqrt(spread) / total)


def perplexity_loss(lost: np.ndarray, tokens: np.ndarray) -> tuple[float, float | None]:
    """The share of perplexity that is lost and its error, from the nats lost on parts of a text and
    their numbers of tokens."""
    mean, error = mean_and_error(lost, tokens)
    if error is not None:
        error *= math.exp(mean)
    return math.expm1(mean), error


def _rounded(value: float | None) -> float | None:
    """A figure as a note has it, to four decimals."""
    return None if value is None else round(value, 4)


def plus_minus(error: float | None, form: str) -> str:
    """` ± 0.2%`, formatted with `form`; nothing for an error that is unknown."""
    if error is None:
        return ""
    return f" ± {error:{form}}"


def describe_count(tokens: int) -> str:
    """`1,200 tokens`, or that nothing follows from so few."""
    return f"{tokens:,} tokens" + ", too few to say" * (tokens < MIN_FAR_TOKENS)
