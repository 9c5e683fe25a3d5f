"""The two attention ops: check the arguments, choose an implementation (`choice`), run it.

`implementation=None` chooses for the device; a name is obeyed or refused with
`NotImplementedError`. Arguments that do not belong together are a `ValueError`. Queries are `B T N
H` as the projection leaves them, keys and values head-major `B K S H` as the cache holds them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from . import cudnn, xla
from .checks import check_decode, check_prefill, check_window, hiding
from .choice import choose, find_tuning, kernels_of
from .decode_plan import DecodePlan
from .device import current_device
from .gradients import LOG_SUMS, SCALED_OR_PAGED, checkpoint_names
from .implementations import Implementation
from .operands import AttentionOperands, AttentionSpec
from .score_options import ScoreOptions

__all__ = ["decode_attention", "plan_decode", "prefill_attention", "widens_pool"]


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K S H"] | Num[Array, "X K page H"],
    v: Num[Array, "B K S H"] | Num[Array, "X K page H"],
    *,
    q_offset: Int[Array, ""] | Int[Array, " B"] | int | np.integer = 0,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    k_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
    v_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
    page_table: Int[Array, "B P"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    window: Int[Array, ""] | int | None = None,
    score_cap: float | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    tuning: Any = None,
    backward_tuning: Any = None,
) -> Float[Array, "B T N H"] | Any:
    """Causal grouped-query attention of many queries.

    Query t of row b stands at key position `q_offset[b] + t` and sees the positions up to and
    including its own: with a cache as `k`, `v`, a chunk attends to all that came before it.
    `q_offset + T` must not exceed S. Of row b only the first `lengths[b]` queries are real; the
    others yield zeros. `segment_ids` (only with S = T and no offset) confines each query to the
    keys with its own id, its packed document.

    With `page_table`, `k` and `v` are a pool of X pages: position s of row b is position `s % page`
    of page `page_table[b, s // page]`. Rows may share pages and whole tables, so several chunks of
    one prompt can be rows. Entries for the pages that real queries see must lie in the pool, which
    is not checked; the others may be anything. Then `q_offset[b] + lengths[b]` must not exceed P
    page; where the queries past `lengths[b]` stand does not matter. Only visible pages are read,
    but for the copy that the next paragraph names. `segment_ids` are refused.

    With `window` a query sees that many positions at most, its own and those right before it.
    Blocks of keys before the windows of a block of queries are skipped, and `page_table` entries
    for pages before the windows of all queries may be anything. With `score_cap` c a score s is
    c tanh(s / c) (Gemma 2, arXiv:2408.00118). Only XLA has the cap, and takes a window that is an
    array; cuDNN has no window.

    With `kv_lengths` only the first `kv_lengths[b]` positions of row b are visible, at most S or P
    page of them, besides all other restrictions. The queries may then stand anywhere: neither
    `q_offset` nor `q_offset + T` has to lie within S. `page_table` entries for pages past
    `kv_lengths[b]` may be anything. `segment_ids` are refused.

    With `return_lse` the result is a tuple of the above and f32[B, T, N]: the natural logarithm of
    the sum of the exponentials of the scores that a query sees, scaled and capped; -inf where it
    sees nothing. It joins attention to two parts of the keys: with `lse = logaddexp(lse1, lse2)`
    that to both is `exp(lse1 - lse) out1 + exp(lse2 - lse) out2`, or 0 where `lse` is -inf. cuDNN
    has neither option.

    Keys and values have the dtype of `q`, or are float8_e4m3fn or int8 with a float32 scale per
    position and head: the value is what is stored times its scale. The device kernels read them
    widened to the dtype of `q`, one copy of this layer's cache, which costs about 3 % of an 8k
    prefill chunk's attention. With a pool that is a copy of all X pages: where `widens_pool`,
    gather those of the table first. XLA and cuDNN widen what they read, one block at a time. What
    no query sees must be finite: its weight is zero, but zero times infinity is NaN.

    `tuning` and `backward_tuning` are the kernel's `Tuning` and that of its gradient, instead of
    the entries of the table (`tuning.tuning_for`); they need a named device kernel.

    Differentiable in q, k, v, but not with `return_lse`, nor for scaled or paged keys and values.
    The device kernels are so only for whole rows (no offset, neither `lengths` nor `kv_lengths`, S
    = T), cuDNN only without an offset. Raises `ValueError` for operands that do not fit together,
    `NotImplementedError` for what a named implementation cannot do and for gradients that it does
    not have. Offsets that are ints, of Python or NumPy, are static. Values of other offsets and of
    both lengths are checked where they are known, that is outside of `jax.jit`.
    """
    window = check_window(window)
    score_options = ScoreOptions(score_cap)
    operands = check_prefill(
        q,
        k,
        v,
        q_offset=q_offset,
        lengths=lengths,
        segment_ids=segment_ids,
        k_scale=k_scale,
        v_scale=v_scale,
        page_table=page_table,
        kv_lengths=kv_lengths,
    )
    window = hiding(window, operands)
    options: dict[str, Any] = {"score_options": score_options, "return_lse": return_lse}
    spec = AttentionSpec.of("prefill", operands, window, **options)
    tunings = {"tuning": tuning, "backward_tuning": backward_tuning}
    name, tuning, _ = choose(current_device(), spec, implementation, **tunings)
    starts_at_zero = isinstance(operands.q_offset, int) and operands.q_offset == 0
    offset = jnp.asarray(operands.q_offset, jnp.int32)
    offset = jnp.broadcast_to(offset, spec.q.shape[:1])
    operands = dataclasses.replace(operands, q_offset=offset)
    operands = _refuse_gradients(operands, return_lse)
    if name == "xla":
        return xla.prefill(operands, window=window, **options)
    if name == "cudnn":
        if starts_at_zero and page_table is None:
            return cudnn.prefill(operands.widened())
        refusal = name, "has no gradient with q_offset; 'xla' has"
        return cudnn.chunk(operands.without_gradient(refusal))
    operands = operands.widened()
    plain = page_table is None and kv_lengths is None and not return_lse
    if starts_at_zero and operands.keys == spec.q.shape[1] and lengths is None and plain:
        arrays = operands.q, operands.k, operands.v, operands.segment_ids
        return _whole_rows(name, tuning, backward_tuning, window, *arrays)
    refusal = name, "has no gradient with q_offset, lengths, kv_lengths or S != T; 'xla' has"
    operands = operands.without_gradient(refusal)
    if starts_at_zero:  # the device kernels read no offsets that are known
        operands = dataclasses.replace(operands, q_offset=None)
    out, lse = _forward(name, tuning, window, operands, save_lse=return_lse)
    if not return_lse:
        return out
    # For the gradient they are +inf where a query sees nothing.
    return out, jnp.where(lse == jnp.inf, -jnp.inf, lse).swapaxes(1, 2)


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K S H"] | Num[Array, "X K page H"],
    v: Num[Array, "B K S H"] | Num[Array, "X K page H"],
    length: Int[Array, " B"],
    *,
    k_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
    v_scale: Float[Array, "B K S"] | Float[Array, "X K page"] | None = None,
    page_table: Int[Array, "B P"] | None = None,
    plan: DecodePlan | None = None,
    window: Int[Array, ""] | int | None = None,
    score_cap: float | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    tuning: Any = None,
) -> Float[Array, "B T N H"] | Any:
    """Attention of the last T tokens of each row against a static cache.

    `length[b]` counts the valid positions of row b, the T new ones included; query t sees the first
    `length[b] - T + t + 1`, and where these are none, as for the early queries of a row with fewer
    than T positions, it yields zeros. A row of length 0 is idle. Cache formats are those of
    `prefill_attention`, widened on the way to the product: the kernels read them as they are
    stored. What no query sees must be finite here too. `window`, `score_cap` and `return_lse` are
    those of `prefill_attention`.

    With `page_table`, `k` and `v` are a pool of X pages: position s of row b is position `s % page`
    of page `page_table[b, s // page]`. Entries for the pages that `length` reaches must lie in the
    pool, which is not checked; the others may be anything, and with `window` those for pages before
    the earliest query's window: the device kernels do not read such pages.

    `plan` is the result of `plan_decode` with these operands and options, made once for all layers
    of a step; that it fits `length` is not checked. Without it the kernel makes its own. A plan
    decides where the sum over a row is cut, and depends on all rows' lengths: a row's result does
    not depend on the other rows but for rounding.

    `tuning` is the kernel's `Tuning`, instead of the table's entry; it needs a named device kernel.

    Differentiable in q, k, v, but not with `return_lse`, nor for scaled or paged keys and values,
    nor on the device kernels. Raises as `prefill_attention` does.
    """
    window = check_window(window)
    score_options = ScoreOptions(score_cap)
    operands = check_decode(
        q, k, v, length, k_scale=k_scale, v_scale=v_scale, page_table=page_table
    )
    window = hiding(window, operands)
    options: dict[str, Any] = {"score_options": score_options, "return_lse": return_lse}
    spec = AttentionSpec.of("decode", operands, window, **options)
    name, tuning, _ = choose(current_device(), spec, implementation, tuning=tuning)
    operands = _refuse_gradients(operands, return_lse)
    if name == "xla":
        return xla.decode(operands, window=window, **options)
    if name == "cudnn":
        return cudnn.decode(operands)
    refusal = name, "has no gradient of decode_attention; 'xla' has"
    operands = operands.without_gradient(refusal)
    static: dict[str, Any] = {"window": window, "return_lse": return_lse}
    attend = _jitted(kernels_of(name).decode.attention, tuning, **static)
    out, lse = attend(operands, plan) if name == "hopper" else attend(operands)
    return (out, lse) if return_lse else out


def plan_decode(
    q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct,
    k: Num[Array, "_ K S H"] | jax.ShapeDtypeStruct,
    length: Int[Array, " B"],
    *,
    page_table: Int[Array, "B P"] | None = None,
    window: Int[Array, ""] | int | None = None,
    score_cap: float | None = None,
    implementation: Implementation | None = None,
    tuning: Any = None,
) -> DecodePlan | None:
    """The `plan` of `decode_attention` with these operands and options: which thread block reads
    which split of which row. Of `q`, `k` and `page_table` only shapes and dtypes count.

    None where the implementation that runs has no use for one: only 'hopper' has. Costs a few
    operations on B^2 + B W small integers, W being about B + 528 / K. Raises as `decode_attention`
    does.
    """
    window = check_window(window)
    score_options = ScoreOptions(score_cap)
    length = jnp.asarray(length, jnp.int32)
    operands = AttentionOperands(q, k, k, length=length, page_table=page_table)
    window = hiding(window, operands)
    spec = AttentionSpec.of("decode", operands, window, score_options=score_options)
    name, tuning, _ = choose(current_device(), spec, implementation, tuning=tuning)
    if name != "hopper":
        return None
    return kernels_of(name).decode.plan(operands, tuning=tuning, window=window)


def widens_pool(
    q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct,
    k: Num[Array, "X K page H"] | jax.ShapeDtypeStruct,
    page_table: Int[Array, "B P"] | jax.ShapeDtypeStruct,
    *,
    implementation: Implementation | None = None,
) -> bool:
    """True if `prefill_attention` with these operands and options widens the whole pool before it
    reads pages of it: with keys in 8 bits, on a device kernel. Only shapes and dtypes count."""
    if k.dtype == q.dtype:
        return False
    if implementation is None:
        spec = AttentionSpec.of("prefill", AttentionOperands(q, k, k, page_table=page_table))
        return choose(current_device(), spec).implementation in ("hopper", "tpu")
    return implementation in ("hopper", "tpu")


def _refuse_gradients(operands: AttentionOperands, return_lse: bool) -> AttentionOperands:
    """The same operands, without the gradients that no implementation has."""
    if operands.k_scale is not None or operands.page_table is not None:
        names = ("q", "k", "v", "k_scale", "v_scale")
        operands = operands.without_gradient(SCALED_OR_PAGED, names)
    return operands.without_gradient(LOG_SUMS) if return_lse else operands


# Device kernels ---------------------------------------------------------------


@functools.cache
def _jitted(kernel, tuning, **options):
    """`kernel` as a function of arrays that is traced and lowered once for all layers of a program,
    not once for each."""
    return jax.jit(functools.partial(kernel, tuning=tuning, **options))


def _forward(name: str, tuning, window, operands: AttentionOperands, *, save_lse: bool = False):
    attention = kernels_of(name).prefill.attention
    return _jitted(attention, tuning, window=window, save_lse=save_lse)(operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _whole_rows(name: str, tuning, backward_tuning, window, q, k, v, segment_ids):
    operands = AttentionOperands(q, k, v, segment_ids=segment_ids)
    return _forward(name, tuning, window, operands)[0]


def _whole_rows_forward(name, tuning, backward_tuning, window, q, k, v, segment_ids):
    operands = AttentionOperands(q, k, v, segment_ids=segment_ids)
    out, lse = _forward(name, tuning, window, operands, save_lse=True)
    q, out, lse = checkpoint_names(q, out, lse)
    return out, (q, k, v, segment_ids, out, lse)


def _whole_rows_backward(name, tuning, backward_tuning, window, residuals, d_out):
    if backward_tuning is None:
        spec = AttentionSpec.of("prefill", AttentionOperands(*residuals[:3]))
        backward_tuning = find_tuning(current_device(), name, "backward", spec)
    gradient = _jitted(kernels_of(name).backward.attention_grad, backward_tuning, window=window)
    return *gradient(*residuals, d_out), None


_whole_rows.defvjp(_whole_rows_forward, _whole_rows_backward)
