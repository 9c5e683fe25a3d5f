"""The disk tier of the prefix cache: pages in files, which outlive the process.

A file holds one page, and its path is the index: the folder stands for all that the bytes depend on
(weights, configuration, format of the cache), the name is the page's key. A file is written under
another name and then renamed, so it is whole or not there; a checksum finds what has changed since.
Whatever is wrong with a file or a disk, it is a miss.

Files are read and written in threads, for which no process stays at its end. The other calls are
for the engine's thread.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
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
from pathlib import Path
from typing import Any

from ...errors import UsageError

logger = logging.getLogger(__name__)

MAGIC = b"swiftkv1"
FINGERPRINT_BYTES = 16
HEADER = struct.Struct(f"<8s{FINGERPRINT_BYTES}s32sQI4x")
"""Magic, fingerprint, key, bytes of the page, their CRC-32."""
MAX_UNWRITTEN = 16
"""Most pages that wait to be written. They may have left their slots in host memory by then."""
READERS = 4
"""Files that are read at a time."""
TOUCH_SECONDS = 60.0
"""Time between two updates of the times of files whose pages are used on the device or the host."""
EXIT_SECONDS = 5.0
"""Time that the threads have at the end of the process."""
_NAME = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")
_PARTIAL = ".partial"
type _Tasks = queue.SimpleQueue[Callable[[], None] | None]


class PageStore:
    """Files of at most `limit` bytes together; the longest unused ones make room."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        fingerprint: bytes,
        page_bytes: int,
        *,
        encode: Callable[[Any], Sequence[Buffer]],
        decode: Callable[[memoryview], Any],
    ):
        """Read the names of the files in `folder`, which no other process may use meanwhile.

        `fingerprint` identifies what the bytes depend on. `encode` turns a page into `page_bytes`
        bytes and `decode` turns them back, in a thread. Raises `UsageError` if another process uses
        the folder, and `OSError`.
        """
        self.fingerprint = fingerprint
        self.saved = 0
        """Pages that were written."""
        self.loaded = 0
        """Pages that were read."""
        self.misses: collections.Counter[str] = collections.Counter()
        """Pages that could not be read or written, by the reason."""
        self.capacity = limit // (HEADER.size + page_bytes)
        """Pages that there is room for."""
        self.on_written: Callable[[], object] = lambda: None
        """Called in a thread when a page is no longer waiting to be written."""
        self._folder = folder
        self._limit = limit
        self.page_bytes = page_bytes
        """Bytes of a page, without those that are written in front of them."""
        self._encode = encode
        self._decode = decode
        self._lock = threading.Lock()
        """Lock of the fields that the threads change."""
        # Path within the folder -> bytes, the longest unused first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        self._unwritten: set[tuple[bytes, bytes]] = set()
        # Those that were used since `_touched_at`, the last used last.
        self._used: OrderedDict[bytes, None] = OrderedDict()
        self._touched_at = -TOUCH_SECONDS
        self._read: queue.SimpleQueue[tuple[bytes, bytes, Any]] = queue.SimpleQueue()
        self._waited: list[tuple[bytes, bytes, Any]] = []
        self._writes: _Tasks = queue.SimpleQueue()
        self._reads: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        owner = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._end = weakref.finalize(self, _end, self._writes, self._reads, owner)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._end()
            if not isinstance(error, BlockingIOError):
                error.filename = str(folder)  # flock names none
                raise
            raise UsageError(
                f"`prefix_cache_dir`={folder}: another process uses it", option="prefix_cache_dir"
            ) from None
        self._scan()
        self._make_room(0)
        for tasks in (self._writes, *[self._reads] * READERS):
            name = "pages to disk" if tasks is self._writes else "pages from disk"
            self._threads.append(threading.Thread(None, _run, name, (tasks,), daemon=True))
            self._threads[-1].start()

    def __len__(self) -> int:
        """Return the number of files, those of other fingerprints included."""
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._name(self.fingerprint, key) in self._sizes

    # Writing ------------------------------------------------------------------

    def write(self, key: bytes, page: Any) -> bool:
        """Begin to write a page, unless it is there. Returns False if too many wait."""
        entry = self.fingerprint, key
        with self._lock:
            if self._name(*entry) in self._sizes or entry in self._unwritten:
                return True
            if len(self._unwritten) >= MAX_UNWRITTEN:
                return False
            self._unwritten.add(entry)
        self._writes.put(functools.partial(self._write, *entry, page))
        return True

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
            self.on_written()

    def _write_file(self, path: Path, parts: Sequence[Buffer]) -> None:
        partial = path.with_suffix(_PARTIAL)
        try:
            for folder in (path.parent.parent, path.parent):  # the cache's own is not made again
                folder.mkdir(mode=0o700, exist_ok=True)
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
        self._reads.put(functools.partial(self._read_file, self.fingerprint, key))

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
            self._use(name, time.time_ns())
            with self._lock:
                self.loaded += 1
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
            *(self.page_bytes, zlib.crc32(body)),
        ):
            raise ValueError("its content is not what was written")
        return self._decode(body)

    # Files --------------------------------------------------------------------

    def use(self, keys: Sequence[bytes]) -> None:
        """Make those of these pages that are there the last used ones, the first the very last. A
        thread sets the times of their files, once in `TOUCH_SECONDS`."""
        with self._lock:
            for key in reversed(keys):
                if (name := self._name(self.fingerprint, key)) in self._sizes:
                    self._sizes.move_to_end(name)
                    self._used[key] = None
                    self._used.move_to_end(key)
        if self._used and time.monotonic() - self._touched_at >= TOUCH_SECONDS:
            self._touched_at = time.monotonic()
            self._writes.put(functools.partial(self.touch, [*reversed(self._used)]))
            self._used.clear()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of these pages that are there the last used ones, the first the very last."""
        now = time.time_ns()
        for number, key in reversed([*enumerate(keys)]):
            self._use(self._name(self.fingerprint, key), now - 1000 * number)

    def close(self) -> None:
        """End the threads, once what was begun is done, and let other processes use the folder."""
        _end_threads(self._writes, self._reads)
        for thread in self._threads:
            thread.join()
        self._end()

    def wait(self) -> None:
        """End the threads before the process ends: nothing more is begun, and a disk that hangs is
        not waited for."""
        deadline = time.monotonic() + EXIT_SECONDS
        for tasks in (self._writes, self._reads):
            with contextlib.suppress(queue.Empty):
                while True:
                    tasks.get_nowait()
        _end_threads(self._writes, self._reads)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

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

    def _use(self, name: str, now: int) -> None:
        """Make a file the last used one, at a time in nanoseconds."""
        with self._lock:
            if name not in self._sizes:
                return
            self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(self._folder / name, ns=(now, now))

    def _remove(self, name: str) -> None:
        with self._lock:
            self._total -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def count_miss(self, reason: str) -> int:
        """Count a page that could not be read or written; returns how many there are for this
        reason."""
        with self._lock:
            self.misses[reason] += 1
            return self.misses[reason]

    def _missed(self, reason: str, name: str, error: Exception) -> None:
        """Count such a page; the first of each reason is logged."""
        if self.count_miss(reason) == 1:
            logger.warning("prefix cache on disk: %s (%s): %s", name, reason, error)


# Threads. They hold no store, so that one can be collected, with all that it holds.


def _run(tasks: _Tasks) -> None:
    """Run tasks until None comes."""
    while (task := tasks.get()) is not None:
        task()
        del task


def _end_threads(writes: _Tasks, reads: _Tasks) -> None:
    for tasks in (writes, *[reads] * READERS):
        tasks.put(None)


def _end(writes: _Tasks, reads: _Tasks, owner: int) -> None:
    """End the threads of a store, and unlock its folder."""
    _end_threads(writes, reads)
    os.close(owner)
