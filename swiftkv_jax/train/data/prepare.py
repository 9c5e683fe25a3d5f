"""From a source to a store: read, tokenise and pack once, and use the result in every run with the
same data and tokenizer."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from ...cli.exit import log
from ...errors import DataError
from ...io.files import new_directory
from .dataset import ROWS, UNREADABLE, Manifest, Store, is_store, write_manifest, write_rows
from .documents import Unreadable
from .packing import pack
from .sources import DataSource, find_files, read_file
from .tokenize import Example, tokenize

MAX_UNREADABLE_SHARE = 0.01
_REPORTED_AT_ONCE = 10
_ROWS_BEFORE_STOP = 1000


def prepare(
    source: DataSource,
    tokenizer: Any,
    length: int,
    cache: Path,
    *,
    held_out: bool = False,
    max_unreadable_share: float = MAX_UNREADABLE_SHARE,
) -> Store:
    """The source as packed rows of `length` tokens: itself if it is a store, else one in `cache`,
    built if it is not there.

    A store in the cache is used again while the source's files (path, size, time of change), the
    tokenizer and the length are the same. With several processes all of them call this, and `cache`
    is a folder they share: process 0 builds. Raises `DataError`.
    """
    tokenizer_id = tokenizer_fingerprint(tokenizer)
    if is_store(Path(source.path)):
        return check_store(Store(Path(source.path)), length, tokenizer_id)

    def look_up() -> np.ndarray:
        key = _key(find_files(source, held_out=held_out), tokenizer_id, length)
        return np.array(
            [*np.frombuffer(key, np.uint32), is_store(cache / _folder(source, key))], np.uint32
        )

    *words, found = _on_process_0(look_up, np.zeros(5, np.uint32))
    path = cache / _folder(source, np.array(words, np.uint32).tobytes())
    if not found:
        return build(
            source,
            tokenizer,
            length,
            path,
            held_out=held_out,
            max_unreadable_share=max_unreadable_share,
        )
    store = check_store(Store(path), length, tokenizer_id)
    _check_share(source, store, max_unreadable_share)
    _log_once(f"{'held-out ' * held_out}{describe(store)}; prepared before")
    return store


def build(
    source: DataSource,
    tokenizer: Any,
    length: int,
    path: Path,
    *,
    held_out: bool = False,
    max_unreadable_share: float = MAX_UNREADABLE_SHARE,
) -> Store:
    """Prepare `source` as a new store at `path`, which appears complete or not at all. Arguments as
    for `prepare`.

    Raises `DataError`, or `UsageError` if `path` exists.
    """
    with new_directory(path) as partial:

        def write() -> None:
            files = find_files(source, held_out=held_out)
            write_manifest(
                partial, _write(partial, source, files, tokenizer, length, max_unreadable_share)
            )

        _on_process_0(write, None)
    store = Store(path)
    _log_once(f"{'held-out ' * held_out}{describe(store)}")
    return store


def check_store(store: Store, length: int, tokenizer_id: str) -> Store:
    """The store, if it fits the run. Raises `DataError`."""
    manifest = store.manifest
    if manifest.length != length:
        raise DataError(
            f"{store.path}: prepared with --max-length {manifest.length}, but the run has "
            f"--max-length {length}"
        )
    if manifest.tokenizer != tokenizer_id:
        raise DataError(
            f"{store.path}: prepared with another tokenizer or chat template than this model's; "
            f"prepare the data again"
        )
    return store


def describe(store: Store) -> str:
    """One line about a store."""
    found = store.manifest
    line = (
        f"{store.name}: {found.tokens:,} tokens ({found.targets:,} to predict) of "
        f"{found.documents:,} documents "
        f"in {found.rows:,} rows of {found.length:,}, {found.fill:.1%} full"
    )
    return line + (
        f"; {found.unreadable:,} unreadable, listed in {store.path / UNREADABLE}"
        if found.unreadable
        else ""
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides which tokens a document becomes."""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _key(files: list[Path], tokenizer_id: str, length: int) -> bytes:
    """16 bytes that name the store of these files in a cache."""
    return hashlib.sha256(
        json.dumps([_describe_files(files), tokenizer_id, length]).encode()
    ).digest()[:16]


