"""The `bench` command: its cells, its document, and mistakes that end it before anything
is measured."""

import dataclasses
import json
import math
import re

import pytest

from swiftkv_jax import cli
from swiftkv_jax.checkpoints.hf_config import config_to_hf
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.__main__ import main, parser
from swiftkv_jax.infer.bench import command, variants
from swiftkv_jax.infer.bench.cells import MODES, QUEUED, STUDENT, TEACHER, Cell, num_pages
from swiftkv_jax.infer.bench.options import BenchOptions, plan
from tests.infer.bench.conftest import CONFIG, ROOFLINE


@pytest.mark.parametrize(
    ("flags", "cells"),
    [
        ("prefill --batch 1,2", [Cell(n, 1, b) for n in (4, 8) for b in (1, 2)]),
        ("decode --output-len 17", [Cell(4, 24, 1), Cell(8, 24, 1)]),
        ("offline --output-len 7 --num-prompts 9", [Cell(4, 7, 9), Cell(8, 7, 9)]),
        (
            "latency --request-rate 1,inf --max-concurrency 3",
            [Cell(n, 128, 64, rate, 3) for n in (4, 8) for rate in (1.0, math.inf)],
        ),
    ],
)
def test_cells(flags, cells):
    assert plan(parsed(f"{flags} --input-len 4,8"))[1] == cells


def parsed(flags: str) -> BenchOptions:
    return BenchOptions.from_args(parser("bench").parse_args(flags.split()))


def test_the_engine_has_the_shapes_of_the_cells():
    options, _ = plan(parsed("decode --input-len 4,8 --batch 3,9 --output-len 16 --mesh 2x1"))
    assert (options.max_model_len, options.max_num_seqs, options.decode_rows) == (24, 9, (2, 5))
    assert plan(parsed("prefill"))[0].decode_steps == 1
    assert num_pages([Cell(4, 4, 9), Cell(9, 8, 2)], rows=3, page_size=8) == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("prefill --config llama-9b --load-format dummy", "--config llama-9b: neither a preset"),
        ("prefill --config llama-3.1-8b", "add --load-format dummy"),
        ("prefill --load-format dummy", "either --config or --model"),
        ("decode --output-len 8", "--output-len 8 must be at least 16"),
        ("offline --batch 2", "--batch is for prefill and decode, not for offline: --max-num-seqs"),
        ("decode --max-num-seqs 2", "--max-num-seqs is for offline and latency"),
        ("decode --request-rate 2", "--request-rate is for latency, not for decode"),
        ("prefill --output-len 8", "and latency, not for prefill, which ends where the first"),
        ("latency --num-prompts 0", "--num-prompts 0: must be at least 1"),
        ("prefill --prediction-error 0", "--prediction-error is for decode, not for prefill"),
        ("decode --prediction-error 0.1", "--prediction-error needs --speculative-config"),
        ("decode --seed -1", "--seed -1: must be at least 0"),
        ("decode --num-prompts 8", "--num-prompts is for offline and latency"),
        ("prefill -o {tmp}/there.json", "exists already"),
        ("prefill -o {tmp}/no/where.json", "its folder does not exist"),
        (
            "prefill --input-len 256k --config llama-3.1-8b --load-format dummy",
            "above the limit of 131072",
        ),
        (
            "prefill --config llama-3.1-8b --load-format dummy --num-key-value-layers 5 "
            "--key-value-group-size 2",
            "--num-key-value-layers 5",
        ),
        (
            "prefill --config llama-3.1-8b --load-format dummy --prompt-attention-layers 16",
            "from 0 to 15",
        ),
        ("prefill --boundary-taps 1", "--boundary-taps is of a cut: add --num-key-value-layers"),
        (
            "prefill --config llama-3.1-8b --load-format dummy --prompt-mlp-neurons 64",
            "--prompt-mlp-neurons 64: prompt_mlp_neurons=64 needs prompt_attention_layers",
        ),
    ],
)
def test_mistakes_are_one_line(flags, message, tmp_path, capsys):
    (tmp_path / "there.json").touch()
    assert main(["bench", *flags.format(tmp=tmp_path).split(), "--compile-cache", "none"]) == 2
    error = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in error and error.count("\n") == 1


def test_a_config_that_does_not_fit_is_refused_with_its_needs(tmp_path, capsys):
    large = dataclasses.replace(CONFIG, embed_dim=2**20, mlp_dim=2**20, num_layers=100)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(large.cut(100))))
    flags = f"prefill --load-format dummy --config {tmp_path} --compile-cache none --input-len 16"
    assert main(["bench", *flags.split()]) == cli.OUT_OF_MEMORY
    error = capsys.readouterr().err
    assert "GiB of weights and 0.00 GiB of KV cache on each device" in error
    assert "--quantization, or split" in error and error.count("\n") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_queue_needs_room_for_one_sequence_only(mode, tmp_path, capsys, monkeypatch):
    """Offline and latency begin where not all sequences fit together; prefill and decode do not."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=512)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    flags = f"--load-format dummy --config {tmp_path} --compile-cache none --input-len 384"
    rows = "--max-num-seqs 64" if mode in QUEUED else "--batch 64"
    monkeypatch.setattr(variants, "_available_memory", lambda: 2**21)

    def begun(dtype, devices):
        raise UsageError("begun")

    monkeypatch.setattr(command, "measure_roofline", begun)
    code = main(["bench", mode, *flags.split(), *rows.split()])
    error = capsys.readouterr().err
    assert (code, "begun" in error) == ((2, True) if mode in QUEUED else (cli.OUT_OF_MEMORY, False))


NONSENSE = [
    "prefill --swiftkv on,on",
    "prefill --input-len 1",
    "decode --batch 0",
    "latency --request-rate 0",
    "decode --prediction-error 4",
    "fly",
]


@pytest.mark.parametrize("flags", NONSENSE)
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *flags.split()])


def test_all_options_are_written():
    args = parser("bench").parse_args(["decode", "--speculative-config", "{}", "-o", "out.json"])
    found = json.loads(json.dumps(command._plain(vars(args))))
    assert found["speculative"]["prompt_lookup_min"] == 2 and found["output"] == "out.json"


def test_both_variants_in_one_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "measure_roofline", lambda dtype, devices: ROOFLINE)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(CONFIG.cut(2))))
    path = tmp_path / "result.json"
    flags = (
        f"decode --load-format dummy --input-len 16 --output-len 4 --decode-steps 2 --batch 2 -r 2 "
        f"--page-size 8 --compile-cache none --config {tmp_path} --num-key-value-layers 1 -o {path}"
    )
    assert main(["bench", *flags.split()]) == 0
    text = capsys.readouterr()
    rows = re.findall(r"^\| 16 in, 4 out, 2 prompts \| (swiftkv|teacher) ", text.out, re.M)
    assert rows == [STUDENT, TEACHER]
    order = re.findall(r"repetition \d: (\w+)", text.err)
    assert order == [STUDENT, TEACHER, TEACHER, STUDENT], "they take turns in going first"
    document = json.loads(path.read_text())
    student, teacher = document["rows"]
    assert student["cell"] == teacher["cell"]
    for row in (student, teacher):
        assert [raw["seed"] for raw in row["repetitions"]] == [0, 1] and row["compilations"] == 0
    assert student["speed_up"] > 0
    weights = [document["engines"][name]["plan"]["weights"] for name in (STUDENT, TEACHER)]
    assert weights[0] != weights[1]
    assert document["config"]["num_key_value_layers"] == 1 and "jax" in document["versions"]
    assert "commit" in document and not list(tmp_path.glob("*partial*"))
