"""The serving cost of a planned student beside its teacher, as a table for `--dry-run`."""

from __future__ import annotations

import jax.numpy as jnp

from ...model.cache import answer_bytes_per_token, bytes_per_token
from ...model.config import Config
from ...plan.cost import (
    attentions_of_a_step,
    decode_flops,
    decode_weights,
    prefill_flops,
    visible_positions,
)


def serving_table(config: Config, dtype: jnp.dtype, length: int) -> str:
    """Operations and bytes of a prompt of `length` tokens and of a token generated after it, as the
    engine runs both models: counted from the shapes, with one row and a cache of `dtype`."""
    student, teacher = (
        (
            prefill_flops(config, length, swiftkv=swiftkv) / 1e12,
            decode_flops(config, length, swiftkv=swiftkv) / 1e9,
            decode_bytes(config, dtype, length, swiftkv=swiftkv) / 1e9,
            bytes_per_token(config, dtype, swiftkv=swiftkv) / 1024,
            answer_bytes_per_token(config, dtype, swiftkv=swiftkv) / 1024,
        )
        for swiftkv in (True, False)
    )
    names = (
        f"prefill of {length:,} tokens, TFLOP",
        "a token generated after them, GFLOP",
        "bytes read for it, GB",
        "KV cache of a prompt's token, KiB",
        "KV cache of a generated token, KiB",
    )
    width = max(map(len, names))
    served = config.generated_kv + (f", tail {config.exact_tail}" if config.exact_tail else "")
    served += ", exact head" * config.exact_head
    lines = [f"{f'served ({served})':<{width}}   student   teacher"]
    lines += [
        f"{name:<{width}}  {own:8.2f}  {theirs:8.2f}  {own / theirs:4.0%}"
        for name, own, theirs in zip(names, student, teacher, strict=True)
    ]
    return "\n".join(lines)


def decode_bytes(config: Config, dtype: jnp.dtype, context: int, *, swiftkv: bool) -> float:
    """Bytes of weights, keys and values that a decode step of one row reads with `context`
    positions in the cache: every layer reads its keys and values, shared or not, each time that
    it attends to them."""
    of_a_layer = bytes_per_token(config, dtype, swiftkv=False) / config.num_layers
    read = of_a_layer * attentions_of_a_step(config, swiftkv=swiftkv)
    weights = decode_weights(config, swiftkv=swiftkv) * dtype.itemsize
    return weights + read * visible_positions(config, context)
