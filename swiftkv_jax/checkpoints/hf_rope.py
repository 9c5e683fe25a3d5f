"""Rotary embeddings as a `config.json` spells them: `rope_theta` with `rope_scaling` (transformers
4) or `rope_parameters` (transformers 5), for all layers or for each type of layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from ..config import Rope, RopeScaling, RopeType
from ..errors import ConfigError

LAYER_TYPES = ("full_attention", "sliding_attention")
"""What nested `rope_parameters` and `layer_types` call the kinds of layers."""

# rope type -> fields that it needs, and those that it may have.
_FIELDS: dict[RopeType | Literal["default"], tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        ),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            "original_max_position_embeddings attention_factor beta_fast beta_slow truncate mscale "
            "mscale_all_dim".split()
        ),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"factor", "original_max_position_embeddings", "attention_factor"}),
    ),
}


def rope_from_hf(
    hf: Mapping[str, Any], *, default_theta: float = 10_000.0, partial: bool = False
) -> Rope:
    """The rotary embedding of all layers, in either spelling. `partial` says that the family has
    `partial_rotary_factor`; elsewhere one below 1 is an error."""
    field = "rope_scaling" if hf.get("rope_parameters") is None else "rope_parameters"
    rope, scaling = hf.get(field) or {}, hf.get("rope_scaling")
    if field == "rope_parameters" and scaling is not None and _alike(scaling) != _alike(rope):
        raise ConfigError(f"rope_scaling={scaling!r} and rope_parameters={rope!r} disagree")
    return _rope(hf, field, rope, default_theta, partial)


def ropes_from_hf(
    hf: Mapping[str, Any], *, full_theta: float, sliding_theta: float
) -> dict[str, Rope]:
    """Layer type -> rotary embedding, of a family that scales the full layers' only. The thetas are
    those of a file that states none."""
    nested = hf.get("rope_parameters")
    if nested is None:
        full = _rope(hf, "rope_scaling", hf.get("rope_scaling") or {}, full_theta, False)
        local = hf.get("rope_local_base_freq")
        sliding = Rope(_number("rope_local_base_freq", local or sliding_theta))
        return dict(zip(LAYER_TYPES, (full, sliding), strict=True))
    if unknown := nested.keys() - set(LAYER_TYPES):
        raise ConfigError(f"rope_parameters: unknown layer types {', '.join(sorted(unknown))}")
    ropes = {}
    for kind, theta in zip(LAYER_TYPES, (full_theta, sliding_theta), strict=True):
        rope = nested.get(kind) or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"rope_parameters: {kind}={rope!r} must be an object")
        of_kind = {"max_position_embeddings": hf.get("max_position_embeddings")}
        ropes[kind] = _rope(of_kind, f"rope_parameters: {kind}", rope, theta, False)
    scaling = hf.get("rope_scaling")
    if scaling is not None and _alike(scaling) != _alike(nested.get("full_attention") or {}):
        raise ConfigError(f"rope_scaling={scaling!r} and rope_parameters={nested!r} disagree")
    return ropes


def rename_longrope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with `longrope` in the place of the older names that Phi-3's files have for it, su
    and yarn."""
    renamed = dict(hf)
    for field in ("rope_scaling", "rope_parameters"):
        rope = hf.get(field)
        if rope and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
            renamed[field] = {**rope, "rope_type": "longrope"}
    return renamed


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the spelling of transformers 4, which later versions read
    too."""
    fields = {"rope_theta": rope.theta, "rope_scaling": scaling_to_hf(rope.scaling)}
    return fields if rope.fraction == 1.0 else fields | {"partial_rotary_factor": rope.fraction}


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    needed, allowed = _FIELDS[scaling.rope_type]
    values = dataclasses.asdict(scaling)
    names = needed | (allowed & values.keys())
    if scaling.rope_type == "longrope":  # its attention_factor says what factor would
        names -= {"factor"}
    found = {name: values[name] for name in sorted(names)}
    lists = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    return {"rope_type": scaling.rope_type} | found | lists


def _rope(
    hf: Mapping[str, Any], field: str, fields: Mapping[str, Any], theta: float, partial: bool
) -> Rope:
    """One rotary embedding; `fields` are those of `field`, `hf` has what stands beside it."""
    fields = dict(fields)
    for stated in (hf.get("rope_theta"), fields.pop("rope_theta", None)):
        theta = theta if stated is None else _number("rope_theta", stated)
    fraction = 1.0
    for stated in (hf.get("partial_rotary_factor"), fields.pop("partial_rotary_factor", None)):
        fraction = fraction if stated is None else _number("partial_rotary_factor", stated)
    if fraction != 1.0 and not partial:
        raise ConfigError(f"{field}: partial_rotary_factor={fraction} is not supported here")
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(
            f"{field}: rope_type={kind!r} is not supported; supported: {', '.join(_FIELDS)}"
        )
    needed, allowed = _FIELDS[kind]
    if missing := needed - fields.keys():
        raise ConfigError(f"{field}: rope_type={kind!r} needs {', '.join(sorted(missing))}")
    if unknown := fields.keys() - needed - allowed:
        raise ConfigError(
            f"{field}: unknown fields for rope_type={kind!r}: {', '.join(sorted(unknown))}"
        )
    if kind == "default":
        return Rope(theta, None, fraction)
    for name in ("short_factor", "long_factor"):
        if name in fields and not isinstance(fields[name], list):
            raise ConfigError(f"{field}: {name}={fields[name]!r} must be a list")
    if kind in ("yarn", "longrope"):
        fields = _resolved(hf, field, kind, fields)
    return Rope(theta, RopeScaling(rope_type=kind, **fields), fraction)


def _resolved(
    hf: Mapping[str, Any], field: str, kind: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a yarn or longrope scaling as numbers, what may be left out computed as
    transformers' `modeling_rope_utils` does."""
    longest, original = (
        hf.get("max_position_embeddings"),
        hf.get("original_max_position_embeddings")
        or fields.get("original_max_position_embeddings")
        or hf.get("max_position_embeddings"),
    )
    if original is None:
        raise ConfigError(f"{field}: rope_type={kind!r} needs original_max_position_embeddings")
    original = _number("original_max_position_embeddings", original)
    if original <= 1:
        raise ConfigError(f"original_max_position_embeddings={original!r} must be above 1")
    factor = fields.get("factor")
    if factor is None:
        factor = _number("max_position_embeddings", longest or original) / original
    factor = _number("factor", factor)
    attention = fields.get("attention_factor")
    if kind == "longrope":
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return {
            "short_factor": tuple(fields["short_factor"]),
            "long_factor": tuple(fields["long_factor"]),
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
    if attention is None:
        both = fields.get("mscale"), fields.get("mscale_all_dim")
        scales = [_number("mscale", value) for value in both] if all(both) else [1.0]
        attention = _mscale(factor, scales[0]) / (_mscale(factor, scales[-1]) if scales[1:] else 1)
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
        "beta_fast": fields.get("beta_fast") or 32.0,
        "beta_slow": fields.get("beta_slow") or 1.0,
        "truncate": fields.get("truncate", True) is not False,
    }


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r} must be positive and a number")
    return value


def _alike(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling in one spelling, to compare two of them."""
    fields = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    }
    return fields | {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}
