"""The rows of the table of parameters in `params`: what is known of a parameter besides its values.

Letters as there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from .config import Config
from .mesh import MODEL

_SIZES = {
    "V": "vocab_size",
    "D": "embed_dim",
    "F": "mlp_dim",
    "N": "num_heads",
    "K": "num_kv_heads",
    "H": "head_dim",
    "E": "num_experts",
    "Nq": "q_norm_dim",
    "Kq": "k_norm_dim",
    "S": "prompt_mlp_neurons",
}
_STACKS: dict[str, Callable[[Config], Sequence[int]]] = {
    "L": lambda config: range(config.num_lower_layers),
    "U": lambda config: range(config.num_lower_layers, config.num_layers),
    "J": lambda config: tuple(group[0] for group in config.kv_groups),
    "M": lambda config: range(config.num_lower_layers, config.first_projected_layer),
    "P": lambda config: range(
        config.first_projected_layer, config.num_layers, config.key_value_group_size
    ),
}


EXPERT = "{expert}"


@dataclasses.dataclass(frozen=True)
class Param:
    """One row of the table: the properties of a parameter besides its values."""

    dims: str
    """The letters of its axes, separated by spaces. A stack of layers comes first: L, U, J, M or
    P, or `?` in a class that serves both for L and for U."""
    tensor: str
    """Name in a Hugging Face checkpoint; of a stacked parameter the part after
    `model.layers.<layer>.`, with `EXPERT` for an expert's number where each has its own tensor."""
    init: Literal["normal", "one", "zeros"] = "normal"
    """`one` leaves what it scales unchanged (`Config.norm_offset`)."""
    split: str | None = None
    """Letter of the axis that tensor parallelism splits. The axis that `fsdp` splits follows from
    the shape: see `sharding`."""
    in_axes: int | None = None
    """How many of the last axes a product sums over; its other axes are output channels. None for
    what is never quantised."""
    when: Callable[[Config], bool] = lambda config: True
    """True if a model of this config has it."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.dims.split())

    @property
    def stacked(self) -> bool:
        """True if the first axis counts layers, or groups of layers."""
        return self.axes[0] in ("?", *_STACKS)

    @property
    def tensor_axes(self) -> int:
        """How many of the first axes count tensors of a checkpoint: layers, and experts."""
        return self.stacked + (EXPERT in self.tensor)

    @property
    def model_axes(self) -> tuple[str | None, ...]:
        """For each axis the mesh axis that it is split over, or None, as in a `PartitionSpec`."""
        return tuple(MODEL if axis == self.split else None for axis in self.axes)

    @property
    def head_axis(self) -> int | None:
        """Axis of one layer's array that a checkpoint merges with the next one: the heads of N H
        and K H."""
        axes = self.axes[self.stacked :]
        return next(
            (i for i in range(len(axes) - 1) if axes[i] in "NK" and axes[i + 1] == "H"), None
        )

    def layers(self, config: Config) -> Sequence[int]:
        """The layers that the entries of its stack belong to: the first of each group for J and
        P."""
        return _STACKS[self.axes[0]](config)

    def shape(self, config: Config) -> tuple[int, ...]:
        return tuple(
            len(_STACKS[axis](config)) if axis in _STACKS else getattr(config, _SIZES[axis])
            for axis in self.axes
        )


def matrix(
    dims: str,
    tensor: str,
    *,
    split: str,
    in_axes: int = 1,
    when: Callable[[Config], bool] = lambda config: True,
) -> Param:
    """A matrix of a layer or of the delta: quantised where the model is."""
    return Param(dims, tensor, split=split, in_axes=in_axes, when=when)


def expert(dims: str, tensor: str) -> Param:
    """A matrix of every expert: whole experts are split over the mesh."""
    return matrix(dims, f"mlp.experts.{EXPERT}.{tensor}.weight", split="E", when=mixture)


def bias(dims: str, tensor: str, *, split: str) -> Param:
    return Param(dims, tensor, init="zeros", split=split, when=lambda config: config.qkv_bias)


def head_norm(dims: str, tensor: str) -> Param:
    return norm_scale(dims, tensor, when=lambda config: config.qk_norm is not None)


def norm_scale(
    dims: str, tensor: str, *, when: Callable[[Config], bool] = lambda config: True
) -> Param:
    return Param(dims, tensor, init="one", when=when)


def value_mix(dims: str, tensor: str) -> Param:
    return Param(dims, tensor, split="K", when=lambda config: config.shared_kv_heads is not None)


def tap(dims: str, tensor: str) -> Param:
    """A projection of the boundary state of the token before, added to that of the token's own."""
    return Param(
        dims,
        tensor,
        init="zeros",
        split="K",
        in_axes=1,
        when=lambda config: config.boundary_taps > 0,
    )


def prompt_neuron(dims: str, tensor: str, init: Literal["normal", "zeros"] = "normal") -> Param:
    """A matrix of the neurons that run beside a map."""
    return Param(
        dims, tensor, init=init, split="S", when=lambda config: config.prompt_mlp_neurons > 0
    )


def dense(config: Config) -> bool:
    return config.num_experts == 0


def mixture(config: Config) -> bool:
    return config.num_experts > 0


def untied(config: Config) -> bool:
    return not config.tie_word_embeddings


def norm_before(config: Config) -> bool:
    return config.norm_order in ("pre", "both")


def norm_after(config: Config) -> bool:
    return config.norm_order in ("post", "both")
