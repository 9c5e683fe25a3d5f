"""The block sizes that are tried, and the shapes on which they are compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from .shapes import Decode, Prefill, Shape

Values = dict[str, tuple[Any, ...]]

# Fields of a kernel's `Tuning` in groups: all combinations within a group, one group after the
# other, each on the best of the one before.
_HOPPER_PREFILL: tuple[Values, ...] = (
    {"block_q": (64, 128), "block_kv": (64, 128, 192, 256), "stages": (2, 3, 4)},
    {"ping_pong": (True, False)},
    {"persistent": (False, True), "multicast": (False, True), "stages": (2, 3)},
)
_TPU_BLOCKS: tuple[Values, ...] = (
    {
        "block_rows": (512, 1024, 2048),
        "block_kv": (1024, 2048),
        "block_kv_compute": (256, 512, 1024),
    },
    {
        "block_rows": (1024, 2048),
        "block_kv": (2048, 4096),
        "block_kv_compute": (512, 1024),
        "vmem_limit_bytes": (2**26,),
    },
)
SWEEPS: dict[str, tuple[Values, ...]] = {
    "hopper.prefill": _HOPPER_PREFILL,
    "hopper.prefill.packed": _HOPPER_PREFILL,
    "hopper.backward": (
        {"dq_block_kv": (64, 96, 128), "dq_stages": (2, 3, 4), "dq_warpgroups": (2, 3)},
        {"dkv_block_q": (64, 96, 128), "dkv_stages": (2, 3), "dkv_warpgroups": (2, 3)},
    ),
    "hopper.decode": ({"block_kv": (64, 128, 256), "stages": (2, 3, 4, 5, 6)},),
    "tpu.prefill": _TPU_BLOCKS,
    "tpu.prefill.packed": _TPU_BLOCKS,
    "tpu.backward": _TPU_BLOCKS,
    "tpu.decode": (
        {"block_bytes": (2**17, 2**18, 2**19, 2**20, 2**21), "buffers": (2, 4, 8)},
        {"rows": (1, 4, 8, 16), "cores": (1, 2)},
    ),
}


def combinations(
    kernel: str, group: int, tuning_class: type, best: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Fields of every candidate of one group: those of `best`, with the group's values.

    Raises `ValueError` for a name that is not a field.
    """
    values = SWEEPS[kernel][group]
    if unknown := values.keys() - {field.name for field in dataclasses.fields(tuning_class)}:
        raise ValueError(
            f"the sweep of {kernel} has {', '.join(sorted(unknown))}, which its Tuning has not"
        )
    for choice in itertools.product(*values.values()):
        yield best | dict(zip(values, choice, strict=True))


def fields(tuning: Any) -> dict[str, Any]:
    """The fields of a `Tuning` that JSON can hold."""
    values = {field.name: getattr(tuning, field.name) for field in dataclasses.fields(tuning)}
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def shapes(kernel: str, head_dim: int, cache: str, table: str) -> tuple[Shape, ...]:
    """The shapes that a kernel is tuned on, with the heads of Llama-3.1-8B. Candidates are ranked
    by the geometric mean of their times."""
    op = kernel.split(".")[1]
    packed = kernel.endswith(".packed")
    if table == "smoke":
        if op == "decode":
            return (Decode("decode", 2, 256, cache, heads=4, kv_heads=2, head_dim=head_dim),)
        return (Prefill(op, 1, 128, 128, 4, 2, head_dim, packed=packed, gradient=op == "backward"),)
    if op == "decode":
        return Decode("64x2k", 64, 2048, cache, head_dim=head_dim), Decode(
            "1x32k", 1, 32768, cache, head_dim=head_dim
        )
    if op == "backward":
        return (Prefill("8k", 1, 8192, 8192, head_dim=head_dim, gradient=True),)
    sizes = {"8k": (1, 8192), "2k": (4, 2048)}
    return tuple(
        Prefill(name, rows, n, n, head_dim=head_dim, packed=packed)
        for name, (rows, n) in sizes.items()
    )
