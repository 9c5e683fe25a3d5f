"""Rotary embeddings as a `config.json` spells them: `rope_theta` with `rope_scaling` (transformers
4) or `rope_parameters` (transformers 5), for all layers or for each type of layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import ConfigError
from ..model.rope_config import Rope, RopeScaling, RopeType
from .hf_values import agreed, check_integer, check_number, shown

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Names of the kinds of layers in nested `rope_parameters` and in `layer_types`."""

# rope type -> fields that it needs, and those that it may have.
_FIELDS: dict[RopeType | Literal["default", "dynamic"], tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    # Its frequencies change beyond max_position_embeddings only, which no text here reaches.
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "llama3": (
        frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        ),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            # The last, of Nous' files, says how the model was trained.
            "original_max_position_embeddings attention_factor beta_fast beta_slow truncate mscale "
            "mscale_all_dim finetuned".split()
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
    rope = _object(field, hf.get(field))
    if field == "rope_parameters":
        _check_alike(hf.get("rope_scaling"), rope, field)
    return _rope(hf, field, rope, default_theta, partial)


def ropes_from_hf(
    hf: Mapping[str, Any], *, full_theta: float, sliding_theta: float
) -> dict[str, Rope]:
    """Layer type -> rotary embedding, of a family that scales the full layers' only. The thetas are
    those of a file that states none."""
    nested = hf.get("rope_parameters")
    if nested is None:
        scaling = _object("rope_scaling", hf.get("rope_scaling"))
        full = _rope(hf, "rope_scaling", scaling, full_theta, False)
        local = hf.get("rope_local_base_freq")
        sliding = Rope(
            check_number("rope_local_base_freq", sliding_theta if local is None else local)
        )
        return dict(zip(LAYER_TYPES, (full, sliding), strict=True))
    if unknown := nested.keys() - set(LAYER_TYPES):
        raise ConfigError(
            f"rope_parameters: unknown layer types {', '.join(map(shown, sorted(unknown)))}; where "
            f"layers rotate in two ways it has an object for each of {', '.join(LAYER_TYPES)}"
        )
    ropes = {}
    for kind, theta in zip(LAYER_TYPES, (full_theta, sliding_theta), strict=True):
        rope = _object(f"rope_parameters: {kind}", nested.get(kind))
        of_kind = {"max_position_embeddings": hf.get("max_position_embeddings")}
        ropes[kind] = _rope(of_kind, f"rope_parameters: {kind}", rope, theta, False)
    full = _object("rope_parameters: full_attention", nested.get("full_attention"))
    _check_alike(hf.get("rope_scaling"), full, "rope_parameters: full_attention")
    return ropes


def check_spellings(hf: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the file says the same of its rotary embeddings in two places, and
    differently. `hf` is without defaults."""
    places = {name: hf.get(name) for name in ("rope_scaling", "rope_parameters")}
    nested = places["rope_parameters"]
    if nested is not None and nested.keys() & set(LAYER_TYPES):
        del places["rope_parameters"]
        places |= {f"rope_parameters: {kind}": nested.get(kind) for kind in LAYER_TYPES}
        field = f"rope_parameters: {LAYER_TYPES[1]}"
        local = _object(field, places.pop(field)).get("rope_theta")
        name = "rope_local_base_freq"
        agreed({name: hf.get(name), f"{field}: rope_theta": local})
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        stated = {name: hf.get(name)}
        for field, rope in places.items():
            stated[f"{field}: {name}"] = _object(field, rope).get(name)
        agreed(stated)


def rename_longrope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with `longrope` in the place of the older names that Phi-3's files have for it, su
    and yarn. transformers 5 writes the one beside the other."""
    renamed = dict(hf)
    for field in ("rope_scaling", "rope_parameters"):
        rope = _object(field, hf.get(field))
        named = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
        older = [name for name in named if name in ("su", "yarn")]
        if not older or any(name not in ("su", "yarn", "longrope") for name in named):
            continue
        if missing := {"short_factor", "long_factor"} - rope.keys():
            raise ConfigError(
                f"{field}: rope_type={older[0]!r} is longrope for this model_type, and needs "
                f"{', '.join(sorted(missing))}"
            )
        rest = {name: value for name, value in rope.items() if name != "type"}
        renamed[field] = rest | {"rope_type": "longrope"}
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
    kind = _rope_type(field, fields)
    fields = {name: value for name, value in fields.items() if name not in ("rope_type", "type")}
    for stated in (hf.get("rope_theta"), fields.pop("rope_theta", None)):
        theta = theta if stated is None else check_number("rope_theta", stated)
    fraction = 1.0
    for stated in (hf.get("partial_rotary_factor"), fields.pop("partial_rotary_factor", None)):
        fraction = fraction if stated is None else check_number("partial_rotary_factor", stated)
    if fraction != 1.0 and not partial:
        raise ConfigError(f"{field}: partial_rotary_factor={fraction} is not supported here")
    needed, allowed = _FIELDS[kind]
    if missing := needed - fields.keys():
        raise ConfigError(f"{field}: rope_type={kind!r} needs {', '.join(sorted(missing))}")
    if unknown := fields.keys() - needed - allowed:
        raise ConfigError(
            f"{field}: unknown fields for rope_type={kind!r}: "
            f"{', '.join(map(shown, sorted(unknown)))}"
        )
    if kind == "default":
        return Rope(theta, None, fraction)
    for name, value in fields.items():
        _check_field(field, name, value, name in needed)
    if kind == "dynamic":
        _check_dynamic(hf, field, fields)
        return Rope(theta, None, fraction)
    if kind in ("yarn", "longrope"):
        fields = _resolved(hf, field, kind, fields)
    return Rope(theta, RopeScaling(rope_type=kind, **fields), fraction)


def _rope_type(field: str, rope: Mapping[str, Any]) -> RopeType | Literal["default", "dynamic"]:
    names = {f"{field}: {name}": rope.get(name) for name in ("rope_type", "type")}
    kind = agreed(names)
    if kind is None:
        return "default"
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(
            f"{field}: rope_type={shown(kind)} is not supported; supported: {', '.join(_FIELDS)}"
        )
    return kind


def _check_field(field: str, name: str, value: Any, needed: bool) -> None:
    """Raise `ConfigError` unless a field of a scaling is what its name says. Null is for absent
    where it is not needed; transformers computes a `factor` for it."""
    if value is None and name != "truncate" and (name == "factor" or not needed):
        return
    if name in ("truncate", "finetuned"):
        if not isinstance(value, bool):
            raise ConfigError(f"{field}: {name}={shown(value)} must be true or false")
    elif name in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise ConfigError(f"{field}: {name}={shown(value)} must be a list")
        for entry in value:
            check_number(f"{field}: {name}: entry", entry)
    elif name == "original_max_position_embeddings":
        check_integer(f"{field}: {name}", value)
    # transformers takes a 0 of these two for null.
    elif name not in ("mscale", "mscale_all_dim") or type(value) not in (int, float) or value:
        check_number(f"{field}: {name}", value)


def _check_dynamic(hf: Mapping[str, Any], field: str, fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the frequencies are the unscaled ones at all positions of the
    model."""
    name = "original_max_position_embeddings"
    longest = hf.get("max_position_embeddings")
    original = agreed({name: hf.get(name), f"{field}: {name}": fields.get(name)})
    if original is not None and longest is not None and original < longest:
        raise ConfigError(
            f"{field}: rope_type='dynamic' is supported up to the positions that need no scaling: "
            f"set max_position_embeddings={longest} to {name}={original}"
        )


def longrope_attention(longest: int | None, original: int, factor: float | None = None) -> float:
    """The `attention_factor` of longrope where a file states none, of transformers'
    `modeling_rope_utils`. `factor` None is `longest / original`."""
    if factor is None:
        factor = (original if longest is None else longest) / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _resolved(
    hf: Mapping[str, Any], field: str, kind: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a yarn or longrope scaling, those that may be left out computed as
    transformers' `modeling_rope_utils` does."""
    name = "original_max_position_embeddings"
    longest = hf.get("max_position_embeddings")
    original = agreed({name: hf.get(name), f"{field}: {name}": fields.get(name)})
    original = longest if original is None else original
    if original is None:
        raise ConfigError(f"{field}: rope_type={kind!r} needs {name}")
    if check_integer(name, original) <= 1:
        raise ConfigError(f"{name}={original!r} must be above 1")
    factor = fields.get("factor")
    attention = fields.get("attention_factor")
    if kind == "longrope":
        if attention is None:
            attention = longrope_attention(longest, original, factor)
        return {
            "short_factor": tuple(fields["short_factor"]),
            "long_factor": tuple(fields["long_factor"]),
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
    if factor is None:
        factor = (original if longest is None else longest) / original
    if attention is None:
        scale = fields.get("mscale")
        scale_all = fields.get("mscale_all_dim")
        if scale and scale_all:
            attention = _mscale(factor, scale) / _mscale(factor, scale_all)
        else:
            attention = _mscale(factor, 1.0)
    fast = fields.get("beta_fast")
    slow = fields.get("beta_slow")
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
        "beta_fast": 32.0 if fast is None else fast,
        "beta_slow": 1.0 if slow is None else slow,
        "truncate": fields.get("truncate", True),
    }


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _object(field: str, value: Any) -> Mapping[str, Any]:
    """The object at `field`; an empty one for null."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field}={shown(value)} must be an object")
    return value


def _check_alike(scaling: Any, rope: Mapping[str, Any], field: str) -> None:
    """Raise `ConfigError` if `rope_scaling` is there and says another scaling than `field` does."""
    if scaling is not None and _alike("rope_scaling", scaling) != _alike(field, rope):
        raise ConfigError(f"rope_scaling={shown(scaling)} and {field}={shown(rope)} disagree")


def _alike(field: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling in one spelling, to compare two of them."""
    fields = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")
    }
    return fields | {"rope_type": _rope_type(field, rope)}
