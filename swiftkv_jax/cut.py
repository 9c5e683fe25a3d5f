"""The SwiftKV cut of a model: how many layers keep their own keys and values, and how many of the
others share a cache."""

from __future__ import annotations

from .config import Config
from .errors import ConfigError, UsageError


def choose_cut(
    config: Config, num_key_value_layers: int | None = None, key_value_group_size: int | None = None
) -> Config:
    """The architecture at the given cut; where it is None, at the cut that `config` has, else with
    half of its layers upper ones and no groups.

    Raises `UsageError` if the layers cannot be cut so.
    """
    half = max(1, config.num_layers // 2)
    own = config.num_key_value_layers if config.num_upper_layers else half
    layers = own if num_key_value_layers is None else num_key_value_layers
    group = key_value_group_size
    if group is None:
        group = config.key_value_group_size if layers == config.num_key_value_layers else 1
    try:
        return config.cut(layers, group)
    except ConfigError as error:
        raise UsageError(
            f"`num_key_value_layers`={layers} with `key_value_group_size`={group}: {error}"
        ) from None
