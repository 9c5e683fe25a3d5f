"""Sources of training text: files, folders, Hugging Face dataset folders, and the standard library
as the default."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sysconfig
import zlib
from pathlib import Path

from ...errors import DataError, UsageError
from .formats import Documents, known_suffixes, read_arrow_stream, reader_for

STDLIB = "stdlib"
# Generated tables, vendored wheels and tests teach little and would take most of the budget.
_STDLIB_SKIPPED = frozenset(
    "test tests idle_test turtledemo site-packages dist-packages encodings ensurepip lib2to3 "
    "__pycache__ pydoc_data".split()
)


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A path of training data, and its weight in the mixture."""

    path: str
    """Path of a file, a folder or a prepared dataset, or `stdlib`."""
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The last part of the path, for messages and file names."""
        return Path(self.path).name or self.path


def parse_source(text: str) -> DataSource:
    """The source of `PATH[:WEIGHT]`. A path that exists with the colon in it has no weight. Raises
    `UsageError`."""
    path, colon, ending = text.rpartition(":")
    if not text or (colon and not path):
        raise UsageError(f"`data`={text!r}: expected PATH or PATH:WEIGHT")
    if not colon or Path(text).exists():
        return DataSource(text)
    try:
        weight = float(ending)
    except ValueError:
        return DataSource(text)
    if not (weight > 0 and math.isfinite(weight)):
        raise UsageError(f"`data`={text}: the weight must be a number above 0")
    return DataSource(path, weight)


def find_files(source: DataSource, *, held_out: bool = False) -> list[Path]:
    """The files of a source, in the order they are read. Raises `UsageError` if the path does not
    exist, `DataError` if there is no file of a known format.

    `held_out` selects the standard library's held-out packages and is meaningless for other
    sources.
    """
    if source.path == STDLIB:
        return _stdlib_files(held_out)
    path = Path(source.path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_file():
        if reader_for(path) is None:
            raise DataError(
                f"{path}: not a format that can be read; expected a name ending in "
                f"{known_suffixes()}"
            )
        return [path]
    files = _folder_files(path)
    if not files:
        raise DataError(
            f"{path}: nothing to read in it; expected files ending in {known_suffixes()}"
        )
    return files


def read_file(file: Path) -> Documents:
    """The documents of one of the files that `find_files` returns. Raises `DataError` if the file
    as a whole is damaged."""
    # The only files without a known ending are those of a dataset folder.
    return (reader_for(file) or read_arrow_stream)(file)


def _folder_files(folder: Path) -> list[Path]:
    """Files of known formats, recursively, by name; hidden files and folders are left out."""
    found = []
    for root, folders, files in os.walk(folder):
        here = Path(root)
        if (here / "dataset_dict.json").is_file():
            splits = ", ".join(str(here / name) for name in sorted(folders))
            raise DataError(f"{here}: a dataset of several splits; name one of {splits}")
        if (here / "state.json").is_file() and (here / "dataset_info.json").is_file():
            folders.clear()
            found += _dataset_files(here)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            here / name
            for name in sorted(files)
            if not name.startswith(".") and reader_for(here / name)
        ]
    return found


def _dataset_files(folder: Path) -> list[Path]:
    """Data files of a folder that `datasets.save_to_disk` wrote."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{folder / 'state.json'}: not the list of data files that datasets.save_to_disk writes"
        ) from None
    if missing := next((file for file in files if not file.is_file()), None):
        raise DataError(f"{missing}: no such file; state.json beside it names it")
    return files


def _stdlib_files(held_out: bool) -> list[Path]:
    """Python files of the running interpreter's standard library. One package in sixteen is held
    out, chosen by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _STDLIB_SKIPPED.intersection(parts) or parts[0].startswith(
            ("config-", "_sysconfigdata")
        ):
            continue
        package = parts[0].removesuffix(".py")
        if (zlib.crc32(package.encode()) % 16 == 0) == held_out:
            found.append(file)
    return found
