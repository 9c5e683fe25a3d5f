"""The wheel in an environment of its own, away from the repository (`make test-wheel`): commands,
a server and a short training run."""

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from swiftkv_jax import demo
from tests.serve.process import SMALL, serving

ENVIRONMENT = Path(os.environ.get("WHEEL_ENVIRONMENT", ""))
"""A virtual environment with the wheel and its extra `serve`."""
SDIST = os.environ.get("SDIST", "")
PROGRAM = str(ENVIRONMENT / "bin" / "swiftkv")
REGEX = "[0-9]{3}-[a-f]{4}"


def run(folder: Path, *command: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The demo model in the wheel."""
    code = "from swiftkv_jax import demo; print(demo.LLAMA.parent / 'swiftkv')"
    python = str(ENVIRONMENT / "bin" / "python")
    path = Path(run(tmp_path_factory.mktemp("model"), python, "-c", code).strip())
    assert path.is_relative_to(ENVIRONMENT) and path != demo.LLAMA.parent / "swiftkv"
    return path


def test_it_generates(tmp_path):
    arguments = ["--prompt", "def main", "--max-tokens", "8", "--compile-cache", "none"]
    assert run(tmp_path, PROGRAM, "infer", *arguments).strip()


def test_it_serves(model, tmp_path):
    body = {
        "prompt": "The code is ",
        "max_tokens": 16,
        "structured_outputs": {"regex": REGEX},
    }
    with serving(model, *SMALL, command=(PROGRAM,), folder=tmp_path) as server:
        (choice,) = server.ask("/v1/completions", body)["choices"]
        assert re.fullmatch(REGEX, choice["text"]) and choice["finish_reason"] == "stop"


def test_it_trains(tmp_path):
    data = tmp_path / "code.txt"
    data.write_text("def f(x):\n    return x + 1\n\n\n" * 100)
    arguments = f"--data {data} --output-dir run --init authors --max-length 32 --batch-size 4"
    run(tmp_path, PROGRAM, "train", *arguments.split(), *"--mesh 2x1 --max-steps 2".split())
    assert (tmp_path / "run" / "model").is_dir() and (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_sdist_has_the_package_and_no_tests():
    """The wheel was built from it. Tests read files that are only in the repository."""
    with tarfile.open(SDIST) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
    assert folders == {"swiftkv_jax", "swiftkv_jax.egg-info"}
