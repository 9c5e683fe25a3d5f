"""PyTorch's flash attention, where a PyTorch with CUDA is installed. Arrays are shared with JAX,
not copied."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .candidates import Candidate
from .inputs import Set
from .shapes import Decode, Shape
from .timing import Program, Run


def torch_flash(shape: Shape) -> Candidate:
    """`scaled_dot_product_attention` with the flash backend and no other; torch's own B N T H over
    B T N H memory."""
    if isinstance(shape, Decode):
        raise NotImplementedError("was not asked to decode: it takes no lengths")
    if shape.packed:
        raise NotImplementedError("takes no documents but as a mask of T x S")
    torch = _torch()
    attend = _attend(torch, shape)

    def prepare(s: Set) -> dict[str, Any]:
        position_major = {name: s[name].transpose(0, 2, 1, 3) for name in ("k", "v")}
        arrays = {name: s[name] for name in ("q", "d_out") if name in s} | position_major
        jax.block_until_ready(arrays)
        tensors = {name: torch.from_dlpack(x).transpose(1, 2) for name, x in arrays.items()}
        if shape.gradient:
            tensors |= {name: tensors[name].detach().requires_grad_() for name in ("q", "k", "v")}
        return tensors

    def call(s):
        out = attend(s["q"], s["k"], s["v"])
        return (
            (out, *torch.autograd.grad(out, (s["q"], s["k"], s["v"]), s["d_out"]))
            if shape.gradient
            else (out,)
        )

    def canonical(outputs) -> tuple:
        out, *gradients = outputs
        swapped = [out.transpose(1, 2), *(x.transpose(1, 2) for x in gradients[:1]), *gradients[1:]]
        torch.cuda.synchronize()
        return tuple(jnp.from_dlpack(x.detach().contiguous()) for x in swapped)

    return Candidate(
        "torch-flash", call, prepare, canonical, lambda call, sets: _program(torch, call, sets)
    )


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation must not lose the other rows
        raise NotImplementedError(f"torch cannot be imported: {type(error).__name__}") from error
    if not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA device")
    return torch


def _attend(torch: Any, shape) -> Callable:
    """With an offset the mask is causal from the lower right corner, which the flash backend
    knows."""
    attention = importlib.import_module("torch.nn.attention")
    bias = None
    if shape.offset:
        if shape.offset + shape.queries != shape.keys:
            raise NotImplementedError("takes a chunk at the end of the cache only")
        bias = importlib.import_module("torch.nn.attention.bias").causal_lower_right(
            shape.queries, shape.keys
        )
    mask = {"is_causal": True} if bias is None else {"attn_mask": bias}

    def attend(q, k, v):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, **mask, enable_gqa=q.shape[1] != k.shape[1]
            )

    return attend


def _program(torch: Any, call: Callable, sets: Sequence) -> Program:
    """Timed by events on torch's stream, which stand on the device's clock."""
    start_time = time.perf_counter()
    outputs = [call(one) for one in sets]
    torch.cuda.synchronize()
    first_seconds = time.perf_counter() - start_time
    output_bytes = sum(x.numel() * x.element_size() for output in outputs for x in output)
    last = tuple(x.detach() for x in outputs[-1])
    del outputs

    def run(repeats: int) -> Run:
        first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        first.record()
        for _ in range(repeats):
            for one in sets:
                call(one)
        end.record()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        return Run(
            first.elapsed_time(end) / 1e3, min(queued - start, first.elapsed_time(end) / 1e3)
        )

    return Program(run, len(sets), last, output_bytes, first_seconds)
