"""The programs that are measured: this package's implementations, and cuDNN in its own order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax

from swiftkv_jax.pallas_kernels import (
    Implementation,
    decode_attention,
    plan_decode,
    prefill_attention,
)

from ..timing import Program, jax_program
from .inputs import Set, draw_one
from .shapes import Decode, Prefill, Shape, score_bytes

OURS: tuple[str, ...] = get_args(Implementation)
_PLATFORM = {"hopper": "gpu", "cudnn": "gpu", "tpu": "tpu"}


def ours_here() -> tuple[str, ...]:
    """This package's implementations for the current platform."""
    return tuple(name for name in OURS if _PLATFORM.get(name) in (None, jax.default_backend()))


def why_not(name: str) -> str | None:
    """The op's reason why implementation `name` cannot run here; None if it can."""
    shape = Prefill(name, 1, 128, 128, 1, 1, 128)
    try:
        jax.eval_shape(op(shape, name), jax.eval_shape(lambda: draw_one(shape, jax.random.key(0))))
    except NotImplementedError as error:
        return " ".join(str(error).split()).removeprefix(f"implementation={name!r} ")
    return None


def _same(x):
    return x


def _as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a shape."""

    name: str
    call: Callable[[Any], Any]
    """Timed function of one prepared set that returns the output, or output and gradients."""
    prepare: Callable[[Set], Any] = _same
    """Conversion of a set to the implementation's preferred layout. Not timed."""
    canonical: Callable[[Any], tuple] = _as_tuple
    """Conversion of the result of `call` to a tuple of B T N H and, for gradients, B K S H. Not
    timed."""
    calls: int | None = None
    """Calls in a program, if fewer than there are sets."""

    def start(self, sets: Sequence[Set]) -> Program:
        """Prepare, compile and run once."""
        prepared = [self.prepare(one) for one in sets[-(self.calls or len(sets)) :]]
        return jax_program(self.call, prepared)


def ours(name: str, shape: Shape) -> Candidate:
    """The op run by implementation `name`. Raises `NotImplementedError` for what would not fit in
    memory."""
    if name == "xla" and score_bytes(shape) > 0.6 * _memory():
        raise NotImplementedError(f"its scores are about {score_bytes(shape) / 1e9:.0f} GB")
    # XLA's prefill is slow and large: one call a program is enough.
    calls = 1 if name == "xla" and not isinstance(shape, Decode) else None
    return Candidate(name, op(shape, name), planned(shape, name), calls=calls)


def planned(shape: Shape, implementation: str, **tunings: Any) -> Callable[[Set], Set]:
    """The preparation of a set of decoding: with its plan, which an engine makes once a step for
    all layers. `tunings` are the op's `tuning`."""
    if not isinstance(shape, Decode):
        return _same

    @jax.jit
    def plan(s: Set):
        return plan_decode(
            s["q"],
            s["k"],
            s["length"],
            page_table=s.get("page_table"),
            implementation=implementation,  # pyright: ignore
            **tunings,
        )

    return lambda s: s | {"plan": plan(s)}


def op(shape: Shape, implementation: str | None, **tunings: Any) -> Callable[[Set], Any]:
    """The op of `shape` as a function of one set; with gradients, (out, dq, dk, dv).

    `tunings` are the op's `tuning` and `backward_tuning`.
    """
    if isinstance(shape, Decode):
        names = ("k_scale", "v_scale", "page_table")
        return lambda s: decode_attention(
            s["q"],
            s["k"],
            s["v"],
            s["length"],
            **{name: s.get(name) for name in names},
            plan=s.get("plan"),
            implementation=implementation,  # pyright: ignore
            **tunings,
        )

    def prefill(s, q, k, v):
        offset = s.get("offset", 0)
        return prefill_attention(
            q,
            k,
            v,
            q_offset=offset,
            segment_ids=s.get("segment_ids"),
            implementation=implementation,  # pyright: ignore
            **tunings,
        )

    if not shape.gradient:
        return lambda s: prefill(s, s["q"], s["k"], s["v"])
    return lambda s: with_gradient(lambda q, k, v: prefill(s, q, k, v), s)


def with_gradient(attend: Callable, s: Set):
    """(out, dq, dk, dv) of one training step's attention."""
    out, pull = jax.vjp(attend, s["q"], s["k"], s["v"])
    return out, *pull(s["d_out"])


def _memory() -> float:
    """Bytes of the device that JAX may use; on a CPU 4 GB, for smoke runs."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 4e9)


# cuDNN ------------------------------------------------------------------------

CUDNN = "cudnn-btnh"
"""Baseline of the ratios: cuDNN on keys and values as B S K H. `cudnn` is this package's op, which
first transposes them."""


def cudnn_in_its_order(shape: Shape) -> Candidate:
    """Raises `NotImplementedError` for what it has no public API for."""
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if isinstance(shape, Decode):
        if shape.cache != "bfloat16" or shape.page is not None:
            raise NotImplementedError("takes neither 8-bit caches nor page tables")
        return Candidate(
            CUDNN,
            lambda s: attend(s["q"], s["k"], s["v"], key_value_seq_lengths=s["length"]),
            _position_major,
        )
    if shape.packed or shape.offset:
        raise NotImplementedError("takes documents and offsets as a mask of T x S only")
    causal = functools.partial(attend, is_causal=True)
    if shape.gradient:
        return Candidate(
            CUDNN, lambda s: with_gradient(causal, s), _position_major, _head_major_gradients
        )
    return Candidate(CUDNN, lambda s: causal(s["q"], s["k"], s["v"]), _position_major)


@jax.jit
def _position_major(s: Set) -> Set:
    """Keys and values as B S K H."""
    return s | {name: s[name].transpose(0, 2, 1, 3) for name in ("k", "v")}


def _head_major_gradients(outputs: tuple) -> tuple:
    """(out, dq, dk, dv) with dk and dv back as B K S H."""
    out, dq, *gradients = outputs
    return out, dq, *(x.transpose(0, 2, 1, 3) for x in gradients)
