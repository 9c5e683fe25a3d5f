"""Preparing: built once, found again, and bad rows counted, reported and limited."""

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.train.data.dataset import UNREADABLE, is_packed_dataset
from swiftkv_jax.train.data.prepare import Preparation, tokenizer_fingerprint
from swiftkv_jax.train.data.sources import DataSource
from swiftkv_jax.train.data.tokenize import VERSION
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import load_data
from tests.free_port import free_port

LENGTH = 16


def prepare(source, tokenizer, length, cache, **options):
    return Preparation(source, tokenizer, length, **options).prepare(cache)


def build(source, tokenizer, length, path, **options):
    return Preparation(source, tokenizer, length, **options).build(path)


def write_rows(file, good, bad=0):
    """Bad rows come first."""
    file.write_text(
        "not JSON\n" * bad
        + "".join(json.dumps({"text": f"document number {i}"}) + "\n" for i in range(good))
    )
    return DataSource(str(file))


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "a.jsonl", 20)


def test_a_dataset_is_found_again_while_nothing_has_changed(
    tmp_path, tokenizer, source, monkeypatch, log
):
    cache = tmp_path / "cache"
    first = prepare(source, tokenizer, LENGTH, cache)
    assert first.manifest.documents == 20 and first.manifest.tokens == sum(
        len(f"document number {i}") + 1 for i in range(20)
    )
    assert (
        first.manifest.fill == first.manifest.tokens / (len(first) * LENGTH)
        and first.name == "a.jsonl"
    )
    assert (
        "a.jsonl: 370 tokens (330 to predict) of 20 documents in 24 rows of 16, 96.4% full"
        in log.messages
    )

    monkeypatch.setattr(Preparation, "build", None)
    assert prepare(source, tokenizer, LENGTH, cache).path == first.path
    assert log.messages[-1].endswith("prepared before")
    other = copy.deepcopy(tokenizer)
    other.chat_template = "other"
    os.utime(source.path, ns=(1, first.manifest.files[0]["mtime_ns"]))
    assert prepare(source, tokenizer, LENGTH, cache).path == first.path
    for change in [(source, other, LENGTH), (source, tokenizer, LENGTH + 1)]:
        with pytest.raises(TypeError):
            prepare(*change, cache)
    os.utime(source.path, ns=(1, 1))
    with pytest.raises(TypeError):
        prepare(source, tokenizer, LENGTH, cache)


def test_truncation_and_padding_of_a_tokenizer_file_change_nothing(tmp_path, tokenizer, source):
    """Calling the tokenizer switches both off, so a hash with them would change on the way."""
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.enable_truncation(8)
    other.backend_tokenizer.enable_padding(length=8)
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
    prepare(source, other, LENGTH, tmp_path / "cache")
    other.backend_tokenizer.enable_truncation(8)  # as the next process reads it
    found = prepare(source, other, LENGTH, tmp_path / "cache")
    assert found.manifest.tokenizer == tokenizer_fingerprint(tokenizer)


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path, tokenizer, source):
    (tmp_path / "elsewhere").mkdir()
    moved = write_rows(tmp_path / "elsewhere" / "b.jsonl", 20)
    stores = [
        build(found, tokenizer, LENGTH, tmp_path / f"store{number}")
        for number, found in enumerate([source, moved])
    ]
    assert stores[0].manifest.fingerprint == stores[1].manifest.fingerprint


def test_a_dataset_as_a_source(tmp_path, tokenizer, source):
    store = build(source, tokenizer, LENGTH, tmp_path / "store")
    as_source = DataSource(str(store.path))
    assert prepare(as_source, tokenizer, LENGTH, tmp_path / "cache").path == store.path
    with pytest.raises(
        DataError, match="store: prepared with `max_length`=16, but the run has `max_length`=32"
    ):
        prepare(as_source, tokenizer, 32, tmp_path / "cache")
    other = copy.deepcopy(tokenizer)
    other.chat_template = "other"
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)
    with pytest.raises(DataError, match="store: prepared with another tokenizer or chat template"):
        prepare(as_source, other, LENGTH, tmp_path / "cache")
    with pytest.raises(UsageError, match="store: exists already"):
        build(source, tokenizer, LENGTH, store.path)


def test_a_dataset_of_an_earlier_version_is_read_and_said_to_be_one(
    tmp_path, tokenizer, source, log
):
    store = build(source, tokenizer, LENGTH, tmp_path / "store")
    as_source = DataSource(str(store.path))
    prepare(as_source, tokenizer, LENGTH, tmp_path / "cache")
    assert "another version" not in log.text
    manifest = json.loads((store.path / "manifest.json").read_text())
    assert manifest.pop("tokenization") == VERSION
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    found = prepare(as_source, tokenizer, LENGTH, tmp_path / "cache")
    assert len(found) == len(store) and found.manifest.tokenization == 1
    assert log.messages[-1].startswith(f"{store.path}: prepared with another version")


