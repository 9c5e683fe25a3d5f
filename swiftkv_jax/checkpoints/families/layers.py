"""The layers of a model as a `config.json` spells them: which have a window, and which rotate how.

A rotary embedding is `rope_theta` with `rope_scaling` (transformers 4) or `rope_parameters`
(transformers 5), for all layers or for each type of layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...errors import ConfigError
from ...model.config import Config, LayerKind
from ...model.rope_config import Rope, RopeScaling, RopeType
from .fields import Fields, agreed, check_integer, check_number, shown

FULL = "full_attention"
SLIDING = "sliding_attention"
_LAYER_TYPES = (FULL, SLIDING)
"""Names of the kinds of layers in nested `rope_parameters` and in `layer_types`."""
ORIGINAL = "original_max_position_embeddings"

# Kinds of layers --------------------------------------------------------------


def read_kind(hf: Fields, rope: Rope | None, sliding: bool, *, keep: bool = False) -> LayerKind:
    """A layer's rope, and its window if that hides anything from the longest text, or with
    `keep`."""
    if not sliding:
        return LayerKind(rope, None)
    window = hf.get("sliding_window")
    if window is None and hf.get("layer_types") is None:
        raise ConfigError(
            "sliding_window=None is not supported for this model_type without layer_types: some "
            "of its layers have a window"
        )
    if window is None:
        raise ConfigError("layer_types has sliding_attention, but there is no sliding_window")
    hides = window < hf["max_position_embeddings"]
    return LayerKind(rope, window if hides or keep else None)


def read_layer_types(hf: Fields, sliding: Callable[[int], bool]) -> list[bool]:
    """Return for each layer whether it has the window: as `layer_types` says, or else `sliding`."""
    count = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        return [sliding(layer) for layer in range(count)]
    if len(types) != count or any(kind not in _LAYER_TYPES for kind in types):
        raise ConfigError(
            f"layer_types={shown(types)} must have {FULL} or {SLIDING} for each of the {count} "
            f"layers"
        )
    return [kind == SLIDING for kind in types]


def one_kind(hf: Fields, *, partial: bool = False) -> tuple[LayerKind, ...]:
    """All layers alike, with a window if there is one."""
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"], partial=partial)
    kind = read_kind(hf, rope, hf.get("sliding_window") is not None)
    hides = kind.window is not None
    if any(here != hides for here in read_layer_types(hf, lambda layer: hides)):
        raise ConfigError(
            f"layer_types={shown(hf['layer_types'])} is not supported; supported: the same "
            f"everywhere, {SLIDING} with a window below max_position_embeddings and {FULL} without"
        )
    return (kind,)


def two_ropes(hf: Fields, sliding: Callable[[int], bool]) -> tuple[LayerKind, ...]:
    """OLMo 3's and Gemma 3's: layers with a window have a rotary embedding of their own, and are
    known by the window where they are written."""
    full, local = _two_ropes(hf)
    return tuple(
        read_kind(hf, local, True, keep=True) if here else read_kind(hf, full, False)
        for here in read_layer_types(hf, sliding)
    )


def window_of(config: Config) -> int | None:
    return next((kind.window for kind in config.kinds if kind.window is not None), None)


def types_of(config: Config) -> list[str]:
    kinds = map(config.kind, range(config.num_layers))
    return [FULL if kind.window is None else SLIDING for kind in kinds]


def write_kinds(config: Config) -> dict[str, Any]:
    """Fields of layers that differ in their windows only, which `layer_types` says."""
    (rope,) = config.ropes
    windows = {"sliding_window": window_of(config), "layer_types": types_of(config)}
    return rope_to_hf(rope) | windows


def write_two_ropes(config: Config) -> dict[str, Any]:
    """Fields of layers that rotate as their type does: windows, `rope_parameters` of each type,
    and beside it the full layers' in the older spelling."""
    fields = {"sliding_window": window_of(config), "layer_types": types_of(config)}
    nested = {}
    for kind in config.kinds:
        if kind.rope is None:
            continue
        scaling = _scaling_to_hf(kind.rope.scaling) or {"rope_type": "default"}
        rope = {"rope_theta": kind.rope.theta, **scaling}
        if kind.window is None:
            nested[FULL] = rope
            fields |= rope_to_hf(kind.rope)
        else:
            nested[SLIDING] = rope
    return fields | {"rope_parameters": nested}


# Rotary embeddings ------------------------------------------------------------

