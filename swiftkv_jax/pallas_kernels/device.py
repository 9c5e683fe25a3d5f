"""The device that the code being traced will run on."""

from __future__ import annotations

import re

import jax

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head dims that the device kernels are built and tested for. XLA takes any."""


def current_device() -> tuple[str, str]:
    """(platform, device kind) of the mesh that tracing happens under, or else of the default
    device.

    The devices of the mesh need not exist, as when compiling ahead of time for a described machine.
    """
    device = (
        jax.sharding.get_abstract_mesh().abstract_device
        or jax.config.jax_default_device
        or jax.devices()[0]
    )
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return device.platform, device.device_kind


def is_hopper(platform: str, kind: str) -> bool:
    """Whether the device has compute capability 9.0, by its product name."""
    return platform in ("gpu", "cuda") and re.search(r"\bG?H(20|100|200|800)\b", kind) is not None
