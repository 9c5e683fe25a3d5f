"""`python -m swiftkv_jax.train prepare` and `... show`: prepare data ahead of a run, and print what
it trains on."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ... import cli
from ...checkpoints.auxiliary import load_tokenizer, read_auxiliary_files
from ...errors import UsageError
from .dataset import PackedDataset, is_packed_dataset
from .packing import PackedRow
from .prepare import (
    MAX_UNREADABLE_SHARE,
    build,
    check_dataset,
    describe_dataset,
    tokenizer_fingerprint,
)
from .sources import DataSource, parse_source

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def prepare_main(argv: list[str] | None = None) -> int:
    """Build one packed dataset per source; print the `--data` flags that name them."""
    parser = cli.ArgumentParser(
        prog=cli.prog("train prepare"),
        description="Tokenise and pack training data into folders, which --data accepts.",
    )
    flag = parser.add_argument
    flag(
        "--model",
        required=True,
        type=Path,
        help="checkpoint whose tokenizer and chat template are used",
    )
    flag(
        "--data",
        required=True,
        action="append",
        metavar="PATH[:WEIGHT]",
        help="as for training; repeat to add more",
    )
    flag("--max-length", required=True, type=int, help="tokens in a packed row")
    flag(
        "--output-dir",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="the new folder; with several --data, one that holds a folder for each: 0, 1, ...",
    )
    flag(
        "--max-unreadable-share",
        type=float,
        default=MAX_UNREADABLE_SHARE,
        help="share of unreadable rows in a source above which it stops (default: %(default)s)",
    )
    args = parser.parse_args(argv)

    def command() -> int:
        if args.max_length < 2:
            raise UsageError(f"`max_length`={args.max_length}: must be at least 2")
        sources = [parse_source(text) for text in args.data]
        tokenizer = _tokenizer(args.model)
        paths = (
            [args.output_dir]
            if len(sources) == 1
            else [args.output_dir / str(number) for number in range(len(sources))]
        )
        for source, path in zip(sources, paths, strict=True):
            if is_packed_dataset(Path(source.path)):
                raise UsageError(
                    f"`data`={source.path}: prepared already; give it to training as it is"
                )
            build(
                source,
                tokenizer,
                args.max_length,
                path,
                max_unreadable_share=args.max_unreadable_share,
            )
        print(
            " ".join(
                f"--data {_argument(path, source)}"
                for source, path in zip(sources, paths, strict=True)
            )
        )
        return cli.OK

    return cli.run(command, parser=parser)


def show_main(argv: list[str] | None = None) -> int:
    """Print the first rows of a packed dataset as text, with what is to be predicted marked."""
    parser = cli.ArgumentParser(
        prog=cli.prog("train show"),
        description="Print rows of prepared data. Text to be predicted is green on a terminal, "
        "and in [[...]] elsewhere.",
    )
    parser.add_argument("folder", type=Path, help="folder of prepared data")
    parser.add_argument(
        "--model",
        required=True,
        type=Path,
        help="checkpoint whose tokenizer the data was prepared with",
    )
    parser.add_argument(
        "--rows", type=int, default=3, help="number of rows, from the first (default: %(default)s)"
    )
    args = parser.parse_args(argv)

    def command() -> int:
        dataset, tokenizer = PackedDataset(args.folder), _tokenizer(args.model)
        check_dataset(dataset, dataset.manifest.length, tokenizer_fingerprint(tokenizer))
        marks = (
            (_GREEN, _PLAIN)
            if sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            else ("[[", "]]")
        )
        print(describe_dataset(dataset))
        for number in range(min(args.rows, len(dataset))):
            row = dataset[number]
            print(
                f"\n=== row {number}: {len(row.lengths)} documents, {len(row.tokens):,} of "
                f"{dataset.manifest.length:,} tokens, "
                f"{int(row.predicting().sum()):,} to predict"
            )
            for document, text in enumerate(_marked_documents(row, tokenizer, marks)):
                print(f"--- document {document}: {row.lengths[document]:,} tokens\n{text}")
        return cli.OK

    return cli.run(command, parser=parser)


def _tokenizer(model: Path) -> Any:
    tokenizer = load_tokenizer(model, read_auxiliary_files(model)[1])
    if tokenizer is None:
        raise UsageError(f"`model`={model}: it has no tokenizer")
    return tokenizer


def _argument(path: Path, source: DataSource) -> str:
    return str(path) if source.weight == 1 else f"{path}:{source.weight}"


def _marked_documents(row: PackedRow, tokenizer: Any, marks: tuple[str, str]) -> Iterator[str]:
    """Text of each document. Its first token is never marked: nothing comes before it that could
    predict it."""
    predicted = np.append(False, row.predicting()[:-1])
    stops = np.cumsum(row.lengths)
    for start, stop in zip(stops - row.lengths, stops, strict=True):
        runs = itertools.groupby(range(start, stop), key=lambda at: bool(predicted[at]))
        texts = (
            (marked, tokenizer.decode(row.tokens[list(positions)])) for marked, positions in runs
        )
        yield "".join(f"{marks[0]}{text}{marks[1]}" if marked else text for marked, text in texts)
