"""The command `train analyze`."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swiftkv_jax import demo
from swiftkv_jax.calibration import LayerFit
from swiftkv_jax.errors import DataError
from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.analysis import analyze
from swiftkv_jax.train.analysis.analysis_table import describe_dips
from swiftkv_jax.train.analysis.sweep import CutResult, LayerR2, Sweep
from swiftkv_jax.train.loss import quality
from tests.train.test_analyze import CONFIG, analyze_cuts, measured_batches, random_llama
from tests.train.test_recommendation import cut as made_cut

FUNCTION = "def f(x):\n    return x + 1\n\n\n"
FLAGS = ["--rows", "2", "--max-length", "64", "--cuts", "50,K=6", "--groups", "1,2"]


def run_command(folder: Path, text: str, *flags: str) -> dict[str, Any]:
    """`analysis.json` of a run on one document."""
    (folder / "code.txt").write_text(text)
    data = ["--data", str(folder / "code.txt"), "--output-dir", str(folder / "out")]
    assert main(["analyze", *data, *FLAGS, *flags]) == 0
    return json.loads((folder / "out" / "analysis.json").read_text())


def rows_of(output: str, cuts: int) -> list[dict[str, str]]:
    """The table's cells by column, which line up."""
    _, head, _, *lines = output.splitlines()[: 3 + cuts]
    assert len({len(line) for line in (head, *lines)}) == 1, "columns line up"
    names = re.split(r"  +", head.strip())
    return [dict(zip(names, re.split(r"  +", line.strip()), strict=True)) for line in lines]


