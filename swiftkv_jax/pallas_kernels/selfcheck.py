"""Attention compared with the reference, on operands that are drawn so that mistakes show.

A `Case` says what a call is like and what each row of it sees. Its keys are moved along the queries
that see them first and last, so that a mask that is wrong by one position, or a page that is passed
over, is another result; what no query sees holds numbers that are noticed in any result. Both the
check of kernels before their first use and the tests are tables of cases.

Letters: B rows, T queries, S positions of a row, R prompts, N and K query and key/value heads, H
head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import ops as shipped
from . import reference
from .operands import AttentionOperands, AttentionSpec
from .score_options import ScoreOptions

HIDDEN = 100.0
"""Value at positions that no query sees, and at those of pages that no row has."""
ALIGNMENT = 3.0
"""Length of what is added to a key along each query that must see it, or must not."""
TILE = 64
"""Positions of a tile. In decoding the first and the last of them weigh much: no tile may be
skipped."""
RUNS = 3
"""Times that a kernel runs: one that reads too early may be right once."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}
"""Largest difference from the reference, to which half of it times the value is added."""
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""Largest difference of a gradient, as a share of its largest value."""


LEAST_GRADIENT = 1e-2
"""Lower limit of a gradient's largest value: a smaller one counts as this."""


class Row(NamedTuple):
    """The queries of a row, and what they see."""

    position: int = 0  # of the first query; negative ones see nothing
    queries: int | None = None  # real ones; None is all
    kv_length: int | None = None  # visible positions; None is all
    prompt: int | None = None  # rows of one prompt share its keys; None is one of its own
    documents: tuple[int, ...] = ()  # lengths of packed documents; what is left is padding


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op, or the gradient of `prefill_attention`."""

    op: Literal["prefill", "decode", "gradient"]
    rows: tuple[Row, ...]
    queries: int  # T
    heads: int
    kv_heads: int
    keys: int  # S
    head_dim: int
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None is `dtype`
    page_size: int | None = None
    window: int | None = None
    score_cap: float | None = None
    return_lse: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """Properties on which the choice of an implementation depends."""
        rows = len(self.rows)
        keys = (rows, self.kv_heads, self.keys, self.head_dim)
        table = None
        if self.page_size is not None:
            pages = self.keys // self.page_size
            table = jax.ShapeDtypeStruct((rows, pages), jnp.int32)
            pool = 2 * (int(self.prompts.max()) + 1) * pages
            keys = (pool, self.kv_heads, self.page_size, self.head_dim)
        return AttentionSpec(
            "decode" if self.op == "decode" else "prefill",
            jax.ShapeDtypeStruct((rows, self.queries, self.heads, self.head_dim), self.dtype),
            jax.ShapeDtypeStruct(keys, self.cache_dtype or self.dtype),
            table,
            packed=any(row.documents for row in self.rows),
            kv_lengths=any(row.kv_length is not None for row in self.rows),
            window=self.window,
            score_options=ScoreOptions(self.score_cap),
            return_lse=self.return_lse,
        )

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the op that are not arrays."""
        every = {"window": self.window, "score_cap": self.score_cap}
        options: dict[str, Any] = {k: value for k, value in every.items() if value is not None}
        if self.return_lse:
            options["return_lse"] = True
        return options

    @property
    def prompts(self) -> np.ndarray:
        """i32[B]: whose keys each row sees."""
        named = [
            number if row.prompt is None else row.prompt for number, row in enumerate(self.rows)
        ]
        return np.array(named)

    @property
    def lengths(self) -> np.ndarray:
        """i32[B]: real queries of each row."""
        return np.array(
            [self.queries if r.queries is None else r.queries for r in self.rows], np.int32
        )

    @property
    def kv_lengths(self) -> np.ndarray:
        """i32[B]: visible positions of each row."""
        return np.array(
            [self.keys if r.kv_length is None else r.kv_length for r in self.rows], np.int32
        )

    @property
    def segment_ids(self) -> np.ndarray:
        """i32[B, T]: 1, 2, ... for the documents of each row, 0 for padding."""
        ids = np.zeros((len(self.rows), self.queries), np.int32)
        for row, (_, _, _, _, documents) in zip(ids, self.rows, strict=True):
            numbers = np.repeat(np.arange(1, len(documents) + 1), documents)
            row[: len(numbers)] = numbers
        return ids

    def mask(self) -> np.ndarray:
        """bool[B, T, S]: the positions that each query sees."""
        query = np.arange(self.queries)[:, None]
        key = np.arange(self.keys)
        position = np.array([row.position for row in self.rows])[:, None, None] + query
        seen = (key <= position) & (query < self.lengths[:, None, None])
        seen &= key < self.kv_lengths[:, None, None]
        if self.window is not None:
            seen &= key > position - self.window
        if any(row.documents for row in self.rows):
            seen &= self.segment_ids[:, :, None] == self.segment_ids[:, None, :]
        return seen


