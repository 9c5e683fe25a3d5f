"""Attention to a part of the keys, and the log-sum-exps that join parts, in every implementation:
edges of the part before, at and after those of blocks, tiles and pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import choice, decode_attention, prefill_attention, reference
from tests.pallas_kernels.interpreted import under
from tests.pallas_kernels.operands import (
    TOLERANCE,
    check,
    check_with_lse,
    chunk_inputs,
    context_inputs,
    decode_inputs,
    hide,
    inputs,
    prefill_mask,
    run,
    segments,
)
from tests.pallas_kernels.shapes import CHUNKS, DECODE, PREFILL, SEGMENTS, Context, Decode, Prefill
from tests.pallas_kernels.small_operands import decode_operands, prefill_operands
from tests.pallas_kernels.test_windows import TUNING, spare

DEVICES = ("hopper", "tpu")
RUNS = [("xla", "float32"), *((name, "bfloat16") for name in DEVICES)]
parametrize, LONG = pytest.mark.parametrize, pytest.mark.long
JOINED = [RUNS[0], *(pytest.param(*each, marks=LONG) for each in RUNS[1:])]


def cases(shapes) -> list:
    """(implementation, format, name) of each combination; `long` where kernels are interpreted, but
    for the shapes whose name begins with a star."""
    return [
        pytest.param(*each, name, marks=[] if each[0] == "xla" or name[0] == "*" else LONG)
        for each in RUNS
        for name in shapes
    ]


def eight_bits(name: str) -> list:
    """A shape in both formats, with XLA and on the device kernels."""
    runs = [(each, form) for each in ("xla", *DEVICES) for form in ("int8", "float8_e4m3fn")]
    return [
        pytest.param(*each, name, marks=[] if each[0] == "xla" or each[1] == "int8" else LONG)
        for each in runs
    ]


# A part of the keys -----------------------------------------------------------

KEYS = {
    # Windows are given with a name: what follows its comma.
    "*pages": (
        Context(4, 40, 4, 2, 512, 64, (600, 128, 90, 255), (40, 40, 33, 0), (300, 128, 0, 77), 128),
        None,
    ),
    "ends of pages and blocks": (
        Context(6, 8, 2, 1, 640, 64, (640,) * 6, None, (127, 128, 129, 255, 256, 640), 128),
        None,
    ),
    "before the queries and after": (
        Context(4, 130, 2, 1, 384, 128, (0, 100, 300, 254), None, (384, 150, 65, 384), 128),
        None,
    ),
    "pages of 256": (Context(2, 20, 2, 2, 768, 96, (700, 800), (20, 20), (520, 255), 256), None),
    "*row by row": (
        Context(4, 70, 4, 2, 290, 64, (250, 0, 1000, 129), (70, 66, 70, 70), (290, 65, 64, 0)),
        None,
    ),
    "one key": (Context(2, 3, 4, 1, 130, 80, (129, 0), None, (1, 1)), None),
    "more queries than keys": (Context(2, 150, 2, 1, 100, 256, (0, 7), None, (100, 63)), None),
    "*pages, a window": (
        Context(3, 40, 2, 1, 640, 64, (620, 300, 700), (40, 40, 9), (600, 320, 640), 128),
        65,
    ),
    "pages, a window of 300": (
        Context(3, 40, 2, 1, 640, 64, (700, 900, 200), None, (640, 610, 129), 128),
        300,
    ),
    "pages, a window of one": (
        Context(3, 40, 2, 1, 640, 64, (600, 300, 0), None, (620, 300, 33), 128),
        1,
    ),
    "row by row, a window": (
        Context(3, 140, 2, 1, 420, 128, (0, 380, 300), None, (420, 400, 64)),
        129,
    ),
}


@parametrize(("implementation", "cache_format", "name"), cases(KEYS) + eight_bits("*pages"))
def test_a_part_of_the_keys(implementation, cache_format, name):
    """Also where queries stand past it, and where a window leaves nothing of it."""
    shape, window = KEYS[name]
    dtype = "float32" if cache_format == "float32" else "bfloat16"
    operands, options, (q, k, v, mask) = context_inputs(
        shape, cache_format, dtype, window, spare(implementation)
    )
    if implementation != "xla":  # these kernels get a widened copy
        k, v = k.astype(q.dtype), v.astype(q.dtype)
    settings = {} if "page_table" in options else TUNING[implementation]
    op = functools.partial(
        prefill_attention, window=window, return_lse=True, implementation=implementation, **settings
    )
    check_with_lse(run(implementation, op, *operands, **options), q, k, v, mask)


@parametrize("name", KEYS)
def test_a_wrong_part_shows(name):
    """In these operands one position less is another result for each row; one more is NaN, but in 8
    bits."""
    shape, window = KEYS[name]
    *_, (q, k, v, mask) = context_inputs(shape, "bfloat16", window=window)
    k = jnp.where(jnp.isnan(k), 0, k)
    fewer = shape._replace(kv_lengths=tuple(max(length - 1, 0) for length in shape.kv_lengths))
    right, wrong = (
        reference.attention(q, k, v, jnp.asarray(seen))
        for seen in (mask, prefill_mask(fewer, window))
    )
    cut = [mask[row, :, max(end - 1, 0)].any() for row, end in enumerate(shape.kv_lengths)]
    changes = jnp.abs(wrong - right).max(axis=(1, 2, 3))
    assert any(cut) and changes[np.array(cut)].min() > 5 * TOLERANCE["bfloat16"]


@parametrize(("implementation", "dtype"), RUNS)
def test_whole_rows(implementation, dtype):
    """The part is all that limits them: no offset, no lengths; and without log-sum-exps."""
    q, k, v = inputs(Prefill(2, 140, 2, 1, 140, 64), dtype)
    mask = prefill_mask(Context(2, 140, 2, 1, 140, 64, (0, 0), None, (64, 101)))
    op = functools.partial(prefill_attention, implementation=implementation)
    out = run(implementation, op, q, *hide(k, v, mask), kv_lengths=jnp.asarray([64, 101]))
    check(out, q, k, v, mask)


def test_a_long_window_still_counts_from_the_query():
    """One as long as the row hides keys from a query past it."""
    shape = Context(1, 4, 2, 1, 16, 8, (20,), None, (16,))
    q, k, v = inputs(shape, "float32")
    found = prefill_attention(
        *(q, k, v), q_offset=20, kv_lengths=jnp.asarray([16]), window=16, implementation="xla"
    )
    check(found, q, k, v, prefill_mask(shape, 16))


def test_a_gradient_of_a_part():
    """XLA has it: in one block and in several."""
    shape = Context(2, 300, 2, 1, 290, 16, (100, 0), None, (200, 0))
    q, k, v = inputs(shape, "float32")
    mask = jnp.asarray(prefill_mask(shape))

    def gradient(op):
        return jax.grad(lambda *operands: jnp.square(op(*operands)).sum(), argnums=(0, 1, 2))

    def attend(q, k, v):
        offset, kv_lengths = jnp.asarray(shape.offset), jnp.asarray(shape.kv_lengths)
        return prefill_attention(
            q, k, v, q_offset=offset, kv_lengths=kv_lengths, implementation="xla"
        )

    for queries in (300, 40):
        part, seen = q[:, :queries] / 4, mask[:, :queries]
        expected = gradient(functools.partial(reference.attention, mask=seen))(part, k, v)
        for got, wanted in zip(gradient(attend)(part, k, v), expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


# Log-sum-exps -----------------------------------------------------------------

ROWS = {
    "*ragged rows at different offsets": PREFILL["ragged rows at different offsets"],
    "8B": PREFILL["8B"],
    "square, several blocks": PREFILL["square, several blocks"],
    "ragged rows": PREFILL["ragged rows"],
}


@parametrize(("implementation", "dtype", "name"), cases(ROWS))
def test_prefill(implementation, dtype, name):
    shape = ROWS[name]
    q, k, v = inputs(shape, dtype)
    mask = prefill_mask(shape)
    lengths = None if shape.lengths is None else jnp.asarray(shape.lengths)
    op = functools.partial(
        prefill_attention,
        q_offset=0 if shape.offset == 0 else jnp.asarray(shape.offset),
        lengths=lengths,
        return_lse=True,
        implementation=implementation,
    )
    check_with_lse(run(implementation, op, q, *hide(k, v, mask)), q, k, v, mask)


@parametrize(("implementation", "dtype", "name"), cases(["documents across blocks"]))
def test_segments(implementation, dtype, name):
    shape, documents = SEGMENTS[name]
    q, k, v = inputs(shape, dtype)
    ids = segments(shape, documents)
    mask = prefill_mask(shape) & (ids[:, :, None] == ids[:, None, :])
    op = functools.partial(prefill_attention, return_lse=True, implementation=implementation)
    check_with_lse(run(implementation, op, q, k, v, segment_ids=jnp.asarray(ids)), q, k, v, mask)


@parametrize(("implementation", "dtype", "name"), cases(["of two prompts, an idle row first"]))
def test_chunks_in_a_pool(implementation, dtype, name):
    operands, options, expected = chunk_inputs(CHUNKS[name], dtype, dtype)
    op = functools.partial(prefill_attention, return_lse=True, implementation=implementation)
    check_with_lse(run(implementation, op, *operands, **options), *expected)


DECODED = {
    "*page table, several tokens": (DECODE["page table, several tokens"], None),
    "*idle rows": (DECODE["idle rows"], None),
    "several tokens": (DECODE["several tokens"], None),  # of which the first see nothing
    "fewer positions than tokens": (Decode(2, 4, 4, 2, 130, 80, (2, 130)), None),
    "wide": (DECODE["wide"], None),
    "one long row, many short": (DECODE["one long row, many short"], None),
    "more splits than are combined at once": (
        DECODE["more splits than are combined at once"],
        None,
    ),
    "*pages, a window": (Decode(3, 2, 4, 2, 640, 64, (620, 0, 261), page=128), 65),
}


@parametrize(
    ("implementation", "cache_format", "name"),
    cases(DECODED) + eight_bits("*page table, several tokens"),
)
def test_decode(implementation, cache_format, name):
    shape, window = DECODED[name]
    dtype = "float32" if cache_format == "float32" else "bfloat16"
    operands, options, expected = decode_inputs(
        shape, cache_format, dtype, window, spare(implementation)
    )
    op = functools.partial(
        decode_attention, window=window, return_lse=True, implementation=implementation
    )
    check_with_lse(run(implementation, op, *operands, **options), *expected)


@parametrize("op", ["prefill", "decode"])
@parametrize("keys", [70, 1300])
def test_a_cap(op, keys):
    """In one block and in several; only XLA has one."""
    lengths, cap = (keys - 5, 50), 3.0
    if op == "decode":
        shape = Decode(2, 2, 4, 2, keys, 16, lengths)
        operands, options, expected = decode_inputs(shape, "float32", "float32")
        call = decode_attention
    else:
        shape = Context(2, 30, 4, 2, keys, 16, (keys, 40), None, lengths)
        operands, options, expected = context_inputs(shape, "float32", "float32")
        call = prefill_attention
    found = call(*operands, score_cap=cap, return_lse=True, implementation="xla", **options)
    check_with_lse(found, *expected, score_cap=cap)


# Choice and gradients ---------------------------------------------------------


@parametrize("op", ["prefill", "decode"])
@parametrize("device", ["H100", "v5e", "A100"])
def test_no_gradient_of_log_sums(device, op):
    """Not even where everything fits in one block, which JAX could differentiate."""
    call, operands = (
        (prefill_attention, prefill_operands())
        if op == "prefill"
        else (decode_attention, decode_operands())
    )

    def total(q):
        out, lse = call(**operands | {"q": q}, return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    with under(device), pytest.raises(NotImplementedError, match="return_lse has no gradient"):
        jax.eval_shape(jax.grad(total), operands["q"])


def test_a_device_kernel_has_no_gradient_of_a_part():
    operands = prefill_operands()

    def total(q):
        operands["q"] = q
        out = prefill_attention(**operands, kv_lengths=jnp.asarray([1, 8]))
        return out.astype(jnp.float32).sum()

    with under("H100"), pytest.raises(NotImplementedError, match="'hopper' has no .*kv_lengths"):
        jax.eval_shape(jax.grad(total), operands["q"])


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "return_lse": ("prefill", {"return_lse": True}),
    "return_lse of decode": ("decode", {"return_lse": True}),
    "kv_lengths": ("prefill", {"kv_lengths": jnp.asarray([1, 2])}),
}


@parametrize("name", OPTIONS)
@parametrize(("device", "chosen"), [("H100", "hopper"), ("v5e", "tpu"), ("B200", "xla")])
def test_none_chooses_the_kernel_of_the_device(name, device, chosen):
    op, options = OPTIONS[name]
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 4, 64), (2, 2, 8, 64)))
    with under(device):
        assert choice.choose_implementation(op, None, q, k, **options) == chosen


@parametrize("name", OPTIONS)
def test_cudnn_refuses_them(name, monkeypatch):
    """By name; otherwise XLA runs where cuDNN would be chosen."""
    op, options = OPTIONS[name]
    monkeypatch.setattr(choice, "cudnn_version", lambda: 91000)
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 4, 64), (2, 2, 8, 64)))
    choose = functools.partial(choice.choose_implementation, op)
    with under("A100"):
        assert choose(None, q, k) == ("cudnn" if op == "prefill" else "xla")
        assert choose(None, q, k, **options) == "xla"
        with pytest.raises(NotImplementedError, match=f"'cudnn' has no {[*options][0]}"):
            choose("cudnn", q, k, **options)


# Parts joined -----------------------------------------------------------------


def join(first, second):
    """Attention to the keys of both parts, of (output, log-sum-exp) of each."""
    lse = jnp.logaddexp(first[1], second[1])
    shares = (jnp.exp(part[1] - lse)[..., None] for part in (first, second))
    out = sum(part[0] * share for part, share in zip((first, second), shares, strict=True))
    return jnp.where(jnp.isneginf(lse)[..., None], 0, out).astype(first[0].dtype), lse


def rest_of(x, starts):
    """x[B, K, S, H] from `starts[b]` on, as long as it was: what no query sees is at the end."""
    return jnp.stack([jnp.roll(row, -start, axis=1) for row, start in zip(x, starts, strict=True)])


STARTS = (130, 64, 0, 0)


def joined(implementation, q, k, v, offset, attend_rest, **options):
    """Attention to the first `STARTS` keys of each row in one call, and to the rest in another,
    `attend_rest(q, k, v, starts)`, as if they lay in two caches."""

    def attend(q, k, v, rest_k, rest_v, starts):
        first = prefill_attention(
            *(q, k, v),
            q_offset=offset,
            kv_lengths=starts,
            return_lse=True,
            implementation=implementation,
            **options,
        )
        return join(first, attend_rest(q, rest_k, rest_v, starts))

    rest = (rest_of(x, STARTS) for x in (k, v))
    return run(implementation, attend, q, k, v, *rest, jnp.asarray(STARTS))


@parametrize(("implementation", "dtype"), JOINED)
def test_parts_of_prefill_join_to_the_whole(implementation, dtype):
    shape = Prefill(4, 40, 4, 2, 300, 64, (200, 64, 0, 250), (40, 33, 40, 0))
    q, k, v = inputs(shape, dtype)
    mask, offset = prefill_mask(shape), jnp.asarray(shape.offset)
    options: dict[str, Any] = {"lengths": jnp.asarray(shape.lengths)}

    def rest(q, k, v, starts):
        return prefill_attention(
            *(q, k, v),
            q_offset=offset - starts,
            return_lse=True,
            implementation=implementation,
            **options,
        )

    k, v = hide(k, v, mask)
    found = joined(implementation, q, k, v, offset, rest, **options)
    check_with_lse(found, q, k, v, mask)


@parametrize(("implementation", "dtype"), JOINED)
def test_parts_of_decode_join_to_the_whole(implementation, dtype):
    shape = Decode(4, 1, 4, 2, 300, 64, (290, 65, 40, 0))
    (q, k, v, length), _, expected = decode_inputs(shape, dtype, dtype)

    def rest(q, k, v, starts):
        options: dict[str, Any] = {"return_lse": True, "implementation": implementation}
        return decode_attention(q, k, v, length - starts, **options)

    found = joined(implementation, q, k, v, jnp.maximum(length - 1, 0), rest)
    check_with_lse(found, *expected)
