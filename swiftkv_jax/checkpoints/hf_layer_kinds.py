"""The kinds of a model's layers from the fields of a `config.json`: windows, rotary embeddings, and
which layers have which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from ..model.config import Config, LayerKind
from .hf_rope import LAYER_TYPES, rope_from_hf, rope_to_hf, ropes_from_hf, scaling_to_hf
from .hf_values import shown

Fields = Mapping[str, Any]
"""Fields of a `config.json`, with the defaults of its family."""
FULL, SLIDING = LAYER_TYPES


def read_kind(hf: Fields, rope, sliding: bool, *, keep: bool = False) -> LayerKind:
    """A layer's rope, and its window if that hides anything from the longest text, or with
    `keep`."""
    window = hf.get("sliding_window") if sliding else None
    if sliding and window is None:
        if hf.get("layer_types") is None:
            raise ConfigError(
                "sliding_window=None is not supported for this model_type without layer_types: "
                "some of its layers have a window"
            )
        raise ConfigError("layer_types has sliding_attention, but there is no sliding_window")
    hides = window is not None and window < hf["max_position_embeddings"]
    return LayerKind(rope, window if hides or keep else None)


def read_layer_types(hf: Fields, sliding: Callable[[int], bool]) -> list[bool]:
    """Whether each layer has the window: as `layer_types` says, or else as `sliding`."""
    count = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        return [sliding(layer) for layer in range(count)]
    if len(types) != count or any(kind not in LAYER_TYPES for kind in types):
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


def windows_above(hf: Fields) -> tuple[LayerKind, ...]:
    """Qwen's: a window, if it is switched on, in the layers from `max_window_layers` on."""
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    on = hf.get("use_sliding_window")
    first = hf["max_window_layers"]
    if not on:
        hf = {**hf, "sliding_window": None}
    windowed = bool(on) and hf.get("sliding_window") is not None
    types = read_layer_types(hf, lambda layer: windowed and layer >= first)
    return tuple(read_kind(hf, rope, here) for here in types)


def some_unrotated(hf: Fields) -> tuple[LayerKind, ...]:
    """SmolLM3's: layers whose entry of `no_rope_layers` is 0 rotate nothing."""
    rope = rope_from_hf(hf, default_theta=hf["rope_theta"])
    count = hf["num_hidden_layers"]
    every = hf["no_rope_layer_interval"]
    rotated = hf.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(count)]
    if len(rotated) != count or any(
        type(entry) is not int or entry not in (0, 1) for entry in rotated
    ):
        raise ConfigError(
            f"no_rope_layers={shown(rotated)} must have 0 or 1 for each of the {count} layers"
        )
    if not any(rotated):
        raise ConfigError(f"no_rope_layers={shown(rotated)}: some layers must rotate")
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window") is not None
    types = read_layer_types(hf, lambda layer: bool(windowed and not rotated[layer]))
    return tuple(
        read_kind(hf, rope if turns else None, here)
        for turns, here in zip(rotated, types, strict=True)
    )


def two_ropes(hf: Fields, sliding: Callable[[int], bool]) -> tuple[LayerKind, ...]:
    """OLMo 3's and Gemma 3's: layers with a window have a rotary embedding of their own, and are
    known by the window where they are written."""
    ropes = ropes_from_hf(hf, full_theta=hf["rope_theta"], sliding_theta=hf["rope_local_base_freq"])
    return tuple(
        read_kind(hf, ropes[SLIDING if here else FULL], here, keep=True)
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
    return rope_to_hf(rope) | {
        "sliding_window": window_of(config),
        "layer_types": types_of(config),
    }


def write_two_ropes(config: Config) -> dict[str, Any]:
    """`rope_parameters` of each layer type; beside it the full layers' in the older spelling."""
    ropes = {
        SLIDING if kind.window is not None else FULL: kind.rope
        for kind in config.kinds
        if kind.rope is not None
    }
    nested = {
        kind: {
            "rope_theta": rope.theta,
            **(scaling_to_hf(rope.scaling) or {"rope_type": "default"}),
        }
        for kind, rope in ropes.items()
    }
    older = {} if FULL not in ropes else rope_to_hf(ropes[FULL])
    return {"rope_parameters": nested} | older
