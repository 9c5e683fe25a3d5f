"""The choice of an implementation: the one that is named, or the device's own kernels where they
take the call.

Every reason for which XLA runs a call in their place is a `Choice.reason`, found here in this
order: an option of the call, the device, the call's shapes and dtypes, the tuning, and last the
limits of the kernel itself (its `unsupported_reason`). `choose` is for attention, `choose_product`
for the rest. `kernel_check.checked_implementation` asks for all calls of a program, logs the
reasons, and names 'xla' where a kernel was found wrong.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp

from . import cudnn
from .device import HEAD_DIMS, Device, cudnn_version
from .implementations import IMPLEMENTATIONS, ImplementationError
from .operands import AttentionSpec
from .tuning import tuning_for

FROM_ROWS = 2048
"""Rows from which the kernel of FP8 products is known to be faster than cuBLASLt, by 8 to 18 %.
Fewer leave multiprocessors without a tile."""
_PRODUCTS = {"grouped": "experts", "fp8_product": "FP8 products", "fp8_rows": "FP8 rows"}
"""Modules of Hopper's kernels besides attention's, and what they make."""


class Choice(NamedTuple):
    """Implementation that runs a call, and its tuning."""

    implementation: str
    tuning: Any = None
    """The sizes of a device kernel's blocks."""
    reason: str | None = None
    """Why XLA runs although the device has kernels."""

    @staticmethod
    def unless(reason: str | None, implementation: str, tuning: Any = None) -> Choice:
        """Return the choice of `implementation`, or of XLA if there is a reason against it."""
        if reason:
            return Choice("xla", reason=reason)
        return Choice(implementation, tuning)


def choose(
    device: Device,
    spec: AttentionSpec,
    implementation: str | None = None,
    *,
    tuning: Any = None,
    backward_tuning: Any = None,
) -> Choice:
    """The implementation that runs such a call on `device`: the named one, or with None the
    device's kernels if they take it, else 'xla'. cuDNN decodes by name only: it takes no pages, and
    transposes a cache before it reads it.

    Raises `NotImplementedError` if the named implementation does not take the call, `ValueError`
    for a tuning of another kernel.
    """
    if implementation not in ("hopper", "tpu"):
        for name, value in (("tuning", tuning), ("backward_tuning", backward_tuning)):
            if value is not None:
                raise ValueError(
                    f"{name} goes with implementation='hopper' or 'tpu', got {implementation=}"
                )
    if implementation is None:
        name = device.kernels
        if name is None:
            return Choice("xla")
        if name == "cudnn" and spec.op == "decode":
            return Choice("xla", reason="decodes by name only")
        tuning, reason = _accepted(device, spec, name, None)
        return Choice.unless(reason, name, tuning)
    if implementation not in IMPLEMENTATIONS:
        available = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ImplementationError(implementation, f"is not available; available: {available}")
    _check_tuning("tuning", tuning, implementation, spec.op)
    _check_tuning("backward_tuning", backward_tuning, implementation, "backward")
    tuning, reason = _accepted(device, spec, implementation, tuning)
    if reason:
        raise ImplementationError(implementation, f"{reason}; 'xla' runs {spec.op} everywhere")
    return Choice(implementation, tuning)


def choose_product(
    kernels: str | None, name: str, *calls: tuple[Any, ...], rows: int = FROM_ROWS
) -> Choice:
    """The same for products of experts or in FP8, by the module `name` of Hopper's kernels, on a
    device with `kernels` (`Device.kernels`): for all of `calls`, each the arguments of its
    `unsupported_reason`, on so many `rows`."""
    if kernels != "hopper":
        return Choice("xla", reason=f"has no kernel for {_PRODUCTS[name]}")
    if rows < FROM_ROWS:
        return Choice("xla", reason=f"takes {_PRODUCTS[name]} from {FROM_ROWS} rows on")
    refused = getattr(kernels_of("hopper"), name).unsupported_reason
    return Choice.unless(next(filter(None, (refused(*call) for call in calls)), None), "hopper")


