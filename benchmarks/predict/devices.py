"""The parameters of the model for each GPU, with their sources."""

from __future__ import annotations

import dataclasses

from swiftkv_jax.plan.hardware import Hardware, hardware_of


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """What a prediction takes of a device. On an H100, times of serving were within 12 % of it, and
    those of attention without a cache in 8 bits within 20 %.

    Rates of products and copies are those that an H200 is known to reach. The other values were
    chosen before anything was measured; where they come from:

    Prefill: of the 2700 cycles for 128 queries and 128 keys, the products need 2048 of the tensor
    cores and 1792 of the port to shared memory; what is lost beyond that is about the same in all
    good kernels. With 6750 cycles a tile the model is 4 to 6 % above what tokamax publishes for an
    H100 at H = 128 (492, 568, 620 TFLOP/s for rows of 2k, 4k, 8k, 16 heads, 16k tokens), with 2750
    and 4000 as much above cuDNN there (532, 595, 629). Beyond 8k power limits the clock: times
    `long_share` the model is at their 636 and 645. For our tiles 6000 cycles are assumed. At other
    head dims the products cost in proportion and the exponentials do not: an extrapolation.

    Gradients: these cycles a product and a tile give what tokamax publishes for its two kernels,
    whose products are as many (408 at 4k, 452 at 16k).

    Decoding: the compiled loop takes 850 to 1000 cycles for 32 KiB, so a block reads about 65
    GB/s. The shares of the copy bandwidth are estimates from the instructions a byte that the
    formats need.
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
    long_share: float = 0.94
    """Rate of rows of more than 8k positions over that of shorter ones."""
    gradient_product_cycles: float = 1480.0
    """Cycles of a product of 128 x 128 x 128 in the backward kernels."""
    gradient_tile_cycles: float = 8000.0
    """Cycles of a tile of theirs outside of its loop."""

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


def device_model(kind: str) -> DeviceModel | None:
    """The model of a `jax.Device.device_kind`; None if there is none."""
    return next((device for device in DEVICES.values() if device.kind == kind), None)
