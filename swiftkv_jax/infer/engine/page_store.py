"""The disk tier of the prefix cache: pages in files, which outlive the process.

A file holds one page, and its path is the index: the folder stands for all that the bytes depend on
(weights, configuration, format of the cache), the name is the page's key. A file is written under
another name and then renamed, so it is whole or not there; a checksum finds what has changed since.
Whatever is wrong with a file or a disk, it is a miss.

Files are read and written in threads. The other calls are for the engine's thread.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import os
import queue
import re
import struct
import threading
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Buffer, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...errors import UsageError

logger = logging.getLogger(__name__)

MAGIC = b"swiftkv1"
FINGERPRINT_BYTES = 16
HEADER = struct.Struct(f"<8s{FINGERPRINT_BYTES}s32sQI4x")
"""Magic, fingerprint, key, bytes of the page, their CRC-32."""
MAX_UNWRITTEN = 32
"""Pages that wait to be written; more of them are not."""
READERS = 4
"""Files that are read at a time."""
_NAME = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")
_PARTIAL = ".partial"


class PageStore:
    """Files of at most `limit` bytes together; the longest unused ones make room."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        fingerprint: bytes,
        *,
        encode: Callable[[Any], Sequence[Buffer]],
        decode: Callable[[memoryview], Any],
    ):
        """Read the names of the files in `folder`, which no other process may use meanwhile.

        `fingerprint` identifies what the bytes depend on. `encode` turns a page into bytes and
        `decode` turns them back, in a thread; it raises `ValueError` if they are not those of a
        page. Raises `UsageError` if another process uses the folder, and `OSError`.
        """
        self.fingerprint = fingerprint
        self.saved = 0
        """Pages that were written."""
        self.loaded = 0
        """Pages that were read."""
        self.misses: collections.Counter[str] = collections.Counter()
        """Pages that could not be read or written, by the reason."""
        self._folder = folder
        self._limit = limit
        self._encode = encode
        self._decode = decode
        self._lock = threading.Lock()
        """Lock of the fields that the threads change."""
        # Path within the folder -> bytes, the longest unused first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        self._unwritten: set[tuple[bytes, bytes]] = set()
        self._read: queue.SimpleQueue[tuple[bytes, bytes, Any]] = queue.SimpleQueue()
        self._waited: list[tuple[bytes, bytes, Any]] = []
        owner = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._unlock = weakref.finalize(self, os.close, owner)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._unlock()
            raise UsageError(
                f"`prefix_cache_dir`={folder}: another process uses it", option="prefix_cache_dir"
            ) from None
        self._scan()
        self._make_room(0)
        self._writer = ThreadPoolExecutor(1, "pages to disk")
        self._readers = ThreadPoolExecutor(READERS, "pages from disk")

    def __len__(self) -> int:
        """Return the number of files, those of other fingerprints included."""
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._name(self.fingerprint, key) in self._sizes

    # Writing ------------------------------------------------------------------

    def write(self, key: bytes, page: Any) -> None:
        """Begin to write a page, unless it is there or too many wait."""
        entry = self.fingerprint, key
        with self._lock:
            if self._name(*entry) in self._sizes or entry in self._unwritten:
                return
            if len(self._unwritten) >= MAX_UNWRITTEN:
                self.misses["queue"] += 1
                return
            self._unwritten.add(entry)
        self._writer.submit(self._write, *entry, page)

    def wait_written(self, most_left: int, deadline: float) -> bool:
        """Wait until at most so many pages have still to be written. Returns False from `deadline`
        on, by `time.monotonic`."""
        while time.monotonic() < deadline:
            if len(self._unwritten) <= most_left:
                return True
            time.sleep(0.002)
        return False

    def _write(self, fingerprint: bytes, key: bytes, page: Any) -> None:
        """Write one page: in a thread."""
        name = self._name(fingerprint, key)
        try:
            parts = self._encode(page)
            size, checksum = 0, 0
            for part in parts:
                size += memoryview(part).nbytes
                checksum = zlib.crc32(part, checksum)
            self._make_room(HEADER.size + size)
            header = HEADER.pack(MAGIC, fingerprint, key, size, checksum)
            self._write_file(self._folder / name, [header, *parts])
            with self._lock:
                self._sizes[name] = HEADER.size + size
                self._total += HEADER.size + size
                self.saved += 1
        except Exception as error:  # of the file system, or of the device
            self._missed("write", name, error)
        finally:
            with self._lock:
                self._unwritten.discard((fingerprint, key))

    def _write_file(self, path: Path, parts: Sequence[Buffer]) -> None:
        partial = path.with_suffix(_PARTIAL)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with partial.open("wb") as file:
                for part in parts:
                    file.write(part)
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        """Remove the longest unused files until `size` bytes more fit."""
        dropped = []
        with self._lock:
            while self._sizes and self._total + size > self._limit:
                name, old = self._sizes.popitem(last=False)
                self._total -= old
                dropped.append(name)
        for name in dropped:
            (self._folder / name).unlink(missing_ok=True)

    # Reading ------------------------------------------------------------------

    def read(self, key: bytes) -> None:
        """Begin to read a page."""
        self._readers.submit(self._read_file, self.fingerprint, key)

    def wait_read(self, seconds: float) -> None:
        """Wait until a page has been read, for so many seconds at most."""
        if not self._waited:
            try:
                self._waited.append(self._read.get(timeout=seconds))
            except queue.Empty:
                pass

    def take_read(self) -> list[tuple[bytes, Any]]:
        """(key, page, None for a miss) of each that has been read since the last call."""
        found, self._waited = self._waited, []
        while not self._read.empty():
            found.append(self._read.get())
        return [(key, page) for fingerprint, key, page in found if fingerprint == self.fingerprint]

    def _read_file(self, fingerprint: bytes, key: bytes) -> None:
        """Read one page: in a thread."""
        name = self._name(fingerprint, key)
        page = None
        try:
            page = self._page(fingerprint, key, (self._folder / name).read_bytes())
            with self._lock:
                if name in self._sizes:
                    self._sizes.move_to_end(name)
                self.loaded += 1
            with contextlib.suppress(OSError):
                os.utime(self._folder / name)
        except Exception as error:  # of the file system, or of the device
            self._missed("damaged" if isinstance(error, ValueError) else "read", name, error)
            if isinstance(error, ValueError | FileNotFoundError):  # another may pass
                self._remove(name)
        finally:
            self._read.put((fingerprint, key, page))

    def _page(self, fingerprint: bytes, key: bytes, content: bytes) -> Any:
        """The page in a file. Raises `ValueError` if the file does not hold it."""
        body = memoryview(content)[HEADER.size :]
        if len(content) < HEADER.size or HEADER.unpack_from(content) != (
            *(MAGIC, fingerprint, key),
            *(len(body), zlib.crc32(body)),
        ):
            raise ValueError("its content is not what was written")
        return self._decode(body)

    # Files --------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, once what was begun is done, and let other processes use the folder."""
        self._writer.shutdown()
        self._readers.shutdown()
        self._unlock()

    @staticmethod
    def _name(fingerprint: bytes, key: bytes) -> str:
        return f"{fingerprint.hex()}/{key[:1].hex()}/{key.hex()}"

    def _scan(self) -> None:
        """Find the files of earlier processes, and remove those that they began to write."""
        found = []
        for folder, _, names in os.walk(self._folder):
            for one in names:
                path = Path(folder, one)
                name = path.relative_to(self._folder).as_posix()
                if name.endswith(_PARTIAL) and _NAME.fullmatch(name.removesuffix(_PARTIAL)):
                    path.unlink(missing_ok=True)
                elif _NAME.fullmatch(name):
                    status = path.stat()
                    found.append((status.st_mtime_ns, name, status.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._total += size

    def _remove(self, name: str) -> None:
        with self._lock:
            self._total -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _missed(self, reason: str, name: str, error: Exception) -> None:
        """Count a page that could not be read or written; the first of each reason is logged."""
        with self._lock:
            self.misses[reason] += 1
            first = self.misses[reason] == 1
        if first:
            logger.warning("prefix cache on disk: %s (%s): %s", name, reason, error)
