"""English and code from the packages installed on this machine, split by package.

The packages are those of `packages`: code is their Python source, English the
prose of their docstrings and of the descriptions in their metadata. Text of held-out packages is
never trained on. The text is rebuilt from the packages and is not part of this repository.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from swiftkv_jax.process import files
from swiftkv_jax.train.data.sources import STDLIB

from .packages import HELD_OUT, PACKAGES, repeats, source_files

ENGLISH = "english"
CODE = "code"
KINDS = (ENGLISH, CODE)
TRAIN = "train.jsonl"

MIN_PARAGRAPH = 120
"""Characters of a paragraph: shorter ones are mostly titles and lists of arguments."""
MIN_DOCUMENT = 1_500
"""Characters of an English document."""
MIN_LETTERS = 0.75
"""Share of letters and spaces in prose."""

logger = logging.getLogger("swiftkv_jax.benchmarks")

Document = tuple[str, str, str]
"""(package or kind, name, text)."""


def held_out_documents(kind: str) -> list[Document]:
    """The held-out documents of a kind, package after package."""
    return list(_documents(kind, HELD_OUT, set()))


def in_turn(documents: Iterable[Document], seed: int) -> Iterator[Document]:
    """One document of each package (or kind) before the next of any, each one's in random
    order."""
    of_package = dict[str, list[Document]]()
    for document in documents:
        of_package.setdefault(document[0], []).append(document)
    rng = np.random.default_rng(seed)
    shuffled = [[found[i] for i in rng.permutation(len(found))] for found in of_package.values()]
    for number in range(max(map(len, shuffled), default=0)):
        yield from (found[number] for found in shuffled if number < len(found))


def write_training_text(folder: Path) -> None:
    """Make a folder of `train.jsonl` (fields `kind`, `name`, `text`) and `corpus.json`, the
    characters of each kind. Files that repeat others, or held-out ones, are left out."""
    seen = set[bytes]()
    count = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for _ in _documents(kind, HELD_OUT, seen):
            pass
    with files.new_directory(folder) as made, (made / TRAIN).open("w", encoding="utf-8") as train:
        for package in PACKAGES:
            for kind in KINDS:
                for _, name, text in _documents(kind, [package], seen):
                    count[kind] += len(text)
                    print(json.dumps({"kind": kind, "name": name, "text": text}), file=train)
        files.write_json(made / "corpus.json", {"characters": count, "packages": list(PACKAGES)})
    logger.info("%s: %s characters", folder, count)


def training_documents(folder: Path) -> list[Document]:
    """(kind, name, text) of what `write_training_text` wrote; it is written if it is not there."""
    if not folder.exists():
        write_training_text(folder)
    with (folder / TRAIN).open(encoding="utf-8") as lines:
        found = map(json.loads, lines)
        return [(line["kind"], line["name"], line["text"]) for line in found]


def write_held_out(file: Path, seed: int) -> None:
    """Write the held-out documents, English and code in turn, as JSONL (fields as those of
    `write_training_text`)."""
    found = [(kind, *document[1:]) for kind in KINDS for document in held_out_documents(kind)]
    lines = (
        json.dumps({"kind": kind, "name": name, "text": text}) + "\n"
        for kind, name, text in in_turn(found, seed)
    )
    files.write_atomic(file, "".join(lines).encode())


def _documents(kind: str, packages: Sequence[str], seen: set[bytes]) -> Iterator[Document]:
    for package in packages:
        found = source_files(package) if kind == CODE else english(package)
        for name, text in found:
            if not repeats(text, seen):
                yield package, name, text


def english(package: str) -> Iterator[tuple[str, str]]:
    """(name, text) of the prose of a package's description and of each of its files."""
    for name, parts in _prose_sources(package):
        paragraphs = [text for part in parts for text in prose(part)]
        text = "\n\n".join(dict.fromkeys(paragraphs))
        if len(text) >= MIN_DOCUMENT:
            yield f"{name} (prose)", text


def _prose_sources(package: str) -> Iterator[tuple[str, Iterable[str]]]:
    if package != STDLIB:
        yield f"{package} METADATA", [_description(package)]
    for name, text in source_files(package):
        yield name, docstrings(text)


def _description(package: str) -> str:
    """The long description in a package's metadata."""
    return str(importlib.metadata.metadata(package).json.get("description", ""))


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of Python source; none of what does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a text that are sentences: not code, tables, lists or titles."""
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c == " " for c in joined)
        if (
            len(joined) >= MIN_PARAGRAPH
            and letters >= MIN_LETTERS * len(joined)
            and joined[0].isupper()
            and joined[-1] in ".:)"
        ):
            yield joined