def test_the_command_on_the_demo_model(tmp_path, capsys):
    result = run_command(tmp_path, FUNCTION * 20)
    output = capsys.readouterr()
    assert "of 8 layers 50% is K=4, K=6" in output.err
    lines = output.out.splitlines()
    assert "teacher's perplexity" in lines[0]
    assert f"in closed form from {result['calibration_tokens']:,} other tokens" in lines[0]
    assert f"far nats: lost on the {result['far_tokens']:,} tokens" in output.out
    cuts = [CutResult(**cut) for cut in result["cuts"]]
    found = [(cut.num_key_value_layers, cut.key_value_group_size, cut.generated_kv) for cut in cuts]
    assert found == [
        (k, *rest) for k in (4, 6) for rest in ((1, "boundary"), (1, "own"), (2, "boundary"))
    ]
    assert result["finished"] and result["versions"]["jax"] and result["command"]
    assert result["rows"] == 1 and result["max_length"] == 64, "a document's beginning is a row"
    assert result["budget"] == {"max_perplexity_loss": 0.02, "max_far_loss": 0.15}
    assert (
        result["prompt_length"] == 1024
        and result["data"] == [str(tmp_path / "code.txt")]
        and result["init"] == "closed-form"
        and np.shape(result["similarity"]) == (9, 9)
        and len(result["heads"]) == 8
    )
    for cut, row in zip(cuts, rows_of(output.out, len(cuts)), strict=True):
        assert (row["K"], row["g"]) == (
            str(cut.num_key_value_layers),
            str(cut.key_value_group_size),
        )
        assert row["of layers"] == f"{cut.num_key_value_layers / 8:.1%}"
        assert row["generated"] == cut.generated_kv, "rows of 64 are too short for a tail"
        assert row["far nats"] == quality.FarLoss(result["far_tokens"], cut.far_nats).cell
        assert row["perplexity"] == f"{cut.perplexity_loss:+.2%}", "one row has no spread"
        assert cut.perplexity_loss == pytest.approx(
            cut.student_perplexity / cut.teacher_perplexity - 1, abs=1e-9
        )
        fits = [LayerR2(**layer) for layer in result["cuts"][cuts.index(cut)]["r2"]]
        assert [fit.layer for fit in fits] == list(range(cut.num_key_value_layers, 8))
        for column, name in (("R2 of K (layer)", "r2_k"), ("R2 of V (layer)", "r2_v")):
            smallest, layer = min((getattr(fit, name), fit.layer) for fit in fits)
            assert row[column] == f"{smallest:.3f} ({layer})"
    assert (tmp_path / "out" / "analysis.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-2] == result["recommendation"]["sentence"]
    assert lines[-1] == f"next: {result['recommendation']['command']}"


@pytest.mark.long
def test_the_demo_models_cliff(tmp_path, capsys):
    """Below K = 3 the keys of layers 4 and 5 dip, and a tap or prompt layers fill the dip."""
    folder = tmp_path / "out"
    flags = ["--cuts", "K=2,K=3", "--groups", "1", "--generated-kv", "own", "--rows", "8"]
    assert main(["analyze", *flags, "--output-dir", str(folder)]) == 0
    output = capsys.readouterr().out
    assert (
        "K=2: the keys of layers 4, 5 dip, R2 of the fit 0.8" in output
        and "K=3: the keys" not in output
    )
    assert (
        "K=2: previous-token heads of layer 2 are above the cut, and the induction heads of layers "
        "4, 5 need what they write" in output
    )
    assert "K=3: previous-token" not in output
    cuts = [CutResult(**cut) for cut in json.loads((folder / "analysis.json").read_text())["cuts"]]
    assert {(cut.generated_kv, cut.exact_tail) for cut in cuts} == {("own", 64)}
    for cut, row in zip(cuts, rows_of(output, len(cuts)), strict=True):
        error = cut.perplexity_loss_error
        assert error and row["perplexity"] == f"{cut.perplexity_loss:+.2%} ± {error:.2%}"
    first, head, *improved = (cut for cut in cuts if cut.num_key_value_layers == 2)
    assert [cut.exact_head for cut in (first, head, *improved)] == [0, *[1] * (1 + len(improved))]
    programs = [(cut.prompt_attention_layers, cut.boundary_taps) for cut in (head, *improved)]
    assert programs[:2] == [(0, 0), (0, 1)]
    assert all(cut.perplexity_loss < first.perplexity_loss / 3 for cut in improved)
    lost = [cut.far_nats for cut in (first, *improved) if cut.far_nats is not None]
    assert len(lost) == 1 + len(improved) and max(lost[1:]) < lost[0] / 3


def test_the_command_with_copies_needs_no_other_text(tmp_path, capsys, log):
    """A document as long as a row: all of it is measured."""
    result = run_command(tmp_path, FUNCTION, "--init", "leader", "--generated-kv", "boundary")
    output = capsys.readouterr().out
    assert "undistilled students, copied (leader), on" in output and "R2 of" not in output
    assert result["calibration_tokens"] == 0 and result["cuts"][0]["layers"] == []
    assert result["far_tokens"] == 0 and result["cuts"][0]["far_nats"] is None
    assert all(row["far nats"] == "none" for row in rows_of(output, 4))
    assert result["recommendation"] is None
    assert output.splitlines()[-1] == "no recommendation: it needs students in closed form (`init`)"
    assert not any(each.levelname == "WARNING" for each in log.records), "they are fitted to none"


def test_one_row_has_no_errors_and_the_next_command_fits_the_model(tmp_path, capsys, log):
    """The demo model, given as any other, has fewer positions than the default length of rows."""
    flags = ["--model", str(demo.LLAMA), "--rows", "1", "--calibration-tokens", "50"]
    result = run_command(tmp_path, FUNCTION * 20, *flags)
    assert result["calibration_tokens"] == 50 and result["rows"] == 1
    errors = {(each["perplexity_loss_error"], each["far_nats_error"]) for each in result["cuts"]}
    assert errors == {(None, None)}
    assert "±" not in capsys.readouterr().out
    assert " --max-length 1024 " in result["recommendation"]["command"]
    assert any(message.startswith("`exact_tail` is 0, not 64: ") for message in log.messages)
    (warning,) = (each.getMessage() for each in log.records if each.levelname == "WARNING")
    assert warning.startswith("calibrated on 50 tokens only, for a hidden state of 128")


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError("made up")])
def test_what_was_measured_is_kept(error, tmp_path, monkeypatch, log):
    """Whatever ends the analysis after the first student."""
    measure = Sweep.measure

    def once(sweep, cut, start):
        if sweep.results:
            raise error
        return measure(sweep, cut, start)

    monkeypatch.setattr(Sweep, "measure", once)
    (tmp_path / "code.txt").write_text(FUNCTION * 20)
    folder = tmp_path / "out"
    data = ["--data", str(tmp_path / "code.txt"), "--output-dir", str(folder)]
    assert main(["analyze", *data, *FLAGS]) == (130 if error is KeyboardInterrupt else 1)
    result = json.loads((folder / "analysis.json").read_text())
    assert result["finished"] is False and result["recommendation"] is None
    assert len(result["cuts"]) == 1 and result["similarity"] == result["heads"] == []
    assert CutResult(**result["cuts"][0]).perplexity_loss > 0
    said = (
        f"not finished: students measured so far, 1, are in {folder / 'analysis.json'}, without a"
    )
    assert f"{said} recommendation" in log.messages


