"""Files of a folder that are read: those of a dataset, without its card and with one of its splits,
or all text."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...errors import DataError
from .cards import declared_splits, is_on_the_hub
from .formats import is_json, is_text, is_unread_data, known_suffixes, reader_for
from .splits import choose_split, split_files

logger = logging.getLogger(__name__)

_CARD = re.compile(
    r"(?:readme|dataset[-_ ]?card|datasheet|licen[sc]es?|copying|copyright|notice|citation|authors|"
    r"changelog|changes|contributing|code[-_ ]of[-_ ]conduct|security|requirements)(?:[-_. ].*)?",
    re.IGNORECASE,
)
"""Names of text about a folder's files, in any language (`README_zh.md`) and format."""
_ABOUT = frozenset("config dataset_info dataset_infos dataset_dict state".split())
"""The same of JSON files."""


def folder_files(folder: Path, *, held_out: bool) -> list[Path]:
    """Files of known formats, recursively, by name; hidden files and folders are left out.

    * Beside files of rows or of data in a format that is not read, and under a card of the Hugging
      Face Hub, which begins with `---`, no card is read (`README.md`, `LICENSE.txt`). Under a card
      of the Hub rows are read without any text beside them.
    * Of several splits the one for training is read, or with `held_out` one to measure on
      (`splits.choose_split`). The card declares them (`cards.declared_splits`), or names of files
      and folders tell them (`splits.split_files`).
    * `.json` files are rows where nothing else is.

    Raises `DataError` if the split is not clear, if all data is in formats that are not read, or a
    dataset that `datasets.save_to_disk` wrote is damaged.
    """
    walked = dict(_walk(folder, held_out))
    found = [file for file, is_read in walked.items() if is_read]
    rows = [file for file in found if not (is_text(file) or is_json(file))]
    texts = [file for file in found if is_text(file)]
    own = [file for file in texts if not _CARD.fullmatch(file.name)]
    objects = [
        file
        for file in found
        if is_json(file) and file.name.partition(".")[0].lower() not in _ABOUT
    ]
    on_the_hub = is_on_the_hub(folder)
    unread = [file for file, is_read in walked.items() if not is_read and is_unread_data(file)]
    if not (rows or objects) and (on_the_hub or not own):
        others = [file for file in walked if not (walked[file] or _CARD.fullmatch(file.name))]
        _refuse(folder, unread or ([] if own else others))
    if unread:
        _say(f"{folder}: {_names(folder, unread)} not read: the format is unknown", logging.WARNING)
    if on_the_hub and (splits := declared_splits(folder, [rows, objects, own])):
        return _of_split(folder, splits, rows or objects or own, held_out)
    if not rows and not own and objects:
        return _of_split(folder, split_files(folder, objects), objects, held_out)
    if objects:
        _say(f"{folder}: .json files are not read beside other files: name them to read them")
    if not rows:
        splits = split_files(folder, own or texts)
        # Source code has folders `test` too; these folders hold nothing but splits.
        is_split = "train" in splits and sum(map(len, splits.values())) == len(own or texts)
        if is_split:
            return _of_split(folder, splits, own or texts, held_out)
        return own if on_the_hub or unread else texts
    chosen = set(_of_split(folder, split_files(folder, rows), rows, held_out))
    if own and on_the_hub:
        _say(f"{folder}: a dataset of the Hugging Face Hub: its text files are not read")
        own = []
    chosen |= set(own)
    return [file for file in found if file in chosen]


def _refuse(folder: Path, unread: Sequence[Path]) -> None:
    """Raise `DataError` if there are files that are not read: nothing beside them is data."""
    if unread:
        raise DataError(
            f"{folder}: {_names(folder, unread)} not read: convert to a format that is, one of "
            f"{known_suffixes()}, or name the files to read"
        )


def _names(folder: Path, files: Sequence[Path]) -> str:
    """`a.csv is`, `a.csv and 2 others are`: the subject of a sentence."""
    first = files[0].relative_to(folder).as_posix()
    others = len(files) - 1
    return f"{first} and {others} other{'s' * (others > 1)} are" if others else f"{first} is"


def _of_split(
    folder: Path, splits: Mapping[str, list[Path]], files: Sequence[Path], held_out: bool
) -> list[Path]:
    """Return those of `files` that are read: the files of a split, or all where there are no
    splits."""
    if not splits:
        return list(files)
    split = choose_split(folder, splits, held_out=held_out)
    chosen = splits[split]
    if len(chosen) < len(files):
        _say(
            f"{folder}: reading its split {split}, {len(chosen)} of {len(files)} files; the splits "
            f"are {', '.join(splits)}"
        )
    return chosen


def _walk(folder: Path, held_out: bool) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether its format is known."""
    for root, folders, files in os.walk(folder):
        here = Path(root)
        if (here / "dataset_dict.json").is_file():
            splits = {name: [here / name] for name in sorted(folders) if not name.startswith(".")}
            split = choose_split(here, splits, held_out=held_out)
            _say(f"{here}: reading its split {split}; the splits are {', '.join(splits)}")
            folders[:] = [split]
            continue
        if (here / "state.json").is_file() and (here / "dataset_info.json").is_file():
            folders.clear()
            yield from ((file, True) for file in _dataset_files(here))
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield here / name, reader_for(here / name) is not None


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


@functools.cache
def _say(line: str, level: int = logging.INFO) -> None:
    """Log a line once: the files of a source are looked up more than once."""
    logger.log(level, "%s", line)
