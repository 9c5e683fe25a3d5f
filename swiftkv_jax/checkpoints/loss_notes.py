"""Fields of `config.json` that say what a student lost when it was made, where that was more than a
limit. Commands that serve it repeat them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ..model.model import LOSS_FIELDS, AuxiliaryFiles

PERPLEXITY, FAR = LOSS_FIELDS
"""Objects: the `share` of the teacher's perplexity on held-out text that was lost, and its standard
`error` or null; and `nats` lost on average on so many far `tokens`. Both have the `limit` and the
`step` that made the student, calibration or training."""
Step = Literal["calibration", "training"]

_TEXTS = {
    PERPLEXITY: "{share:.1%} of perplexity on held-out text (limit {limit:.0%}) after {step}",
    FAR: "{nats:.3f} nats on {tokens:,} far tokens (limit {limit:g}) after {step}",
}


def with_notes(files: AuxiliaryFiles, notes: Mapping[str, Any]) -> AuxiliaryFiles:
    """The files with these values of the fields, without those that are None."""
    kept = {name: value for name, value in files.hf_config.items() if name not in notes}
    written = {name: value for name, value in notes.items() if value is not None}
    return dataclasses.replace(files, hf_config=kept | written)


def loss_warning(hf_config: dict[str, Any]) -> str | None:
    """A line about the fields; None where there is none that can be read."""
    lost = []
    for field, text in _TEXTS.items():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            lost.append(text.format(**hf_config[field]))
    if not lost:
        return None
    return (
        f"this cut lost {' and '.join(lost)}: keep more layers, or distil it; "
        "swiftkv train analyze shows what it takes"
    )
