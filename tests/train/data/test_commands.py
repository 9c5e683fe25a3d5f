"""The commands `prepare`, `restate` and `show`: from flags to what is printed."""

import json

import pytest

from swiftkv_jax import cli, demo
from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.data.dataset import PackedDataset

MODEL = ["--model", str(demo.LLAMA)]


@pytest.fixture
def chat(tmp_path):
    """The demo's tokenizer has no chat template, so prompts and completions."""
    file = tmp_path / "chat.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"question {i}\n", "completion": f"answer {i}\n"}) + "\n"
            for i in range(30)
        )
    )
    return file


def prepare(*sources, output, length="32"):
    data = [part for source in sources for part in ("--data", str(source))]
    return main(["prepare", *MODEL, *data, "--max-length", length, "--output-dir", str(output)])


def test_prepare_and_show(tmp_path, chat, capfd):
    assert prepare(chat, output=tmp_path / "store") == cli.OK
    assert capfd.readouterr().out == f"--data {tmp_path / 'store'}\n"
    assert main(["show", str(tmp_path / "store"), *MODEL, "--rows", "1"]) == cli.OK
    shown = capfd.readouterr().out
    row = PackedDataset(tmp_path / "store")[0]
    assert (
        shown.count("[[") == shown.count("--- document") == len(row.lengths)
        and shown.count("===") == 1
    )
    assert (
        f"=== row 0: {len(row.lengths)} documents, {len(row.tokens)} of 32 tokens, "
        f"{row.predicting().sum()} to predict" in shown
    )
    assert "question 0\n[[answer 0\n<|end_of_text|>]]" in shown


def test_restate(tmp_path, capfd):
    """A file is written once, and training reads it."""
    file = tmp_path / "restated.jsonl"
    flags = ["--data", "stdlib", "--examples", "2", "--max-length", "128"]
    command = ["restate", *MODEL, *flags, "--output"]
    assert main([*command, str(file)]) == cli.OK
    assert capfd.readouterr().out == f"--data {file}\n"
    assert prepare(file, output=tmp_path / "store", length="128") == cli.OK
    rows = PackedDataset(tmp_path / "store")
    assert sum(len(rows[row].lengths) for row in range(len(rows))) == 2
    assert not rows[0].is_target[:16].any()
    assert main([*command, str(file)]) == cli.USAGE
    assert "exists already" in capfd.readouterr().err
    assert main([*command, str(tmp_path / "restated.txt")]) == cli.USAGE
    assert "must end in .jsonl" in capfd.readouterr().err


def test_colour_on_a_terminal(tmp_path, chat, capfd, monkeypatch):
    prepare(chat, output=tmp_path / "store")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["show", str(tmp_path / "store"), *MODEL])
    shown = capfd.readouterr().out
    assert "\x1b[32manswer 0\n<|end_of_text|>\x1b[0m" in shown and "[[" not in shown


def test_several_sources(tmp_path, chat, capfd):
    other = tmp_path / "note.txt"
    other.write_text("a note")
    assert prepare(f"{chat}:1", other, output=tmp_path / "stores") == cli.OK
    assert (
        capfd.readouterr().out
        == f"--data {tmp_path / 'stores' / '0'}:1.0 --data {tmp_path / 'stores' / '1'}\n"
    )
    assert PackedDataset(tmp_path / "stores" / "1").manifest.documents == 1


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--data", "{chat}:0"], cli.USAGE, "the weight must be a number above 0"),
        (
            ["--data", "{chat}", "--max-length", "1"],
            cli.USAGE,
            "--max-length 1: must be at least 2",
        ),
        (["--data", "{chat}", "--output-dir", "{chat}"], cli.USAGE, "exists already"),
        (["--data", "{chat}.gone"], cli.USAGE, "no such file or folder"),
    ],
)
def test_refusals(tmp_path, chat, capfd, flags, code, message):
    given = [flag.format(chat=chat) for flag in flags]
    assert (
        main(
            ["prepare", *MODEL, "--max-length", "32", "--output-dir", str(tmp_path / "out"), *given]
        )
        == code
    )
    error = capfd.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_refusals_of_prepared_data(tmp_path, chat, capfd):
    prepare(chat, output=tmp_path / "store")
    assert prepare(tmp_path / "store", output=tmp_path / "again") == cli.USAGE
    assert "prepared already; give it to training as it is" in capfd.readouterr().err
    command = ["restate", *MODEL, "--examples", "1", "--max-length", "128"]
    command += ["--data", str(tmp_path / "store"), "--output", str(tmp_path / "new.jsonl")]
    assert main(command) == cli.USAGE
    assert "prepared already; name the text that it was made of" in capfd.readouterr().err
    assert main(["show", str(tmp_path), *MODEL]) == cli.ERROR
    assert "not a prepared dataset" in capfd.readouterr().err
