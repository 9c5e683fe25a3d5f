"""Model and text of a distillation in small folders."""

import dataclasses
import itertools
import json

import numpy as np

from benchmarks import distill_real
from benchmarks.real import carry, corpus
from swiftkv_jax.train.data.dataset import ROWS, PackedDataset
from swiftkv_jax.train.data.prepare import Preparation
from swiftkv_jax.train.data.sources import DataSource
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import open_tokenizer


def test_what_a_distillation_needs_is_carried(tmp_path, monkeypatch):
    """In folders of few bytes: the same rows, text and model on the other side."""
    tokenizer = open_tokenizer(DEMO)
    model, text = tmp_path / "model.gguf", tmp_path / "corpus"
    model.write_bytes(np.random.default_rng(0).bytes(5_000))
    text.mkdir()
    words = ["".join(np.random.default_rng(i).choice(list("abcdefgh"), 6)) for i in range(600)]
    source = "".join(f"{a} = {b}({c})\n" for a, b, c in itertools.batched(words, 3))
    lines = [{"kind": "code", "name": "n", "text": text} for text in ("a = 1\n" * 700, source)]
    (text / corpus.TRAIN).write_text("\n".join(map(json.dumps, lines)))
    plan = dataclasses.replace(carry.PLANS["gpu"], restated=3)
    monkeypatch.setitem(carry.PLANS, "gpu", plan)
    monkeypatch.setattr(carry, "open_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(carry, "FOLDER_BYTES", 4_000)
    monkeypatch.setattr(carry, "PART_BYTES", 2_000)
    monkeypatch.setattr(corpus, "write_held_out", lambda file, seed: file.write_text("held out"))
    carry.pack(model, text, tmp_path / "packed")
    folders = sorted((tmp_path / "packed").iterdir())
    assert len(folders) > 1
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000
    target = tmp_path / "there"
    carry.unpack(folders, target)
    made = Preparation(DataSource(str(text / corpus.TRAIN)), tokenizer, carry.LENGTH)
    expected = made.prepare(tmp_path / "again").path
    assert (target / "text" / ROWS).read_bytes() == (expected / ROWS).read_bytes()
    assert len(PackedDataset(target / "text")) == len(PackedDataset(expected)) > 1
    examples = PackedDataset(target / "restated")
    assert sum(len(examples[row].lengths) for row in range(len(examples))) == 3
    assert (target / "held-out.jsonl").read_text() == "held out"
    joined = distill_real.join(target / "parts", target)
    assert (target / "model.gguf").read_bytes() == model.read_bytes() and joined
