"""The gradients that attention does not have are refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import decode_attention, prefill_attention
from tests.pallas_kernels.interpreted import under
from tests.pallas_kernels.small_operands import (
    SCALE,
    B,
    H,
    K,
    N,
    S,
    T,
    decode_operands,
    prefill_operands,
    zeros,
)


def prefill(**changes):
    return prefill_attention(**prefill_operands(**changes))


def decode(**changes):
    return decode_attention(**decode_operands(**changes))


INT8 = {"k": zeros(B, K, S, H, dtype=jnp.int8), "v": zeros(B, K, S, H, dtype=jnp.int8)}
SCALED = INT8 | {"k_scale": SCALE, "v_scale": SCALE}
SCALED_OR_PAGED = "scaled or paged keys and values has no gradient"
NO_GRADIENT: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a chunk on Hopper": ("H100", prefill, {"q_offset": jnp.int32(1)}, "no gradient with q_offset"),
    "a chunk on a TPU": ("v5e", prefill, {"q_offset": jnp.int32(1)}, "no gradient with q_offset"),
    "a part on Hopper": (
        *("H100", prefill, {"kv_lengths": jnp.asarray([1, 8])}),
        "'hopper' has no .*kv_lengths",
    ),
    "decoding on Hopper": ("H100", decode, {}, "no gradient of decode"),
    "decoding on a TPU": ("v5e", decode, {}, "no gradient of decode"),
    **{
        f"{what} of {call.__name__} on {machine}": (machine, call, options, message)
        for machine in ("H100", "v5e", "A100")
        for call in (prefill, decode)
        for what, options, message in (
            ("log-sum-exps", {"return_lse": True}, "return_lse has no gradient"),
            ("scaled keys", SCALED, SCALED_OR_PAGED),
            (
                "pages",
                {"page_table": jnp.asarray([[0], [1]]), "implementation": "xla"},
                SCALED_OR_PAGED,
            ),
        )
    },
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_gradient_that_does_not_exist_is_refused(name):
    """By name, not by a trace through a kernel; not even where everything fits in one block, which
    JAX could differentiate."""
    machine, call, options, message = NO_GRADIENT[name]

    def total(q):
        found = jax.tree.leaves(call(q=q, **options))
        return sum(x.astype(jnp.float32).sum() for x in found)

    queries = 1 if call is decode else T
    with under(machine), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(total), zeros(B, queries, N, H))