# Rope type -> fields that it needs, and those that it may have.
_NEEDED: dict[RopeType | Literal["default", "dynamic"], set[str]] = {
    "default": set(),
    "linear": {"factor"},
    # Its frequencies change beyond max_position_embeddings only, which no text here reaches.
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}
_ALLOWED: dict[str, set[str]] = {
    "dynamic": {ORIGINAL},
    "yarn": {
        ORIGINAL,
        *"attention_factor beta_fast beta_slow truncate mscale mscale_all_dim".split(),
        "finetuned",  # of Nous' files: how the model was trained
    },
    "longrope": {"factor", ORIGINAL, "attention_factor"},
}


def rope_from_hf(hf: Fields, *, default_theta: float, partial: bool = False) -> Rope:
    """The rotary embedding of all layers, in either spelling. `partial` says that the family has
    `partial_rotary_factor`; elsewhere one below 1 is an error."""
    if hf.get("rope_parameters") is None:
        scaling = read_object("rope_scaling", hf.get("rope_scaling"))
        return _rope(hf, "rope_scaling", scaling, default_theta, partial)
    rope = read_object("rope_parameters", hf["rope_parameters"])
    _check_alike(hf.get("rope_scaling"), rope, "rope_parameters")
    return _rope(hf, "rope_parameters", rope, default_theta, partial)


def _two_ropes(hf: Fields) -> tuple[Rope, Rope]:
    """The rotary embeddings of full layers, and of those with a window, of a family that scales
    the former's only."""
    nested = hf.get("rope_parameters")
    theta = hf["rope_theta"]
    local_theta = hf["rope_local_base_freq"]
    if nested is None:
        local = Rope(check_number("rope_local_base_freq", local_theta))
        return rope_from_hf(hf, default_theta=theta), local
    if unknown := nested.keys() - set(_LAYER_TYPES):
        raise ConfigError(
            f"rope_parameters: unknown layer types {', '.join(map(shown, sorted(unknown)))}; where "
            f"layers rotate in two ways it has an object for each of {', '.join(_LAYER_TYPES)}"
        )

    def of_type(kind: str, theta: float) -> Rope:
        field = f"rope_parameters: {kind}"
        rope = read_object(field, nested.get(kind))
        if kind == FULL:
            _check_alike(hf.get("rope_scaling"), rope, field)
        beside = {name: hf.get(name) for name in ("max_position_embeddings", ORIGINAL)}
        return _rope(beside, field, rope, theta, False)

    return of_type(FULL, theta), of_type(SLIDING, local_theta)


