"""The benchmark of command buffers: thunks in them and not, and tokens that differ."""

import json

import pytest

from benchmarks import command_buffers, thunks
from benchmarks.command_buffers import DEFAULT, SETS

SEQUENCE = """\
000: kCommandBuffer [source       | next=009 (1)]
    001: kCopy         [source | sink] kCopy
    002: kCustomKernel [source | sink] loop_gather_fusion grid: [1, 1, 1] threads: [64, 1, 1]
009: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    010: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=030 (1)]
        011: kConditional  [source | sink]
          false_branch:
            012: kWhile        [source | sink]
condition:
                013: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
              body:
                014: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
    015: kConditional   [prev=000 (1) | next=178 (1)]
      false_branch:
        016: kCustomCall    [prev=000 (1) | next=000 (1)] kCustomCall
    017: kAsyncStart    [prev=177 (1) | sink        ] stream=computation_stream[1], async_id=178
        018: kDynamicSliceFusion [source | sink] params=1, results=1
            019: kCopy [source | sink] kCopy
    020: kAsyncDone     [source       | sink        ] async_id=178
"""


def test_thunks_in_command_buffers_and_not():
    """What a command buffer holds is in it at any depth; the loop around it is the host's."""
    assert thunks.count(SEQUENCE) == thunks.Thunks(
        command_buffers=2, inside=4, outside=3, branches_outside=1, loops_outside=1
    )


def test_the_last_sequence_counts(tmp_path):
    with pytest.raises(ValueError, match="no sequence"):
        thunks.count_dumped(tmp_path)
    (tmp_path / "m.thunk_sequence.txt").write_text("001: kCopy [source | sink] kCopy\n")
    assert thunks.count_dumped(tmp_path).outside == 1
    after = tmp_path / "m.thunk_sequence_after_thunk_passes.txt"
    after.write_text("000: kCommandBuffer [a]\n    001: kCopy [source | sink] kCopy\n")
    assert thunks.count_dumped(tmp_path).inside == 1


def benchmark(tmp_path, monkeypatch, differ: str | None = None) -> tuple[int, list]:
    """(exit code, rows) of a run whose engines are not made: the set `differ` has other tokens."""

    def run(model, size, options, seed):
        name = next(name for name, one in SETS.items() if one == options)
        if name == "full unrolling":
            raise RuntimeError("no")
        return {"greedy step": 1e-3}, [[1, 2, 3 + (name == differ)]]

    monkeypatch.setattr(command_buffers, "run", run)
    path = tmp_path / "result.json"
    code = command_buffers.main(["--shapes", "smoke", "--output", str(path)])
    return code, json.loads(path.read_text())["rows"]


def test_other_tokens_and_failures_are_told(tmp_path, monkeypatch, capsys):
    code, rows = benchmark(tmp_path, monkeypatch, differ="with loops")
    assert code == 1
    equal = {row["set"]: row.get("equal_tokens", row.get("error")) for row in rows}
    assert equal.pop("with loops") is False and equal.pop("full unrolling") == "RuntimeError: no"
    assert all(equal.values()) and DEFAULT in equal
    assert "with loops            equal tokens: NO; greedy step 1 ms" in capsys.readouterr().out


@pytest.mark.long
def test_equal_tokens_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Two sets, run: options of GPUs change nothing here."""
    for name in list(SETS)[2:]:
        monkeypatch.delitem(SETS, name)
    path = tmp_path / "result.json"
    assert command_buffers.main(["--shapes", "smoke", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["equal_tokens"] for row in rows] == [True, True]
    assert all(row["greedy step"] > 0 and row["sampled step"] > 0 for row in rows)
