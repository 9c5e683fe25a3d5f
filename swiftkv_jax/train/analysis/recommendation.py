"""The cheapest of the measured students that stays within a budget."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...model.config import Config, GeneratedKV
from ...model.cut import CUT_FIELDS, describe_cut
from ..loss.quality import MAX_FAR_LOSS, MAX_PERPLEXITY_LOSS, MIN_FAR_TOKENS, plus_minus

if TYPE_CHECKING:
    from .sweep import CutResult


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most that a student may lose, one standard error included; None where that does not
    count."""

    perplexity_loss: float | None = MAX_PERPLEXITY_LOSS
    """Share of the teacher's perplexity."""
    far_loss: float | None = MAX_FAR_LOSS
    """Nats on the predictions that depend on the far part of a row."""

    def __str__(self) -> str:
        limits = []
        if self.perplexity_loss is not None:
            limits.append(f"{100 * self.perplexity_loss:g}% of perplexity")
        if self.far_loss is not None:
            limits.append(f"{self.far_loss} nats on far tokens")
        return " and ".join(limits)

    def excess(self, cut: CutResult) -> float:
        """The largest loss of a student with its error, in shares of its limit: above 1 it is over
        the budget. Losses count where they are measured and limited; NaN is over every limit."""
        counted = (
            (cut.perplexity_loss, cut.perplexity_loss_error, self.perplexity_loss),
            (cut.far_nats, cut.far_nats_error, self.far_loss),
        )
        shares = [
            with_error(lost, error) / limit
            for lost, error, limit in counted
            if lost is not None and limit is not None
        ]
        return max((math.inf if math.isnan(share) else share for share in shares), default=0.0)

    def holds(self, cut: CutResult) -> bool:
        """True if a student is within the budget. Its border is."""
        return self.excess(cut) <= 1


def with_error(lost: float, error: float | None) -> float:
    """A loss with one standard error on top. One that is unknown, as for a single row, counts as
    none."""
    return lost + (error or 0.0)


def as_counted(cut: CutResult, far_tokens: int) -> CutResult:
    """A student as a budget counts it: without the loss on far tokens where they are too few."""
    if far_tokens >= MIN_FAR_TOKENS:
        return cut
    return dataclasses.replace(cut, far_nats=None)


def parse_budget(perplexity: str | None, far: float | None) -> Budget:
    """The budget of `--max-perplexity-loss` and `--max-far-loss`. Where only one is given, only
    that one counts; where none is, the default budget. Raises `UsageError`."""
    if perplexity is None and far is None:
        return Budget()
    share = None if perplexity is None else _share(perplexity)
    if far is not None and not 0 < far < math.inf:
        raise UsageError(f"`max_far_loss`={far}: must be above 0 nats and finite")
    return Budget(share, far)


