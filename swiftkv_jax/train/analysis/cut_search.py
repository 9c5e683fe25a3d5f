"""Measurements of an analysis, and their order.

1. Every cut that is named, without taps and prompt layers: one pass over the calibration text.
2. Where no cuts are named, those between the lowest K that is within the budget and the one below
   it, by bisection.
3. From there down, one K after the other as long as one of its students is within the budget: first
   without, then with an exact head, a tap and prompt layers, from the cheapest on, up to the first
   that is within it. Students that cost more than one that is within the budget are left out.
4. The same, all of them, for the largest other K at which the keys of some layers dip.

In 3 and 4 a student with an exact head is measured if what its keys leave unexplained is less than
that of all cheaper ones at the same K: R2 comes with the fit, losses take a pass of the student.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from ...calibration import LayerFit
from ...model.config import GeneratedKV
from ...model.cut import describe_cut
from .recommendation import Budget, as_counted
from .sweep import CutResult, Sweep, measure_all

logger = logging.getLogger(__name__)

DIP = 0.03
"""R2 of keys by which a layer is below others on both sides of it, for a dip: such layers look for
what the boundary state lacks, where R2 that only falls with depth is a matter of distance."""
LEAST_GAIN = 0.02
"""Share of what is left unexplained by which a student has to be better than cheaper ones."""


def dips(layers: Sequence[LayerFit]) -> list[LayerFit]:
    """The layers whose keys dip."""
    r2 = [layer.r2_k for layer in layers]
    return [
        layer
        for at, layer in enumerate(layers[1:-1], start=1)
        if min(max(r2[:at]), max(r2[at + 1 :])) - r2[at] >= DIP
    ]


def search(
    sweep: Sweep,
    cuts: Iterable[tuple[int, int]],
    generated: Sequence[GeneratedKV],
    budget: Budget,
    *,
    named: bool,
) -> list[CutResult]:
    """Measurements of `cuts`, (K, g), sorted, with each of `generated` that goes with them, and of
    what the module's description says. `named`: no other K are tried."""
    found = measure_all(
        sweep,
        [
            (k, g, where)
            for k, g in cuts
            for where in generated
            if g == 1 or where == "boundary" or len(generated) == 1
        ],
    )
    if sweep.init == "closed-form" and any(cut.key_value_group_size == 1 for cut in found):
        where: GeneratedKV = "own" if "own" in generated else "boundary"
        found += _Search(sweep, budget, where, found).more(named=named)
    return sorted(
        found,
        key=lambda cut: (
            cut.num_key_value_layers,
            cut.key_value_group_size,
            cut.generated_kv,
            cut.prompt_attention_layers,
            cut.boundary_taps,
            cut.exact_head,
        ),
    )


class _Search:
    def __init__(
        self, sweep: Sweep, budget: Budget, generated: GeneratedKV, found: Sequence[CutResult]
    ):
        self.sweep = sweep
        self.budget = budget
        self.generated: GeneratedKV = generated
        self.base = {
            cut.num_key_value_layers: cut
            for cut in found
            if cut.key_value_group_size == 1 and cut.generated_kv == generated
        }
        self.added: list[CutResult] = []

    def more(self, *, named: bool) -> list[CutResult]:
        last = self.sweep.config.num_layers - 1  # where nothing is lost
        within = [k for k, cut in self.base.items() if self.holds(cut)]
        edge = min(within, default=last + 1 if named else last)
        if not named:
            edge = self._bisect(edge)
        tried = set()
        for k in self._below(edge, named=named):
            tried.add(k)
            if not self._descend(k):
                break
        dipping = [k for k, cut in self.base.items() if k not in tried and dips(cut.layers)]
        if dipping:
            self._improve(max(dipping), float("inf"), every=True)
        return self.added

    def holds(self, cut: CutResult) -> bool:
        return self.budget.holds(as_counted(cut, self.sweep.far_tokens))

    def _bisect(self, edge: int) -> int:
        """The lowest K within the budget, between `edge` and the highest measured one below it."""
        lower = max((k for k in self.base if k < edge), default=edge)
        while edge - lower > 1:
            middle = (lower + edge) // 2
            if self.holds(self._measure(middle)):
                edge = middle
            else:
                lower = middle
        self._measure(edge)
        return edge

    def _below(self, edge: int, *, named: bool) -> Iterable[int]:
        if named:
            return sorted((k for k in self.base if k < edge), reverse=True)
        return range(edge - 1, 0, -1)

    def _measure(self, k: int) -> CutResult:
        if k not in self.base:
            self.base[k] = measure_all(self.sweep, [(k, 1, self.generated)])[0]
            self.added.append(self.base[k])
        return self.base[k]

    def _descend(self, k: int) -> bool:
        """True if a student at `k` is within the budget."""
        if self.holds(self._measure(k)):
            return True
        within = [cut for cut in [*self.base.values(), *self.added] if self.holds(cut)]
        limit = min((cut.prefill_flops_share for cut in within), default=float("inf"))
        return self._improve(k, limit, every=False)

    def _improve(self, k: int, limit: float, *, every: bool) -> bool:
        """True if a student at `k` with an exact head, which costs less than `limit`, is within the
        budget. `every`: those after it are measured too."""
        left = float("inf")
        holds = False
        for layers, starts in self.sweep.improved_starts(k, self.generated):
            for taps, start in enumerate(starts):
                cut = self.sweep.at(k, 1, self.generated, layers, taps, 1)
                if self.sweep.cost(cut) >= limit:
                    continue
                if _unexplained(start.layers) > (1 - LEAST_GAIN) * left:
                    continue
                left = _unexplained(start.layers)
                self.added.append(self.sweep.measure(cut, start))
                logger.info(
                    "%s measured", describe_cut(self.added[-1], self.sweep.config.num_layers)
                )
                holds |= self.holds(self.added[-1])
                if holds and not every:
                    return True
            if layers + 1 >= self.sweep.config.num_layers - k:
                break  # another prompt layer would leave no upper layer without one
            following = self.sweep.at(k, 1, self.generated, layers + 1, 0, 1)
            if self.sweep.cost(following) >= limit:
                break
        return holds


def _unexplained(layers: Sequence[LayerFit]) -> float:
    return sum(1 - layer.r2_k for layer in layers)
