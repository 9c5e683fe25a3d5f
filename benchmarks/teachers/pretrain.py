"""A small Llama from scratch: tokenizer, training that continues where it stopped, export."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax import Config, Model, save_hf
from swiftkv_jax.model.attention import DEFAULT, Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.initialization import init_llama
from swiftkv_jax.model.layers import unembed
from swiftkv_jax.model.model import AuxiliaryFiles
from swiftkv_jax.model.params import Llama
from swiftkv_jax.model.stacks import cast
from swiftkv_jax.model.transformer import teacher
from swiftkv_jax.train.data.loader import DatasetMixture, batches, first_batches

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
DECAY_SHARE = 0.3
SEEDS = 2100, 3000  # of the data order, constant and falling learning rate
SAVE_SECONDS = 120.0

logger = logging.getLogger("swiftkv_jax.benchmarks")


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """AdamW at a constant rate, and for the last `DECAY_SHARE` of the steps at one that falls
    linearly to zero."""

    config: Config
    steps: int
    tokens_per_step: int
    lengths: tuple[int, int]
    """Tokens of a row while the learning rate is constant, and while it falls."""
    peak_rate: float
    dtype: str = "float32"
    """Of the forward and backward passes; parameters and moments are float32."""

    @property
    def decay_start(self) -> int:
        return self.steps - int(self.steps * DECAY_SHARE)

    def learning_rate(self) -> optax.Schedule:
        warmup = min(100, self.steps // 10)
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.peak_rate, warmup),
                optax.constant_schedule(self.peak_rate),
                optax.linear_schedule(self.peak_rate, 0.0, self.steps - self.decay_start),
            ],
            [warmup, self.decay_start],
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Write a byte-level BPE in the shape of Llama 3's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 lacks; both have this one.
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")


def make_train_step(recipe: Pretraining, attention: Attention = DEFAULT):
    """(optimiser, compile-on-first-use `((llama, moments), batch) -> ((llama, moments), loss)`).
    What is passed is donated."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            recipe.learning_rate(),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 2, tree),
        ),
    )

    def loss_of(llama, batch: Batch):
        llama = cast(llama, jnp.dtype(recipe.dtype))
        return cross_entropy(recipe.config, llama, batch, attention)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch: Batch):
        llama, moments = state
        loss, gradient = jax.value_and_grad(loss_of)(llama, batch)
        updates, moments = optimizer.update(gradient, moments, llama)
        return (optax.apply_updates(llama, updates), moments), loss

    return optimizer, train_step


def train(
    recipe: Pretraining,
    rows: tuple[DatasetMixture, DatasetMixture],
    held_out: DatasetMixture,
    saved: Path,
) -> Llama:
    """Train on `rows` of the two lengths, from the step in the file `saved` if it is there. It is
    rewritten every `SAVE_SECONDS` seconds."""
    optimizer, train_step = make_train_step(recipe)
    rate = recipe.learning_rate()
    llama: Any = init_llama(recipe.config, jax.random.key(0), scale=0.04)
    state: Any = (llama, optimizer.init(llama))
    first = 0
    if saved.exists():
        first, state = _restore(saved, state)
    step, started = first, time.perf_counter()
    saved_at = started
    for data, stop, seed in zip(rows, (recipe.decay_start, recipe.steps), SEEDS, strict=True):
        size = recipe.tokens_per_step // data.length
        for local in batches(
            data, size, positions=range(size), seed=seed, start=step, stop=max(stop, step)
        ):
            state, loss = train_step(state, local.batch)
            step += 1
            last = step == recipe.steps
            if step % 50 == 0 or last:
                tokens = (step - first) * recipe.tokens_per_step
                line: dict[str, Any] = {
                    "step": step,
                    "loss": round(float(loss), 4),
                    "rate": float(np.asarray(rate(step))),
                    "tokens_per_second": round(tokens / (time.perf_counter() - started)),
                }
                if step % 250 == 0 or last:
                    found = held_out_loss(recipe.config, state[0], held_out)
                    line["held_out_loss"] = round(found, 4)
                logger.info("%s", json.dumps(line))
            if last or time.perf_counter() - saved_at >= SAVE_SECONDS:
                _save(saved, step, state)
                saved_at = time.perf_counter()
    return state[0]


def cross_entropy(config: Config, llama: Llama, batch: Batch, attention: Attention = DEFAULT):
    """Mean over the predicted tokens, nats."""
    return text_loss(config, llama, teacher(config, llama, batch, attention=attention), batch)


def text_loss(config: Config, llama: Llama, x: Array, batch: Batch):
    """Mean cross-entropy with the text over the predicted tokens, nats, of hidden states before the
    final norm."""
    logits = unembed(config, llama, x)
    targets = jnp.roll(batch.tokens, -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * batch.loss_mask).sum() / jnp.maximum(batch.loss_mask.sum(), 1)


_loss = jax.jit(cross_entropy, static_argnums=0)


def held_out_loss(config: Config, llama: Llama, rows: DatasetMixture) -> float:
    """Mean over the first 32 batches of 8 rows."""
    found = first_batches(rows, 8, positions=range(8), limit=32)
    return float(np.mean([_loss(config, llama, local.batch) for local in found]))


def _save(file: Path, step: int, state: Any) -> None:
    leaves: dict[str, Any] = {
        f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))
    }
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, step=step, **leaves)
    partial.replace(file)


def _restore(file: Path, like: Any) -> tuple[int, Any]:
    with np.load(file) as arrays:
        leaves = [jnp.asarray(arrays[f"leaf{i}"]) for i in range(len(jax.tree.leaves(like)))]
        return int(arrays["step"]), jax.tree.unflatten(jax.tree.structure(like), leaves)


def export(config: Config, llama: Llama, tokenizer: Path, folder: Path) -> None:
    """Round to bfloat16 and write as a Hugging Face checkpoint."""
    contents = {file.name: file.read_bytes() for file in tokenizer.iterdir()}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    contents["generation_config.json"] = (json.dumps(ends, indent=2) + "\n").encode()
    model = Model(
        cast(llama, jnp.bfloat16),
        None,
        config=config,
        auxiliary_files=AuxiliaryFiles(contents, ends),
    )
    save_hf(model, folder)
