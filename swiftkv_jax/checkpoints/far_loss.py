"""The field of `config.json` that says what a student lost on far tokens when it was made, where
that was more than the limit. Commands that serve it repeat it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ..model.model import AuxiliaryFiles

FIELD = "swiftkv_far_loss"
"""An object: `nats` lost on average on so many `tokens`, the `limit`, and the `step` that made it,
calibration or training."""
Step = Literal["calibration", "training"]


def with_far_loss(
    files: AuxiliaryFiles, step: Step, tokens: int, nats: float | None, limit: float
) -> AuxiliaryFiles:
    """The files of a new student. `nats` None: it is within the limit, or was not measured, and the
    field goes, whatever the model had that it was made from."""
    if nats is None:
        return with_field(files, None)
    return with_field(
        files, {"nats": round(nats, 4), "tokens": tokens, "limit": limit, "step": step}
    )


def with_field(files: AuxiliaryFiles, value: Any) -> AuxiliaryFiles:
    """The files with this value of the field, or without it if the value is None."""
    fields = {name: old for name, old in files.hf_config.items() if name != FIELD}
    if value is not None:
        fields[FIELD] = value
    return dataclasses.replace(files, hf_config=fields)


def far_loss_warning(hf_config: dict[str, Any]) -> str | None:
    """A line about the field; None where there is none that can be read."""
    match hf_config.get(FIELD):
        case {"nats": float(nats), "tokens": int(tokens), "limit": float(limit), "step": str(step)}:
            return (
                f"this cut lost {nats:.3f} nats on {tokens:,} far tokens (limit {limit:g}) after "
                f"{step}: keep more layers, or distil it; swiftkv train analyze shows what it takes"
            )
    return None
