"""What a block of keys and values takes on TPUs by the compiler's final schedule. Nothing runs.

The counts are those of the libtpu of requirements-compile.lock. More of them are a slower kernel.
"""

import jax.numpy as jnp
import pytest

from swiftkv_jax.plan.hardware import hardware_of
from tests.compile.bundles import PAGE, H, K, decode_block, largest, schedule, segments

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# Cycles a second: what the peak rates of v5e and v5p come to over four 128 x 128 matrix units a
# core. v6e is taken to be as fast as v5p.
CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
SLACK = 1.02

PREFILL = {"v5e": 4377, "v5p": 4419, "v6e": 2952}
"""Bundles of 1024 rows (queries x heads) x 1024 keys without a mask."""
DECODE = {
    ("v5e", "bfloat16"): (256, 78, 398),
    ("v5e", "float8_e4m3fn"): (512, 167, 934),
    ("v5e", "int8"): (512, 166, 1338),
    ("v5p", "bfloat16"): (512, 112, 375),
    ("v5p", "float8_e4m3fn"): (1024, 256, 914),
    ("v5p", "int8"): (1024, 256, 1310),
    ("v6e", "bfloat16"): (256, 87, 388),
    ("v6e", "float8_e4m3fn"): (512, 149, 913),
    ("v6e", "int8"): (512, 149, 648),
}
"""Positions of a block, bundles that start its copies and wait for them, and that attend."""
COMPUTED_LONGER = {("v5p", "int8"): 1.15}
"""Cycles to compute a block over those to copy it, where that is more than 1."""


def copy_cycles(chip: str, cache_format: str, positions: int) -> float:
    """The least cycles in which a chip copies a block. The two cores of v5p share its memory, and
    the heads."""
    position = H * jnp.dtype(cache_format).itemsize + (0 if cache_format == "bfloat16" else 4)
    hardware = hardware_of(f"TPU {chip}")
    assert hardware is not None
    return 2 * K * positions * position / hardware.bandwidth * CLOCK[chip]


@pytest.mark.parametrize("chip", PREFILL)
def test_prefill(chip):
    """A block, of one head a core, takes at most a quarter of its time to copy."""
    bundles = largest(segments(schedule(TOPOLOGIES[chip], "prefill", "bfloat16"))).bundles
    cores = 2 if chip == "v5p" else 1
    cycles = copy_cycles(chip, "bfloat16", 1024) / K * cores
    print(f"{bundles} bundles, {cycles:.0f} cycles to copy")
    assert bundles <= SLACK * PREFILL[chip]
    assert cycles <= bundles / 4


@pytest.mark.parametrize(("chip", "cache_format"), DECODE)
def test_decode(chip, cache_format):
    """A block takes less time to compute than to copy, in all but one format."""
    positions, overhead, attend = DECODE[chip, cache_format]
    block = decode_block(segments(schedule(TOPOLOGIES[chip], "decode", cache_format)))
    cycles = copy_cycles(chip, cache_format, positions)
    print(f"{block}, {cycles:.0f} cycles to copy")
    assert block.copies == positions // PAGE * (2 if cache_format == "bfloat16" else 4)
    assert block.waited == block.copied > 0
    assert block.overhead <= SLACK * overhead
    assert block.attend <= SLACK * attend
    assert block.bundles <= COMPUTED_LONGER.get((chip, cache_format), 1) * cycles