def _check_tuning(name: str, tuning: Any, implementation: str, op: str) -> None:
    """Raise `ValueError` if `tuning` is not None and not of the class of this kernel."""
    if tuning is None:
        return
    wanted = getattr(kernels_of(implementation), op).Tuning
    if not isinstance(tuning, wanted):
        raise ValueError(
            f"{name} must be a Tuning of the {implementation} {op} kernel, got {tuning!r}"
        )


def _accepted(
    device: Device, spec: AttentionSpec, name: str, tuning: Any
) -> tuple[Any, str | None]:
    """(the tuning that `name` runs with, why it does not take the call or None)."""
    if name == "xla":
        return None, None
    reason = _refused_option(spec, name)
    if reason:
        return None, reason
    if name == "cudnn":
        return None, _refused_by_cudnn(device, spec)
    reason = _refused_by_kernels(device, spec, name)
    if reason:
        return None, reason
    try:
        tuning = tuning or find_tuning(device, name, spec.op, spec)
    except NotImplementedError as error:
        return None, f"cannot: {error}"
    # The kernel's module is imported here first, on its own device only.
    kernel = getattr(kernels_of(name), spec.op)
    return tuning, kernel.unsupported_reason(spec, tuning)


def _refused_option(spec: AttentionSpec, name: str) -> str | None:
    """Return the option of the call that `name` does not support, in words; None if there is
    none."""
    for option in spec.score_options.given:
        return f"has no {option}"
    if name == "cudnn":
        for option in ("window", "kv_lengths", "return_lse"):
            if getattr(spec, option):
                return f"has no {option}"
    if spec.window == "array":
        return "takes a window that is an int, got an array"
    return None


def _refused_by_cudnn(device: Device, spec: AttentionSpec) -> str | None:
    if not device.is_nvidia:
        return f"needs an NVIDIA GPU, this is {device}"
    wide = device.is_hopper  # on older GPUs JAX refuses H > 128
    return cudnn.unsupported_reason(spec, wide_heads=wide, version=cudnn_version())


def _refused_by_kernels(device: Device, spec: AttentionSpec, name: str) -> str | None:
    """Why a device kernel takes no call on this device, or none with such queries."""
    if name == "hopper":
        dtypes = (jnp.bfloat16, jnp.float16)
        if not device.is_hopper:
            return f"needs a Hopper GPU, this is {device}"
        if device.hopper_refused_reason:
            return device.hopper_refused_reason
    else:
        dtypes = (jnp.bfloat16, jnp.float32)
        if device.platform != "tpu":
            return f"needs a TPU, this is {device}"
    q = spec.q
    if q.shape[3] not in HEAD_DIMS:
        return f"takes head dims {HEAD_DIMS}, got {q.shape=}"
    if q.dtype not in dtypes:
        return f"takes {' or '.join(jnp.dtype(dtype).name for dtype in dtypes)}, got {q.dtype=}"
    return None


def kernels_of(name: str) -> ModuleType:
    """The package of device kernels, imported when first used: Mosaic GPU alone takes half a
    second."""
    if name == "hopper":
        from . import hopper as kernels
    else:
        from . import tpu as kernels
    return kernels


def find_tuning(device: Device, name: str, op: str, spec: AttentionSpec) -> Any:
    """The table's entry of a device kernel for such a call: of `name`, for the call's own `op`, or
    for "backward", its gradient.

    Keys that prefill widens count as widened. float16 has the entries of bfloat16: both have 16
    bits.
    """
    kernel = getattr(kernels_of(name), op)
    entry = f"{name}.{op}"
    if op == "prefill" and spec.packed:
        entry += ".packed"
    dtype = spec.q.dtype
    if op == "decode":
        dtype = spec.k.dtype
    if dtype == jnp.float16:
        dtype = jnp.bfloat16
    tuning = tuning_for(kernel.Tuning, entry, spec.q.shape[3], dtype, device.kind)
    if name == "hopper" and op == "prefill":
        tuning = kernel.for_heads(tuning, spec.q, spec.k)
    return tuning