def check_spellings(hf: Fields) -> None:
    """Raise `ConfigError` if the file says the same of its rotary embeddings in two places, and
    differently. `hf` is without defaults."""
    places = {name: hf.get(name) for name in ("rope_scaling", "rope_parameters")}
    nested = places["rope_parameters"]
    if nested is not None and nested.keys() & set(_LAYER_TYPES):
        del places["rope_parameters"]
        places[f"rope_parameters: {FULL}"] = nested.get(FULL)
        field = f"rope_parameters: {SLIDING}"
        local = read_object(field, nested.get(SLIDING)).get("rope_theta")
        name = "rope_local_base_freq"
        agreed({name: hf.get(name), f"{field}: rope_theta": local})
    for name in ("rope_theta", "partial_rotary_factor", ORIGINAL):
        stated = {name: hf.get(name)}
        for field, rope in places.items():
            stated[f"{field}: {name}"] = read_object(field, rope).get(name)
        agreed(stated)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the spelling of transformers 4, which later versions read
    too."""
    fields = {"rope_theta": rope.theta, "rope_scaling": _scaling_to_hf(rope.scaling)}
    return fields if rope.fraction == 1.0 else fields | {"partial_rotary_factor": rope.fraction}


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    kind = scaling.rope_type
    values = dataclasses.asdict(scaling)
    names = _NEEDED[kind] | (_ALLOWED.get(kind, set()) & values.keys())
    if kind == "longrope":  # its attention_factor says what factor would
        names = names - {"factor"}
    found = {name: values[name] for name in sorted(names)}
    lists = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    return {"rope_type": kind} | found | lists


def _rope(hf: Fields, field: str, fields: Fields, theta: float, partial: bool) -> Rope:
    """One rotary embedding; `fields` are those of `field`, `hf` has what stands beside it."""
    kind = _rope_type(field, fields)
    fields = {name: value for name, value in fields.items() if name not in ("rope_type", "type")}
    for stated in (hf.get("rope_theta"), fields.pop("rope_theta", None)):
        if stated is not None:
            theta = check_number("rope_theta", stated)
    fraction = 1.0
    for stated in (hf.get("partial_rotary_factor"), fields.pop("partial_rotary_factor", None)):
        if stated is not None:
            fraction = check_number("partial_rotary_factor", stated)
    if fraction != 1.0 and not partial:
        raise ConfigError(f"{field}: partial_rotary_factor={fraction} is not supported here")
    if missing := _NEEDED[kind] - fields.keys():
        raise ConfigError(f"{field}: rope_type={kind!r} needs {', '.join(sorted(missing))}")
    if unknown := fields.keys() - _NEEDED[kind] - _ALLOWED.get(kind, set()):
        raise ConfigError(
            f"{field}: unknown fields for rope_type={kind!r}: "
            f"{', '.join(map(shown, sorted(unknown)))}"
        )
    if kind == "default":
        return Rope(theta, None, fraction)
    for name, value in fields.items():
        _check_field(field, name, value, name in _NEEDED[kind])
    if kind == "linear" or kind == "llama3":
        return Rope(theta, RopeScaling(rope_type=kind, **fields), fraction)
    longest = hf.get("max_position_embeddings")
    original = agreed({ORIGINAL: hf.get(ORIGINAL), f"{field}: {ORIGINAL}": fields.get(ORIGINAL)})
    if kind == "dynamic":  # the unscaled frequencies at all positions of the model
        if original is not None and longest is not None and original < longest:
            raise ConfigError(
                f"{field}: rope_type='dynamic' is supported up to the positions that need no "
                f"scaling: set max_position_embeddings={longest} to {ORIGINAL}={original}"
            )
        return Rope(theta, None, fraction)
    original = longest if original is None else original
    if original is None:
        raise ConfigError(f"{field}: rope_type={kind!r} needs {ORIGINAL}")
    if check_integer(ORIGINAL, original) <= 1:
        raise ConfigError(f"{ORIGINAL}={original!r} must be above 1")
    resolve = {"yarn": _yarn, "longrope": _longrope}[kind]
    return Rope(theta, resolve(fields, longest, original), fraction)


def _rope_type(field: str, rope: Fields) -> RopeType | Literal["default", "dynamic"]:
    kind = agreed({f"{field}: {name}": rope.get(name) for name in ("rope_type", "type")})
    if kind is None:
        return "default"
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ConfigError(
            f"{field}: rope_type={shown(kind)} is not supported; supported: {', '.join(_NEEDED)}"
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
    elif name == ORIGINAL:
        check_integer(f"{field}: {name}", value)
    # transformers takes a 0 of these two for null.
    elif name not in ("mscale", "mscale_all_dim") or type(value) not in (int, float) or value:
        check_number(f"{field}: {name}", value)


def longrope_attention(longest: int | None, original: int, factor: float | None = None) -> float:
    """The `attention_factor` of longrope where a file states none, of transformers'
    `modeling_rope_utils`. `factor` None is `longest / original`."""
    if factor is None:
        factor = (longest or original) / original
    return math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))


def _longrope(fields: Fields, longest: int | None, original: int) -> RopeScaling:
    attention = fields.get("attention_factor")
    if attention is None:
        attention = longrope_attention(longest, original, fields.get("factor"))
    return RopeScaling(
        rope_type="longrope",
        short_factor=tuple(fields["short_factor"]),
        long_factor=tuple(fields["long_factor"]),
        original_max_position_embeddings=original,
        attention_factor=attention,
    )


def _yarn(fields: Fields, longest: int | None, original: int) -> RopeScaling:
    """The fields that may be left out are computed as transformers' `modeling_rope_utils` does."""
    stated = {name: value for name, value in fields.items() if value is not None}
    factor = stated.get("factor", (longest or original) / original)
    scale = stated.get("mscale", 0)
    scale_all = stated.get("mscale_all_dim", 0)
    attention = _mscale(factor, 1.0)
    if scale and scale_all:
        attention = _mscale(factor, scale) / _mscale(factor, scale_all)
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=stated.get("attention_factor", attention),
        beta_fast=stated.get("beta_fast", 32.0),
        beta_slow=stated.get("beta_slow", 1.0),
        truncate=stated.get("truncate", True),
    )


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(max(factor, 1)) + 1.0


def read_object(field: str, value: Any) -> Fields:
    """The object at `field`; an empty one for null."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field}={shown(value)} must be an object")
    return value


def _check_alike(scaling: Any, rope: Fields, field: str) -> None:
    """Raise `ConfigError` if `rope_scaling` is there and says another scaling than `field` does."""
    if scaling is not None and _alike("rope_scaling", scaling) != _alike(field, rope):
        raise ConfigError(f"rope_scaling={shown(scaling)} and {field}={shown(rope)} disagree")


def _alike(field: str, rope: Fields) -> dict[str, Any]:
    """The scaling in one spelling, to compare two of them."""
    fields = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")
    }
    return fields | {"rope_type": _rope_type(field, rope)}
