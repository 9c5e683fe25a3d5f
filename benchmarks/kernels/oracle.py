"""Checks a result against the reference formula in float32, computed in slices that fit in
memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from swiftkv_jax.pallas_kernels import reference

from .inputs import Set, dequantised
from .shapes import Decode, Prefill, Shape

SCORES = 2**27
"""Most scores of a slice: half a gigabyte in float32."""

# Operands of 8 significant bits leave about 3e-3. A norm over millions of entries hides one wrong
# tile; the worst vector of H entries, relative to its own norm, does not.
RELATIVE, WORST = 1e-2, 5e-2
GRADIENT_RELATIVE, GRADIENT_WORST = 2e-2, 1e-1
# Norms below this share of the root mean square count as it: some vectors are zero by right. The
# gradient of a query that sees two keys is a small difference of large terms, whose rounding errors
# are as large as any other's.
FLOOR, QUERY_FLOOR = 0.1, 0.5


@dataclasses.dataclass(frozen=True)
class Error:
    """Error of one output: ||out - ref|| / ||ref||, the same of its worst vector, and the largest
    difference."""

    relative: float
    worst_vector: float
    max_abs: float


def expected(shape: Shape, arrays: Set) -> tuple[jax.Array, ...]:
    """float32 (out,) or, for a gradient, (out, dq, dk, dv)."""
    if isinstance(shape, Decode):
        return (_run(_decode, shape, arrays),)
    return _run(_gradient, shape, arrays) if shape.gradient else (_run(_prefill, shape, arrays),)


def _run(formula, shape: Shape, arrays: Set):
    # A formula runs once: cuBLAS, without a search for its fastest products, which would take
    # longer than they do.
    options = (
        {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        if jax.default_backend() == "gpu"
        else None
    )
    return formula.lower(shape, arrays).compile(compiler_options=options)(arrays)


def check(
    shape: Shape, outputs: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]
) -> tuple[dict[str, Error], str | None]:
    """(error of each output, what is wrong or None)."""
    names = ("out", "dq", "dk", "dv")[: len(wanted)]
    errors, wrong = {}, None
    for name, out, ref in zip(names, outputs, wanted, strict=True):
        if out.shape != ref.shape:
            raise ValueError(f"{name} is {out.shape}, expected {ref.shape}")
        relative, worst = GRADIENT_RELATIVE, GRADIENT_WORST
        if name == "out":
            relative, worst = RELATIVE, WORST
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
    return relative, worst, jnp.max(jnp.abs(difference))


def _slices(shape: Prefill, arrays: Set, names: tuple[str, ...]):
    """(query-like arrays as B*K I c G H, key-like as B*K S H, mask of slice i of row b as 1 c
    S)."""
    groups = shape.heads // shape.kv_heads
    chunk = next(
        c
        for c in range(shape.queries, 0, -1)
        if shape.queries % c == 0 and (c * groups * shape.keys <= SCORES or c == 1)
    )
    split = (shape.batch, shape.queries // chunk, chunk, shape.kv_heads, groups, shape.head_dim)
    q_like = [
        arrays[name]
        .reshape(split)
        .transpose(0, 3, 1, 2, 4, 5)
        .reshape(-1, split[1], chunk, *split[4:])
        for name in names
    ]
    kv_like = [arrays[name].reshape(-1, shape.keys, shape.head_dim) for name in ("k", "v")]

    def mask(row, i):
        position = i * chunk + jnp.arange(chunk)
        seen = jnp.arange(shape.keys) <= shape.offset + position[:, None]
        if "segment_ids" in arrays:
            ids = arrays["segment_ids"][row]
            seen &= ids == lax.dynamic_slice_in_dim(ids, i * chunk, chunk)[:, None]
        return seen[None]

    return q_like, kv_like, mask


def _joined(shape: Prefill, slices):
    """B*K I c G H -> B T N H."""
    _, count, chunk, groups, head_dim = slices.shape
    split = slices.reshape(shape.batch, shape.kv_heads, count, chunk, groups, head_dim)
    return split.transpose(0, 2, 3, 1, 4, 5).reshape(
        shape.batch, shape.queries, shape.heads, head_dim
    )


@functools.partial(jax.jit, static_argnums=0)
def _prefill(shape: Prefill, arrays: Set):
    (q,), (k, v), mask = _slices(shape, arrays, ("q",))

    def head(index):
        kv = k[index][None, None], v[index][None, None]

        def part(i):
            return reference.attention(q[index, i][None], *kv, mask(index // shape.kv_heads, i))[0]

        return lax.map(part, jnp.arange(q.shape[1]))

    return _joined(shape, lax.map(head, jnp.arange(q.shape[0])))


@functools.partial(jax.jit, static_argnums=0)
def _gradient(shape: Prefill, arrays: Set):
    (q, d_out), (k, v), mask = _slices(shape, arrays, ("q", "d_out"))

    def head(index):
        kv = tuple(x[index][None, None].astype(jnp.float32) for x in (k, v))

        def part(totals, i):
            seen = mask(index // shape.kv_heads, i)
            out, pull = jax.vjp(
                functools.partial(reference.attention, mask=seen),
                q[index, i][None].astype(jnp.float32),
                *kv,
            )
            dq, *d_kv = pull(d_out[index, i][None].astype(jnp.float32))
            return tuple(total + d for total, d in zip(totals, d_kv, strict=True)), (out[0], dq[0])

        zeros = tuple(jnp.zeros_like(x) for x in kv)
        (dk, dv), (out, dq) = lax.scan(part, zeros, jnp.arange(q.shape[1]))
        return out, dq, dk[0, 0], dv[0, 0]

    out, dq, dk, dv = lax.map(head, jnp.arange(q.shape[0]))
    kv_shape = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    return _joined(shape, out), _joined(shape, dq), dk.reshape(kv_shape), dv.reshape(kv_shape)


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
