"""A distillation loop of one's own, around `skv.distill_loss`. `swiftkv train` does far more.

python examples/distill.py            the demo model on some of the standard library, on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import swiftkv_jax as skv
from swiftkv_jax import demo

STEPS = 16
ROWS = 8
LENGTH = 256


def main() -> None:
    model = skv.load(demo.LLAMA)
    model = skv.add_swiftkv(model, num_key_value_layers=model.config.num_layers // 2)
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    ids = np.array(model.tokenizer(text)["input_ids"])
    random = np.random.default_rng(0)

    optimizer = optax.adamw(2e-3)
    # In float32: bfloat16, in which weights are on an accelerator, loses small updates.
    delta: Any = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.swiftkv)
    moments = optimizer.init(delta)
    loss_mask = jnp.ones((ROWS, LENGTH)).at[:, -1].set(0)  # nothing is known after the last token

    @jax.jit
    def step(llama, delta, moments, tokens):
        def loss(delta):
            student = dataclasses.replace(model, llama=llama, swiftkv=delta)
            return skv.distill_loss(student, tokens, loss_mask)

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(delta)
        updates, moments = optimizer.update(gradient, moments, delta)
        return optax.apply_updates(delta, updates), moments, value, metrics

    for number in range(1, STEPS + 1):
        starts = random.integers(0, len(ids) - LENGTH, ROWS)
        tokens = jnp.array([ids[start : start + LENGTH] for start in starts])
        delta, moments, value, metrics = step(model.llama, delta, moments, tokens)
        parts = "  ".join(f"{name} {part:.4f}" for name, part in metrics.items())
        print(f"step {number:2}  loss {value:.3f}  {parts}", flush=True)


if __name__ == "__main__":
    main()
