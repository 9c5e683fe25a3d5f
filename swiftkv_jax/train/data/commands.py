"""`python -m swiftkv_jax.train prepare`, `... restate` and `... show`: prepare data ahead of a run,
make examples of them, and print what is trained on."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ... import cli
from ...checkpoints import auxiliary_files_of
from ...checkpoints.auxiliary import load_tokenizer
from ...checkpoints.hub import local_path
from ...cli.fields import given
from ...errors import UsageError
from ...process import files
from . import restated
from .dataset import PackedDataset, is_packed_dataset
from .options import PrepareOptions, RestateOptions, ShowOptions
from .packing import PackedRow
from .prepare import Preparation, check_dataset, describe_dataset, tokenizer_fingerprint
from .sources import parse_source

_GREEN = "\x1b[32m"
_PLAIN = "\x1b[0m"


def prepare(args: argparse.Namespace) -> int:
    """Build one packed dataset per source; print the `--data` flags that name them."""
    options = PrepareOptions(**given(PrepareOptions, args))
    sources = [parse_source(text) for text in options.data]
    tokenizer = _tokenizer(options)
    paths = (
        [options.output_dir]
        if len(sources) == 1
        else [options.output_dir / str(number) for number in range(len(sources))]
    )
    for source, path in zip(sources, paths, strict=True):
        if is_packed_dataset(Path(source.path)):
            raise UsageError(
                f"`data`={source.path}: prepared already; give it to training as it is"
            )
        share = options.max_unreadable_share
        made = Preparation(source, tokenizer, options.max_length, max_unreadable_share=share)
        made.build(path)
    print(
        " ".join(
            f"--data {dataclasses.replace(source, path=str(path))}"
            for source, path in zip(sources, paths, strict=True)
        )
    )
    return cli.OK


def restate(args: argparse.Namespace) -> int:
    """Write a JSONL file of examples that `restated.restate` makes; print the `--data` flag that
    names it."""
    options = RestateOptions(**given(RestateOptions, args))
    if options.output.suffix != ".jsonl":
        raise UsageError(f"`output`={options.output}: must end in .jsonl")
    files.check_absent("--output", options.output)
    restated.write(
        options.data,
        _tokenizer(options),
        options.output,
        options.examples,
        options.max_length,
        options.seed,
    )
    print(f"--data {options.output}")
    return cli.OK


def show(args: argparse.Namespace) -> int:
    """Print the first rows of a packed dataset as text, with what is to be predicted marked."""
    options = ShowOptions(**given(ShowOptions, args))
    dataset = PackedDataset(args.folder)
    tokenizer = _tokenizer(options)
    check_dataset(dataset, dataset.manifest.length, tokenizer_fingerprint(tokenizer))
    marks = (
        (_GREEN, _PLAIN) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("[[", "]]")
    )
    print(describe_dataset(dataset))
    for number in range(min(options.rows, len(dataset))):
        row = dataset[number]
        print(
            f"\n=== row {number}: {len(row.lengths)} documents, {len(row.tokens):,} of "
            f"{dataset.manifest.length:,} tokens, "
            f"{int(row.predicting().sum()):,} to predict"
        )
        for document, text in enumerate(_marked_documents(row, tokenizer, marks)):
            print(f"--- document {document}: {row.lengths[document]:,} tokens\n{text}")
    return cli.OK


def _tokenizer(options: PrepareOptions | RestateOptions | ShowOptions) -> Any:
    model = local_path(options.model, options.revision, weights=False)
    tokenizer = load_tokenizer(model, auxiliary_files_of(model)[1])
    if tokenizer is None:
        raise UsageError(f"`model`={options.model}: it has no tokenizer")
    return tokenizer


def _marked_documents(row: PackedRow, tokenizer: Any, marks: tuple[str, str]) -> Iterator[str]:
    """Text of each document. Its first token is never marked: nothing comes before it that could
    predict it."""
    predicted = np.append(False, row.predicting()[:-1])
    for document in row.documents():
        places = range(document.start, document.stop)
        runs = itertools.groupby(places, key=lambda at: bool(predicted[at]))
        texts = (
            (marked, tokenizer.decode(row.tokens[list(positions)])) for marked, positions in runs
        )
        yield "".join(f"{marks[0]}{text}{marks[1]}" if marked else text for marked, text in texts)
