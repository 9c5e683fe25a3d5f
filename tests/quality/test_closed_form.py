"""What limits the closed form: runs, and adds up."""

import json

import pytest

from benchmarks import closed_form


@pytest.mark.long
def test_what_limits_the_closed_form(tmp_path, capsys):
    """With exact keys or values less is lost than without, and with more tokens too."""
    output = tmp_path / "result.json"
    flags = f"--rows 8 --tokens 2048,8192 --folder {tmp_path} --output {output}"
    assert closed_form.main(flags.split()) == 0
    cells = json.loads(output.read_text())["cells"]
    assert [(cell["tokens"], cell["exact"]) for cell in cells] == [
        (2048, "nothing"),
        (8192, "nothing"),
        (8192, "keys"),
        (8192, "values"),
    ]
    few, fitted, *halves = (cell["above"] for cell in cells)
    assert few > fitted > max(halves) > min(halves) > 0
    assert cells[1]["r2_k"][0] == pytest.approx(1, abs=1e-4) and 0.5 < cells[1]["r2_v"][-1] < 1
    assert 0 < cells[1]["own"]["above"] < fitted
    assert cells[1]["far"] > cells[2]["far"], "the distant prompt is found by keys"
    assert "| 8,192 | keys |  |  | +" in capsys.readouterr().out


def test_counts_are_whole_numbers(capsys):
    with pytest.raises(SystemExit):
        closed_form.main(["--tokens", "1,x"])
    assert "--tokens: must be whole numbers, got '1,x'" in capsys.readouterr().err
