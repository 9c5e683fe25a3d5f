"""Sources of training text: files, folders, Hugging Face dataset folders, and the standard library
as the default."""

from __future__ import annotations

import dataclasses
import glob
import math
import sysconfig
import zlib
from pathlib import Path

from ...errors import DataError, UsageError
from .folders import folder_files
from .formats import Documents, known_suffixes, read_arrow_stream, reader_for

STDLIB = "stdlib"
# Generated tables, vendored wheels and tests teach little and would take most of the budget.
_STDLIB_SKIPPED = frozenset(
    "test tests idle_test turtledemo site-packages dist-packages encodings ensurepip lib2to3 "
    "__pycache__ pydoc_data".split()
)


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A path of training data, and its weight in the mixture, if one is given."""

    path: str
    """Path of a file, a folder or a prepared dataset, a pattern of paths, or `stdlib`."""
    weight: float | None = None

    def __str__(self) -> str:
        return self.path if self.weight is None else f"{self.path}:{self.weight}"

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


def unweighted(option: str, text: str) -> DataSource:
    """The source of `PATH`, a value of `option`, which mixes nothing. Raises `UsageError`."""
    source = parse_source(text)
    if source.weight is not None:
        raise UsageError(f"`{option}`={text}: only sources to train on have a weight")
    return source


def find_files(source: DataSource, *, held_out: bool = False) -> list[Path]:
    """The files of a source, in the order they are read: those of a path, of all paths that a
    pattern matches (`data/train-*`, `**` for any folders), or what `folders.folder_files` chooses
    of a folder. Raises `UsageError` if the path does not exist, `DataError` if there is no file of
    a known format.

    `held_out` selects what is measured on: the standard library's held-out packages, and of a
    dataset's splits that of validation or test.
    """
    if source.path == STDLIB:
        return _stdlib_files(held_out)
    path = Path(source.path)
    if path.exists():
        paths = [path]
    else:
        paths = [Path(one) for one in sorted(glob.glob(source.path, recursive=True))]
        if not paths:
            found = "nothing matches" if glob.has_magic(source.path) else "no such file or folder"
            raise UsageError(f"{path}: {found}")
    files = []
    for one in paths:
        files += folder_files(one, held_out=held_out) if one.is_dir() else [_checked(one)]
    if not files:
        raise DataError(
            f"{path}: nothing to read in it; expected files ending in {known_suffixes()}"
        )
    return list(dict.fromkeys(files))


def read_file(file: Path) -> Documents:
    """The documents of one of the files that `find_files` returns. Raises `DataError` if the file
    as a whole is damaged."""
    # The only files without a known ending are those of a dataset folder.
    return (reader_for(file) or read_arrow_stream)(file)


def _checked(file: Path) -> Path:
    """The file, if its format is known. Raises `DataError`."""
    if reader_for(file) is None:
        raise DataError(
            f"{file}: not a format that can be read; expected a name ending in {known_suffixes()}"
        )
    return file


def _stdlib_files(held_out: bool) -> list[Path]:
    """Python files of the running interpreter's standard library. One package in sixteen is held
    out, chosen by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in root.walk():
        folders[:] = (name for name in folders if name not in _STDLIB_SKIPPED)
        found += [folder / name for name in names if name.endswith(".py")]
        if folder == root:
            folders[:] = (name for name in folders if _is_stdlib(name, held_out))
            found = [file for file in found if _is_stdlib(file.stem, held_out)]
    return sorted(found)


def _is_stdlib(package: str, held_out: bool) -> bool:
    generated = package.startswith(("config-", "_sysconfigdata"))
    return not generated and (zlib.crc32(package.encode()) % 16 == 0) == held_out
