"""`python -m benchmarks.teachers`: the text, and a run that is stopped and continued."""

import dataclasses
import importlib.metadata
import json

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from benchmarks.quality import __main__ as quality
from benchmarks.teachers import __main__ as command
from benchmarks.teachers import corpus, pretrain
from benchmarks.teachers.files import TeacherFiles
from swiftkv_jax.train.data.sources import STDLIB


def lines(*numbers: int) -> str:
    return "".join(f"value_{number} = compute_something({number})\n" for number in numbers)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages in place of the installed ones, and no standard library."""
    texts = {
        "held": {"a.py": lines(*range(90))},
        "kept": {
            "b.py": lines(*range(60, 160)),
            "repeats.py": lines(*range(40, 110)),
            "small.py": lines(1000),
            "_vendor/c.py": lines(*range(2000, 2100)),
        },
    }
    for package, found in texts.items():
        info = tmp_path / "site" / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nLicense: MIT\n whole text\n"
        )
        names = []
        for name, text in found.items():
            file = tmp_path / "site" / package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            names.append(f"{package}/{name},,\n")
        (info / "RECORD").write_text("".join(names))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(corpus, "PACKAGES", ("kept",))
    monkeypatch.setattr(corpus, "HELD_OUT", ("held",))


def test_corpus(tmp_path, packages):
    """A file most of whose lines stand in others is left out, as are small and vendored ones."""
    corpus.write_corpus(tmp_path / "corpus")
    found = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    size = len(lines(*range(60, 160)))
    assert found["kept"] == {
        "version": "1.0",
        "licence": "MIT",
        "held_out": False,
        "files": 1,
        "bytes": size,
        "left_out": 1,
    }
    made = TeacherFiles.of(tmp_path)
    assert [name for name, _ in command.documents(made.train)] == ["corpus/train.jsonl:1"]
    assert [text for _, text in made.held_out_texts()] == [lines(*range(90))]


def test_every_package_is_pinned():
    for name in {*corpus.PACKAGES, *corpus.HELD_OUT} - {STDLIB}:
        assert importlib.metadata.version(name)
    assert not set(corpus.PACKAGES) & set(corpus.HELD_OUT)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_stopped_and_continued(dtype, tmp_path, packages, monkeypatch, capsys):
    """It ends with the same weights, and its students can be measured."""
    tiny = dataclasses.replace(
        command.TEACHERS["t1"],
        config=skv.Config(
            vocab_size=300,
            embed_dim=32,
            mlp_dim=32,
            num_layers=4,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        ),
        steps=8,
        tokens_per_step=128,
        lengths=(32, 64),
        dtype=dtype,
    )
    monkeypatch.setitem(command.TEACHERS, "t1", tiny)
    monkeypatch.setattr(pretrain, "SAVE_SECONDS", 0.0)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert command.main(["t1", str(whole)]) == 0
    save, steps = pretrain._save, []

    def saving(file, step, state):
        save(file, step, state)
        steps.append(step)
        if step in (4, 6):
            raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "_save", saving)
    for code in 130, 130, 0:
        assert command.main(["t1", str(stopped)]) == code
    assert steps == list(range(1, 9))
    with np.load(whole / "state.npz") as first, np.load(stopped / "state.npz") as second:
        assert first.files == second.files
        for name in first.files:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    model = skv.load(whole / "llama")
    assert TeacherFiles.of(whole).description == {
        "name": "t1",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.llama)),
        "steps": 8,
        "tokens": 8 * 128,
    }
    assert command.main(["t1", str(whole)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert command.main(["t1", str(tmp_path / "none"), "--steps", "0"]) == 2
    assert quality.main(["--teacher", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
