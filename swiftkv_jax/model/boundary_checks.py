"""Checks of the fields of `Config` that say how the boundary state of a prompt is made."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError


def check_boundary(config: Any) -> None:
    """Raise `ConfigError` unless a `Config` can have its prompt attention layers, their neurons,
    its tap and its groups. Without upper layers it has none of the first three."""
    if type(alone := config.prompt_attention_layers) is not int:
        raise ConfigError(f"prompt_attention_layers={alone!r} must be a whole number")
    if config.num_upper_layers == 0:  # nothing is projected
        object.__setattr__(config, "prompt_attention_layers", 0)
        object.__setattr__(config, "prompt_mlp_neurons", 0)
        object.__setattr__(config, "boundary_taps", 0)
    elif not 0 <= alone < config.num_upper_layers:
        raise ConfigError(
            f"prompt_attention_layers={alone} must be from 0 to {config.num_upper_layers - 1}: "
            f"of {config.num_upper_layers} upper layers one must be left to project for"
        )
    _check_neurons(config)
    if type(config.boundary_taps) is not int or config.boundary_taps not in (0, 1):
        raise ConfigError(f"boundary_taps={config.boundary_taps!r} must be 0 or 1")
    left = config.num_layers - config.first_projected_layer
    alone = config.prompt_attention_layers
    if config.key_value_group_size < 1 or left % config.key_value_group_size:
        raise ConfigError(
            f"key_value_group_size={config.key_value_group_size} must divide the {left} layers "
            f"from num_key_value_layers={config.num_key_value_layers} "
            f"{f'+ prompt_attention_layers={alone} ' * (alone > 0)}to "
            f"num_layers={config.num_layers}"
        )


def _check_neurons(config: Any) -> None:
    if type(neurons := config.prompt_mlp_neurons) is not int:
        raise ConfigError(f"prompt_mlp_neurons={neurons!r} must be a whole number")
    if not 0 <= neurons <= config.mlp_dim:
        raise ConfigError(
            f"prompt_mlp_neurons={neurons} must be from 0 to mlp_dim={config.mlp_dim}"
        )
    if neurons and not config.prompt_attention_layers:
        raise ConfigError(f"prompt_mlp_neurons={neurons} needs prompt_attention_layers above 0")
    if neurons and config.num_experts:
        raise ConfigError(
            f"prompt_mlp_neurons={neurons} must be 0: tokens choose among "
            f"num_experts={config.num_experts}"
        )
