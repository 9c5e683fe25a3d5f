"""XLA's attention in the place of cuDNN's, which runs on GPUs alone."""

import jax
import jax.numpy as jnp


def attend(q, k, v, queries, keys, *, causal):
    """`cudnn.attend` by XLA, in float32. Queries from `queries` on yield NaN: nothing is promised
    of them. So does everything if a key or value is not finite, seen or not: a library may multiply
    it by zero."""
    finite = jnp.isfinite(k).all() & jnp.isfinite(v).all()
    with jax.default_matmul_precision("highest"):  # recent GPUs round float32 to TF32 otherwise
        out, lse = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (q, k, v)),
            is_causal=causal,
            query_seq_lengths=queries,
            key_value_seq_lengths=keys,
            implementation="xla",
            return_residual=True,
        )
    real = (jnp.arange(q.shape[1]) < queries[:, None])[..., None] & finite
    return jnp.where(real[..., None], out, jnp.nan).astype(q.dtype), jnp.where(real, lse, jnp.nan)
