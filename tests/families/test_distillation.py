"""The training command on models that are no Llamas: the loss falls, a run goes on where it
stopped, its export loads and continues text; plans and analysis from a config alone."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.train.__main__ import main

from . import models
from .cases import CASES, tensor_for
from .running import logits

TEXT = "def main(argv):\n    for word in argv: print(word)\n\n\nclass A:\n    pass\n\n" * 60
STEPS = 40


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer):
    """The directory of a case whose vocabulary is the tokenizer's."""

    def make(case: str):
        path = tmp_path_factory.mktemp("teacher") / case
        hf, size = CASES[case] | {"vocab_size": 320, "eos_token_id": 1}, 320
        shapes = models.recorded(case).shapes
        shapes = {
            name: (size, *shape[1:]) if "embed_tokens" in name or "lm_head" in name else shape
            for name, shape in shapes.items()
        }
        path.mkdir()
        (path / "config.json").write_text(json.dumps(hf))
        arrays = {name: tensor_for(hf, name, tuple(shape)) for name, shape in shapes.items()}
        save_file(arrays, path / "model.safetensors", {"format": "pt"})
        tokenizer.save_pretrained(path)
        return path

    return make


def distilled(teacher, case: str, tmp_path):
    """(the base, the output folder, the command that wrote it, the loss of each step)."""
    path, data, output = teacher(case), tmp_path / "code.txt", tmp_path / "run"
    data.write_text(TEXT)
    command = [
        *("--model", str(path), "--data", str(data), "--output-dir", str(output)),
        *("--init", "leader", "--max-length", "32", "--batch-size", "4", "--learning-rate", "3e-3"),
        *("--num-key-value-layers", "3", "--logging-steps", "1", "--save-steps", "20"),
        *("--max-steps", str(STEPS)),
    ]
    assert main(command) == 0
    return path, output, command, losses_of(output)


def losses_of(output) -> dict[int, float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_distillation(teacher, tmp_path):
    """The loss falls, and the export has the teacher's tensors beside its own."""
    path, output, _, losses = distilled(teacher, "qwen3", tmp_path)
    assert losses[STEPS] < losses[1] / 2
    before, after = (load_file(p / "model.safetensors") for p in (path, output / "model"))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    hf = json.loads((output / "model" / "config.json").read_text())
    assert hf["model_type"] == "qwen3_swiftkv"


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3", "gemma3", "glm4"])
def test_a_run_goes_on_and_its_student_is_served(case, teacher, tmp_path):
    path, output, command, losses = distilled(teacher, case, tmp_path)
    whole = load_file(output / "model" / "model.safetensors")
    # As if it had been killed in the last steps.
    shutil.rmtree(output / "model")
    shutil.rmtree(output / "checkpoints" / str(STEPS))
    assert main(command) == 0
    again = losses_of(output)
    assert list(again) == list(range(1, STEPS + 1)) and again == losses
    exported = load_file(output / "model" / "model.safetensors")
    assert all(np.array_equal(whole[name], exported[name]) for name in whole)
    student = skv.load(output / "model", dtype="float32")
    prompt = list(range(5, 25))
    new = skv.generate(student, [prompt], max_tokens=6, ignore_eos=True)[0]
    best = logits(student, [prompt + new])[0, len(prompt) - 1 : -1]
    np.testing.assert_allclose(best[np.arange(6), new], best.max(-1), atol=1e-3)


@pytest.mark.long
def test_plans_and_analysis(teacher, tmp_path, capsys):
    path, data = teacher("qwen3"), tmp_path / "code.txt"
    data.write_text(TEXT)
    assert main(["--model", str(path), "--dry-run", "--max-length", "64"]) == 0
    assert "memory" in capsys.readouterr().out
    assert main(["--model", "qwen3-8b", "--num-key-value-layers", "27", "--dry-run"]) == 0
    # Nine layers with q of 4096 x 4096, k and v of 4096 x 1024 and 2 x 128 scales, and one norm.
    assert f"{9 * (4096 * (4096 + 2 * 1024) + 256) + 4096:,} trained" in capsys.readouterr().out
    flags = ["--rows", "2", "--max-length", "64", "--cuts", "50", "--groups", "1,3"]
    output = tmp_path / "analysis"
    args = ["--model", str(path), "--data", str(data), *flags, "--output-dir", str(output)]
    assert main(["analyze", *args]) == 0
    found = json.loads((output / "analysis.json").read_text())["cuts"]
    cuts = {(cut["num_key_value_layers"], cut["key_value_group_size"]) for cut in found}
    assert cuts == {(3, 1)}, "groups of 3 have no closed form: keys have norms"
    assert all(np.isfinite(cut["kl"]) for cut in found)
