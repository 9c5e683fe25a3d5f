"""Cards of datasets on the Hugging Face Hub, which may declare the files of each split: the
metadata at the beginning of `README.md`.

https://huggingface.co/docs/hub/datasets-manual-configuration
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from .formats import reader_for
from .splits import split_files

_CARD = "README.md"
_LINE = "---"


def is_on_the_hub(folder: Path) -> bool:
    """Return whether the folder has a card with metadata."""
    card = folder / _CARD
    return card.is_file() and card.read_bytes().startswith(_LINE.encode())


@dataclasses.dataclass(frozen=True)
class _Configuration:
    name: str
    """`default` of the default one."""
    folder: Path
    """`data_dir`: where its files lie."""
    patterns: dict[str, list[str]]
    """`data_files` of each split. Without any, all files of `data_dir` are meant."""

    @property
    def place(self) -> Path:
        """A path that names its files."""
        return self.folder / next(iter(self.patterns.values()))[0] if self.patterns else self.folder

    def splits(self, kinds: Sequence[Sequence[Path]]) -> dict[str, list[Path]]:
        if self.patterns:
            return {
                split: [
                    Path(file)
                    for pattern in patterns
                    for file in sorted(glob.glob(str(self.folder / pattern), recursive=True))
                    if reader_for(Path(file))
                ]
                for split, patterns in self.patterns.items()
            }
        inside = ([file for file in kind if self.folder in file.parents] for kind in kinds)
        files = next(filter(None, inside), [])
        return split_files(self.folder, files) or {"train": files}


def declared_splits(folder: Path, kinds: Sequence[Sequence[Path]]) -> dict[str, list[Path]]:
    """The files of each split that the card of `folder` declares, in the only configuration, or in
    the default one of several, as far as their formats are known; empty if it declares none.

    `kinds` are the folder's files that could be read, by kind. Of a `data_dir` the first kind that
    is in it is read. Raises `DataError` if it is not clear which configuration is meant."""
    configs = {
        config.name: config
        for config in _configurations(folder)
        if config.patterns or config.folder != folder
    }
    chosen = configs.get("default") or next(iter(configs.values()), None)
    if len(configs) > 1 and "default" not in configs:
        places = " or ".join(str(config.place) for config in configs.values())
        raise DataError(
            f"{folder}: its configurations are {', '.join(configs)}, none of them the default: "
            f"name the files of one, {places}"
        )
    return chosen.splits(kinds) if chosen else {}


def _configurations(folder: Path) -> Iterator[_Configuration]:
    for config in _metadata(folder).get("configs") or []:
        if isinstance(config, Mapping):
            name = "default" if config.get("default") else config.get("config_name", "default")
            place = folder / os.path.normpath(str(config.get("data_dir") or "."))
            yield _Configuration(str(name), place, _patterns(config.get("data_files")))


def _metadata(folder: Path) -> Mapping[str, Any]:
    import yaml

    text = (folder / _CARD).read_text(encoding="utf-8", errors="replace")
    metadata = re.match(rf"{_LINE}\s*\n(.*?\n){_LINE}\s*$", text, re.DOTALL | re.MULTILINE)
    try:
        found = metadata and yaml.safe_load(metadata[1])
    except yaml.YAMLError:
        raise DataError(
            f"{folder / _CARD}: its metadata are not valid YAML; name the files to read"
        ) from None
    return found if isinstance(found, Mapping) else {}


def _patterns(files: Any) -> dict[str, list[str]]:
    """`data_files` of a configuration: one pattern or several, of which those without a split are
    for training."""
    if isinstance(files, Mapping):
        return {str(split): _list(paths) for split, paths in files.items()}
    found: dict[str, list[str]] = {}
    for one in _list(files):
        if not isinstance(one, Mapping):
            one = {"split": "train", "path": one}
        found.setdefault(str(one.get("split")), []).extend(_list(one.get("path")))
    return found


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]
