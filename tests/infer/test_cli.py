"""The command: what goes to standard output, what to files, and how each mistake ends."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax import demo
from swiftkv_jax.infer.__main__ import DEMO_PROMPT, main, parser
from swiftkv_jax.infer.text import encode
from tests.infer.conftest import CHAT_TEMPLATE

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama-trained-4of8-group2-tied"
LIMIT = 512  # positions of the fixture


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(FIXTURE, path)
    tokenizer.save_pretrained(path)
    return path


def expected(checkpoint: Path, tokenizer, text: str, **options) -> list[int]:
    return skv.generate(skv.load(checkpoint), [encode(tokenizer, text)], **{"max_tokens": 8} | options)[0]


def run(*argv: object) -> int:
    return main([str(part) for part in argv])


def test_flags_are_these():
    common = "--model --swiftkv --dtype --mesh --attention --max-model-len".split()
    sampling = "--max-tokens --temperature --top-k --top-p --seed --stop --ignore-eos".split()
    own = "--prompt --prompt-file --input --output --max-num-seqs --stream".split()
    assert _flags("generate") == {*common, *sampling, *own, "stdin"}
    assert _flags("chat") == {*common, *sampling, "--system-prompt"}


def _flags(command: str) -> set[str]:
    actions = [action for action in parser(command)._actions if action.dest != "help"]
    assert all(action.help for action in actions)
    return {action.option_strings[0] if action.option_strings else action.dest for action in actions}


def test_a_prompt_becomes_its_completion_and_nothing_else(checkpoint, tokenizer, capsys):
    text = tokenizer.decode(expected(checkpoint, tokenizer, "def x"))
    for stream in ("--stream", "--no-stream"):
        assert run("-m", checkpoint, "-p", "def x", "-n", 8, stream) == 0
        out, err = capsys.readouterr()
        assert out == text + "\n"
        assert "SwiftKV, prompts run 4 of 8 layers, 6 layers of KV" in err
        assert "tokens/s" in err and "first token after" in err and "KV cache: 1536 bytes/token" in err


def test_the_teacher_is_the_control(checkpoint, tokenizer, capsys):
    assert run("generate", "--model", checkpoint, "--prompt", "def x", "--max-tokens", 8, "--swiftkv", "off") == 0
    out, err = capsys.readouterr()
    assert out == tokenizer.decode(expected(checkpoint, tokenizer, "def x", swiftkv=False)) + "\n"
    assert "teacher, 8 layers" in err and "KV cache: 2048 bytes/token" in err


def test_several_prompts_come_in_order(checkpoint, tokenizer, capsys):
    assert run("-m", checkpoint, "-p", "def x", "-p", "print", "-p", "if", "-n", 8, "--max-num-seqs", 2) == 0
    texts = [tokenizer.decode(expected(checkpoint, tokenizer, text)) for text in ("def x", "print", "if")]
    assert capsys.readouterr().out == "".join(text + "\n" for text in texts)


def test_prompt_from_a_file_and_from_standard_input(checkpoint, tokenizer, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.py").write_text("def naïve\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("def naïve\n"))
    assert run("-m", checkpoint, "-f", tmp_path / "prompt.py", "-n", 8) == 0
    assert run("-m", checkpoint, "-", "-n", 8) == 0
    assert capsys.readouterr().out == 2 * (tokenizer.decode(expected(checkpoint, tokenizer, "def naïve\n")) + "\n")


def test_stop_strings_end_a_row(checkpoint, tokenizer, tmp_path, capsys):
    tokens = expected(checkpoint, tokenizer, "def x")
    text = tokenizer.decode(tokens)
    stop = text[len(text) // 2 :][:3]
    assert run("-m", checkpoint, "-p", "def x", "-n", 8, "--stop", stop, "-o", tmp_path / "out.jsonl") == 0
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["text"] == text[: text.index(stop)] and row["finish_reason"] == "stop"
    assert row["token_ids"] == tokens[: row["usage"]["completion_tokens"]]


def test_jsonl_rows_fail_alone(checkpoint, tokenizer, tmp_path, capsys):
    rows = tmp_path / "in.jsonl"
    rows.write_text(
        "\n".join(
            [
                '{"id": "a", "prompt": "def x"}',
                "{not json}",
                json.dumps({"id": "long", "prompt_token_ids": [5] * (LIMIT + 1)}),
                "",
                json.dumps({"prompt_token_ids": encode(tokenizer, "print")}),
                '{"id": "b", "prompt": "x", "max_tokens": 3}',
                '{"id": "c", "prompt_token_ids": []}',
                '{"id": "d", "messages": [{"role": "user", "content": "hi"}]}',
                '["prompt"]',
            ]
        )
    )
    out = tmp_path / "out.jsonl"
    assert run("-m", checkpoint, "-i", rows, "-o", out, "-n", 8, "--max-num-seqs", 2) == 3
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    first, second = (expected(checkpoint, tokenizer, text) for text in ("def x", "print"))
    assert found[0] == {
        "id": "a",
        "text": tokenizer.decode(first),
        "token_ids": first,
        "finish_reason": "length",
        "usage": {"prompt_tokens": len(encode(tokenizer, "def x")), "completion_tokens": 8},
    }
    assert found[3]["id"] == 3 and found[3]["token_ids"] == second
    errors = {row["id"]: row["error"] for row in found if "error" in row}
    assert list(errors) == [1, "long", "b", "c", "d", 7]
    assert errors[1].startswith(f"{rows}:2: not valid JSON")
    assert "513 tokens, with 8 new ones that is 521, above the limit of 512" in errors["long"]
    assert "expected id and one of prompt, prompt_token_ids, messages; got prompt, max_tokens" in errors["b"]
    assert "is empty" in errors["c"]
    assert "no chat template" in errors["d"]
    assert errors[7].startswith(f"{rows}:9: expected an object")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("error: ") == 6


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["-p", ""], 2, "the prompt is empty"),
        (["-p", "\udcff x"], 2, "the text is not UTF-8"),
        (["-p", "x", "-o", "/nowhere/out.jsonl"], 2, "--output /nowhere/out.jsonl: its folder does not exist"),
        (["-p", "x", "--temperature", "nan"], 2, "temperature=nan must be"),
        (["-p", "x", "--top-p", "0"], 2, "top_p=0.0 must be"),
        (["-p", "x", "--top-k", "-1"], 2, "top_k=-1 must be"),
        (["-p", "x", "-n", "0"], 2, "max_tokens=0 must be"),
        (["-p", "x", "--seed", "-1"], 2, "seed=-1 must be"),
        (["-p", "x", "--stop", ""], 2, "--stop ''"),
        (["-p", "x", "-i", "y"], 2, "give one of"),
        ([], 2, "nothing to generate from"),
        (["-p", "x", "--max-num-seqs", "0"], 2, "--max-num-seqs 0"),
        (["-p", "x", "--max-model-len", "1k"], 2, "--max-model-len 1024 must be from 2 to the model's 512"),
        (["-p", "x" * 600], 2, "above the limit of 512"),
        (["-p", "x" * 30, "-n", "8", "-c", "16"], 2, "above the limit of 16"),
        (["-p", "x", "--mesh", "2by2"], 2, "--mesh '2by2'"),
        (["-f", "/nowhere/prompt"], 1, "/nowhere/prompt"),
        (["-i", "/nowhere/rows"], 1, "/nowhere/rows"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(checkpoint, capsys, argv, code, message):
    assert run("-m", checkpoint, *argv) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


def test_an_existing_output_is_not_overwritten(checkpoint, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    assert run("-m", checkpoint, "-p", "x", "-o", out) == 2
    assert "out.jsonl: exists already" in capsys.readouterr().err and out.read_text() == "precious"


@pytest.mark.parametrize("argv", [["--max-model-len", "many"], ["--swiftkv", "maybe"], ["--nonsense"], ["serve"]], ids=str)
def test_mistakes_in_the_command_line(argv, capsys):
    with pytest.raises(SystemExit) as error:
        run(*argv)
    assert error.value.code == 2


def test_models_that_are_not_there(tmp_path, capsys):
    assert run("-m", tmp_path / "nothing", "-p", "x") in (1, 4)
    assert "nothing" in capsys.readouterr().err


def test_without_a_tokenizer_tokens_still_work(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "x"}\n')
    assert run("-m", FIXTURE, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-n", 4) == 3
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0]["text"] is None and len(rows[0]["token_ids"]) == 4
    assert "needs a tokenizer" in rows[1]["error"]
    assert run("-m", FIXTURE, "-p", "x") == 2


def test_no_arguments_run_the_demo(checkpoint, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(demo, "SWIFTKV", checkpoint)
    assert run("-n", 8) == 0
    out, err = capsys.readouterr()
    assert out == DEMO_PROMPT + tokenizer.decode(expected(checkpoint, tokenizer, DEMO_PROMPT)) + "\n"
    assert str(checkpoint) in err
    monkeypatch.setattr(demo, "SWIFTKV", checkpoint / "missing")
    assert run() == 4


def test_a_mesh_gives_the_same_text(checkpoint, capsys):
    assert run("-m", checkpoint, "-p", "def x", "-n", 8) == 0
    assert run("-m", checkpoint, "-p", "def x", "-n", 8, "--mesh", "2x2") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_as_a_process(checkpoint, tokenizer, tmp_path):
    command = [sys.executable, "-m", "swiftkv_jax.infer", "-m", str(checkpoint), "-p", "def x", "-n", "8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout == tokenizer.decode(expected(checkpoint, tokenizer, "def x")) + "\n"


def test_chat(checkpoint, tokenizer, tmp_path, capsys, monkeypatch):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    lines = "hello\n\nmore\n/reset\nhello\n" + "x" * 600 + "\n/exit\nunread\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run("chat", "-m", path, "-n", 6, "--system-prompt", "be brief") == 0
    out, err = capsys.readouterr()

    def reply(*messages: tuple[str, str]) -> str:
        text = "<s>" + "".join(f"[{role}]{text}\n" for role, text in messages) + "[assistant]"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer.decode(skv.generate(skv.load(path), [ids], max_tokens=6)[0], skip_special_tokens=True)

    system = ("system", "be brief")
    first = reply(system, ("user", "hello"))
    second = reply(system, ("user", "hello"), ("assistant", first), ("user", "more"))
    assert out == f"{first}\n{second}\n{first}\n"
    assert "above the limit of 512" in err and "/reset" in err


def test_chat_needs_a_template(checkpoint, capsys):
    assert run("chat", "-m", checkpoint) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: this model's tokenizer has no chat template")
