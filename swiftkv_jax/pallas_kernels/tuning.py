"""Block sizes of the kernels: a table, in `tuning.json`, by kernel, device, head dim and cache
format.

The first entry from the top that matches is used; "any" matches everything. `python -m
benchmarks.kernels.tune` measures candidates on the current device and puts the best at the top.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from .device import current_device

TABLE = Path(__file__).with_name("tuning.json")
FIELDS = {"kernel", "device", "head_dim", "dtype", "tuning", "basis"}


def tuning_for[Tuning](
    tuning_class: type[Tuning], kernel: str, head_dim: int, dtype: Any, kind: str | None = None
) -> Tuning:
    """The entry of `kernel` ("hopper.prefill", say) for devices of a kind, None being the current
    device's, as its dataclass.

    `dtype` is that of the keys as they are stored. Raises `NotImplementedError` if none matches.
    """
    kind = kind or current_device()[1]
    dtype = jnp.dtype(dtype).name
    for entry in read_table():
        if entry["kernel"] == kernel and all(
            entry[field] in ("any", value)
            for field, value in (("device", kind), ("head_dim", head_dim), ("dtype", dtype))
        ):
            return tuning_class(**entry["tuning"])
    raise NotImplementedError(
        f"{kernel} has no tuning for {head_dim=} and {dtype} keys on {kind}: add one with python "
        f"-m benchmarks.kernels.tune"
    )


@functools.cache
def read_table(path: Path = TABLE) -> tuple[dict[str, Any], ...]:
    """All entries, in order. Raises `ValueError` for fields that are missing or unknown."""
    entries = json.loads(path.read_text())
    for entry in entries:
        if entry.keys() != FIELDS:
            raise ValueError(
                f"{path.name}: an entry has the fields {sorted(entry)}, expected {sorted(FIELDS)}"
            )
    return tuple(entries)
