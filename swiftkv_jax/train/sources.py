"""Where training text comes from: files, folders, JSONL, and the standard library as the embedded default.

A source yields tokenised examples. Chat rows are masked so that only assistant tokens are targets; the mask is the
difference between two renderings of the conversation, so it follows any prefix-stable chat template.
"""

from __future__ import annotations

import dataclasses
import json
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from ..errors import DataError

STDLIB = "stdlib"
_TEXT_SUFFIXES = frozenset(".c .cc .cpp .cu .go .h .hpp .java .js .md .py .rs .rst .sh .toml .ts .txt .yaml .yml".split())
# Generated tables, vendored wheels and tests teach little and would take most of the budget.
_STDLIB_SKIPPED = frozenset(
    "test tests idle_test turtledemo site-packages dist-packages encodings ensurepip lib2to3 __pycache__ pydoc_data".split()
)


@dataclasses.dataclass(frozen=True)
class Document:
    """One unit of text, or one conversation, before tokenisation."""

    origin: str
    """`file` or `file:line`, for messages."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Example:
    """One tokenised document."""

    tokens: np.ndarray
    """i32[n]"""
    is_target: np.ndarray
    """bool[n]; True where the token is to be predicted."""


def read(source: str, *, held_out: bool = False) -> Iterator[Document]:
    """Documents of a `.jsonl` file, a text file, a folder of text files, or `stdlib`.

    `held_out` selects the standard library's held-out packages and is meaningless for other sources. Raises `DataError`
    for a path that does not exist, holds no text, or has a malformed row.
    """
    if source == STDLIB:
        yield from _stdlib(held_out)
        return
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such file or folder")
    suffixes = _TEXT_SUFFIXES | {".jsonl"}
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    found = False
    for file in files:
        for document in _jsonl(file) if file.suffix == ".jsonl" else _text(file):
            found = True
            yield document
    if not found:
        raise DataError(f"{source}: no text in it; expected .jsonl rows or files ending in {' '.join(sorted(_TEXT_SUFFIXES))}")


def tokenize(documents: Iterable[Document], tokenizer) -> Iterator[Example]:
    """Examples in the order of the documents. Text gets the tokenizer's own special tokens and an end token."""
    for document in documents:
        if document.messages is not None:
            yield _tokenize_chat(document, tokenizer)
        else:
            tokens = tokenizer(document.text, verbose=False)["input_ids"]
            if tokenizer.eos_token_id is not None:
                tokens = [*tokens, tokenizer.eos_token_id]
            yield Example(np.array(tokens, np.int32), np.ones(len(tokens), bool))


def _tokenize_chat(document: Document, tokenizer) -> Example:
    """Assistant turns are the targets: all that a turn adds to the rendering that ends with the generation prompt."""
    messages = document.messages or []

    def render(turns: list[dict[str, Any]], generation_prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise DataError(f"{document.origin}: the chat template refuses these messages ({error})") from None

    if tokenizer.chat_template is None:
        raise DataError(f"{document.origin}: this tokenizer has no chat template, so rows with `messages` cannot be rendered")
    text = render(messages, False)
    spans = []
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = render(messages[:turn], True), render(messages[: turn + 1], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(f"{document.origin}: the chat template rewrites earlier turns, so answer {turn} cannot be located")
        spans.append((len(before), len(after)))
    if not spans:
        raise DataError(f"{document.origin}: no message with role 'assistant', so nothing to learn")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    is_target = [any(start < stop and start >= a and stop <= b for a, b in spans) for start, stop in encoded["offset_mapping"]]
    return Example(np.array(encoded["input_ids"], np.int32), np.array(is_target, bool))


def _text(file: Path) -> Iterator[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if text.strip():
        yield Document(origin=str(file), text=text)


def _jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            origin = f"{file}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except json.JSONDecodeError as error:
                raise DataError(f"{origin}: not valid JSON ({error.msg} at column {error.colno})") from None
            except RecursionError:
                raise DataError(f"{origin}: not valid JSON (nested too deeply)") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start})") from None
            yield _row(row, origin)


def _row(row: Any, origin: str) -> Document:
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return Document(origin, text=row["text"])
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return Document(origin, messages=messages)
    raise DataError(f'{origin}: expected {{"text": "..."}} or {{"messages": [{{"role": "...", "content": "..."}}]}}')


def _stdlib(held_out: bool) -> Iterator[Document]:
    """Python files of the running interpreter's standard library. One package in sixteen is held out, chosen by name."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _STDLIB_SKIPPED.intersection(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        package = parts[0].removesuffix(".py")
        if (zlib.crc32(package.encode()) % 16 == 0) == held_out:
            yield from _text(file)
