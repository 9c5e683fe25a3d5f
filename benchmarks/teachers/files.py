"""Where a teacher, the text it learned from and the text held out are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiftkv_jax.errors import UsageError
from swiftkv_jax.train.data.documents import Document
from swiftkv_jax.train.data.sources import STDLIB, DataSource, find_files, read_file
from swiftkv_jax.train.recipe import DEMO


@dataclasses.dataclass(frozen=True)
class TeacherFiles:
    """A teacher's checkpoint and its text."""

    name: str
    model: Path
    train: DataSource
    held_out: DataSource
    """Of the standard library that is its held-out packages."""

    @classmethod
    def demo(cls) -> TeacherFiles:
        """The model inside the package."""
        return cls("demo", Path(DEMO.model), DataSource(STDLIB), DataSource(STDLIB))

    @classmethod
    def of(cls, folder: Path) -> TeacherFiles:
        """What `python -m benchmarks.teachers` made in a folder, or is to make."""
        train, held_out = (
            DataSource(str(folder / "corpus" / name)) for name in ("train.jsonl", "held-out.jsonl")
        )
        return cls(folder.name, folder / "llama", train, held_out)

    def check(self) -> None:
        """Raise `UsageError` unless the teacher is complete."""
        for path in (self.model, *(Path(s.path) for s in (self.train, self.held_out))):
            if str(path) != STDLIB and not path.exists():
                raise UsageError(
                    f"{path}: no such file or folder; python -m benchmarks.teachers makes it"
                )

    @property
    def description(self) -> dict[str, Any]:
        """Its name, and how it was made where `benchmarks.teachers` made it."""
        file = self.model.parent / "teacher.json"
        made = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {"name": self.name} | made

    def held_out_texts(self) -> Iterator[tuple[str, str]]:
        """(name, text) of every held-out document."""
        return documents(self.held_out, held_out=True)


def documents(source: DataSource, *, held_out: bool = False) -> Iterator[tuple[str, str]]:
    """(name, text) of a source's documents of plain text."""
    for file in find_files(source, held_out=held_out):
        for document in read_file(file):
            if isinstance(document, Document) and document.text is not None:
                yield "/".join(Path(document.origin).parts[-2:]), document.text
