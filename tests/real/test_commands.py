"""The commands on the three real models, each as a process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.real_models import path_of
from tests.serve.process import ROOT

LAYERS = {
    "smollm2": "30 of width 576",
    "gemma3": "18 of width 640",
    "qwen2.5-coder": "24 of width 896",
}
PROMPT, CONTINUATION, OTHER = "The opposite of hot is", " cold", " Berlin"
GREEDY = "--temperature 0 --max-tokens 16".split()
SMALL = "--max-model-len 256 --max-num-seqs 2 --max-num-batched-tokens 64".split()


def swiftkv(*arguments: str | Path, given: str = "") -> tuple[str, str]:
    """(standard output, standard error) of a command that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "swiftkv_jax", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        input=given,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.fixture(params=list(LAYERS))
def name(request) -> str:
    return request.param


def test_inspect(name):
    facts = swiftkv("convert", "inspect", path_of(name))[0]
    assert re.search(rf"^layers +{LAYERS[name]}", facts, re.MULTILINE)
    assert re.search(r"^tokenizer +yes", facts, re.MULTILINE)


def test_generate(name):
    text = swiftkv("infer", "generate", "-m", path_of(name), "-p", PROMPT, *GREEDY, *SMALL)[0]
    assert text.removeprefix(PROMPT).startswith(CONTINUATION)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder"])
def test_chat(name):
    """Two turns of the models that have a chat template; the second leaves out what is asked."""
    turns = "What is the capital of France?\nAnd of Italy?\n"
    text = swiftkv("infer", "chat", "-m", path_of(name), *GREEDY, given=turns)[0]
    assert "The capital of France is Paris." in text
    assert "The capital of Italy is Rome." in text


def test_score(name, tmp_path):
    """The word that generation takes is the likeliest one, by far before one that does not fit."""
    rows = [{"context": PROMPT, "continuation": text} for text in (CONTINUATION, OTHER)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = swiftkv("infer", "score", "-m", path_of(name), "-i", tmp_path / "rows.jsonl", *SMALL)[0]
    right, wrong = map(json.loads, lines.splitlines())
    assert right["is_greedy"] and not wrong["is_greedy"]
    assert -2 < right["logprob"] < 0 and wrong["logprob"] < right["logprob"] - 4


def test_convert(tmp_path):
    """An Orbax copy and what is exported from it generate what the file does."""
    orbax, exported = tmp_path / "orbax", tmp_path / "exported"
    swiftkv("convert", "hf2orbax", path_of("smollm2"), orbax)
    swiftkv("convert", "orbax2hf", orbax, exported)
    texts = {
        swiftkv("infer", "generate", "-m", model, "-p", PROMPT, *GREEDY, *SMALL)[0]
        for model in (path_of("smollm2"), orbax, exported)
    }
    assert len(texts) == 1 and CONTINUATION in texts.pop()
