"""Python source of installed packages, split by package, without near-duplicates.

The text is rebuilt from what `requirements.lock` pins and is not part of this repository.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from swiftkv_jax.process import files
from swiftkv_jax.train.data.sources import STDLIB, DataSource, find_files

PACKAGES = (
    STDLIB,
    *"absl-py anyio beartype etils filelock flax fonttools grain huggingface_hub jax jaxlib "
    "markdown-it-py matplotlib numpy openai orbax-checkpoint pillow pip psutil pydantic Pygments "
    "pytest rich scipy setuptools starlette transformers typer uvicorn".split(),
)
"""Their licences are Apache-2.0, BSD, MIT or PSF-like; each one's is written into corpus.json."""
HELD_OUT = ("click", "fsspec", "Jinja2", "optax", "packaging")
MIN_BYTES, MAX_BYTES = 2_000, 200_000
"""Sizes of a file: smaller ones are mostly imports, larger ones mostly tables."""
MAX_REPEATED = 0.5
"""Largest share of a file's lines that stand in files before it."""
_SKIPPED = frozenset({"_vendor", "_distutils", "__pycache__"})
_MIN_LINE = 20


@dataclasses.dataclass
class _Part:
    """What a package gives."""

    version: str
    licence: str
    held_out: bool
    files: int = 0
    bytes: int = 0
    left_out: int = 0
    """Files of an allowed size that repeat others."""


def write_corpus(folder: Path) -> None:
    """Make a folder of `train.jsonl`, `held-out.jsonl` (fields `name`, `text`) and `corpus.json`,
    which says what each package gave.

    Held-out packages are read first, so that a training file that repeats them is left out. Raises
    `importlib.metadata.PackageNotFoundError`.
    """
    parts, seen = dict[str, _Part](), set[bytes]()
    with (
        files.new_directory(folder) as made,
        (made / "held-out.jsonl").open("w", encoding="utf-8") as held_out,
        (made / "train.jsonl").open("w", encoding="utf-8") as train,
    ):
        for package in (*HELD_OUT, *PACKAGES):
            part = parts[package] = _part(package)
            for name, text in source_files(package):
                if repeats(text, seen):
                    part.left_out += 1
                    continue
                part.files += 1
                part.bytes += len(text.encode())
                line = json.dumps({"name": name, "text": text})
                print(line, file=held_out if part.held_out else train)
        document = {name: dataclasses.asdict(part) for name, part in parts.items()}
        files.write_json(made / "corpus.json", document)


def _part(package: str) -> _Part:
    if package == STDLIB:
        return _Part(sys.version.split()[0], "PSF-2.0", False)
    metadata = importlib.metadata.metadata(package)
    classifiers = [
        each.rpartition("::")[2].strip()
        for each in metadata.get_all("Classifier") or []
        if each.startswith("License ::")
    ]
    licence = metadata.get("License-Expression") or ", ".join(classifiers) or metadata["License"]
    name = " ".join(licence.strip().split("\n")[0].split())  # some give the whole text
    return _Part(metadata["Version"], name, package in HELD_OUT)


def source_files(package: str) -> Iterator[tuple[str, str]]:
    """(name, text) of a package's files of an allowed size, by name."""
    if package == STDLIB:
        found = find_files(DataSource(STDLIB))
        named = [(f"{file.parent.name}/{file.name}", file) for file in found]
    else:
        distribution = importlib.metadata.distribution(package)
        named = [
            (str(file), Path(str(distribution.locate_file(file))))
            for file in sorted(distribution.files or [])
            if file.suffix == ".py" and not _SKIPPED.intersection(file.parts)
        ]
    for name, file in named:
        if MIN_BYTES <= file.stat().st_size <= MAX_BYTES:
            try:
                yield name, file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def repeats(text: str, seen: set[bytes]) -> bool:
    """Whether most lines of a file stand in others; if not, its own are added to `seen`."""
    lines = {
        hashlib.blake2b(line.encode(), digest_size=8).digest()
        for line in map(str.strip, text.splitlines())
        if len(line) >= _MIN_LINE
    }
    if len(lines & seen) > MAX_REPEATED * len(lines):
        return True
    seen |= lines
    return not lines
