"""What is written beside every measurement."""

import json
import re
import sys
from pathlib import Path

import pytest

from swiftkv_jax.process import provenance
from swiftkv_jax.process.provenance import _commit

COMMIT = "1309431f0a6ab0c1b0d0e2a4a4d3c2f1e0d9c8b7"


def test_it_is_json_and_says_where_and_with_what(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measure.py", "--repeats", "3"])
    found = json.loads(json.dumps(provenance.provenance()))
    assert found["device"]["platform"] == "cpu" and found["device"]["processes"] == 1
    assert {"python", "jax", "numpy"} <= found["versions"].keys()
    assert found["command"].endswith("--repeats 3") and len(found["host"]["load"]) == 3


@pytest.mark.parametrize(
    "words", ["--api-key K1", "--api_key=K1", "--a K1", "--api-key K1 --api K2"]
)
def test_a_command_is_written_without_its_secret(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["swiftkv", "infer", *words.split(), "-o", "out.json"])
    found = provenance.command(secret="--api-key")
    assert not {"K1", "K2"} & set(re.split("[ =]", found)) and found.endswith("-o out.json")


def test_the_root_is_the_checkout():
    assert (provenance.ROOT / "swiftkv_jax" / "process").is_dir()


@pytest.mark.parametrize(
    "files",
    [
        {"HEAD": COMMIT},
        {"HEAD": "ref: refs/heads/main\n", "refs/heads/main": f"{COMMIT}\n"},
        {"HEAD": "ref: refs/heads/main\n", "packed-refs": f"# pack\n{COMMIT} refs/heads/main\n"},
    ],
    ids=["detached", "branch", "packed"],
)
def test_the_commit_is_read_without_git(files, tmp_path):
    for name, content in files.items():
        path: Path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert _commit(tmp_path) == COMMIT


@pytest.mark.parametrize("head", [COMMIT, "ref: refs/heads/main"], ids=["detached", "branch"])
def test_the_commit_of_a_worktree_is_read(head, tmp_path):
    of_worktree = tmp_path / "clone" / ".git" / "worktrees" / "w"
    for file, content in {
        tmp_path / "w" / ".git": f"gitdir: {of_worktree}\n",
        of_worktree / "HEAD": f"{head}\n",
        of_worktree / "commondir": "../..\n",
        tmp_path / "clone" / ".git" / "refs" / "heads" / "main": f"{COMMIT}\n",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert _commit(tmp_path / "w") == COMMIT


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    assert _commit(tmp_path) is None