class Drawn(NamedTuple):
    """The operands of a case."""

    operands: AttentionOperands
    k_values: np.ndarray  # B K S H: what the stored keys stand for
    v_values: np.ndarray  # B K S H
    mask: np.ndarray  # B T S


def draw(case: Case) -> Drawn:
    """Operands that show mistakes; queries are large, so that scores rounded to 16 bits would
    show."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    shape = len(case.rows), case.queries, case.heads, case.head_dim
    q = (4 * rng.normal(size=shape)).astype(dtype)
    mask = case.mask()
    prompts = case.prompts
    seen = np.stack([mask[prompts == prompt].any((0, 1)) for prompt in range(max(prompts) + 1)])
    size = len(seen), case.kv_heads, case.keys, case.head_dim
    k = rng.normal(size=size) + _aligned(case, q).swapaxes(1, 2)
    v = rng.normal(size=size)
    options: dict[str, Any] = {}
    table = None
    if case.page_size is not None:
        pages = case.keys // case.page_size
        table = rng.permutation(2 * len(seen) * pages)[: len(seen) * pages].reshape(-1, pages)
        # Entries of pages that no query of a row sees may be anything.
        seen_pages = mask.any(1).reshape(len(case.rows), pages, -1).any(2)
        options["page_table"] = np.int32(np.where(seen_pages, table[prompts], 10**9))

    def laid_out(stored):
        if table is None:
            return stored[prompts]
        return _pool(stored, table)

    values = []
    for name, drawn in (("k", k), ("v", v)):
        drawn = np.where(seen[:, None, :, None], drawn, HIDDEN).astype(dtype)
        content, scale, value = as_format(drawn, case.cache_dtype or case.dtype, rng)
        values.append(value[prompts])
        options[name] = laid_out(content)
        if scale is not None:
            options[f"{name}_scale"] = laid_out(scale)
    if case.op == "gradient":
        q = (np.float32(q) / 4).astype(dtype)
    operands = AttentionOperands(q, **options, **_limits(case))
    return Drawn(operands, values[0], values[1], mask)


def _limits(case: Case) -> dict[str, np.ndarray]:
    """The operands that say what each row sees."""
    positions = np.array([row.position for row in case.rows], np.int32)
    if case.op == "decode":
        return {"length": positions + case.queries}
    limits = {}
    if positions.any() or case.page_size is not None:
        limits["q_offset"] = positions
    if any(row.queries is not None for row in case.rows):
        limits["lengths"] = case.lengths
    if any(row.kv_length is not None for row in case.rows):
        limits["kv_lengths"] = case.kv_lengths
    if any(row.documents for row in case.rows):
        limits["segment_ids"] = case.segment_ids
    return limits


def _aligned(case: Case, q: np.ndarray) -> np.ndarray:
    """f64[R, S, K, H]: what is added to the keys. Each query marks its own position, and with a
    window the first one in it and the one before; with `kv_lengths` the last query of a row that
    they cut marks the last visible position and the next."""
    added = np.zeros((max(case.prompts) + 1, case.keys, case.kv_heads, case.head_dim))
    steps = (0,) if case.window is None else (0, case.window - 1, case.window)
    lengths = case.lengths
    kv_lengths = case.kv_lengths
    for number, (row, along) in enumerate(
        zip(case.rows, directions(q, case.kv_heads), strict=True)
    ):
        keys = added[case.prompts[number]]
        length = lengths[number]
        for step in steps:
            first = max(0, step - row.position)  # of the queries that have such a position
            marked = along[first : min(length, case.keys + step - row.position)]
            start = row.position + first - step
            keys[start : start + len(marked)] += marked
        end = row.position + length
        if kv_lengths[number] < end:
            keys[max(kv_lengths[number] - 1, 0) : kv_lengths[number] + 1] += along[length - 1]
        if case.op == "decode" and end > 0:
            for edge in (0, TILE - 1):
                keys[edge:end:TILE] += along[-1]
    return added


def directions(q: np.ndarray, kv_heads: int) -> np.ndarray:
    """f64[B, T, K, H]: what is added to a key so that all queries of its head see it."""
    heads = np.asarray(q, np.float64).reshape(*q.shape[:2], kv_heads, -1, q.shape[3])
    return ALIGNMENT * (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).sum(axis=3)


def as_format(x: np.ndarray, dtype: str, rng: np.random.Generator):
    """(x, R K S H, as it is stored, its scales or None, the values that it then stands for).

    Scales are powers of two, so 16 bits hold the values exactly: where a kernel widens them does
    not matter.
    """
    if dtype == x.dtype:
        return x, None, x
    values = np.float32(x)
    limit = 127 if dtype == "int8" else 448
    exponents = np.ceil(np.log2(np.abs(values).max(axis=-1) / limit))
    scale = np.exp2(exponents + rng.integers(0, 2, exponents.shape)).astype(np.float32)
    content = values / scale[..., None]
    if dtype == "int8":
        content = np.round(content)
    content = content.astype(jnp.dtype(dtype))
    return content, scale, np.float32(content) * scale[..., None]


def _pool(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """x[R, K, S, ...] as a pool X K page ..., each page of each row where the table says."""
    split = np.moveaxis(x.reshape(*x.shape[:2], table.shape[1], -1, *x.shape[3:]), 2, 1)
    pool = np.full((2 * table.size, *split.shape[2:]), HIDDEN, x.dtype)
    pool[table] = split
    return pool


# Comparison -------------------------------------------------------------------


class Comparison(NamedTuple):
    """How far a kernel is from the reference. NaN or infinity for results that are not finite, or
    are so where the reference is not."""

    difference: float  # the largest of an element, over all runs
    error: float  # the same in units of what is tolerated there

    @property
    def right(self) -> bool:
        return self.error <= 1


def compare(
    case: Case,
    implementation: str | None,
    *,
    ops: Any = shipped,
    runs: int = RUNS,
    **tunings: Any,
) -> Comparison:
    """Run `implementation` on the operands of `case`, on the default device, and compare.

    `ops` has the two attention ops and `plan_decode`; `tunings` are theirs. Raises
    `NotImplementedError` for what the implementation cannot do.
    """
    drawn = draw(case)
    expected, tolerated = expected_of(case, drawn)
    options = case.options | tunings | {"implementation": implementation}
    call = jax.jit(functools.partial(_call, case.op, ops, options))
    results = (call(drawn.operands) for _ in range(runs))
    return difference(results, expected, tolerated)


def difference(results, expected: list[np.ndarray], tolerated: list[np.ndarray]) -> Comparison:
    """The comparison of each of `results`, trees of arrays, with what is expected of them."""
    differences = []
    errors = []
    for result in results:
        for actual, wanted, most in zip(jax.tree.leaves(result), expected, tolerated, strict=True):
            # Both are -inf where the logarithm of an empty sum is expected.
            actual = np.asarray(actual, np.float32)
            with np.errstate(invalid="ignore"):
                off = np.where(actual == wanted, 0, np.abs(actual - wanted))
            differences.append(off.max())
            errors.append((off / most).max())
    return Comparison(float(np.max(differences)), float(np.max(errors)))


def _call(op: str, ops: Any, options: dict[str, Any], operands: AttentionOperands):
    names = [field.name for field in dataclasses.fields(operands)]
    arrays = {name: getattr(operands, name) for name in names}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    q, k, v = (arrays.pop(name) for name in ("q", "k", "v"))
    if op == "decode":
        planned = {name: value for name, value in options.items() if name != "return_lse"}
        table = {"page_table": operands.page_table}
        plan = ops.plan_decode(q, k, operands.length, **table, **planned)
        return ops.decode_attention(q, k, v, **arrays, **options, plan=plan)
    attend = functools.partial(ops.prefill_attention, **arrays, **options)
    if op == "gradient":
        return jax.vjp(attend, q, k, v)[1](d_out(q))
    return attend(q, k, v)


def d_out(q):
    return np.random.default_rng(1).normal(size=q.shape).astype(q.dtype)


_reference = jax.jit(reference.attention, static_argnames=("score_cap", "return_lse"))


@functools.partial(jax.jit, static_argnames="score_cap")
def _reference_gradient(mask, q, k, v, of_out, score_cap):
    attend = functools.partial(reference.attention, mask=mask, score_cap=score_cap)
    return jax.vjp(attend, q, k, v)[1](of_out)


def expected_of(case: Case, drawn: Drawn) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(results of the reference, the difference from each element that is tolerated)."""
    q = drawn.operands.q
    keys = drawn.k_values
    values = drawn.v_values
    mask = drawn.mask
    if case.op == "gradient":
        wide = (np.float32(x) for x in (q, keys, values, d_out(q)))
        found = _reference_gradient(mask, *wide, case.score_cap)
        expected = [np.asarray(one) for one in found]
        share = GRADIENT_TOLERANCE[case.dtype]
        # With a window of one position, queries and keys have none.
        largest = [max(np.abs(one).max(), LEAST_GRADIENT) for one in expected]
        tolerated = [
            np.full_like(x, share * most) for x, most in zip(expected, largest, strict=True)
        ]
        return expected, tolerated
    found = _reference(q, keys, values, mask, case.score_cap, case.return_lse)
    out, *lse = (np.asarray(one) for one in jax.tree.leaves(found))
    tolerance = TOLERANCE[case.dtype]
    # The error of a log-sum-exp is one of weights, and counts as it is.
    tolerated = [
        tolerance + tolerance / 2 * np.abs(out),
        *(np.full_like(x, tolerance) for x in lse),
    ]
    return [out, *lse], tolerated
