"""Checks a result against the reference formula in float32: at full size where `swiftkv
check-kernels` and the tests use small operands, so a part of it is enough."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from swiftkv_jax.pallas_kernels import reference

from .inputs import Set, dequantised
from .shapes import Decode, Prefill, Shape

QUERIES = 128
"""Of the last row, those that see most keys."""

# Operands of 8 significant bits leave about 3e-3. A norm over millions of entries hides one wrong
# tile; the worst vector of H entries, relative to its own norm, does not.
RELATIVE = 1e-2
WORST = 5e-2
GRADIENT_RELATIVE = 2e-2
GRADIENT_WORST = 1e-1
# Norms below this share of the root mean square count as it: some vectors are zero by right. The
# gradient of a query that sees two keys is a small difference of large terms, whose rounding errors
# are as large as any other's.
FLOOR = 0.1
QUERY_FLOOR = 0.5


@dataclasses.dataclass(frozen=True)
class Error:
    """Error of one output: ||out - ref|| / ||ref||, and the same of its worst vector."""

    relative: float
    worst_vector: float


def expected(shape: Shape, arrays: Set) -> tuple[jax.Array, ...]:
    """float32 (out,) or, for a gradient, (out, dq), of the part that is compared (`compared`)."""
    if isinstance(shape, Decode):
        return (_run(_decode, shape, arrays),)
    return _run(_prefill, shape, arrays)


def compared(shape: Shape, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Of the results of an implementation: all of decoding; of the rest the output, and the
    gradient of the queries, of the last `QUERIES` queries of the last row."""
    if isinstance(shape, Decode):
        return outputs
    return tuple(one[-1:, -QUERIES:] for one in outputs[: 2 if shape.gradient else 1])


def _run(formula, shape: Shape, arrays: Set):
    # A formula runs once: cuBLAS, without a search for its fastest products, which would take
    # longer than they do.
    options = None
    if jax.default_backend() == "gpu":
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return formula.lower(shape, arrays).compile(compiler_options=options)(arrays)


def check(
    shape: Shape, outputs: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]
) -> tuple[dict[str, Error], str | None]:
    """(error of each output, what is wrong or None)."""
    errors = {}
    wrong = None
    for name, out, ref in zip(("out", "dq"), compared(shape, outputs), wanted, strict=False):
        if out.shape != ref.shape:
            raise ValueError(f"{name} is {out.shape}, expected {ref.shape}")
        relative = GRADIENT_RELATIVE
        worst = GRADIENT_WORST
        if name == "out":
            relative = RELATIVE
            worst = WORST
        floor = QUERY_FLOOR if name == "dq" else FLOOR
        error = errors[name] = Error(*(float(x) for x in _error(out, ref, floor)))
        right = error.relative <= relative and error.worst_vector <= worst  # NaN is wrong
        if not right and wrong is None:
            wrong = (
                f"{name}: error {error.relative:.2g} (at most {relative:g}), worst vector "
                f"{error.worst_vector:.2g} (at most {worst:g})"
            )
    return errors, wrong


@jax.jit
def _error(out, ref, floor: float):
    difference = out.astype(jnp.float32) - ref
    norm = jnp.linalg.norm(ref, axis=-1)
    least = floor * jnp.sqrt(jnp.mean(jnp.square(norm)))
    worst = jnp.max(jnp.linalg.norm(difference, axis=-1) / jnp.maximum(norm, least))
    relative = jnp.sqrt(jnp.sum(jnp.square(difference))) / jnp.sqrt(jnp.sum(jnp.square(ref)))
    return relative, worst


@functools.partial(jax.jit, static_argnums=0)
def _prefill(shape: Prefill, arrays: Set):
    first = max(0, shape.queries - QUERIES)
    position = first + jnp.arange(min(QUERIES, shape.queries))
    seen = jnp.arange(shape.keys) <= shape.offset + position[:, None]
    if "segment_ids" in arrays:
        ids = arrays["segment_ids"][-1]
        seen &= ids == ids[position, None]
    q, k, v = (arrays[name][-1:].astype(jnp.float32) for name in ("q", "k", "v"))
    out, pull = jax.vjp(lambda q: reference.attention(q, k, v, seen[None]), q[:, first:])
    if not shape.gradient:
        return (out,)
    return out, *pull(arrays["d_out"][-1:, first:].astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=0)
def _decode(shape: Decode, arrays: Set):
    def row(b):
        one = {name: x for name, x in arrays.items() if name in ("k", "v", "k_scale", "v_scale")}
        pages = b[None]
        if shape.page is not None:
            pages = arrays["page_table"][b, : shape.keys // shape.page]
        one = {name: x[pages] for name, x in one.items()}  # P K page ..., or 1 K S ...
        k, v = (jnp.moveaxis(dequantised(one, name), 0, 1) for name in ("k", "v"))
        k, v = (x.reshape(1, shape.kv_heads, shape.keys, shape.head_dim) for x in (k, v))
        seen = jnp.arange(shape.keys) < arrays["length"][b]
        return reference.attention(arrays["q"][b][None], k, v, seen[None, None])[0]

    return lax.map(row, jnp.arange(shape.batch))
