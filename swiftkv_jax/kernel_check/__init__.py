"""Checks the device kernels of attention before their first use on a kind of device.

`checked_implementation` is called where an implementation is chosen. Where the device has kernels
of its own, each configuration that the model needs runs once, in a child process, against the
reference; the verdict is kept. A kernel that is wrong, crashes or hangs is not used: XLA's form is.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pallas_kernels import Implementation
from ..pallas_kernels.device import Device
from ..process.distributed import any_process
from .configurations import (
    KernelConfig,
    choose_for,
    forward_configs,
    serving_configs,
    training_configs,
)
from .running import CHILD, TIMEOUT, after_the_end, check_in_children, check_in_process
from .verdicts import DEFAULT_FOLDER, DeviceVersion, Verdict, VerdictFile

__all__ = [
    "KernelCheck",
    "KernelConfig",
    "checked_implementation",
    "forward_configs",
    "serving_configs",
    "training_configs",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """How kernels are checked."""

    folder: str | Path = DEFAULT_FOLDER
    """Folder of the verdicts; made for its owner alone."""
    timeout: float = TIMEOUT
    """Seconds for one configuration."""
    command: Sequence[str] = CHILD
    """The child process."""
    device: Any = None
    """Stands for the device at hand; None is that one."""


def checked_implementation(
    implementation: Implementation | None,
    configs: Sequence[KernelConfig],
    device: Any,
    check: KernelCheck | None = None,
) -> Implementation | None:
    """The implementation to use for these configurations on `device`, a `jax.Device` of this
    process: a named one as it is; else None, which chooses for the device, or 'xla' if a kernel
    that would be chosen has not been found right.

    Does nothing where the device has no kernels. Otherwise the log says what the kernels do not
    take, and why. Configurations that they take and that have no verdict run first, some seconds
    each; one warning says what is not used and why. With several processes, all of them call this,
    and one answer holds for all. Raises `TimeoutError` if a kernel hangs on a TPU, which runs it in
    this process.
    """
    check = check or KernelCheck()
    device = check.device or device
    kind = Device.of(device)
    kernels = kind.kernels
    if implementation is not None or kernels is None:
        return implementation
    if kind.hopper_refused_reason:
        _log(
            f"attention on {device.device_kind} runs without the hopper kernels, more slowly: "
            f"hopper {kind.hopper_refused_reason}"
        )
    taken = []
    for config in configs:
        reason = choose_for(config, kind).reason
        if reason is None:
            taken.append(config)
        else:
            _log(f"{config} runs through XLA: {kernels} {reason}", logging.INFO)
    failed = _first_failed(kernels, taken, device, check)
    if failed is not None:
        by_name = f"; `attention`={kernels} uses the kernels all the same"
        if kernels == "cudnn":  # which does not decode from pages: by name it cannot serve
            by_name = ""
        _log(
            f"all attention runs through XLA, more slowly, and not through the {kernels} kernels: "
            f"on {device.device_kind}, {failed[0]}: {failed[1]}. `swiftkv check-kernels` checks "
            f"all of them again, its --json FILE is what to send with a report{by_name}"
        )
    if not any_process(failed is not None):
        return None
    if failed is None:
        _log(
            f"all attention runs through XLA, more slowly, and not through the {kernels} "
            f"kernels: another process has not found them right"
        )
    return "xla"


def _first_failed(
    kernels: str, configs: Sequence[KernelConfig], device: Any, check: KernelCheck
) -> tuple[KernelConfig, Verdict] | None:
    """The first of these configurations that the kernels cannot run, and its verdict."""
    start = time.monotonic()
    file = VerdictFile.in_folder(check.folder, DeviceVersion.of(device), kernels)
    kept = {config: after_the_end(verdict) for config, verdict in file.read().items()}
    for config in configs:
        verdict = kept.get(config)
        if verdict is not None and not verdict.usable:
            return config, verdict
    missing = [config for config in configs if kept.get(config) is None]
    if not missing:
        return None
    # One process alone can hold a TPU, and this one does.
    if device.platform == "tpu":
        verdicts = check_in_process(missing, device, file, timeout=check.timeout)
    else:
        verdicts = check_in_children(missing, file, command=check.command, timeout=check.timeout)
    for config, verdict in verdicts.items():
        if not verdict.usable:
            return config, verdict
    logger.info(
        "the %s kernels agree with the reference on %s (%d configurations, %.0f s)",
        kernels,
        device.device_kind,
        len(missing),
        time.monotonic() - start,
    )
    return None


@functools.cache
def _log(message: str, level: int = logging.WARNING) -> None:
    """Log a message once."""
    logger.log(level, "%s", message)
