"""Checks of single values of a `config.json`, and how errors show them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 3.4e38
"""About the largest number of float32."""


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


def agreed(stated: Mapping[str, Any]) -> Any:
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