def test_unreadable_rows_are_counted_and_reported(tmp_path, tokenizer, log):
    source = write_rows(tmp_path / "a.jsonl", 38, bad=12)
    store = build(source, tokenizer, LENGTH, tmp_path / "store", max_unreadable_share=0.25)
    assert (store.manifest.unreadable, store.manifest.documents) == (12, 38)
    lines = (store.path / UNREADABLE).read_text().splitlines()
    assert len(lines) == 12 and lines[2].startswith(f"{source.path}:3: not valid JSON")
    warnings = [text for text in log.messages if text.startswith("left out: ")]
    assert warnings == [f"left out: {line}" for line in lines[:10]]
    assert f"12 unreadable, listed in {store.path / UNREADABLE}" in log.messages[-1]


def test_too_many_unreadable_rows_stop(tmp_path, tokenizer):
    source, cache = write_rows(tmp_path / "a.jsonl", 98, bad=2), tmp_path / "cache"
    message = (
        "a.jsonl: 2 of 100 rows cannot be read .2.00%.; `max_unreadable_share`=0.01 allows "
        "fewer; the first: .*a.jsonl:1: not valid"
    )
    with pytest.raises(DataError, match=message):
        prepare(source, tokenizer, LENGTH, cache)
    assert not any(cache.iterdir())
    assert is_packed_dataset(
        prepare(source, tokenizer, LENGTH, cache, max_unreadable_share=0.02).path
    )
    with pytest.raises(DataError, match=message):
        prepare(source, tokenizer, LENGTH, cache)


def test_a_source_with_too_many_stops_early(tmp_path, tokenizer):
    """With the eleventh: the limit is that of a thousand rows at least."""
    source = write_rows(tmp_path / "a.jsonl", 4000, bad=11)
    with pytest.raises(DataError, match="11 of 11 rows"):
        build(source, tokenizer, LENGTH, tmp_path / "store")


def test_nothing_to_predict(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(DataError, match="a.txt: it holds no token to predict"):
        build(DataSource(str(tmp_path / "a.txt")), tokenizer, LENGTH, tmp_path / "store")


def run(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], text=True, **options
    )


PREAMBLE = """
import logging, os, signal, sys
from pathlib import Path
import jax
from swiftkv_jax import cli, demo
from swiftkv_jax.checkpoints.auxiliary import load_tokenizer, read_auxiliary_files
from swiftkv_jax.train.data import prepare as module
from swiftkv_jax.train.data.sources import DataSource
from swiftkv_jax.train.data.tokenize import VERSION
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import load_data
cli.configure_logging()
logging.getLogger("swiftkv_jax").propagate = False  # as while a command runs
tokenizer = load_tokenizer(demo.LLAMA, read_auxiliary_files(demo.LLAMA)[1])
source, cache = DataSource(sys.argv[1]), Path(sys.argv[2])
"""


def test_a_killed_build_leaves_nothing_that_is_taken_for_a_dataset(tmp_path, tokenizer, source):
    """Killed at the last moment: all files are written, the manifest too, but the folder has not
    got its name."""
    code = PREAMBLE + (
        "write = module.write_manifest\n"
        "def write_and_die(*arguments): write(*arguments); os.kill(os.getpid(), signal.SIGKILL)\n"
        "module.write_manifest = write_and_die\n"
        "module.Preparation(source, tokenizer, 16).prepare(cache)\n"
    )
    cache = tmp_path / "cache"
    process = run(code, source.path, cache)
    assert process.wait(60) == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".a.jsonl-") and ".partial-" in left.name
    assert is_packed_dataset(prepare(source, tokenizer, LENGTH, cache).path)


@pytest.mark.long
def test_two_processes_share_one_build(tmp_path, source):
    """Process 0 builds and both open; when it cannot, both say so and neither waits."""
    code = PREAMBLE + (
        "jax.config.update('jax_cpu_collectives_implementation', 'gloo')\n"
        "index = int(sys.argv[3])\n"
        "jax.distributed.initialize(f'127.0.0.1:{sys.argv[4]}', 2, index)\n"
        "print(module.Preparation(source, tokenizer, 16).prepare(cache).manifest.fingerprint)\n"
        "print(module.Preparation(source, tokenizer, 16).prepare(cache).manifest.fingerprint)\n"
        "try: module.Preparation(DataSource(sys.argv[5]), tokenizer, 16).prepare(cache)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    bad, port = write_rows(tmp_path / "bad.jsonl", 0, bad=1), free_port()
    processes = [
        run(
            code,
            source.path,
            tmp_path / "cache",
            index,
            port,
            bad.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    first, second = (
        [line for line in output.splitlines() if "[Gloo]" not in line] for output, _ in outputs
    )
    assert len(first) == 3 and first[:2] == second[:2] and first[0] == first[1], outputs
    assert "DataError" in first[2] and "1 of 1 rows cannot be read" in first[2]
    assert second[2] == "DataError process 0 has failed; its message says why"
    assert "prepared before" in outputs[0][1] and "prepared before" not in outputs[1][1]


@pytest.mark.parametrize("splits", [{"train": 20, "validation": 5}, {"validation": 5}])
def test_a_folder_is_measured_on_by_its_held_out_split(splits, tmp_path, source, tokenizer):
    (folder := tmp_path / "folder").mkdir()
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
    recipe = dataclasses.replace(
        DEMO, data=(source.path,), eval_data=str(folder), max_length=LENGTH, output_dir=tmp_path
    )
    _, held_out = load_data(recipe, tokenizer)
    assert held_out is not None and held_out.datasets[0].manifest.documents == 5