def test_dips_are_compared_with_the_same_fit():
    """A student of `boundary` beside them does not count."""

    def fitted(r2: float, **fields: Any) -> CutResult:
        layers = [LayerFit(layer, 0.9, 0.9, 1, 1) for layer in (2, 3, 4)]
        layers[1] = LayerFit(3, r2, 0.9, 1, 1)
        return made_cut(2, 0.5, 0.1, None, layers=layers, **fields)

    boundary = fitted(0.81, generated_kv="boundary", exact_tail=0)
    cuts = [boundary, fitted(0.72), fitted(0.73, exact_head=1)]
    for given, expected in ((cuts, "0.72; with an exact head 0.73"), (cuts[:1], "0.81")):
        lines = describe_dips(SimpleNamespace(cuts=given, heads=[]))  # type: ignore
        assert lines == [f"K=2: the keys of layer 3 dip, R2 of the fit {expected}"]


def test_without_text_to_calibrate_on_there_is_one_line(tmp_path, capsys):
    (tmp_path / "code.txt").write_text(FUNCTION)
    data = ["--data", str(tmp_path / "code.txt"), "--output-dir", str(tmp_path / "out")]
    assert main(["analyze", *data, *FLAGS]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "no text is left beside the rows that are measured" in error[0]
    assert "--rows" in error[0] and "--init" in error[0]


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, log):
    analysis = analyze_cuts(CONFIG, random_llama(), measured_batches(), [(5, 1)], init="leader")
    monkeypatch.setattr(analyze, "matplotlib_missing", lambda: "pip install it")
    options = analyze.AnalyzeOptions(groups="1", output_dir=tmp_path)
    found = analyze.Findings(analysis, None, analyze.settle(options))
    analyze.write(found, options)
    assert [file.name for file in tmp_path.iterdir()] == ["analysis.json"]
    assert "no analysis.png: pip install it" in log.messages


BAD_FLAGS = {
    "cuts": ("--cuts 3", "--cuts '3': 3 layers, or 3 % of the 8? Write K=3 or 3%"),
    "groups": ("--groups 1,0", "--groups '1,0': expected whole numbers from 1"),
    "no group fits": (
        "--cuts 50 --groups 3",
        "--groups 3: none fits at any of the cuts: key_value_group_size=3 must divide",
    ),
    "rows": ("--rows 0", "--rows 0: must be at least 1"),
    "calibration tokens": (
        "--calibration-tokens 0",
        "--calibration-tokens 0: must be at least 1",
    ),
    "rows too long": ("--max-length 1025", "--max-length 1025: this model has 1024 positions"),
    "prompt too long": (
        "--prompt-length 2000",
        "--prompt-length 2000: this model has 1024 positions",
    ),
    "budget": ("--max-perplexity-loss 2", "--max-perplexity-loss '2': expected a percentage"),
    "tail": ("--exact-tail 300", "--exact-tail 300: must be from 0 to below 256"),
    "tail of boundary": (
        "--exact-tail 8 --generated-kv boundary",
        "--exact-tail 8 needs --generated-kv own",
    ),
    "model alone": ("--model somewhere", "--model also needs --data"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_one_line(case, tmp_path, capsys):
    flags, message = BAD_FLAGS[case]
    assert main(["analyze", *flags.split(), "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]
