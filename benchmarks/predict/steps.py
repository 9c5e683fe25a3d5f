"""Predicted times of the engine's two device programs: a chunk of prefill and a step of decoding.

Kernels are counted in the programs that XLA's compiler for the H200 makes of Llama-3.1-8B, bytes
by hand for what the fusions between products must read and write. Autotuning, which chooses other
products on a device, was not part of that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from swiftkv_jax.infer.bench.summary import Variant
from swiftkv_jax.model.cache import bytes_per_token
from swiftkv_jax.model.config import Config
from swiftkv_jax.pallas_kernels.hopper import prefill
from swiftkv_jax.pallas_kernels.tuning import tuning_for
from swiftkv_jax.plan.cost import decode_flops, prefill_flops

from ..kernels.shapes import Decode
from . import attention
from .devices import DeviceModel

PRODUCTS = 4
"""Products of a layer: queries with keys and values, or queries; output; gate and up; down."""
ATTENTION = 2
"""Kernels of attention in a layer."""
SMALL_SELF, SMALL_CROSS = 9, 6
"""Other kernels of a decode step in a layer that writes keys and values, and in one that does not:
norms, rotary embedding, check, scatters, activation, sums."""
SMALL_PER_GROUP, SMALL_REST = 3, 25
"""The same for each group of upper layers (scatters of its keys and values), and for the whole
step: embedding, rotary table, work list, final norm, sampling."""
_LOGITS_PASSES = 2
"""Times that a greedy step writes or reads the float32 logits."""
_KV_PASSES = 15
"""Times that a chunk reads or writes all its new keys and values in a layer, beside the products
and attention: rotary embedding, check, unpacking, merge with their pages, scatter."""


@dataclasses.dataclass(frozen=True)
class StepModel:
    """One model, as student or teacher, on one device."""

    device: DeviceModel
    variant: Variant
    cache: jnp.dtype
    page_size: int

    def __post_init__(self):
        if self.config.num_experts:
            raise NotImplementedError("the products of experts are not in this model of a step")
        config = self.config
        if config.prompt_attention_layers or config.boundary_taps or config.exact_head:
            raise NotImplementedError(
                "prompt attention, taps and an exact head are not in this model of a step"
            )

    @property
    def config(self) -> Config:
        return self.variant.config

    @property
    def _self_layers(self) -> int:
        """Layers that make their own keys and values."""
        return self.config.num_lower_layers if self.variant.swiftkv else self.config.num_layers

    @property
    def _groups(self) -> int:
        return self.config.num_kv_groups if self.variant.swiftkv else 0

    # Prefill ------------------------------------------------------------------

    def chunk_seconds(
        self, tokens: int, tiles: Sequence[int], context_pages: int | None = None
    ) -> float:
        """A chunk program of `tokens`. `tiles` has the positions that the last query of each of its
        pages sees, 0 for one without tokens; with `context_pages` so many are widened first."""
        device, config = self.device, self.config
        # The products of one token alone: its attention to itself is 1/10,000 of them.
        products = max(
            tokens * prefill_flops(config, 1, swiftkv=self.variant.swiftkv) / device.layer_matmul,
            self.variant.prefill_bytes / (device.weights_share * device.copy),
        )
        # Of its last layer the teacher needs the keys and values only.
        layers = self._self_layers - (not self.variant.swiftkv)
        each = self._attention(tiles) + self._widening(context_pages)
        each += max(self._small_bytes(tokens, len(tiles)) / device.copy, 11 * device.launch)
        kv = _KV_PASSES * tokens * self._kv_bytes(config.num_kv_groups if self._groups else 1)
        return products + layers * each + kv / device.copy

    def _attention(self, tiles: Sequence[int]) -> float:
        """Seconds of one layer's attention: pages in their order, all heads of each."""
        device, config = self.device, self.config
        kernel = tuning_for(
            prefill.Tuning, "hopper.prefill", config.head_dim, jnp.bfloat16, device.kind
        )
        kernel = prefill.fit(kernel, self.page_size)
        rows = -(-self.page_size // (2 * kernel.block_q))
        cycles = attention.makespan(
            (
                attention.prefill_tile(device, kernel, config.head_dim, -(-seen // kernel.block_kv))
                for seen in tiles
                for _ in range(rows * config.num_heads)
            ),
            device.multiprocessors,
        )
        return device.launch + cycles / device.clock

    def _small_bytes(self, tokens: int, tiles: int) -> float:
        """Bytes that a layer's other kernels read and write, in bfloat16: norms and sums, the
        queries and results that are unpacked into tiles and packed again, the activation."""
        config, rows = self.config, tiles * self.page_size
        heads = config.num_heads * config.head_dim
        norms_and_sums = tokens * 7 * config.embed_dim
        packing = 2 * (tokens + rows) * heads
        activation = tokens * 3 * config.mlp_dim
        return 2 * (norms_and_sums + packing + activation) + _KV_PASSES * tokens * self._kv_bytes(1)

    def _kv_bytes(self, layers: int) -> int:
        """Bytes of a token's keys and values in bfloat16 in so many layers."""
        return layers * bytes_per_token(self.config, jnp.bfloat16) // self.config.num_cache_layers

    def _widening(self, context_pages: int | None) -> float:
        """Seconds in which one layer's cache of 8 bits is read and written as bfloat16."""
        if context_pages is None:
            return 0.0
        wide = self._kv_bytes(1) * context_pages * self.page_size
        return self.device.launch + 1.5 * wide / self.device.copy

    # Decoding -----------------------------------------------------------------

    def decode_seconds(self, lengths: Sequence[int], keys: int) -> float:
        """One step of rows of `lengths` positions, their new ones among them and 0 for rows without
        a sequence, whose page tables have room for `keys`."""
        device, config = self.device, self.config
        rows = len(lengths)
        products = max(
            rows * decode_flops(config, 0, swiftkv=self.variant.swiftkv) / device.layer_matmul,
            self.variant.weight_bytes / (device.weights_share * device.copy),
        )
        logits = _LOGITS_PASSES * 4 * rows * config.vocab_size / device.copy
        small = (
            self._self_layers * SMALL_SELF
            + (config.num_layers - self._self_layers) * SMALL_CROSS
            + self._groups * SMALL_PER_GROUP
            + SMALL_REST
        )
        attended = _decode_attention(device, self._decode_shape(rows, keys), tuple(lengths))
        return products + logits + small * device.launch + config.num_layers * attended

    def _decode_shape(self, rows: int, keys: int) -> Decode:
        config = self.config
        return Decode(
            "decode step",
            rows,
            keys,
            self.cache.name,
            page=self.page_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )


@functools.lru_cache(4096)
def _decode_attention(device: DeviceModel, shape: Decode, lengths: tuple[int, ...]) -> float:
    return attention.decode_seconds(device, shape, lengths)
