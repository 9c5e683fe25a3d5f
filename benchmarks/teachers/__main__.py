"""Make a teacher: a small Llama trained from scratch on Python source.

    python -m benchmarks.teachers demo build/demo    # 2M parameters; about an hour on two cores
    python -m benchmarks.teachers t1 build/t1        # 7M; some four hours
    python -m benchmarks.teachers t2 build/t2        # 28M; a GPU: five minutes on an H100

`demo` is the model that ships inside the package, trained on the standard library of the
interpreter that runs this; the shipped one saw that of Python 3.12.1. To ship another:

    rm -r swiftkv_jax/demo/llama swiftkv_jax/demo/swiftkv
    cp -r build/demo/llama swiftkv_jax/demo/llama
    python -m swiftkv_jax.train --mesh 4x1 --max-steps 512    # some ten minutes
    cp -r runs/demo/model swiftkv_jax/demo/swiftkv

The others learn from installed packages as well, and other packages are held out
(`benchmarks/teachers/corpus.py`). `python -m benchmarks.quality --teacher build/t1` measures
students of them. The folder holds the model in `llama`; the same command continues a run that was
stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

import jax
from transformers import PreTrainedTokenizerFast

from swiftkv_jax import Config, cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.process import files
from swiftkv_jax.train.data.loader import DatasetMixture
from swiftkv_jax.train.data.prepare import prepare
from swiftkv_jax.train.data.sources import DataSource

from .corpus import write_corpus
from .files import TeacherFiles, documents
from .pretrain import Pretraining, export, train, train_tokenizer

logger = logging.getLogger("swiftkv_jax.benchmarks")

TEACHERS = {
    "demo": Pretraining(
        Config(
            vocab_size=2048,
            embed_dim=128,
            mlp_dim=512,
            num_layers=8,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
        steps=1900,
        tokens_per_step=4096,
        lengths=(256, 512),
        peak_rate=3e-3,
    ),
    "t1": Pretraining(
        Config(
            vocab_size=4096,
            embed_dim=192,
            mlp_dim=512,
            num_layers=16,
            num_heads=6,
            num_kv_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
        steps=4900,
        tokens_per_step=4096,
        lengths=(512, 512),
        peak_rate=3e-3,
    ),
    "t2": Pretraining(
        Config(
            vocab_size=8192,
            embed_dim=384,
            mlp_dim=1024,
            num_layers=16,
            num_heads=6,
            num_kv_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        ),
        steps=8000,
        tokens_per_step=16_384,
        lengths=(1024, 2048),
        peak_rate=2e-3,
        dtype="bfloat16",
    ),
}


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog="python -m benchmarks.teachers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("teacher", choices=TEACHERS)
    result.add_argument("folder", type=Path, help="folder to make")
    result.add_argument("--steps", type=int, help="optimiser steps, instead of the teacher's own")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    args = arguments.parse_args(argv)
    return cli.run(lambda: make(args), arguments)


def make(args: argparse.Namespace) -> int:
    """Make tokenizer and text where they are not there, train, and write the model."""
    recipe: Pretraining = TEACHERS[args.teacher]
    if args.steps is not None:
        if args.steps < 1:
            raise UsageError(f"`steps`={args.steps}: must be at least 1")
        recipe = dataclasses.replace(recipe, steps=args.steps)
    made = TeacherFiles.demo() if args.teacher == "demo" else TeacherFiles.of(args.folder)
    model, tokenizer_folder = args.folder / "llama", args.folder / "tokenizer"
    files.check_free(model)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.teacher != "demo" and not (args.folder / "corpus").exists():
        write_corpus(args.folder / "corpus")
    if not tokenizer_folder.exists():
        texts = (text for _, text in documents(made.train))
        train_tokenizer(texts, recipe.config.vocab_size, tokenizer_folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)

    def packed(source: DataSource, length: int, held_out: bool = False) -> DatasetMixture:
        # `held_out` says which packages of the standard library are meant.
        store = prepare(source, tokenizer, length, args.folder / "data", held_out=held_out)
        return DatasetMixture((store,), (1.0,))

    constant, falling = (packed(made.train, length) for length in recipe.lengths)
    held_out = packed(made.held_out, recipe.lengths[1], held_out=True)
    logger.info("%d training tokens, %d held out", falling.num_tokens, held_out.num_tokens)
    llama = train(recipe, (constant, falling), held_out, args.folder / "state.npz")
    export(recipe.config, llama, tokenizer_folder, model)
    description = {
        "name": args.teacher,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(llama)),
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.tokens_per_step,
    }
    files.write_json(args.folder / "teacher.json", description)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
