"""Packed datasets: rows are read as they were written, and damage is named."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from swiftkv_jax.errors import DataError
from swiftkv_jax.train.data.dataset import (
    MANIFEST,
    ROWS,
    Manifest,
    PackedDataset,
    write_manifest,
    write_rows,
)
from swiftkv_jax.train.data.packing import PackedRow


def make_row(random, length):
    lengths = random.integers(1, 1 + length // 3, 3).astype(np.int32)
    count = int(lengths.sum())
    return PackedRow(
        random.integers(0, 2**31 - 1, count, dtype=np.int32), random.random(count) < 0.5, lengths
    )


def make_dataset(path, rows, length=64):
    path.mkdir()
    totals = write_rows(path / ROWS, rows, length)
    counts = {
        "rows": totals.rows,
        "tokens": totals.tokens,
        "targets": totals.targets,
        "fingerprint": totals.fingerprint,
    }
    write_manifest(
        path,
        Manifest(
            source="a.jsonl",
            files=[],
            tokenizer="t",
            length=length,
            documents=1,
            unreadable=0,
            fill=1.0,
            **counts,
        ),
    )
    return path


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    return [make_row(random, 64) for _ in range(50)]


def test_rows_come_back_in_any_order(tmp_path, rows):
    dataset = pickle.loads(pickle.dumps(PackedDataset(make_dataset(tmp_path / "s", rows))))
    assert len(dataset) == 50 and dataset.name == "a.jsonl"
    for number in [49, 0, 17]:
        for name, expected in vars(rows[number]).items():
            found = getattr(dataset[number], name)
            assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
    assert dataset.manifest.tokens == sum(len(row.tokens) for row in rows)
    assert dataset.manifest.targets == sum(row.fields(64)["loss_mask"].sum() for row in rows)


def test_fingerprint_is_of_content_and_order(tmp_path, rows):
    def fingerprint(name, rows, length=64):
        return PackedDataset(make_dataset(tmp_path / name, rows, length)).manifest.fingerprint

    first = fingerprint("a", rows)
    assert fingerprint("b", rows) == first
    flipped = PackedRow(rows[0].tokens, ~rows[0].is_target, rows[0].lengths)
    others = [
        fingerprint("c", rows[::-1]),
        fingerprint("d", [flipped, *rows[1:]]),
        fingerprint("e", rows[1:]),
        fingerprint("f", rows, 65),
    ]
    assert len({first, *others}) == 5


def truncate(path):
    (path / ROWS).write_bytes((path / ROWS).read_bytes()[:-100])


def flip(path):
    content = bytearray((path / ROWS).read_bytes())
    content[200] ^= 1  # in the first record
    (path / ROWS).write_bytes(content)


def edit(**fields):
    def change(path):
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps(manifest | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "rows.arrayrecord: damaged .*; remove the folder and prepare the data again"),
        (lambda path: (path / ROWS).write_bytes(b""), "rows.arrayrecord: damaged"),
        (flip, "rows.arrayrecord: damaged"),
        (edit(rows=51), "rows.arrayrecord: damaged .50 rows of 51"),
        (
            edit(version=2),
            "manifest.json: 'swiftkv-jax packed rows' version 2, but this release reads version 1",
        ),
        (edit(format="other"), "manifest.json: 'other' version 1"),
        (edit(strange=1), "manifest.json: damaged .*strange"),
        (
            lambda path: (path / MANIFEST).write_text("{"),
            "manifest.json: damaged, or not the manifest",
        ),
        (
            lambda path: (path / MANIFEST).unlink(),
            "not a prepared dataset: it has no manifest.json",
        ),
    ],
)
def test_damage(tmp_path, rows, damage, message):
    path = make_dataset(tmp_path / "s", rows)
    damage(path)
    with pytest.raises(DataError, match=message):
        dataset = PackedDataset(path)
        for number in range(len(dataset)):
            dataset[number]


def test_a_full_disk_is_an_os_error(rows):
    with pytest.raises(OSError, match="/dev/full: cannot be written"):
        write_rows(Path("/dev/full"), rows, 64)
