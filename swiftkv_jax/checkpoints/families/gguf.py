"""An architecture of GGUF files as data, and the metadata that its fields of a `config.json` are
made from.

Keys are those of llama.cpp's converter, and what stands for them in a `config.json` is what the
converter reads. A key of the architecture that is not known is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError
from .fields import shown
from .layers import FULL, SLIDING

# Keys of every architecture, without its name.
_COMMON = frozenset(
    """
    vocab_size context_length embedding_length block_count feed_forward_length
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned
    rope.scaling.attn_factor rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scale_linear
    """.split()
)
# Keys with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (1,),
    "expert_weights_scale": (1.0, 0.0),
    **dict.fromkeys(
        """
        attention.sliding_window expert_count expert_used_count expert_shared_count
        nextn_predict_layers pooling_type
        """.split(),
        (0,),
    ),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.finetuned": (True,),
}


class Metadata:
    """The keys of a file's architecture, by their names without it, and the file's tensors. Keys
    that were not asked for are left over."""

    def __init__(
        self, metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, Any]
    ) -> None:
        self.tensors = tensors
        self.prefix = f"{architecture}."
        self.known: set[str] = {*_COMMON}
        self.values = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }

    def get(self, name: str, default: Any = None) -> Any:
        """A value. Numbers of 32 bits have the fewest digits that tell them from others: 1e-05 is
        stored as 9.999999747378752e-06."""
        self.known.add(name)
        value = self.values.get(name, default)
        return shortest(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, which may stand once for each layer. Raises `ConfigError` if layers
        differ, or if it is missing and there is no default."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"missing: {self.prefix}{name}")
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise ConfigError(
                    f"{self.prefix}{name}={shown(value.tolist())} differs from layer to layer, "
                    f"which is not supported"
                )
            value = value[0].item()
        if type(value) is not int:
            raise ConfigError(f"{self.prefix}{name}={shown(value)} must be an integer")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def check(self) -> None:
        """Raise `ConfigError` for a key that nothing has read and that could change the model."""
        for name, value in self.values.items():
            if name in self.known:
                continue
            if name not in _NEUTRAL:
                raise ConfigError(
                    f"unknown metadata {self.prefix}{name}={shown(value)}: it could change the "
                    f"model; if it changes nothing, remove it by {removal(self.prefix + name)}"
                )
            if value not in _NEUTRAL[name]:
                raise ConfigError(
                    f"{self.prefix}{name}={shown(value)} is not supported; supported: "
                    f"{_NEUTRAL[name][0]!r}"
                )


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A `general.architecture` of GGUF."""

    read: Callable[[Metadata], dict[str, Any]]
    """Makes the fields of a `config.json` beyond the common ones, and `model_type`."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name within a layer of a Hugging Face tensor -> that in the file, where it is not Llama's."""
    permuted: bool = False
    """Reordering of the rows of queries and keys for a rotation of neighbours."""
    norm_offset: float = 0.0
    """Number that was added to the scales of norms."""


HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GATE_UP_NAME = {"mlp.gate_up_proj": "ffn_up"}


def attention_bias(found: Metadata) -> dict[str, Any]:
    """The fields of a family whose MLP has SiLU and whose attention may have biases."""
    return {"hidden_act": "silu", "attention_bias": found.has("blk.0.attn_q.bias")}


def layer_types(found: Metadata, sliding: Callable[[int], bool]) -> list[str]:
    """The type of each layer, as the file's list of windowed ones says, its period, or else as
    `sliding`."""
    layers = range(found.integer("block_count"))
    pattern = found.get("attention.sliding_window_pattern")
    if pattern is None:
        flags = [sliding(layer) for layer in layers]
    elif isinstance(pattern, np.ndarray):
        flags = [bool(flag) for flag in pattern]
    else:
        flags = [bool((layer + 1) % pattern) for layer in layers]
    if len(flags) != len(layers):
        raise ConfigError(
            f"{found.prefix}attention.sliding_window_pattern has {len(flags)} entries for "
            f"{len(layers)} layers"
        )
    return [SLIDING if flag else FULL for flag in flags]


def removal(key: str) -> str:
    """The command of the package gguf that copies a file without a key."""
    return f"`gguf-new-metadata --remove-metadata {key} IN OUT`"


def shortest(value: Any) -> Any:
    """The number of the fewest digits that is this one in float32, for a float that is one; any
    other value as it is."""
    if not isinstance(value, float):
        return value
    narrow = np.float32(value)
    if float(narrow) != value:
        return value
    return float(str(narrow))
