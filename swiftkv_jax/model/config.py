"""Architecture of a decoder and where SwiftKV cuts it.

A `Config` is frozen and hashable, so it is a static argument of every jitted function. It holds
architecture only: no mesh, no dtype, no batch size, no kernel choice.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ..errors import ConfigError
from .boundary_checks import check_boundary
from .rope_config import LayerKind, Rope

GeneratedKV = Literal["boundary", "own"]
"""Source of the upper keys and values of generated tokens: see `Config.generated_kv`."""
GENERATED_KV: tuple[GeneratedKV, ...] = ("boundary", "own")

KVCacheDtype = Literal["auto", "float32", "bfloat16", "fp8", "int8"]
"""How keys and values are stored. `auto` is the weights' dtype; `fp8` is float8_e4m3fn."""
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "float32", "bfloat16", "fp8", "int8")

Quantization = Literal["none", "fp8", "int8"]
"""Values of the argument `quantization` of loading; None keeps weights as they are stored."""

Remat = Literal["none", "mlp", "layer"]
"""Operations that the backward pass recomputes: only elementwise ones (`none`); all of an upper
layer but its attention (`mlp`); or the whole layer from its input (`layer`)."""

NO_OWN = 2**30
"""A position that no sequence reaches."""

QKNorm = Literal["head", "all"]
NormOrder = Literal["pre", "post", "both"]
Activation = Literal["silu", "gelu_tanh"]
_POSITIVE = (
    "norm_eps embed_scale residual_scale query_scale score_cap logit_divisor logit_cap"
).split()
_SIZES = (
    "vocab_size embed_dim mlp_dim num_layers num_heads num_kv_heads head_dim "
    "max_position_embeddings"
).split()

