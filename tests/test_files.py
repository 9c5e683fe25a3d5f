"""Files and directories that appear complete or not at all."""

import errno
import json
import os

import pytest

from swiftkv_jax import UsageError
from swiftkv_jax.process.files import (
    check_absent,
    check_free,
    new_directory,
    write_atomic,
    write_json,
)


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_in_one_step_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"b": "é", "a": 1})
    assert path.read_text() == '{\n "b": "é",\n "a": 1\n}\n'
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomic(path, b"new")
    assert error.value.__notes__ == [f"cannot write {path}"]
    assert json.loads(path.read_text())["a"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_canonical_json_has_sorted_keys_and_is_ascii(tmp_path):
    write_json(tmp_path / "x.json", {"b": "\ud800", "a": 1}, canonical=True)
    assert (tmp_path / "x.json").read_text() == '{\n  "a": 1,\n  "b": "\\ud800"\n}\n'


def test_a_directory_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    with new_directory(tmp_path / "a" / "b") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as error, new_directory(tmp_path / "c"):
        pass
    assert error.value.__notes__ == [f"cannot write {tmp_path / 'c'}"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError) as error, new_directory(tmp_path / "file" / "out"):
        pass
    assert error.value.__notes__ == [f"cannot write {tmp_path / 'file' / 'out'}"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        check_free(tmp_path / "full")
    check_free(tmp_path / "absent")
    with pytest.raises(UsageError, match="^output .*full: exists already"):
        check_absent("output", tmp_path / "full")
    with pytest.raises(UsageError, match="its folder does not exist"):
        check_absent("output", tmp_path / "no" / "x")
    check_absent("output", None)
