"""The weight of the hidden state's error: runs, and trains with the weight."""

import json

import pytest

from benchmarks import hidden_loss


@pytest.mark.long
def test_weights_of_the_hidden_loss(tmp_path, capsys):
    output = tmp_path / "result.json"
    flags = f"--rows 8 --seeds 1 --steps 1 --folder {tmp_path} --output {output}"
    assert hidden_loss.main(flags.split()) == 0
    cells = json.loads(output.read_text())["cells"]
    assert [cell["weight"] for cell in cells] == list(hidden_loss.WEIGHTS)
    found = [cell["kl"][0] for cell in cells]
    assert len(set(found)) == len(found), "each was trained otherwise"
    assert "| 0.3 | +" in capsys.readouterr().out