def _folder(source: DataSource, key: bytes) -> str:
    return f"{source.name}-{key.hex()}"


def _describe_files(files: list[Path]) -> list[dict[str, Any]]:
    found = [(file, file.stat()) for file in files]
    return [
        {"path": str(file.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        for file, stat in found
    ]


def _write(
    folder: Path,
    source: DataSource,
    files: list[Path],
    tokenizer: Any,
    length: int,
    max_share: float,
) -> Manifest:
    """All of a store but its manifest, which is returned."""
    described = _describe_files(
        files
    )  # before reading: a file that changes meanwhile must not pass for what was read
    rows = itertools.chain.from_iterable(map(read_file, files))
    examples = tqdm(
        tokenize(rows, tokenizer),
        desc=f"preparing {source.name}",
        unit=" rows",
        leave=False,
        disable=None,
    )
    with (folder / UNREADABLE).open("w", encoding="utf-8", errors="backslashreplace") as report:
        sieve = _Sieve(source, max_share, report)
        totals = write_rows(folder / ROWS, pack(sieve.readable(examples), length), length)
    sieve.check()
    if not totals.targets:
        raise DataError(
            f"{source.path}: it holds no token to predict: it is empty, or every row is blank"
        )
    return Manifest(
        source=source.path,
        files=described,
        tokenizer=tokenizer_fingerprint(tokenizer),
        length=length,
        rows=totals.rows,
        documents=sieve.read - sieve.unreadable,
        unreadable=sieve.unreadable,
        tokens=totals.tokens,
        targets=totals.targets,
        fill=totals.tokens / (totals.rows * length),
        fingerprint=totals.fingerprint,
    )


class _Sieve:
    """Lets readable rows through; counts and reports the others, and stops when they are too
    many."""

    def __init__(self, source: DataSource, max_share: float, report: TextIO):
        self._source, self._max_share, self._report = source, max_share, report
        self._first = ""
        self.read = self.unreadable = 0

    def readable(self, rows: Iterable[Example | Unreadable]) -> Iterator[Example]:
        for row in rows:
            self.read += 1
            if isinstance(row, Unreadable):
                self._note(f"{row.origin}: {row.reason}".replace("\n", " "))
            else:
                yield row
            if self.read >= _ROWS_BEFORE_STOP:
                self.check()

    def check(self) -> None:
        _check_unreadable(self._source, self.unreadable, self.read, self._max_share, self._first)

    def _note(self, line: str) -> None:
        self.unreadable += 1
        self._first = self._first or line
        self._report.write(line + "\n")
        if self.unreadable <= _REPORTED_AT_ONCE:
            with tqdm.external_write_mode(file=sys.stderr):
                log(f"left out: {line}")


def _check_unreadable(
    source: DataSource, unreadable: int, read: int, max_share: float, first: str
) -> None:
    """Raise `DataError` if more than `max_share` of the rows read are unreadable."""
    if unreadable > max_share * read:
        raise DataError(
            f"{source.path}: {unreadable:,} of {read:,} rows cannot be read "
            f"({unreadable / read:.2%}); "
            f"--max-unreadable-share {max_share:g} allows fewer; the first: {first}"
        )


def _check_share(source: DataSource, store: Store, max_share: float) -> None:
    """The same check on a store that an earlier run built, perhaps with a wider limit."""
    found = store.manifest
    first = (store.path / UNREADABLE).read_text(encoding="utf-8").partition("\n")[0]
    _check_unreadable(
        source, found.unreadable, found.documents + found.unreadable, max_share, first
    )


def _log_once(message: str) -> None:
    """On process 0 only."""
    if jax.process_index() == 0:
        log(message)


def _on_process_0[T](work: Callable[[], T], otherwise: T) -> T:
    """What `work` returns on process 0, on every process. An error there is raised on all: none
    waits for a process that gave up.

    The result is a pytree of arrays shaped like `otherwise`.
    """
    if jax.process_count() == 1:
        return work()
    result, error = otherwise, None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    failed, result = multihost_utils.broadcast_one_to_all((np.int32(error is not None), result))
    if error is not None:
        raise error
    if failed:
        raise DataError("process 0 could not prepare the data; its message says why")
    return result
