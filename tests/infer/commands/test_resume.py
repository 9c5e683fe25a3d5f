"""Output files that survive a kill: no row is lost or written twice, and no file is
overwritten."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.infer import Engine, RequestOutput
from swiftkv_jax.infer.commands.batch import Row
from swiftkv_jax.infer.commands.output import ProgressWriter
from swiftkv_jax.infer.commands.resume import OutputFile, checkpoint_digest
from tests.infer.commands.test_batch import rows_file, written

SETTINGS = {"command": "generate", "input": "abc", "sampling": {"seed": 1, "logit_bias": {5: 1.0}}}


def write(
    path: Path, *rows: dict, resume: bool = True, settings: dict = SETTINGS, end: bool = True
) -> list[dict]:
    """Add rows and return those that were there; without `end`, the run is interrupted."""
    old: list[dict] = []
    try:
        with OutputFile(path, resume=resume).open(settings, old.append) as file:
            for row in rows:
                file.write(json.dumps(row).encode() + b"\n")
            if not end:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return old


@contextlib.contextmanager
def interrupted_once_written(partial: Path, monkeypatch) -> Iterator[None]:
    """Runs of the block get a Ctrl-C when the file has rows."""
    step = Engine.step

    def interrupted(engine, **options):
        if partial.read_bytes():
            raise KeyboardInterrupt
        return step(engine, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        yield


def test_output_takes_its_name_at_the_end(tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    assert write(out, {"id": 0}, {"id": 1}, resume=False, end=False) == []
    assert not out.exists() and written(partial) == [{"id": 0}, {"id": 1}]
    with pytest.raises(
        UsageError, match="is of an interrupted run; go on with `resume`, or remove it"
    ):
        OutputFile(out, resume=False)
    with partial.open("ab") as file:
        file.write(b'{"id": 2, "te')
    assert write(out, {"id": 2}, end=False) == [{"id": 0}, {"id": 1}]
    assert write(out, {"id": 3}) == [{"id": 0}, {"id": 1}, {"id": 2}]
    assert written(out) == [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.settings.json"]
    with pytest.raises(UsageError, match="exists already"):
        OutputFile(out, resume=False)
    assert OutputFile(out, resume=True).count(SETTINGS) == (4, 0)
    with pytest.raises(
        UsageError, match="out was written with another command: 'generate' then, 'score' now"
    ):
        OutputFile(out, resume=True).count(SETTINGS | {"command": "score"})


def test_two_that_began_together_do_not_overwrite_each_other(tmp_path):
    out = tmp_path / "out"
    first, second, third = (OutputFile(out, resume=resume) for resume in (False, False, True))
    with first.open(SETTINGS, lambda row: None) as file:
        file.write(b'{"id": 0}\n')
        file.flush()
        late = third.partial.open("a+b")
    for other in (second, third):
        with (
            pytest.raises(UsageError, match="another process has just written it"),
            other.open(SETTINGS, lambda row: None),
        ):
            pass
    late.close()
    assert written(out) == [{"id": 0}] and not second.partial.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "xyz"}, "was written with another input; use the same"),
        ({"sampling": {"seed": 2}}, "was written with another sampling: "),
        ({"more": 1}, "was written with another more: None then, 1 now"),
    ],
)
def test_other_settings_do_not_go_on(tmp_path, change, message):
    write(tmp_path / "out", {"id": 0}, end=False)
    with pytest.raises(UsageError, match=message):
        write(tmp_path / "out", {"id": 1}, settings=SETTINGS | change)
    assert written(tmp_path / "out.partial") == [{"id": 0}]


def test_damaged_and_busy_outputs(tmp_path):
    out = tmp_path / "out"
    write(out, {"id": 0}, end=False)
    with OutputFile(out, resume=True).open(SETTINGS, lambda row: None) as file:
        with pytest.raises(UsageError, match="another process is writing"):
            write(out, {"id": 1})
        file.write(b"\0\0\n")
        file.flush()
        (tmp_path / "copy.partial").write_bytes((tmp_path / "out.partial").read_bytes())
        (tmp_path / "copy.settings.json").write_bytes((tmp_path / "out.settings.json").read_bytes())
    with pytest.raises(DataError, match="copy.partial:2: not valid JSON"):
        write(tmp_path / "copy")
    (tmp_path / "copy.settings.json").write_text("{")
    with pytest.raises(DataError, match="missing or damaged, so it is not known"):
        write(tmp_path / "copy")


def test_a_digest_of_a_checkpoint_sees_other_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(3 << 20))
    file.write_bytes(content)
    before = checkpoint_digest(tmp_path)
    assert checkpoint_digest(tmp_path) == before
    file.write_bytes(os.urandom(len(content)))
    other = checkpoint_digest(tmp_path)
    file.write_bytes(content)
    assert checkpoint_digest(tmp_path) == before != other
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_digest(tmp_path) != before
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(bytes(content))
    before = checkpoint_digest(parts[0])
    for part in parts:
        part.write_bytes(os.urandom(len(content)))
        assert checkpoint_digest(parts[0]) != before
        before = checkpoint_digest(parts[0])


def test_an_interrupted_run_says_how_to_go_on(checkpoint, run, tmp_path, capsys, monkeypatch):
    rows, out = (
        rows_file(tmp_path, *({"prompt": f"x{number}"} for number in range(6))),
        tmp_path / "out.jsonl",
    )
    flags = ("-m", checkpoint, "-i", rows, "--max-tokens", 8, "--max-num-seqs", 2)
    assert run(*flags, "-o", tmp_path / "whole.jsonl") == 0
    with interrupted_once_written(tmp_path / "out.jsonl.partial", monkeypatch):
        assert run(*flags, "-o", out) == 130
    done = len(written(tmp_path / "out.jsonl.partial"))
    assert 0 < done < 6
    assert (
        f"out.jsonl.partial has {done} of 6 rows; the same command with --resume goes on"
        in capsys.readouterr().err
    )
    assert run(*flags, "-o", out) == 2
    assert run(*flags, "-o", out, "--resume", "--temperature", 1) == 2
    assert "another sampling" in capsys.readouterr().err
    assert run(*flags, "-o", out, "--resume") == 0
    assert without_timing(out) == without_timing(tmp_path / "whole.jsonl")
    content = out.read_bytes()
    assert run(*flags, "-o", out, "--resume") == 0
    assert capsys.readouterr().err.endswith("out.jsonl is complete: 6 rows\n")
    assert out.read_bytes() == content


def test_resuming_what_is_complete(checkpoint, run, tmp_path, capsys):
    """The exit code is that of the run which wrote it, and another input is refused."""
    rows, out = rows_file(tmp_path, {"prompt": "a"}, {"prompt": ""}), tmp_path / "out.jsonl"
    flags = ("-m", checkpoint, "-i", rows, "--max-tokens", 2, "-o", out)
    assert run(*flags) == 3
    assert run(*flags, "--resume") == 3
    assert "is complete: 2 rows, 1 failed" in capsys.readouterr().err
    assert run(*flags, "--resume", "--seed", 4) == 2
    assert "out.jsonl was written with another sampling" in capsys.readouterr().err
    for other in ("--chat-template plain", "--generated-kv own", "--quantize-activations"):
        assert run(*flags, "--resume", *other.split()) == 2
        name = other.split()[0][2:].replace("-", "_")
        assert f"out.jsonl was written with another {name}" in capsys.readouterr().err
    assert run("score", "-m", checkpoint, "-i", rows, "-o", out, "--resume") == 2
    with rows.open("a") as file:
        file.write('\n{"prompt": "b"}\n')
    assert run(*flags, "--resume") == 2
    assert "was written with another input" in capsys.readouterr().err
    (tmp_path / "out.jsonl.settings.json").unlink()
    assert run(*flags, "--resume") == 1
    assert "missing or damaged, so it is not known how" in capsys.readouterr().err


def without_timing(path: Path) -> list[str]:
    """Lines without their times, byte for byte."""
    return [
        json.dumps(
            {name: value for name, value in row.items() if name != "timing"}, ensure_ascii=False
        )
        for row in written(path)
    ]


@pytest.mark.long
def test_kill_at_any_time_and_resume(checkpoint, run, tmp_path):
    """SIGKILL while rows are being written, and again; then the whole is as if nothing had
    happened."""
    rows = rows_file(
        tmp_path,
        *(
            {"id": f"r{number}", "prompt": f"x{number}"} if number % 7 else "broken"
            for number in range(400)
        ),
    )
    flags = f"-m {checkpoint} -i {rows} --max-tokens 8 --temperature 2 --max-num-seqs 2"
    flags += " -c 128 --max-num-batched-tokens 16 --decode-steps 3 --page-size 8"
    assert run(*flags.split(), "-o", tmp_path / "whole.jsonl") == 3

    def start() -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "swiftkv_jax.infer",
            *flags.split(),
            "--compile-cache",
            str(tmp_path / "compiled"),
        ]
        command += ["-o", str(tmp_path / "out.jsonl"), "--resume"]
        return subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )

    partial, done = tmp_path / "out.jsonl.partial", 0
    for more in (60, 100):
        process = start()
        deadline = time.monotonic() + 300
        while not partial.exists() or partial.read_bytes().count(b"\n") < done + more:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert done + more <= (done := partial.read_bytes().count(b"\n")) < 400
    last = start()
    errors = last.communicate(timeout=300)[1]
    assert last.returncode == 3 and "error: 48 more rows failed" in errors, errors
    assert without_timing(tmp_path / "out.jsonl") == without_timing(tmp_path / "whole.jsonl")
    assert not partial.exists()


class Counted:
    """A result of so many tokens."""

    done, timing = True, None

    def __init__(self, tokens: int):
        self.tokens = tokens

    def update(self, output: RequestOutput) -> bool:
        return False

    def to_json(self) -> dict:
        return {"text": "x" * self.tokens}


def test_progress_is_that_of_this_run(monkeypatch):
    """Rows of an earlier run are done, but count neither in the rate of rows nor in that of
    tokens."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    writer = ProgressWriter(total=10, progress=True)
    for _ in range(6):
        writer.count_existing({"text": "x" * 50})
    now = 2.0
    writer.write(Row(6, result=Counted(30)))
    facts = writer._bar.format_dict
    assert (facts["n"], facts["initial"], facts["total"]) == (7, 6, 10) and facts[
        "postfix"
    ] == "15 tokens/s"
    writer.close()
