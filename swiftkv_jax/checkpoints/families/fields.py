"""A family of models as data, and the checks of single fields of a `config.json`."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...errors import ConfigError
from ...model.config import Config

Fields = Mapping[str, Any]
"""Fields of a `config.json`; where a family reads them, with the defaults of its class."""
Kind = Literal["size", "integer", "number", "flag", "text", "list", "object", "unread"]
"""The content of a field. A size is an integer from 1 up; an unread field may hold anything."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    architecture: str
    """The name that its classes begin with."""
    read: Callable[[Fields], dict[str, Any]]
    """Makes the options of a `Config` from its fields, including defaults."""
    write: Callable[[Config], dict[str, Any]]
    """Makes the fields from those options."""
    fields: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    """Fields beyond the common ones that change the model, or that its files have."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields with the only values that are supported, which do not change the model."""
    defaults: Fields = dataclasses.field(default_factory=dict)
    """Values of fields that are missing in a file."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field of `params` -> its tensor's name within a layer, where that is not Llama's."""
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Tensor within a layer -> the fields of `params` whose rows it joins."""
    mlp_dim: str = "intermediate_size"
    """The field that has the width of its MLP, or of an expert's."""
    interleaved: bool = False
    """Rotation of neighbouring dimensions of a head in pairs; see `interleaved`."""
    inside: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """`model_type` of a model that takes images and has this family's under `text_config` ->
    values of the fields that `text_config` may leave out, which the class defaults to."""


COMMON = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
"""Defaults of most classes."""
SILU = {"hidden_act": ("silu",)}
QK_NORM = {"use_qk_norm": (True, None)}
"""Norms of queries and keys, in families that have them."""
GATE_UP = {"mlp.gate_up_proj.weight": ("gate", "up")}


def biases(hf: Fields) -> dict[str, Any]:
    """The biases of all four matrices of attention, of a family that has them together."""
    bias = bool(hf.get("attention_bias"))
    return {"qkv_bias": bias, "o_bias": bias}


# Single fields ----------------------------------------------------------------

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 3.4e38
"""About the largest number of float32."""
_TYPES: dict[Kind, tuple[tuple[type, ...], str]] = {
    "size": ((int,), "an integer"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "flag": ((bool,), "true or false"),
    "text": ((str,), "a string"),
    "list": ((list,), "a list"),
    "object": ((Mapping,), "an object"),
}


class _Short(reprlib.Repr):
    """Long values are shortened in the middle, so that an error stays one readable line."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < 10**100 else "<a number above 1e100>"


shown = _Short().repr
"""The value as errors show it."""


def unknown_field(name: str, value: Any, *, where: str = "") -> ConfigError:
    """The error for a field that is not listed; `where` are words that follow its name."""
    return ConfigError(
        f"unknown field {shown(name)}{where} (value {shown(value)}): it may change the model, so "
        f"it is not ignored; if it changes nothing, remove it"
    )


def check_kind(name: str, value: Any, kind: Kind) -> None:
    """Raise `ConfigError` unless the value is null or what `kind` says."""
    if value is None or kind == "unread":
        return
    types, wanted = _TYPES[kind]
    if not isinstance(value, types) or isinstance(value, bool) is not (kind == "flag"):
        raise ConfigError(f"{name}={shown(value)} must be {wanted}")
    if kind == "size":
        check_integer(name, value)
    if kind == "number" and abs(value) > MAX_NUMBER:
        raise ConfigError(f"{name}={shown(value)} is too large for float32")


def check_integer(name: str, value: Any) -> int:
    """The value, an integer from 1 up. Raises `ConfigError`."""
    if type(value) is not int:
        raise ConfigError(f"{name}={shown(value)} must be an integer")
    if not 1 <= value <= MAX_INTEGER:
        raise ConfigError(f"{name}={shown(value)} must be from 1 to {MAX_INTEGER}")
    return value


def check_number(name: str, value: Any) -> Any:
    """The value, a positive number that float32 can hold. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise ConfigError(f"{name}={shown(value)} must be a positive number")
    return value


def agreed(stated: Fields) -> Any:
    """The one value of fields that say the same; None if all are absent or null. Raises
    `ConfigError` if two differ."""
    given = {name: value for name, value in stated.items() if value is not None}
    if not given:
        return None
    first, *others = given
    for name in others:
        if given[name] != given[first]:
            raise ConfigError(
                f"{first}={shown(given[first])} and {name}={shown(given[name])} say the same and "
                f"differ"
            )
    return given[first]
