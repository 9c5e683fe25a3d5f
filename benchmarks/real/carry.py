"""What a distillation needs, in small folders, for a machine that takes little at a time.

    python -m benchmarks.real.carry pack MODEL.gguf FOLDER     folders 1, 2 ... of 60 MB
    python -m benchmarks.real.carry unpack FOLDER... TARGET

Packed are the model in parts, training text of this machine's packages and examples that restate it
as packed rows, and held-out text. The machine then runs `python -m benchmarks.distill_real gpu
--model TARGET/parts --data TARGET/text --restated TARGET/restated --folder TARGET --train-only`.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.process import files
from swiftkv_jax.train.data import restated
from swiftkv_jax.train.data.dataset import MANIFEST, ROWS, UNREADABLE, PackedDataset, write_rows
from swiftkv_jax.train.data.packing import PackedRow
from swiftkv_jax.train.data.prepare import Preparation
from swiftkv_jax.train.data.sources import DataSource
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.run.setup import open_tokenizer

from ..distill_real import HELD_OUT, PLANS
from . import corpus, parts

FOLDER_BYTES = 60_000_000
PART_BYTES = 14 * 2**20
LENGTH = PLANS["gpu"].max_length
"""Tokens of a row."""
PARTS = "parts"
DATASETS = "text", "restated"


def main(argv: list[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.real.carry",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("action", choices=("pack", "unpack"))
    flag("sources", type=Path, nargs="+")
    flag("target", type=Path)
    flag("--corpus", type=Path, default=Path("runs/real/corpus"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.action == "unpack":
        return cli.run(lambda: unpack(args.sources, args.target) or cli.OK, parser)
    if len(args.sources) > 1:
        parser.error("pack takes one model")
    return cli.run(lambda: pack(args.sources[0], args.corpus, args.target) or cli.OK, parser)


def pack(model: Path, text: Path, folder: Path) -> None:
    """Make the folder. Raises `UsageError` if it exists or there is no such model."""
    if not model.is_file():
        raise UsageError(f"{model}: no such file")
    corpus.training_documents(text)
    tokenizer = open_tokenizer(Recipe(model=str(model), data=(), output_dir=folder))
    with files.new_directory(folder) as made, tempfile.TemporaryDirectory() as name:
        work = Path(name)
        written = text / corpus.TRAIN
        examples = work / "restated.jsonl"
        restated.write([str(written)], tokenizer, examples, PLANS["gpu"].restated, LENGTH)
        for name, source in zip(DATASETS, (written, examples), strict=True):
            prepared = Preparation(DataSource(str(source)), tokenizer, LENGTH)
            dataset = prepared.prepare(work / "prepared")
            write_packed(dataset, work / _rows_of(name))
            shutil.copy(dataset.path / MANIFEST, work / _manifest_of(name))
        corpus.write_held_out(work / HELD_OUT, seed=0)
        parts.split(model, work / PARTS, PART_BYTES)
        for file in (work / HELD_OUT, *map(work.joinpath, map(_rows_of, DATASETS))):
            with lzma.open(file.with_name(f"{file.name}.xz"), "wb", preset=6) as compressed:
                compressed.write(file.read_bytes())
        manifests = map(work.joinpath, map(_manifest_of, DATASETS))
        found = [*work.glob("*.xz"), *manifests, *(work / PARTS).iterdir()]
        for number, some in enumerate(in_folders(found), 1):
            (made / str(number)).mkdir()
            for file in some:
                shutil.copy(file, made / str(number))


def in_folders(found: Sequence[Path]) -> list[list[Path]]:
    """Files in as few lists of at most `FOLDER_BYTES` as first fit finds, large ones first."""
    lists = list[list[Path]]()
    for file in sorted(found, key=lambda file: -file.stat().st_size):
        for some in lists:
            if sum(one.stat().st_size for one in (*some, file)) <= FOLDER_BYTES:
                some.append(file)
                break
        else:
            lists.append([file])
    return lists


def unpack(folders: Sequence[Path], target: Path) -> None:
    """Make the folder of the parts, of each of `DATASETS` and of the held-out text."""
    every = {file.name: file for folder in folders for file in folder.iterdir()}
    with files.new_directory(target) as made:
        (made / PARTS).mkdir()
        for name, file in every.items():
            if name.startswith("part"):
                shutil.copy(file, made / PARTS)
        (made / HELD_OUT).write_bytes(lzma.open(every[f"{HELD_OUT}.xz"]).read())
        for name in DATASETS:
            (made / name).mkdir()
            packed = every[f"{_rows_of(name)}.xz"]
            with lzma.open(packed) as compressed, tempfile.TemporaryFile() as plain:
                shutil.copyfileobj(compressed, plain)
                plain.seek(0)
                write_rows(made / name / ROWS, read_packed(plain), LENGTH)
            (made / name / UNREADABLE).touch()
            shutil.copy(every[_manifest_of(name)], made / name / MANIFEST)


def _rows_of(dataset: str) -> str:
    return f"{dataset}.npz"


def _manifest_of(dataset: str) -> str:
    return f"{dataset}.json"


def write_packed(dataset: PackedDataset, file: Path) -> None:
    """Write the rows as a few arrays, which compress better than one record a row."""
    rows = [dataset[number] for number in range(len(dataset))]
    tokens = np.concatenate([row.tokens for row in rows])
    np.savez(
        file,
        tokens=tokens.astype(np.min_scalar_type(tokens.max())),
        is_target=np.packbits(np.concatenate([row.is_target for row in rows])),
        documents=np.array([len(row.lengths) for row in rows], np.int32),
        lengths=np.concatenate([row.lengths for row in rows]).astype(np.int32),
    )


def read_packed(file: IO[bytes] | Path) -> Iterator[PackedRow]:
    """The rows of `write_packed`."""
    arrays = np.load(file)
    tokens, lengths = arrays["tokens"].astype(np.int32), arrays["lengths"]
    is_target = np.unpackbits(arrays["is_target"])[: len(tokens)].astype(bool)
    start = 0
    documents = iter(lengths)
    for count in arrays["documents"].tolist():
        of_row = np.array(list(itertools.islice(documents, count)), np.int32)
        stop = start + int(of_row.sum())
        yield PackedRow(tokens[start:stop], is_target[start:stop], of_row)
        start = stop


if __name__ == "__main__":
    sys.exit(main())
