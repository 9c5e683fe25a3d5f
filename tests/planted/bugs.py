"""The planted bugs: one TOML file for each subject."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change of one place in one file."""

    name: str
    """What is wrong with it."""
    file: str
    """Relative to the repository, as is `test`."""
    old: str
    """Text that occurs once in the file."""
    new: str
    test: str
    """The test that fails: a file, or a file and the name of a function."""

    def planted_in(self, text: str) -> str:
        """`text` with the bug. Raises `ValueError` unless `old` occurs in it once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: found {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def read_bugs() -> list[Bug]:
    """All planted bugs, subject after subject."""
    return [
        Bug(**fields)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for fields in tomllib.loads(path.read_text(encoding="utf-8"))["bug"]
    ]
