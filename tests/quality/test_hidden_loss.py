"""The weight of the hidden state's error: runs, and trains with the weight."""

import json

import pytest

from benchmarks import hidden_loss, measurements, result_files


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


def test_the_page_has_a_section_where_there_is_a_result(tmp_path, monkeypatch):
    title = "## The weight of the hidden state's error"
    make = measurements.of(hidden_loss.hidden_loss, "hidden loss")
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    assert make() is None
    cells = [{"weight": 0.1, "above": [0.01, 0.03], "far": [0.1, 0.3], "kl": [0.5]}]
    document = {"group": 2, "steps": 64, "cells": cells}
    (tmp_path / "hidden-loss-cpu-20260101-000000.json").write_text(json.dumps(document))
    found = make()
    assert found is not None and found.startswith(title)
    assert "| 0.1 | +1.00%, +3.00% | +2.00% | +0.200 | 0.5000 |" in found
