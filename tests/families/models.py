"""The tiny models of `cases` as Hugging Face directories, and what transformers computes for
them."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from .cases import CASES, FIXTURES, tensor_for


class Recorded(NamedTuple):
    logits: np.ndarray  # f32[2, 40, V]
    greedy: np.ndarray  # i32[2, 12], after 20 tokens
    shapes: dict[str, list[int]]


def recorded(case: str) -> Recorded:
    with safe_open(FIXTURES / f"{case}.safetensors", "numpy") as file:
        shapes = json.loads(file.metadata()["shapes"])
        return Recorded(file.get_tensor("logits"), file.get_tensor("greedy"), shapes)


def tensors(case: str) -> dict[str, np.ndarray]:
    hf = CASES[case]
    return {
        name: tensor_for(hf, name, tuple(shape)) for name, shape in recorded(case).shapes.items()
    }


def assert_same_tensors(path: Path, case: str) -> None:
    """Every tensor bit for bit, under the names that they had."""
    written, expected = load_file(path / "model.safetensors"), tensors(case)
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], expected[name]) for name in expected)


def write(case: str, path: Path, **changes) -> Path:
    """The model's directory. `changes` are fields of its config.json."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CASES[case] | changes))
    save_file(tensors(case), path / "model.safetensors", {"format": "pt"})
    return path
