"""Predicted times of the engine's two device programs, a chunk of prefill and a step of decoding,
with the parameters of each GPU.

Kernels are counted in the programs that XLA's compiler for the H200 makes of Llama-3.1-8B, bytes
by hand for what the fusions between products must read and write. The thread blocks of Hopper's
attention are taken in the order of their launch.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.infer.bench.summary import Variant
from swiftkv_jax.model.cache import bytes_per_token
from swiftkv_jax.model.config import Config
from swiftkv_jax.pallas_kernels import AttentionOperands
from swiftkv_jax.pallas_kernels.fp8_product import FROM_ROWS
from swiftkv_jax.pallas_kernels.hopper import decode, prefill
from swiftkv_jax.pallas_kernels.tuning import tuning_for
from swiftkv_jax.plan.cost import decode_flops, prefill_flops
from swiftkv_jax.plan.hardware import Hardware, hardware_of

PRODUCTS = 4
"""Products of a layer: queries with keys and values, or queries; output; gate and up; down."""
ATTENTION = 2
"""Kernels of attention in a layer."""
SMALL_SELF = 9
SMALL_CROSS = 6
"""Other kernels of a decode step in a layer that writes keys and values, and in one that does not:
norms, rotary embedding, check, scatters, activation, sums."""
SMALL_PER_GROUP = 3
SMALL_FP8 = 5
"""More of them in a layer whose products quantise their activations: of two rows or more."""
SMALL_REST = 25
"""The same for each group of upper layers (scatters of its keys and values), and for the whole
step: embedding, rotary table, work list, final norm, sampling."""
_LOGITS_PASSES = 2
"""Times that a greedy step writes or reads the float32 logits."""
_KV_PASSES = 15
"""Times that a chunk reads or writes all its new keys and values in a layer, beside the products
and attention: rotary embedding, check, unpacking, merge with their pages, scatter."""


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """What a prediction takes of a device. On an H100, times of serving were within 12 % of it.

    Rates of products and copies are those that an H200 is known to reach. Prefill: of the 2700
    cycles for 128 queries and 128 keys, the products need 2048 of the tensor cores; with 6750
    cycles a tile the model is 4 to 6 % above what tokamax publishes for an H100 at H = 128, with
    2750 and 4000 as much above cuDNN there. For our tiles 6000 are assumed. At other head dims the
    products cost in proportion and the exponentials do not: an extrapolation. Decoding: the
    compiled loop takes 850 to 1000 cycles for 32 KiB, so a block reads about 65 GB/s. The shares of
    the copy bandwidth are estimates from the instructions a byte that the formats need.
    """

    name: str
    """Machine, as `swiftkv_jax.plan.topology` calls it."""
    kind: str
    """`jax.Device.device_kind`."""
    matmul: float = 790e12
    """FLOP/s of a large bfloat16 product."""
    copy: float = 4.3e12
    """Bytes a second of a large copy, read and written."""
    layer_matmul: float = 650e12
    """FLOP/s of a layer's products in a chunk of prefill."""
    layer_fp8_matmul: float = 1190e12
    """The same of FP8 products: by themselves the four of a layer of Llama-3.1-8B reached 1,226 to
    1,398 TFLOP/s on an H100 (`pallas_kernels.fp8_product`), of which a chunk is assumed to keep the
    share that it keeps in bfloat16."""
    weights_share: float = 0.85
    """Share of `copy` at which the products of few rows read weights."""
    launch: float = 2e-6
    """Seconds of a kernel with little to do, its launch included."""

    multiprocessors: int = 132
    clock: float = 1.755e9
    """Cycles a second under load."""
    pair_cycles: float = 2700.0
    """Cycles for 128 queries of a head and a block of 128 keys at H = 128: two products, with the
    exponentials between them mostly hidden."""
    tile_cycles: float = 6000.0
    """Cycles of a prefill tile of 128 queries before and after its loop: start, first loads and
    output, which nothing hides."""
    idle_tile_cycles: float = 4400.0
    """Cycles of a tile without queries."""
    exponential_cycles: float = 1050.0
    """Cycles from a warpgroup's scores to its weights."""

    decode_slots: int = 2
    """Thread blocks of decoding that share a multiprocessor."""
    decode_block: float = 2e-6
    """Seconds of a thread block of decoding before its first bytes and after its last."""
    decode_block_rate: float = 65e9
    """Bytes a second that one thread block can read."""
    decode_shares: tuple[tuple[str, float], ...] = (
        ("bfloat16", 0.93),
        ("float8_e4m3fn", 0.92),
        ("int8", 0.80),
    )
    """Share of `copy` at which decoding reads a cache of each dtype."""

    @property
    def published(self) -> Hardware:
        hardware = hardware_of(self.kind)
        assert hardware is not None
        return hardware

    def decode_bandwidth(self, dtype: str) -> float:
        """Bytes a second of a cache stored as `dtype`."""
        return dict(self.decode_shares)[dtype] * self.copy


