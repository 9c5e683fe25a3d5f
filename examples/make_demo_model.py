"""Make the demo model that ships inside the package: a small Llama trained from scratch on the
standard library's source.

    python examples/make_demo_model.py build/demo              # about an hour on two CPU cores
    rm -r swiftkv_jax/demo/llama swiftkv_jax/demo/swiftkv
    cp -r build/demo/llama swiftkv_jax/demo/llama
    python -m swiftkv_jax.train --mesh 4x1                     # about five minutes
    cp -r runs/demo/model swiftkv_jax/demo/swiftkv

The corpus is the standard library of the interpreter that runs this: the shipped model saw that of
Python 3.12.1. Restarting continues from the last saved step. The learning rate is constant until
the last 30 % of the steps, which fall linearly to zero on rows twice as long.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax import Config, Model, save_hf
from swiftkv_jax.initialization import init_llama
from swiftkv_jax.layers import unembed
from swiftkv_jax.model import AuxiliaryFiles
from swiftkv_jax.stacks import cast
from swiftkv_jax.train.data.loader import DatasetMixture, batches, first_batches
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.data.sources import STDLIB, DataSource, find_files
from swiftkv_jax.transformer import Batch, teacher

CONFIG = Config(
    vocab_size=2048,
    embed_dim=128,
    mlp_dim=512,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TOKENS_PER_STEP = 4096
PEAK_RATE, DECAY_SHARE = 3e-3, 0.3
SEEDS = 2100, 3000  # of the data order, constant and falling learning rate


def train_tokenizer(path: Path) -> None:
    """A byte-level BPE of `CONFIG.vocab_size` entries, in the shape of Llama 3's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        (file.read_text(encoding="utf-8") for file in find_files(DataSource(STDLIB))), trainer
    )
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(path)
    # transformers 5 writes a class name that transformers 4 lacks; both have this one.
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")


def cross_entropy(llama, batch: Batch):
    logits = unembed(CONFIG, llama, teacher(CONFIG, llama, batch))
    targets = jnp.roll(batch.tokens, -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * batch.loss_mask).sum() / jnp.maximum(batch.loss_mask.sum(), 1)


def schedule(steps: int) -> optax.Schedule:
    decay = int(steps * DECAY_SHARE)
    warmup = min(100, steps // 10)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, PEAK_RATE, warmup),
            optax.constant_schedule(PEAK_RATE),
            optax.linear_schedule(PEAK_RATE, 0.0, decay),
        ],
        [warmup, steps - decay],
    )


def held_out_loss(loss, llama, rows: DatasetMixture, limit: int = 32) -> float:
    return float(
        np.mean(
            [
                loss(llama, local.batch)
                for local in first_batches(rows, 8, positions=range(8), limit=limit)
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument(
        "--steps", type=int, default=1900, help=f"optimiser steps of {TOKENS_PER_STEP} tokens"
    )
    args = parser.parse_args()
    tokenizer_folder = args.output / "tokenizer"
    if not (tokenizer_folder / "tokenizer.json").exists():
        train_tokenizer(tokenizer_folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)

    def packed(length: int, held_out: bool = False) -> DatasetMixture:
        store = prepare(
            DataSource(STDLIB), tokenizer, length, args.output / "data", held_out=held_out
        )
        return DatasetMixture((store,), (1.0,))

    short, long, held_out = packed(256), packed(512), packed(512, held_out=True)
    print(f"{short.num_tokens:,} training tokens, {held_out.num_tokens:,} held out", flush=True)

    rate = schedule(args.steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 2, tree),
        ),
    )
    llama: Any = init_llama(CONFIG, jax.random.key(0), scale=0.04)
    state = (llama, optimizer.init(llama))
    first, saved = 0, args.output / "state.npz"
    if saved.exists():
        with np.load(saved) as arrays:
            first = int(arrays["step"])
            leaves = [jnp.asarray(arrays[f"leaf{i}"]) for i in range(len(jax.tree.leaves(state)))]
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)

    loss = jax.jit(cross_entropy)

    @jax.jit
    def train_step(state, batch: Batch):
        llama, moments = state
        value, gradient = jax.value_and_grad(cross_entropy)(llama, batch)
        updates, moments = optimizer.update(gradient, moments, llama)
        return (optax.apply_updates(llama, updates), moments), value

    decay_start = args.steps - int(args.steps * DECAY_SHARE)
    started = time.time()
    step = first
    for rows, stop, seed in ((short, decay_start, SEEDS[0]), (long, args.steps, SEEDS[1])):
        size = TOKENS_PER_STEP // rows.length
        for local in batches(
            rows, size, positions=range(size), seed=seed, start=step, stop=max(stop, step)
        ):
            state, value = train_step(state, local.batch)
            step += 1
            if step % 50 == 0 or step == args.steps:
                speed = (step - first) * TOKENS_PER_STEP / (time.time() - started)
                now = float(np.asarray(rate(step)))
                line = {
                    "step": step,
                    "loss": round(float(value), 4),
                    "rate": now,
                    "tokens_per_second": round(speed),
                }
                if step % 250 == 0 or step == args.steps:
                    line["held_out_loss"] = round(held_out_loss(loss, state[0], held_out), 4)
                print(json.dumps(line), flush=True)
            if step % 100 == 0 or step == args.steps:
                arrays: dict[str, Any] = {
                    f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))
                }
                partial = saved.with_suffix(".partial.npz")
                np.savez(partial, step=step, **arrays)
                partial.replace(saved)

    export(state[0], tokenizer_folder, args.output / "llama")


def export(llama, tokenizer_folder: Path, folder: Path) -> None:
    """Round to bfloat16 and write as a Hugging Face checkpoint."""
    contents = {file.name: file.read_bytes() for file in tokenizer_folder.iterdir()}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    contents["generation_config.json"] = (json.dumps(ends, indent=2) + "\n").encode()
    model = Model(
        cast(llama, jnp.bfloat16),
        None,
        config=CONFIG,
        auxiliary_files=AuxiliaryFiles(contents, ends),
    )
    save_hf(model, folder)


if __name__ == "__main__":
    main()
