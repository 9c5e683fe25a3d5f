"""A delta in closed form: the upper layers' keys and values by least squares from the hidden
state that enters layer K, on some ten thousand tokens of text, without training.

`moments` gathers second moments in one pass of the teacher per batch, `solve` has the formulas,
`delta` makes the delta of them. Cost: one forward pass, of which the products for the moments are a
few percent, and a factorisation of one D x D matrix per upper layer on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..attention import Attention
from ..config import Config
from ..params import Llama
from ..transformer import Batch
from .delta import Fit, LayerFit, fit_delta
from .moments import add_batch, zero_moments

__all__ = ["Fit", "LayerFit", "calibrate"]


def calibrate(
    config: Config, llama: Llama, batches: Iterable[Batch], *, attention: Attention
) -> Fit:
    """The delta of the cut of `config` in closed form, from `batches` of one shape.

    `llama` is split at that cut and, like the batches, on the mesh of `attention`. Raises
    `ValueError` if the teacher's upper projections were dropped or the batches hold no token.
    """
    moments = zero_moments(config, attention.mesh)
    for batch in batches:
        moments = add_batch(config, attention, moments, llama, batch)
    if not moments.tokens > 0:
        raise ValueError("there is no token to calibrate on")
    return fit_delta(config, llama, moments, attention.mesh)