H200 = DeviceModel("h200", "NVIDIA H200")
# The same chip, whose memory reaches the same share of its published bandwidth.
H100 = dataclasses.replace(H200, name="h100", kind="NVIDIA H100 80GB HBM3", copy=3.0e12)

DEVICES = {device.name: device for device in (H200, H100)}


# Attention --------------------------------------------------------------------

_BLOCK = 128  # queries, and keys, that `pair_cycles` is for


def prefill_tile(device: DeviceModel, tuning: prefill.Tuning, head_dim: int, blocks: int) -> float:
    """Cycles of a tile of 2 `block_q` queries of one head that sees `blocks` key blocks."""
    if not blocks:
        return device.idle_tile_cycles
    tensor = 2048 * head_dim / _BLOCK
    # A warpgroup issues its scores in a quarter of these, and then needs their exponentials.
    loop = max(tensor, tensor / 4 + device.exponential_cycles) / 2048
    size = 2 * tuning.block_q / _BLOCK * tuning.block_kv / _BLOCK
    return device.tile_cycles + blocks * size * loop * device.pair_cycles


def makespan(times: Iterable[float], workers: int) -> float:
    """When all have ended that `workers` take in this order, each the next as soon as it is
    free."""
    free = [0.0] * workers
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


@functools.lru_cache(4096)
def decode_attention_seconds(
    device: DeviceModel,
    config: Config,
    cache: jnp.dtype,
    page: int,
    keys: int,
    lengths: tuple[int, ...],
) -> float:
    """Seconds of the two kernels of decode attention in one layer, launches included, for rows of
    `lengths` positions in page tables with room for `keys`. They follow the kernel's own plan."""
    tuning = tuning_for(decode.Tuning, "hopper.decode", config.head_dim, cache, device.kind)
    rows = len(lengths)
    pages = keys // page
    q = jax.ShapeDtypeStruct((rows, 1, config.num_heads, config.head_dim), jnp.bfloat16)
    pool = (rows * pages, config.num_kv_heads, page, config.head_dim)
    k = jax.ShapeDtypeStruct(pool, cache)
    plan = _planner(tuning, q, k, (rows, pages))(jnp.asarray(lengths, jnp.int32))
    tiles = np.asarray(plan.entries)[:, 2] - np.asarray(plan.entries)[:, 1]
    # Whole tiles, and all heads of an entry next to each other.
    position = bytes_per_token(config, cache) // config.num_cache_layers
    sizes = np.repeat(tiles * plan.tile * (position // config.num_kv_heads), config.num_kv_heads)
    columns = 8 * math.ceil(config.num_heads / config.num_kv_heads / 8)
    partial_bytes = 4 * len(sizes) * (config.head_dim + 1) * columns
    slots = device.decode_slots * device.multiprocessors
    # At the bandwidth of all blocks together, or at the rate of each, whichever takes longer.
    waves = -(-len(sizes) // slots)
    together = waves * device.decode_block + sizes.sum() / device.decode_bandwidth(cache.name)
    each = (device.decode_block + size / device.decode_block_rate for size in sizes.tolist())
    reading = max(together, makespan(each, slots))
    return reading + 2 * device.launch + 2 * partial_bytes / device.copy


@functools.cache
def _planner(tuning, q, k, table: tuple[int, int]):
    """`decode.plan` for operands of these shapes, compiled as a function of the lengths."""

    def run(length):
        page_table = jnp.zeros(table, jnp.int32)
        operands = AttentionOperands(q, k, k, length=length, page_table=page_table)
        return decode.plan(operands, tuning=tuning)

    return jax.jit(run)


# Steps ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepModel:
    """One model, as student or teacher, on one device."""

    device: DeviceModel
    variant: Variant
    cache: jnp.dtype
    page_size: int
    fp8: bool = False
    """Whether products are of float8 by float8."""

    def __post_init__(self):
        config = self.config
        prompt_programs = config.prompt_attention_layers, config.boundary_taps, config.exact_head
        if config.num_experts or any(prompt_programs):
            raise NotImplementedError("this model of a step has plain layers only")

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

    def _product_rate(self, rows: int) -> float:
        """FLOP/s of a layer's products with so many rows."""
        return self.device.layer_fp8_matmul if self.fp8 and rows > 1 else self.device.layer_matmul

    # Prefill ------------------------------------------------------------------

    def chunk_seconds(
        self, tokens: int, tiles: Sequence[int], context_pages: int | None = None
    ) -> float:
        """A chunk program of `tokens`. `tiles` has the positions that the last query of each of its
        pages sees, 0 for one without tokens; with `context_pages` so many are widened first."""
        device = self.device
        config = self.config
        # The products of one token alone: its attention to itself is 1/10,000 of them.
        products = max(
            tokens
            * prefill_flops(config, 1, swiftkv=self.variant.swiftkv)
            / self._product_rate(tokens),
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
        device = self.device
        config = self.config
        kernel = tuning_for(
            prefill.Tuning, "hopper.prefill", config.head_dim, jnp.bfloat16, device.kind
        )
        kernel = prefill.fit(kernel, self.page_size)
        rows = -(-self.page_size // (2 * kernel.block_q))
        cycles = makespan(
            (
                prefill_tile(device, kernel, config.head_dim, -(-seen // kernel.block_kv))
                for seen in tiles
                for _ in range(rows * config.num_heads)
            ),
            device.multiprocessors,
        )
        return device.launch + cycles / device.clock

    def _small_bytes(self, tokens: int, tiles: int) -> float:
        """Bytes that a layer's other kernels read and write, in bfloat16: norms and sums, the
        queries and results that are unpacked into tiles and packed again, the activation. What FP8
        products multiply is read once more and written in 8 bits; of large chunks it is, but for
        attention's results, made and quantised at once (`pallas_kernels.fp8_rows`)."""
        config = self.config
        rows = tiles * self.page_size
        heads = config.num_heads * config.head_dim
        norms_and_sums = tokens * 7 * config.embed_dim
        packing = 2 * (tokens + rows) * heads
        activation = tokens * 3 * config.mlp_dim
        quantising = 0.0
        if self.fp8 and tokens >= FROM_ROWS:  # two norms, the results of attention, the activation
            quantising = tokens * (config.embed_dim + 0.5 * heads - 0.5 * config.mlp_dim)
        elif self.fp8:
            quantising = tokens * (4 * config.embed_dim + 0.5 * heads + 1.5 * config.mlp_dim)
        every = norms_and_sums + packing + activation + quantising
        return 2 * every + _KV_PASSES * tokens * self._kv_bytes(1)

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

    def decode_seconds(
        self, lengths: Sequence[int], keys: int, *, lower_layers: bool = True
    ) -> float:
        """One step of rows of `lengths` positions, their new ones among them and 0 for rows without
        a sequence, whose page tables have room for `keys`; without `lower_layers` the rest of a
        student's, where a chunk of prefill goes on to it."""
        device = self.device
        config = self.config
        rows = len(lengths)
        prefilled = 0 if lower_layers else self.variant.prefill_bytes
        layers = config.num_layers - (0 if lower_layers else self._self_layers)
        products = max(
            rows * decode_flops(config, 0, swiftkv=self.variant.swiftkv) / self._product_rate(rows),
            (self.variant.weight_bytes - prefilled) / (device.weights_share * device.copy),
        )
        logits = _LOGITS_PASSES * 4 * rows * config.vocab_size / device.copy
        small = (config.num_layers - self._self_layers) * SMALL_CROSS + SMALL_REST
        if lower_layers:
            small += self._self_layers * SMALL_SELF + self._groups * SMALL_PER_GROUP
        if self.fp8 and rows > 1:
            small += layers * SMALL_FP8
        attended = decode_attention_seconds(
            device, config, self.cache, self.page_size, keys, tuple(lengths)
        )
        return products + logits + small * device.launch + layers * attended