MAX_LAYERS = 1_000
"""Far more than any model has. Names, programs and lists grow with the layers, so a wrong number in
a `config.json` would fill the memory."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a Llama and of its SwiftKV variant; options make it another family's model.

    Layers `0 .. num_key_value_layers-1` ("lower") own their keys and values. The others ("upper")
    read keys and values projected from the hidden state that enters layer `num_key_value_layers`
    (SingleInputKV), one projection per `key_value_group_size` consecutive layers (AcrossKV). That
    hidden state, the boundary state, may be improved: see `prompt_attention_layers`. With
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
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    layer_kinds: tuple[LayerKind, ...] = (LayerKind(),)
    """The kind of each layer; a single entry if all layers are of one kind."""
    family: str = "llama"
    """The family whose tensor and field names a checkpoint uses: a key of
    `checkpoints.families`."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm | None = None
    """An RMS norm of queries and keys before they rotate: `head` of each head by itself, `all` of
    all heads together."""
    norm_order: NormOrder = "pre"
    """Norms before attention and MLP, after them (of what is added to the residual), or both."""
    norm_offset: bool = False
    """True if a norm multiplies by one more than its scale."""
    norm_wide: bool = False
    """True if a norm multiplies by its scale in float32, before it rounds."""
    activation: Activation = "silu"
    """Activation function of the MLP gate."""
    num_experts: int = 0
    """Mixture of experts: the MLPs of each layer, `mlp_dim` wide each; 0: one MLP, no router."""
    num_experts_per_token: int = 0
    renormalize_experts: bool = False
    """True if the router's probabilities of a token's experts are divided by their sum."""
    embed_scale: float = 1.0
    """Factor of the embeddings."""
    round_embed_scale: bool = False
    """True if `embed_scale` is first rounded to the embedding's dtype."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual."""
    query_scale: float | None = None
    """Factor of the attention scores; None is 1 / sqrt(head_dim)."""
    score_cap: float | None = None
    """The c in c tanh(score / c), applied before the mask; None: no cap."""
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    """Cap of the logits, as `score_cap` of scores; applied after `logit_divisor`."""
    num_key_value_layers: int = 0
    """K of the paper; 0 means all layers, as in the authors' configuration."""
    key_value_group_size: int = 1
    prompt_attention_layers: int = 0
    """M: number of upper layers, the first ones, of which prompt tokens run the attention, with a
    linear map (`SwiftKV.mlp_map`) in place of the MLP. They have caches of their own, and the other
    upper layers' keys and values come from the hidden state after them."""
    prompt_mlp_neurons: int = 0
    """m: number of neurons of each of their MLPs that run beside the map (`SwiftKV.mlp_gate`)."""
    boundary_taps: int = 0
    """0, or 1: those keys come from the hidden states of a token and of the one before it
    (`SwiftKV.k_tap`). Values do not: what a tap brings nearly all lies in the keys."""
    shared_kv_heads: tuple[tuple[int, ...], ...] | None = None
    """`[U][K]`: for each key/value head of an upper layer, the head of its group's cache that it
    reads. Set for students whose layers compute their values from the shared ones (`SwiftKV.mix`);
    None: every head reads the head with its own number, as in the authors' models."""
    generated_kv: GeneratedKV = "boundary"
    """`boundary`: every token's upper keys and values come from the hidden state that enters layer
    `num_key_value_layers`. `own`: those of a generated token come from its own hidden state before
    each upper layer, by the teacher's projections. Queries are the student's in both, with one
    exception: where layers share caches, tokens' own keys are looked up with the teacher's
    queries."""
    exact_head: int = 0
    """0, or 1: the first token of a text, an attention sink (Xiao et al. 2023, arXiv 2309.17453),
    also runs through all layers and keeps its own upper keys and values. Needs groups of 1."""
    exact_tail: int = 0
    """Number of tokens at a prompt's end that also keep their own upper keys and values, and
    therefore run through all layers; needs `own`."""

    def __post_init__(self):
        for field in _SIZES:
            largest = MAX_LAYERS if field == "num_layers" else 2**31 - 1
            if not 1 <= getattr(self, field) <= largest:
                raise ConfigError(f"{field}={getattr(self, field)} must be from 1 to {largest}")
        for field in _POSITIVE:
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{field}={value} must be positive")
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
        check_boundary(self)
        if not min(self.num_experts, 1) <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token={self.num_experts_per_token} must be from 1 to "
                f"num_experts={self.num_experts}, or both 0"
            )
        self._check_layer_kinds()
        self._check_shared_kv_heads()
        self._check_generated_kv()

    def _check_layer_kinds(self):
        if len(set(self.layer_kinds)) == 1:
            object.__setattr__(self, "layer_kinds", self.layer_kinds[:1])
        elif len(self.layer_kinds) != self.num_layers:
            raise ConfigError(
                f"layer_kinds has {len(self.layer_kinds)} entries, not one for each of the "
                f"{self.num_layers} layers"
            )
        for rope in self.ropes:
            rope.check_factors(self.head_dim)
        rotated = {rope.rotated(self.head_dim) for rope in self.ropes}
        if any(size < 2 or size % 2 for size in rotated) or len(rotated) > 1:
            raise ConfigError(
                f"of head_dim={self.head_dim}, {sorted(rotated)} dimensions rotate: they must be "
                f"an even number, the same in all layers that rotate"
            )
        for group in self.kv_groups:
            if len({self.kind(layer).rope for layer in group}) > 1:
                raise ConfigError(
                    f"key_value_group_size={len(group)}: layers {group[0]} to {group[-1]} would "
                    f"share rotated keys, and rotate them differently"
                )

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
            raise ConfigError(f"exact_tail={tail!r} must be a whole number from 0 to 2^30 - 1")
        if tail and self.generated_kv != "own":
            raise ConfigError(f"exact_tail={tail} needs generated_kv=own")
        if type(self.exact_head) is not int or self.exact_head not in (0, 1):
            raise ConfigError(f"exact_head={self.exact_head!r} must be 0 or 1")
        if self.exact_head and self.key_value_group_size > 1:
            raise ConfigError("exact_head=1 needs key_value_group_size=1")
        upper = range(self.num_lower_layers, self.num_layers)
        if self.has_two_caches and any(self.kind(layer).window is not None for layer in upper):
            raise ConfigError(
                f"generated_kv=own with key_value_group_size={self.key_value_group_size} needs "
                f"upper layers without windows; generated_kv=boundary does not"
            )
        if self.num_upper_layers == 0:  # every token keeps its own: there is nothing to choose
            object.__setattr__(self, "generated_kv", "boundary")
            object.__setattr__(self, "exact_tail", 0)
            object.__setattr__(self, "exact_head", 0)

    @property
    def has_two_caches(self) -> bool:
        """True if upper layers attend to two caches: their group's, with the student's queries, and
        one of the keys and values that tokens keep of their own, with the teacher's queries."""
        return self.generated_kv == "own" and self.key_value_group_size > 1

    @property
    def pages_per_own_page(self) -> int:
        """Number of cache pages that hold the tokens' own upper keys and values for `page_size`
        tokens, where upper layers attend to two caches, else 0. In each pool a page has room for
        one layer's."""
        if not self.has_two_caches:
            return 0
        return -(-self.num_upper_layers // self.num_cache_layers)

    @property
    def keeps_own(self) -> bool:
        """True if any token keeps its own upper keys and values."""
        return self.generated_kv == "own" or self.exact_head > 0

    def own_start(self, prompt_length: int) -> int:
        """Position of the first token that keeps its own upper keys and values; `NO_OWN` if none
        does."""
        if self.generated_kv == "boundary":
            return NO_OWN
        return max(prompt_length - self.exact_tail, 0)

    def kind(self, layer: int) -> LayerKind:
        return self.layer_kinds[layer if len(self.layer_kinds) > 1 else 0]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct ones among `layer_kinds`."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def window(self) -> int | None:
        """Largest window of all layers; None if a layer has no window."""
        windows = [kind.window for kind in self.kinds if kind.window is not None]
        return max(windows) if len(windows) == len(self.kinds) else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(kind.rope for kind in self.kinds if kind.rope is not None))

    @property
    def rotated_dims(self) -> int:
        """R: number of a head's dimensions, its first ones, that rotate in the layers that do; all
        if no layer rotates."""
        return self.ropes[0].rotated(self.head_dim) if self.ropes else self.head_dim

    def at_length(self, length: int) -> Config:
        """The same model for texts of at most `length` tokens: LongRoPE uses its short or its long
        factors, and windows that hide nothing are removed.

        Serving takes the longest text that it accepts for all texts, so that cached keys stay
        valid, as vLLM does; Hugging Face takes the length of each text. Long factors are never
        changed back to short ones.
        """

        def fit(kind: LayerKind) -> LayerKind:
            rope = kind.rope
            if rope is not None and rope.scaling is not None:
                long = length > rope.scaling.original_max_position_embeddings
                long = long and rope.scaling.rope_type == "longrope"
                scaling = dataclasses.replace(rope.scaling, long=long or rope.scaling.long)
                rope = dataclasses.replace(rope, scaling=scaling)
            window = kind.window
            if window is not None and window >= length:
                window = None
            return LayerKind(rope, window)

        return dataclasses.replace(self, layer_kinds=tuple(map(fit, self.layer_kinds)))

    @property
    def q_norm_dim(self) -> int:
        """Number of scales in a layer's norm of queries; `k_norm_dim` is that of keys."""
        return self.head_dim * (self.num_heads if self.qk_norm == "all" else 1)

    @property
    def k_norm_dim(self) -> int:
        return self.head_dim * (self.num_kv_heads if self.qk_norm == "all" else 1)

    @property
    def num_lower_layers(self) -> int:
        return self.num_key_value_layers

    @property
    def num_upper_layers(self) -> int:
        return self.num_layers - self.num_key_value_layers

    @property
    def first_projected_layer(self) -> int:
        """K + M: the first layer whose keys and values are projected from the boundary state."""
        return self.num_key_value_layers + self.prompt_attention_layers

    @property
    def kv_groups(self) -> tuple[range, ...]:
        """The upper layers by the cache that they share: each of the `prompt_attention_layers`
        alone, then `key_value_group_size` at a time."""
        first = self.first_projected_layer
        size = self.key_value_group_size
        alone = [range(layer, layer + 1) for layer in range(self.num_lower_layers, first)]
        return *alone, *(range(at, at + size) for at in range(first, self.num_layers, size))

    @property
    def num_kv_groups(self) -> int:
        """J: number of key/value projections that the upper layers share."""
        return self.prompt_attention_layers + self.num_projected_groups

    @property
    def num_projected_groups(self) -> int:
        """P: number of those that are projected from the boundary state."""
        return (self.num_layers - self.first_projected_layer) // self.key_value_group_size

    def kv_group(self, layer: int) -> int:
        """The index in `kv_groups` of the group of an upper layer."""
        upper = layer - self.num_lower_layers
        alone = self.prompt_attention_layers
        if upper < alone:
            return upper
        return alone + (upper - alone) // self.key_value_group_size

    @property
    def num_cache_layers(self) -> int:
        """Number of pools of keys in the student's KV cache: one per lower layer and one per group
        of upper layers."""
        return self.num_lower_layers + self.num_kv_groups

    def cut(
        self,
        num_key_value_layers: int,
        key_value_group_size: int = 1,
        *,
        prompt_attention_layers: int | None = None,
        prompt_mlp_neurons: int | None = None,
        boundary_taps: int | None = None,
    ) -> Config:
        """The same Llama with another SwiftKV cut. Prompt attention layers, their neurons and taps
        that are None stay as they are at the cut that it has, and are 0 at another. Raises
        `ConfigError` if the cut does not fit the layers."""
        same = (num_key_value_layers, key_value_group_size) == (
            self.num_key_value_layers,
            self.key_value_group_size,
        )

        def chosen(name: str, value: int | None) -> int:
            if value is not None:
                return value
            return getattr(self, name) * same

        alone = chosen("prompt_attention_layers", prompt_attention_layers)
        taps = chosen("boundary_taps", boundary_taps)
        same = same and alone == self.prompt_attention_layers
        neurons = chosen("prompt_mlp_neurons", prompt_mlp_neurons)
        return dataclasses.replace(
            self,
            num_key_value_layers=num_key_value_layers,
            key_value_group_size=key_value_group_size,
            shared_kv_heads=self.shared_kv_heads if same else None,
            prompt_attention_layers=alone,
            prompt_mlp_neurons=neurons,
            boundary_taps=taps,
        )
