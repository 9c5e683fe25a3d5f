"""The benchmark of drafts and of pages in host memory, on a tiny model."""

import json

import pytest

from benchmarks import drafts_and_tiers


@pytest.mark.long
def test_a_smoke_run(tmp_path):
    path = tmp_path / "result.json"
    assert drafts_and_tiers.main(["--shapes", "smoke", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    costs, answer = found["drafts"]["costs"], found["drafts"]["answer"]
    assert [(row["rows"], row["width"]) for row in costs] == [(1, 16), (4, 8)]
    assert answer["same"] and answer["accepted"] > answer["tokens"] / 2
    tier = found["host_memory"]
    assert tier["hits"] >= tier["document"] / 2
    assert min(tier["bytes_per_second"].values()) > 0
