"""Read an adapter of `peft` to serve it beside the weights: its factors, for each layer."""

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

_BLOCK = "o", "gate", "up", "down"
_FIELDS = {
    **{f"{stack}.{field}": field for stack in ("lower", "upper") for field in _BLOCK},
    **{f"{stack}.{field}": field for stack in ("lower_qkv", "swiftkv") for field in "qkv"},
    "upper_qkv.q": "own_q",
}
"""Leaf -> field of `LayerAdapters`."""
_CHANGES_CACHE = (
    "changed, on which keys and values of prompts depend: `lora_upper_only` refuses that, so that "
    "all adapters share those (serve without it)"
)

_NOT_BESIDE = "merged only (--adapter DIR)"

Factors = tuple[np.ndarray, np.ndarray]
"""(A [R, inputs], B [outputs, R] with the scaling)."""


def read_factors(
    config: Config, path: Path, *, max_rank: int, upper_only: bool, dtype: Any
) -> list[dict[str, Factors]]:
    """For each layer, field of `LayerAdapters` -> factors in `dtype`, in the model's order of rows.
    Other arguments and errors as those of `placed_factors`."""
    found: list[dict[str, Factors]] = []
    beyond = []
    for terms in placed_factors(config, path, max_rank=max_rank, upper_only=upper_only):
        found.append({field: _factors(*term, dtype) for field, term in terms.items()})
        for field, factors in found[-1].items():
            if not all(np.isfinite(one.astype(np.float32)).all() for one in factors):
                beyond.append(terms[field][1].name)
    check_no_problems(path, {f"beyond {np.dtype(dtype)}": beyond})
    return found


def placed_factors(
    config: Config, path: Path, *, max_rank: int, upper_only: bool
) -> list[dict[str, tuple[MappedLeaf, LowRank]]]:
    """For each layer, field of `LayerAdapters` -> the leaf and its term, unread. A teacher's
    `config` has no upper layers. With `upper_only` an adapter that changes keys and values of
    prompts is refused.

    An upper layer's q_proj, of an adapter that was trained on the teacher, is added to the
    student's queries too, as `merge.with_adapter` does. Raises `CheckpointError` and
    `ConfigError`.
    """
    placed = placed_terms(config, path, has_delta=config.num_upper_layers > 0)
    found: list[dict[str, tuple[MappedLeaf, LowRank]]] = [{} for _ in range(config.num_layers)]
    problems: dict[str, list[str]] = collections.defaultdict(list)
    for leaf in leaves(config):
        for place, tensor in enumerate(leaf.tensors):
            term = placed.get(tensor)
            if term is None:
                continue
            module = tensor.removesuffix(".weight")
            layer, rank, field = 0, term.a.shape[0], _FIELDS.get(leaf.name)
            if field is not None:
                layer = leaf.param.layers(config)[place]
            if field is None:
                problems[_NOT_BESIDE].append(module)
            elif upper_only and (layer < config.num_lower_layers or field in "kv"):
                problems[_CHANGES_CACHE].append(module)
            elif rank > max_rank:
                problems[f"of a rank above --max-lora-rank {max_rank}"].append(f"{module} {rank}")
            else:
                found[layer][field] = leaf, term
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