def _share(text: str) -> float:
    """`2%` and `0.02` are the same."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    is_percentage = text.strip().endswith("%")
    if not 0 < value < math.inf or (value >= 1 and not is_percentage):
        raise UsageError(
            f"`max_perplexity_loss`={text!r}: expected a percentage above 0, for example 2%"
        )
    if is_percentage:
        value /= 100
    return value


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A cut, how a prompt runs at it and what that costs: `recommendation` in `analysis.json`."""

    num_key_value_layers: int
    key_value_group_size: int
    prompt_attention_layers: int
    prompt_mlp_neurons: int
    boundary_taps: int
    exact_head: int
    generated_kv: GeneratedKV
    exact_tail: int
    prefill_flops_share: float
    perplexity_loss: float
    """Share of the teacher's perplexity that it loses, with its standard error over rows; None if
    that is unknown, as for a single row."""
    perplexity_loss_error: float | None
    far_nats: float | None
    """Nats that it loses on far tokens; None if those are too few."""
    far_nats_error: float | None
    within_budget: bool
    """True if these losses, each with its standard error on top, are within the budget."""
    max_perplexity_loss: float | None
    """The budget."""
    max_far_loss: float | None

    @property
    def cut(self) -> dict[str, Any]:
        """The fields that are those of a cut, by the names of a recipe."""
        return {name: getattr(self, name) for name in CUT_FIELDS}

    @property
    def far_is_unknown(self) -> bool:
        """True if the budget limits the loss on far tokens and these are too few to know it."""
        return self.max_far_loss is not None and self.far_nats is None

    def is_of(self, cut: CutResult) -> bool:
        """True if `cut` is the recommended student."""
        return all(getattr(cut, name) == value for name, value in self.cut.items())

    def describe(self, num_layers: int) -> str:
        """A sentence: the cut, its losses and its cost."""
        far_limit = None if self.far_nats is None else self.max_far_loss
        budget = Budget(self.max_perplexity_loss, far_limit)
        what = describe_cut(self, num_layers)
        error = plus_minus(self.perplexity_loss_error, ".1%")
        losses = f"{self.perplexity_loss:+.1%}{error} of perplexity"
        if self.far_nats is None:
            few = f"too few to say ({MIN_FAR_TOKENS} are needed: measure more rows)"
            losses += f", unknown on far tokens, of which there are {few}"
        else:
            error = plus_minus(self.far_nats_error, ".3f")
            losses += f", {self.far_nats:+.3f}{error} nats on far tokens"
        cost = f"{self.prefill_flops_share:.1%} of the teacher's prefill"
        if self.within_budget:
            alone = " alone" if self.far_is_unknown else ""
            return f"recommended within {budget}{alone}: {what}; {losses}; {cost}"
        return f"none is within {budget}{self._misses()}: the nearest is {what}; {losses}; {cost}"

    def _misses(self) -> str:
        missed = []
        if self.max_perplexity_loss is not None:
            lost = with_error(self.perplexity_loss, self.perplexity_loss_error)
            over = lost - self.max_perplexity_loss
            if over > 0:
                missed.append(f"{over:.1%} of perplexity")
        if self.max_far_loss is not None and self.far_nats is not None:
            over = with_error(self.far_nats, self.far_nats_error) - self.max_far_loss
            if over > 0:
                missed.append(f"{over:.3f} nats")
        return f", by {' and '.join(missed)}"

    def record(
        self,
        num_layers: int,
        model: str | None,
        data: Sequence[str],
        revision: str | None = None,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """The fields, with the sentence and the command: for `analysis.json`."""
        command = self.command(model, data, revision, max_length)
        text = {"sentence": self.describe(num_layers), "command": command}
        return dataclasses.asdict(self) | text

    def command(
        self,
        model: str | None,
        data: Sequence[str],
        revision: str | None = None,
        max_length: int | None = None,
    ) -> str:
        """The command to run next: `calibrate`, or `train` where the closed form alone loses too
        much. `max_length` is that of its rows, None the default."""
        words = ["swiftkv", "train", *(["calibrate"] if self.within_budget else [])]
        if model is not None:
            words += ["--model", model, *(["--revision", revision] if revision else [])]
        for text in data:
            words += ["--data", text]
        if max_length is not None:
            words += ["--max-length", str(max_length)]
        for name, value in self.cut.items():
            if value != getattr(Config, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--output-dir", "runs/cut"])


def recommend(cuts: Iterable[CutResult], budget: Budget, far_tokens: int) -> Recommendation | None:
    """Return, of the `cuts` within `budget`, the one with the cheapest prefill, then with the
    smallest cache and the lowest divergence; the one nearest to it if none is. None without cuts,
    or where far tokens alone count and are too few to say."""
    measured = far_tokens >= MIN_FAR_TOKENS
    known = [as_counted(cut, far_tokens) for cut in cuts]
    if not known or (budget.perplexity_loss is None and not measured):
        return None
    within = [cut for cut in known if budget.holds(cut)]
    if within:
        chosen = min(
            within, key=lambda cut: (cut.prefill_flops_share, cut.kv_bytes_per_token, cut.kl)
        )
    else:
        chosen = min(known, key=budget.excess)
    same = {field.name for field in dataclasses.fields(chosen)}
    fields = {
        field.name: getattr(chosen, field.name)
        for field in dataclasses.fields(Recommendation)
        if field.name in same
    }
    return Recommendation(
        **fields,
        within_budget=bool(within),
        max_perplexity_loss=budget.perplexity_loss,
        max_far_loss=budget.far_loss,
    )
