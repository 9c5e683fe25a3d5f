"""Which implementation of attention runs: the one that is named, or the device's own kernel."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from . import IMPLEMENTATIONS, Implementation, cudnn
from .device import (
    HEAD_DIMS,
    cuda_runtime_version,
    cuda_unsupported_reason,
    cudnn_version,
    current_device,
    device_kernels,
    is_hopper,
    is_nvidia,
)
from .tuning import tuning_for


def widens_pool(
    q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct,
    k: Num[Array, "X K page H"] | jax.ShapeDtypeStruct,
    page_table: Int[Array, "B P"] | jax.ShapeDtypeStruct,
    *,
    implementation: Implementation | None = None,
) -> bool:
    """Whether `prefill_attention` with these operands and options widens the whole pool before it
    reads pages of it: with keys in 8 bits, on a device kernel. Only shapes and dtypes count."""
    if k.dtype == q.dtype:
        return False
    name = implementation or choose_implementation("prefill", None, q, k, page_table=page_table)
    return name in ("hopper", "tpu")


def choose_implementation(
    op: Literal["prefill", "decode"],
    implementation: str | None,
    q,
    k,
    *,
    segment_ids=None,
    page_table=None,
    kv_lengths=None,
    window: Any = None,
    score_cap: float | None = None,
    return_lse: bool = False,
    tuning: Any = None,
    backward_tuning: Any = None,
) -> str:
    """The implementation to run: the named one, or with None the current device's kernel if it can
    run these operands, else 'xla'. cuDNN decodes by name only: it takes no pages, and transposes
    a cache before it reads it.

    Only the shapes and dtypes of the arrays count, whether `window` is an int or an array, whether
    there are `kv_lengths` and a `score_cap`, and `return_lse`. Raises `NotImplementedError` if the
    named implementation cannot run them, `ValueError` for a tuning of another kernel.
    """
    operands = op, q, k, segment_ids, page_table, kv_lengths, window, score_cap, return_lse
    if implementation not in ("hopper", "tpu"):
        for name, value in (("tuning", tuning), ("backward_tuning", backward_tuning)):
            if value is not None:
                raise ValueError(
                    f"{name} goes with implementation='hopper' or 'tpu', got {implementation=}"
                )
    if implementation is None:
        name = device_kernels(*current_device())
        if name is None or (name, op) == ("cudnn", "decode"):
            return "xla"
        return "xla" if _unsupported_reason(name, *operands) else name
    if implementation not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"{implementation=} is not available; available: "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    _check_tuning("tuning", tuning, implementation, op)
    _check_tuning("backward_tuning", backward_tuning, implementation, "backward")
    reason = _unsupported_reason(implementation, *operands, tuning)
    if reason:
        raise NotImplementedError(f"{implementation=} {reason}; 'xla' runs {op} everywhere")
    return implementation


def _check_tuning(name: str, tuning: Any, implementation: str, op: str) -> None:
    """Raise `ValueError` if `tuning` is not None and not of the class of this kernel."""
    if tuning is None:
        return
    wanted = getattr(kernels_of(implementation), op).Tuning
    if not isinstance(tuning, wanted):
        raise ValueError(
            f"{name} must be a Tuning of the {implementation} {op} kernel, got {tuning!r}"
        )


def _unsupported_reason(
    name: str,
    op: str,
    q,
    k,
    segment_ids,
    page_table,
    kv_lengths,
    window,
    score_cap,
    return_lse: bool,
    tuning: Any = None,
) -> str | None:
    """Why `name` cannot run `op` on these operands on the current device; None if it can."""
    if score_cap is not None and name != "xla":
        return "has no score_cap"
    if window is not None and name == "cudnn":
        return "has no window"
    if kv_lengths is not None and name == "cudnn":
        return "has no kv_lengths"
    if return_lse and name == "cudnn":
        return "has no return_lse"
    if window is not None and not isinstance(window, int) and name != "xla":
        return f"takes a window that is an int, got an array: {window!r}"
    platform, kind = current_device()
    if name in ("hopper", "tpu"):
        dtypes = (jnp.bfloat16, jnp.float16) if name == "hopper" else (jnp.bfloat16, jnp.float32)
        if not (is_hopper(platform, kind) if name == "hopper" else platform == "tpu"):
            needed = "Hopper GPU" if name == "hopper" else "TPU"
            return f"needs a {needed}, this is {platform} ({kind})"
        if name == "hopper" and (reason := cuda_unsupported_reason(cuda_runtime_version())):
            return reason
        if q.shape[3] not in HEAD_DIMS:
            return f"takes head dims {HEAD_DIMS}, got {q.shape=}"
        if q.dtype not in dtypes:
            return f"takes {' or '.join(jnp.dtype(dtype).name for dtype in dtypes)}, got {q.dtype=}"
        if tuning is None:
            packed = segment_ids is not None
            try:
                tuning = find_tuning(name, "prefill.packed" if packed else op, q, k)
            except NotImplementedError as error:
                return f"cannot: {error}"
        # The kernel's module is imported here first, on its own device only.
        return getattr(kernels_of(name), op).unsupported_reason(q, k, page_table, tuning)
    if name == "cudnn":
        if not is_nvidia(platform, kind):
            return f"needs an NVIDIA GPU, this is {platform} ({kind})"
        wide = is_hopper(platform, kind)  # on older GPUs JAX refuses H > 128
        return cudnn.unsupported_reason(
            op, q, k, segment_ids, page_table, wide_heads=wide, version=cudnn_version()
        )
    return None


def kernels_of(name: str) -> ModuleType:
    """The package of device kernels, imported when first used: Mosaic GPU alone takes half a
    second."""
    if name == "hopper":
        from . import hopper as kernels
    else:
        from . import tpu as kernels
    return kernels


def find_tuning(name: str, op: str, q, k) -> Any:
    """The table's entry for `op` of device kernel `name`, with these queries and keys.

    Keys that prefill widens count as widened. float16 has the entries of bfloat16: both have 16
    bits.
    """
    kernel = getattr(kernels_of(name), op.split(".")[0])
    dtype = k.dtype if op == "decode" else q.dtype
    dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype
    tuning = tuning_for(kernel.Tuning, f"{name}.{op}", q.shape[3], dtype)
    if name == "hopper" and op.startswith("prefill"):
        tuning = kernel.for_heads(tuning, q, k)
    return tuning
