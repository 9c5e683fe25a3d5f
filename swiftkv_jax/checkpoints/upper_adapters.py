"""Read an adapter of `peft` that leaves the keys and values of prompts as they are: one that
changes the queries, outputs and MLPs of upper layers alone."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np

from ..model.config import Config
from .interleaved import split_pairs
from .merge import placed_terms
from .peft import LowRank
from .tensor_map import MappedLeaf, check_no_problems, leaves

_TARGETS = {
    "swiftkv.q": "q",
    "upper.o": "o",
    "upper.gate": "gate",
    "upper.up": "up",
    "upper.down": "down",
}
"""Leaves that no key and value of a prompt depends on."""
_TEACHER_Q = "upper_qkv.q"
"""The teacher's upper queries, in whose place the student's run."""
_CHANGES_CACHE = (
    "changed, on which keys and values of prompts depend, and those are shared by all adapters "
    "(merge this one while the model loads: --adapter DIR, a server for each)"
)

Factors = tuple[np.ndarray, np.ndarray]
"""(A [R, inputs], B [outputs, R] with the scaling)."""


def read_upper_adapter(
    config: Config, path: Path, *, max_rank: int, dtype: Any
) -> list[dict[str, Factors]]:
    """For each upper layer of a student, field of `LayerAdapters` -> factors in `dtype`, in the
    model's order of rows. Raises `CheckpointError` and `ConfigError`."""
    found: list[dict[str, Factors]] = []
    beyond = []
    for terms in upper_terms(config, path, max_rank=max_rank):
        found.append({field: _factors(*term, dtype) for field, term in terms.items()})
        for field, factors in found[-1].items():
            if not all(np.isfinite(one.astype(np.float32)).all() for one in factors):
                beyond.append(terms[field][1].name)
    check_no_problems(path, {f"beyond {np.dtype(dtype)}": beyond})
    return found


def upper_terms(
    config: Config, path: Path, *, max_rank: int
) -> list[dict[str, tuple[MappedLeaf, LowRank]]]:
    """For each upper layer of a student, field of `LayerAdapters` -> the leaf and its term, unread.

    An upper layer's q_proj, of an adapter that was trained on the teacher, is added to the
    student's queries, as `merge.with_adapter` does. Raises `CheckpointError` and `ConfigError`.
    """
    placed = placed_terms(config, path, has_delta=True)
    found: list[dict[str, tuple[MappedLeaf, LowRank]]] = [
        {} for _ in range(config.num_upper_layers)
    ]
    problems: dict[str, list[str]] = collections.defaultdict(list)
    for leaf in leaves(config):
        for place, tensor in enumerate(leaf.tensors):
            term = placed.get(tensor)
            if term is None or leaf.name == _TEACHER_Q:
                continue
            module = tensor.removesuffix(".weight")
            rank = term.a.shape[0]
            if leaf.name not in _TARGETS:
                problems[_CHANGES_CACHE].append(module)
                continue
            if rank > max_rank:
                problems[f"of a rank above --max-lora-rank {max_rank}"].append(f"{module} {rank}")
                continue
            found[place][_TARGETS[leaf.name]] = leaf, term
    check_no_problems(path, problems)
    return found


def _factors(leaf: MappedLeaf, term: LowRank, dtype: Any) -> Factors:
    a, b = term.factors()
    if leaf.rows is not None:
        first, stop, _ = leaf.rows
        b = b[first:stop]
    if leaf.interleaved is not None:
        b = np.ascontiguousarray(b)
        split_pairs(b, leaf.interleaved)
    with np.errstate(over="ignore"):
        return a.astype(dtype), b.astype(dtype)
