"""Pages on disk: what is read is what was written, or nothing."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine import host_tier, page_store
from swiftkv_jax.infer.engine.host_tier import HostTier, PageMove
from swiftkv_jax.infer.engine.page_pool import ON_HOST
from swiftkv_jax.infer.engine.page_store import HEADER, MAX_UNWRITTEN, PageStore
from tests.infer.engine.test_host_tier import Memory, pool_of
from tests.infer.mock_model_runner import MockHostPages

SIZE = 4
FILE = HEADER.size + 8 * SIZE
KEYS = [bytes([number]) * 32 for number in range(64)]


def page_of(number: int) -> np.ndarray:
    return np.arange(SIZE) + 100 * number


def store_of(folder: Path, limit: int = 2**20, weights: bytes = b"the first weights") -> PageStore:
    pages = MockHostPages(SIZE)
    pages.weights = weights
    return pages.open(folder, limit)


def write(store: PageStore, *numbers: int) -> None:
    for number in numbers:
        store.write(KEYS[number], page_of(number))
        assert store.wait_written(0, time.monotonic() + 10)


def read(store: PageStore, *numbers: int) -> dict[int, list[int] | None]:
    """Number -> the page, None for a miss."""
    for number in numbers:
        store.read(KEYS[number])
    found = []
    while len(found) < len(numbers):
        store.wait_read(10)
        found += store.take_read()
    return {key[0]: None if page is None else page.tolist() for key, page in found}


def expected(*numbers: int) -> dict[int, list[int] | None]:
    return {number: page_of(number).tolist() for number in numbers}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


# Files ------------------------------------------------------------------------


def test_a_later_process_finds_what_was_written(tmp_path):
    first = store_of(tmp_path)
    write(first, 1, 2)
    assert KEYS[1] in first and KEYS[3] not in first and len(first) == 2
    with pytest.raises(UsageError, match="another process uses it"):
        store_of(tmp_path)
    first.close()
    second = store_of(tmp_path)
    assert read(second, 1, 2, 3) == expected(1, 2) | {3: None}
    assert (second.saved, second.loaded, second.misses) == (0, 2, {"read": 1})
    second.close()


def test_files_of_other_weights_are_not_found(tmp_path):
    first = store_of(tmp_path)
    write(first, 1)
    first.close()
    second = store_of(tmp_path, weights=b"other weights....")
    assert KEYS[1] not in second and read(second, 1) == {1: None} and len(second) == 1
    second.read(KEYS[2])
    second.fingerprint = b"the third weights"[:16]
    second.wait_read(10)
    assert second.take_read() == [], "it was asked for before the weights changed"
    # Nor under another name: the header says whose a file is.
    (path,) = files(tmp_path)
    target = tmp_path / second._name(second.fingerprint, KEYS[1])
    target.parent.mkdir(parents=True)
    path.rename(target)
    assert read(second, 1) == {1: None} and second.misses["damaged"] == 1 and not files(tmp_path)
    second.close()


@pytest.mark.parametrize("place", [0, 8, 24, 56, 64, HEADER.size - 5, HEADER.size, FILE - 1])
def test_a_flipped_bit_is_a_miss(tmp_path, place):
    """In each field of the header, and at both ends of the page."""
    store = store_of(tmp_path)
    write(store, 1)
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    assert read(store, 1) == {1: None} and store.misses == {"damaged": 1}
    assert not files(tmp_path) and KEYS[1] not in store
    write(store, 1)
    assert read(store, 1) == expected(1)
    store.close()


@pytest.mark.parametrize("length", [0, 10, HEADER.size, FILE - 1, FILE + 1])
def test_a_file_of_another_length_is_a_miss(tmp_path, length):
    store = store_of(tmp_path)
    write(store, 1)
    (path,) = files(tmp_path)
    path.write_bytes((path.read_bytes() + b"\0")[:length])
    assert read(store, 1) == {1: None} and store.misses == {"damaged": 1}
    store.close()


class Kill(BaseException):
    """The end of the process: nothing is tidied up."""


@pytest.mark.parametrize("point", range(7))
def test_a_kill_while_a_page_is_written_leaves_nothing_wrong(tmp_path, monkeypatch, point):
    """After each step of writing it, and in the middle of its bytes."""
    before = store_of(tmp_path)
    write(before, 1)
    before.close()
    store = store_of(tmp_path)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps > point:
            raise Kill

    class File:
        """A file that writes half of what it is given before each step."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content) -> None:
            content = bytes(content)
            self.file.write(content[: len(content) // 2])
            step()
            self.file.write(content[len(content) // 2 :])
            step()

    opened, renamed = Path.open, Path.rename

    def open_file(path, mode="r", *rest):
        if mode != "wb":
            return opened(path, mode, *rest)
        step()
        return File(opened(path, mode, *rest))

    def rename(path, target):
        step()
        renamed(path, target)
        step()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_file)
        patch.setattr(Path, "rename", rename)
        with pytest.raises(Kill):
            store._write(store.fingerprint, KEYS[2], page_of(2))
    store.close()
    after = store_of(tmp_path)
    found = read(after, 1, 2)
    assert found == expected(1) | (expected(2) if point == 6 else {2: None})
    assert all(path.suffix != ".partial" for path in files(tmp_path))
    assert len(after) == 1 + (point == 6) and after.misses["damaged"] == 0
    write(after, 2)
    assert read(after, 2) == expected(2)
    after.close()


def test_the_longest_unused_files_make_room(tmp_path):
    store = store_of(tmp_path, 3 * FILE)
    write(store, 1, 2, 3)
    time.sleep(0.02)  # times of files have steps
    assert read(store, 1) == expected(1)
    time.sleep(0.02)
    write(store, 4)
    assert [number for number in (1, 2, 3, 4) if KEYS[number] in store] == [1, 3, 4]
    assert len(files(tmp_path)) == 3
    store.close()
    less = store_of(tmp_path, 2 * FILE)  # and over the end of the process
    assert [number for number in (1, 2, 3, 4) if KEYS[number] in less] == [1, 4]
    assert len(files(tmp_path)) == 2
    less.close()
    others = store_of(tmp_path, 2 * FILE, b"other weights....")
    write(others, 5)
    assert len(files(tmp_path)) == 2 and KEYS[5] in others
    others.close()


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    store = store_of(tmp_path)

    def full(path, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        write(store, 1, 2)
    assert store.misses == {"write": 2} and not files(tmp_path) and len(store) == 0
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    write(store, 1)
    assert read(store, 1) == expected(1)
    store.close()


def test_a_burst_of_pages_is_written_while_host_memory_keeps_it(tmp_path, monkeypatch):
    """The engine does not wait for the disk, and the pages that do are no more than their slots
    and a number."""
    memory, go_on = Memory(), threading.Event()
    store = memory.host_pages.open(tmp_path)
    encode = store._encode
    monkeypatch.setattr(store, "_encode", lambda page: go_on.wait(10) and encode(page))
    host = HostTier(MAX_UNWRITTEN + 5, memory)
    for number in range(2 * MAX_UNWRITTEN + 8):
        assert host.save(KEYS[number], number)
        host.flush()
    assert store.misses == {"queue": 3} and not store.wait_written(0, time.monotonic())
    go_on.set()
    while host._unwritten:
        assert store.wait_written(0, time.monotonic() + 10)
        host.flush()
    assert store.wait_written(0, time.monotonic() + 10)
    assert store.saved == 2 * MAX_UNWRITTEN + 5 and store.misses == {"queue": 3}
    store.close()


def test_other_files_stay(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("mine")
    store = store_of(tmp_path, 2 * FILE)
    write(store, 1, 2, 3)
    assert note.read_text() == "mine" and len(store) == 2
    store.close()


def test_a_page_that_was_read_waits_for_the_moves_of_its_slot(tmp_path):
    """One slot: what is saved in it, by a move that is planned, is dropped for what was read."""
    memory = Memory()
    store = memory.host_pages.open(tmp_path)
    write(store, 1)
    host = HostTier(1, memory)
    assert host.save(KEYS[0], 5) and not memory
    assert host.fetch([KEYS[1]]) == {KEYS[1]} and host.is_reading(KEYS[1])
    assert memory == [PageMove(True, 5, 0)] and not memory.host_pages.slots
    while host.is_reading(KEYS[1]):
        host.take_read(wait=True)
    assert KEYS[1] in host and KEYS[0] not in host
    assert memory.host_pages.get(0).tolist() == page_of(1).tolist()
    store.close()


def test_a_page_that_waits_for_its_load_is_written_from_host_memory(tmp_path, monkeypatch):
    """Its request may be gone: the page of the device has not been filled, and still will be."""
    memory = Memory()
    store = memory.host_pages.open(tmp_path)
    host = HostTier(2, memory)
    host.save(KEYS[0], 5)
    with monkeypatch.context() as full:
        full.setattr(store, "write", lambda key, page: True)
        host.flush()
    host.hold([KEYS[0]])
    host.begin_load(KEYS[0], 7, 0)
    host.persist({KEYS[0]: 7}, 10)
    assert KEYS[0] in store
    assert host.load([7])
    host.flush()
    assert memory[-1] == PageMove(False, 7, 0)
    store.close()


def test_pages_persist_the_last_used_first_and_stay_in_this_order(tmp_path):
    """As many as the disk has room for, whatever it had before; and in the next process."""
    memory = Memory()
    store = memory.host_pages.open(tmp_path, 4 * FILE)
    write(store, 9, 1, 8)
    host = HostTier(8, memory)
    for number in (5, 4, 3, 2):  # the last was used last
        assert host.save(KEYS[number], number)
    host._unwritten.clear()
    host.persist({KEYS[0]: 10, KEYS[1]: 11}, 10)

    def found(store: PageStore) -> list[int]:
        return [int(name.split("/")[1], 16) for name in reversed(store._sizes)]

    assert found(store) == [0, 1, 2, 3] and store.saved == 3 + 3
    store.close()
    less = store_of(tmp_path, 2 * FILE)
    assert found(less) == [0, 1]
    less.close()


def test_the_beginning_of_a_prefix_is_read_and_kept(tmp_path):
    """Of six pages there are slots for four, and none for others while these are read; then the
    last makes room first."""
    pool, host, memory = pool_of(4, 5)
    store = memory.host_pages.open(tmp_path)
    keys = pool.keys([*range(12)])
    for key in keys:
        store.write(key, page_of(1))
    assert store.wait_written(0, time.monotonic() + 10)
    assert host.save(KEYS[0], 0) and host.save(KEYS[1], 1)
    host.hold(KEYS[:1])
    fetching = host.fetch(keys)
    assert fetching == {*keys[:4]} and host.fetch(keys) is None
    assert len(memory.host_pages.slots) + len(host._reading) == 5
    while fetching:
        fetching = pool.fetch(keys, fetching)
    assert pool.match(keys) == [ON_HOST] * 4
    assert host.save(KEYS[2], 2) and pool.match(keys) == [ON_HOST] * 3
    store.close()


def test_a_disk_that_gives_nothing_is_not_waited_for(tmp_path, monkeypatch):
    memory = Memory()
    store = memory.host_pages.open(tmp_path)
    write(store, 1, 2)
    host = HostTier(2, memory)
    read = store.read
    monkeypatch.setattr(store, "read", lambda key: None)
    host.fetch([KEYS[1]])
    assert host.is_reading(KEYS[1])
    monkeypatch.setattr(host_tier, "STALLED_SECONDS", 0.0)
    assert not host.is_reading(KEYS[1])
    monkeypatch.setattr(host_tier, "STALLED_SECONDS", 60.0)
    read(KEYS[1])  # late, and of use all the same
    while host.is_reading(KEYS[1]):
        host.take_read(wait=True)
    assert KEYS[1] in host
    store.close()


def test_a_file_that_cannot_be_read_now_stays(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    store = store_of(tmp_path)
    write(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert read(store, 1) == {1: None}
    assert store.misses == {"read": 1} and len(files(tmp_path)) == 1
    assert read(store, 1) == expected(1)
    store.close()


def test_the_end_of_a_process_does_not_wait_for_a_disk(tmp_path, monkeypatch):
    """What waits is left. A store that is dropped ends its threads, and lets others use the
    folder."""
    store, started, go_on = store_of(tmp_path), threading.Event(), threading.Event()

    def encode(page):
        started.set()
        go_on.wait(10)
        return [page]

    threads = store._threads
    assert all(thread.daemon for thread in threads)
    monkeypatch.setattr(page_store, "EXIT_SECONDS", 0.01)
    with monkeypatch.context() as hangs:
        hangs.setattr(store, "_encode", encode)
        store.write(KEYS[1], page_of(1))
        store.write(KEYS[2], page_of(2))
        assert started.wait(10)
        store.wait()
    assert threads[0].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert store.saved == 1
    del store
    store = store_of(tmp_path)
    threads = store._threads
    assert read(store, 1) == expected(1)
    del store
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    store_of(tmp_path).close()
