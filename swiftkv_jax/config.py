"""Architecture of a Llama-family model and where SwiftKV cuts it.

A `Config` is frozen and hashable, so it is a static argument of every jitted function. It holds
architecture only: no mesh, no dtype, no batch size, no kernel choice.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from .errors import ConfigError

GeneratedKV = Literal["boundary", "own"]
"""Where generated tokens take their upper keys and values from: see `Config.generated_kv`."""
GENERATED_KV: tuple[GeneratedKV, ...] = ("boundary", "own")

NO_OWN = 2**30
"""A position that no sequence reaches."""

MAX_LAYERS = 1_000
"""Far more than any model has. Names, programs and lists grow with the layers, so that a slip in a
`config.json` would fill the memory."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining length.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones, keeps the high ones
    and blends between (Llama 3.1, "The Llama 3 Herd of Models", 2024; HF `rope_type: llama3`).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        for field in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"rope scaling: {field}={value!r} must be a positive number")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling: high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a Llama and of its SwiftKV variant.

    Layers `0 .. num_key_value_layers-1` ("lower") own their keys and values. The others ("upper")
    read keys and values projected from the hidden state that enters layer `num_key_value_layers`
    (SingleInputKV), one projection per `key_value_group_size` consecutive layers (AcrossKV). With
    `num_key_value_layers == num_layers` there is no upper layer and the model is the plain Llama.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    num_key_value_layers: int = 0
    """K of the paper; 0 means all layers, as in the authors' configuration."""
    key_value_group_size: int = 1
    shared_kv_heads: tuple[tuple[int, ...], ...] | None = None
    """[U][K]: the head of its group's cache that each key/value head of an upper layer reads, for a
    student whose layers make values of their own of the shared ones (`SwiftKV.mix`); None where
    every head reads the one of its number, as in the authors' models."""
    generated_kv: GeneratedKV = "boundary"
    """`boundary`: every token's upper keys and values come from the hidden state that enters layer
    `num_key_value_layers`. `own`: those of a generated token come from its own hidden state before
    each upper layer, by the teacher's projections; queries are the student's in both."""
    exact_tail: int = 0
    """Number of tokens at a prompt's end that also keep their own upper keys and values, and so run
    through all layers; needs `own`."""

    def __post_init__(self):
        for field in (
            "vocab_size",
            "embed_dim",
            "mlp_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            largest = MAX_LAYERS if field == "num_layers" else 2**31 - 1
            if not 1 <= getattr(self, field) <= largest:
                raise ConfigError(f"{field}={getattr(self, field)} must be from 1 to {largest}")
        for field in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, field) < math.inf:
                raise ConfigError(f"{field}={getattr(self, field)} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs"
            )
        if self.num_key_value_layers == 0:
            object.__setattr__(self, "num_key_value_layers", self.num_layers)
        if not 1 <= self.num_key_value_layers <= self.num_layers:
            raise ConfigError(
                f"num_key_value_layers={self.num_key_value_layers} must be from 1 to "
                f"num_layers={self.num_layers}"
            )
        if self.key_value_group_size < 1 or self.num_upper_layers % self.key_value_group_size:
            raise ConfigError(
                f"key_value_group_size={self.key_value_group_size} must divide the "
                f"{self.num_upper_layers} layers "
                f"from num_key_value_layers={self.num_key_value_layers} to "
                f"num_layers={self.num_layers}"
            )
        self._check_shared_kv_heads()
        self._check_generated_kv()

    def _check_shared_kv_heads(self):
        if self.shared_kv_heads is None:
            return
        if self.num_upper_layers == 0:
            object.__setattr__(self, "shared_kv_heads", None)
        elif (
            self.key_value_group_size == 1
            or len(self.shared_kv_heads) != self.num_upper_layers
            or any(sorted(row) != list(range(self.num_kv_heads)) for row in self.shared_kv_heads)
        ):
            raise ConfigError(
                f"shared_kv_heads={self.shared_kv_heads} must be one permutation of the "
                f"{self.num_kv_heads} key/value heads for each of the {self.num_upper_layers} "
                f"upper layers, which share caches (key_value_group_size above 1)"
            )

    def _check_generated_kv(self):
        if self.generated_kv not in GENERATED_KV:
            raise ConfigError(
                f"generated_kv={self.generated_kv!r} is not one of {', '.join(GENERATED_KV)}"
            )
        tail = self.exact_tail
        if isinstance(tail, bool) or not isinstance(tail, int) or not 0 <= tail < 2**30:
            raise ConfigError(f"exact_tail={tail!r} must be a whole number from 0 up")
        if tail and self.generated_kv != "own":
            raise ConfigError(f"exact_tail={tail} needs generated_kv=own")
        if self.generated_kv == "own" and self.key_value_group_size > 1:
            raise ConfigError(
                f"generated_kv=own needs key_value_group_size=1, not {self.key_value_group_size}: "
                f"layers that share one cache have no room for keys and values of their own"
            )
        if self.num_upper_layers == 0:  # every token keeps its own: there is nothing to choose
            object.__setattr__(self, "generated_kv", "boundary")
            object.__setattr__(self, "exact_tail", 0)

    def own_start(self, prompt_length: int) -> int:
        """Position of the first token that keeps its own upper keys and values; `NO_OWN` if none
        does."""
        return (
            NO_OWN if self.generated_kv == "boundary" else max(prompt_length - self.exact_tail, 0)
        )

    @property
    def num_lower_layers(self) -> int:
        return self.num_key_value_layers

    @property
    def num_upper_layers(self) -> int:
        return self.num_layers - self.num_key_value_layers

    @property
    def num_kv_groups(self) -> int:
        """J: number of key/value projections that the upper layers share."""
        return self.num_upper_layers // self.key_value_group_size

    @property
    def num_cache_layers(self) -> int:
        """Number of pools of keys in the student's KV cache: one per lower layer and one per group
        of upper layers."""
        return self.num_lower_layers + self.num_kv_groups

    def cut(self, num_key_value_layers: int, key_value_group_size: int = 1) -> Config:
        """The same Llama with another SwiftKV cut. Raises `ConfigError` if the cut does not fit the
        layers."""
        same = (num_key_value_layers, key_value_group_size) == (
            self.num_key_value_layers,
            self.key_value_group_size,
        )
        return dataclasses.replace(
            self,
            num_key_value_layers=num_key_value_layers,
            key_value_group_size=key_value_group_size,
            shared_kv_heads=self.shared_kv_heads if same else None,
        )
