"""Splits of a dataset folder: which of its files are for training.

Names tell, as in Hugging Face datasets (`datasets/data_files.py`): `data/NAME-00000-of-00001.EXT`,
else folders whose name has a word of `KEYWORDS`, else files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import DataError

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words that name it, between characters of `_SEPARATORS`."""
_SEPARATORS = r"[-._ 0-9]"
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_HELD_OUT = ("validation", "test")
"""Splits to measure on, the first that there is."""


def split_files(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of each split, by the names below `folder`; empty if none tells of a split."""
    names = {file: file.relative_to(folder).as_posix() for file in files}
    shards = {file: found[1] for file, name in names.items() if (found := _SHARD.fullmatch(name))}
    by_shard = {
        split: [file for file in shards if shards[file] == split] for split in shards.values()
    }
    if by_shard:
        return by_shard
    for is_folder in (True, False):
        found = {
            split: [file for file in files if _is_named(names[file], split, is_folder)]
            for split in KEYWORDS
        }
        if any(found.values()):
            return {split: of_split for split, of_split in found.items() if of_split}
    return {}


def choose_split(folder: Path, splits: Mapping[str, Sequence[Path]], *, held_out: bool) -> str:
    """The split to train on, or with `held_out` to measure on. Raises `DataError` if there is none,
    or more than one to choose from."""
    for wanted in _HELD_OUT if held_out else ("train",):
        named = [split for split in splits if _has_word(split, wanted)]
        if wanted in splits:
            return wanted
        if len(named) == 1:
            return named[0]
        if named:
            raise _ambiguous(folder, splits, named, f"{len(named)} of which are named {wanted}")
    if held_out and len(splits) == 1:
        return next(iter(splits))
    purpose = "to measure on" if held_out else "for training"
    raise _ambiguous(folder, splits, list(splits), f"none of which is {purpose} by its name")


def _ambiguous(
    folder: Path, splits: Mapping[str, Sequence[Path]], candidates: list[str], reason: str
) -> DataError:
    places = " or ".join(_place(splits[split]) for split in candidates)
    return DataError(f"{folder}: its splits are {', '.join(splits)}, {reason}: name {places}")


def _place(files: Sequence[Path]) -> str:
    """A path that names these files."""
    if len(files) == 1:
        return str(files[0])
    return os.path.commonprefix([str(file) for file in files]) + "*"


def _is_named(name: str, split: str, is_folder: bool) -> bool:
    """Return whether a folder of the path `name`, or its file, names the split."""
    *folders, file = name.split("/")
    return any(_has_word(part, split) for part in (folders if is_folder else [file]))


def _has_word(name: str, split: str) -> bool:
    words = "|".join(KEYWORDS[split])
    pattern = rf"(?:^|{_SEPARATORS})(?:{words})(?:{_SEPARATORS}|$)"
    return re.search(pattern, name, re.IGNORECASE) is not None
