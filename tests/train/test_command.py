"""The arguments of the training command: bad input is one line; recipes are sets of settings."""

import shutil
from pathlib import Path

import pytest

from swiftkv_jax import demo
from swiftkv_jax.errors import UsageError
from swiftkv_jax.train.__main__ import main, parser
from swiftkv_jax.train.run import setup
from swiftkv_jax.train.run.output_folder import held_folder, prepare_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "code.txt"
    file.write_text("def f(x):\n    return x + 1\n" * 40)
    return file


BAD_INPUT = {
    "mesh": ("--mesh 4by1", "--mesh '4by1': expected DATAxMODEL"),
    "mesh axis": ("--mesh data=2,tensor=2", "the axes are data, fsdp and model, each at most once"),
    "mesh twice the rest": ("--mesh=-1x-1", "only one axis can take the rest of the devices"),
    "micro-batches": (
        "--batch-size 8 --gradient-accumulation-steps 3",
        "--batch-size 8 must be a multiple of --gradient-accumulation",
    ),
    "early stopping": ("--early-stopping-patience 2", "need --eval-data"),
    "profile": ("--profile-steps 9:3", "--profile-steps '9:3': expected FIRST:LAST"),
    "report": (
        "--report-to carrier-pigeon",
        "'carrier-pigeon' is unknown; choose from jsonl, tensorboard, wandb",
    ),
    "top k": ("--kl-top-k 4097", "--kl-top-k 4097: this model has"),
    "topology": ("--topology h200:1", "--topology goes with --dry-run"),
    "no such step": ("--resume 7", "--resume 7: no checkpoint of that step"),
    "shape without weights": (
        "--model llama-3.1-8b --data stdlib",
        "the name of a shape, for --dry-run only",
    ),
    "infinite": ("--temperature inf", "--temperature inf: must be above 0 and finite"),
    "half of a job": (
        "--num-processes 2",
        "--coordinator-address, --num-processes and --process-id go together",
    ),
    "mesh zero": ("--mesh 0x1", "expected DATAxMODEL"),
    "too many devices": (
        "--mesh 64x64 --batch-size 64",
        "--mesh 64x64 needs 4096 devices; this process sees 8",
    ),
    "batch": (
        "--mesh 2x1 --batch-size 3",
        "--batch-size 3 must be a multiple of the 2 data devices",
    ),
    "cut": ("--num-key-value-layers 9", "num_key_value_layers=9 must be from 1 to num_layers=8"),
    "no upper layers": ("--num-key-value-layers 8", "nothing is left to distil"),
    "group": (
        "--key-value-group-size 3",
        "--key-value-group-size 3: key_value_group_size=3 must divide the 4 layers",
    ),
    "no data": ("--data {tmp}/nowhere", "nowhere: no such file or folder"),
    "empty data": ("--data {tmp}/empty.txt", "empty.txt: it holds no token to predict"),
    "malformed data": ("--data {tmp}/bad.jsonl", "bad.jsonl:2: not valid JSON"),
    "no model": ("--model {tmp}/nowhere --data stdlib", "nowhere: no such file or directory"),
    "model alone": ("--model somewhere", "--model also needs --data"),
    "output is the model": (
        "--model {tmp}/base --data stdlib --max-length 32 --output-dir {tmp}/base",
        "--output-dir {tmp}/base: it is the folder of the model",
    ),
    "output has other files": (
        "--output-dir {tmp}",
        "--output-dir {tmp}: it holds other files than a run's (bad.jsonl and 2 more)",
    ),
    "output is a file": ("--output-dir {tmp}/empty.txt", "empty.txt: File exists"),
    "steps": ("--max-steps 0", "--max-steps 0: must be at least 1"),
    "steps of no speculator": (
        "--speculator-steps 9",
        "--speculator-steps 9 needs --speculator",
    ),
    "rows of no held-out text": ("--eval-batches 9", "--eval-batches 9 needs --eval-data"),
    "weight of held-out text": (
        "--eval-data {tmp}/base:2",
        "--eval-data {tmp}/base:2: only sources to train on have a weight",
    ),
    "nothing to resume": ("--resume must", "--resume must: no checkpoint in"),
    "seed": ("--seed -1", "--seed -1: must be from 0"),
    "no lower layers": ("--num-key-value-layers 0", "--num-key-value-layers 0: must be at least 1"),
    "rows longer than the model": (
        "--max-length 1025",
        "--max-length 1025: this model has 1024 positions",
    ),
    "rate": ("--learning-rate nan", "--learning-rate nan"),
    "hidden layer": ("--hidden-loss-layer 12", "--hidden-loss-layer 12: must be from -9 to 8"),
}
CODES = {"empty data": 1, "malformed data": 1, "no model": 4}
"""Exit codes that are not 2."""


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(case, data, tmp_path, capsys):
    text, message = BAD_INPUT[case]
    shutil.copytree(demo.LLAMA, tmp_path / "base")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n{"text": oops}\n')
    flags = text.format(tmp=tmp_path).split()
    if not {"--data", "--model"} & set(flags):
        flags += ["--data", str(data)]
    if "--output-dir" not in flags and case != "model alone":
        flags += ["--output-dir", str(tmp_path / "run")]
    assert main(flags) == CODES.get(case, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and message.format(tmp=tmp_path) in lines[-1], lines
    assert "`" not in lines[-1], "names of arguments are flags here"
    assert not any("Traceback" in line for line in lines)


def test_flags_stay():
    """The command line is public: a flag goes only by decision."""
    flags = {action.option_strings[0] for action in parser()._actions}
    assert flags >= set(
        """-h --model --num-key-value-layers --key-value-group-size --data --eval-data --max-length
        --max-unreadable-share --output-dir --mesh --dtype --remat --shard-sequence --attention
        --coordinator-address --num-processes --process-id --dry-run --topology --batch-size
        --gradient-accumulation-steps --max-steps --num-train-epochs --learning-rate --lr-schedule
        --warmup-ratio --max-grad-norm --seed --recipe --temperature --kl --kl-top-k
        --init --calibration-tokens --hidden-loss --padding --generated-kv --exact-tail
        --hidden-loss-weight --hidden-loss-layer --loss-average --loss-mask --resume --save-steps
        --save-total-limit --logging-steps --report-to --profile-steps --eval-steps --eval-batches
        --early-stopping-patience --load-best-model-at-end --revision --prompt-attention-layers
        --prompt-mlp-neurons --boundary-taps --exact-head --analysis""".split()
    )
    assert all(action.help for action in parser()._actions)


def test_weights_beyond_the_memory_of_the_host(data, tmp_path, monkeypatch, capsys):
    def load(*_, **__):
        raise MemoryError

    monkeypatch.setattr(setup, "load", load)
    assert main(["--data", str(data), "--output-dir", str(tmp_path / "run")]) == 5
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: {demo.LLAMA}: not enough host memory for its ")
    assert "GiB of weights in bfloat16" in line


# The output folder ------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [[], ["data"], ["model"], ["log.out"], [".hidden"], ["recipe.json", "notes.txt"]]
)
def test_folders_that_may_be_a_runs(names, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    prepare_folder(tmp_path, str(demo.LLAMA))


def test_a_folder_with_one_other_file(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"other files than a run's \(thesis.tex\); name another"):
        prepare_folder(tmp_path, str(demo.LLAMA))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("command", [[], ["calibrate"]])
def test_a_folder_is_used_by_one_run(command, data, tmp_path, capsys):
    """Until that has ended, well or not; nothing is left of the lock."""
    folder = tmp_path / "run"
    with pytest.raises(KeyError), held_folder(folder, str(demo.LLAMA)):
        assert main([*command, "--data", str(data), "--output-dir", str(folder)]) == 2
        assert "another run is using this folder" in capsys.readouterr().err
        raise KeyError
    assert not folder.exists()
    folder.mkdir()
    with held_folder(folder, str(demo.LLAMA)):
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert not any(folder.iterdir())
