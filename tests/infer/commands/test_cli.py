"""`generate` on single prompts: standard output, and how each mistake ends."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax import demo
from swiftkv_jax.infer import Request, SamplingParams
from swiftkv_jax.infer.__main__ import COMMANDS, main
from swiftkv_jax.infer.commands import complete
from swiftkv_jax.infer.commands.complete_arguments import DEMO_PROMPT, DEMO_SAMPLING
from swiftkv_jax.infer.text import encode
from tests.infer.conftest import LIMIT


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name}" in out and one.purpose in out for name, one in COMMANDS.items())


def test_standard_output_is_the_completion_alone(checkpoint, tokenizer, greedy, run, capsys):
    text = tokenizer.decode(greedy(encode(tokenizer, "def x"), 8))
    for stream in ("--stream", "--no-stream"):
        assert run("-m", checkpoint, "-p", "def x", "--max-tokens", 8, stream) == 0
        out, err = capsys.readouterr()
        assert out == text + "\n"
        assert "SwiftKV, prompts run 1 of 2 layers, 2 layers of KV" in err
        said = (
            "generated: 8 tokens",
            "first token after",
            "KV cache: 256 bytes/token",
            "0% cached",
        )
        assert all(text in err for text in said) and "compiled while" not in err


def test_text_is_streamed(checkpoint, run, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", written.append)
    assert run("-m", checkpoint, "-p", "def x", "--max-tokens", 8) == 0
    assert len([text for text in written if text.strip()]) >= 3  # three tokens at a time


@pytest.mark.long
def test_the_teacher(checkpoint, tokenizer, greedy, run, capsys):
    flags = ("--max-tokens", 8, "--swiftkv", "off", "--no-stream")
    assert run("generate", "--model", checkpoint, "--prompt", "def x", *flags) == 0
    out, err = capsys.readouterr()
    assert out == tokenizer.decode(greedy(encode(tokenizer, "def x"), 8, False)) + "\n"
    assert "teacher, 2 layers" in err


def test_several_prompts_and_samples_come_in_order(checkpoint, tokenizer, greedy, run, capsys):
    prompts = ("def x", "print", "if")
    flags = [part for text in prompts for part in ("-p", text)]
    assert run("-m", checkpoint, *flags, "--max-tokens", 8, "--n", 2, "--max-num-seqs", 2) == 0
    texts = [tokenizer.decode(greedy(encode(tokenizer, text), 8)) for text in prompts]
    assert capsys.readouterr().out == "".join(f"{text}\n{text}\n" for text in texts)


def test_prompt_from_a_file_and_from_standard_input(
    checkpoint, tokenizer, greedy, run, tmp_path, capsys, monkeypatch
):
    (tmp_path / "prompt.py").write_text("def naïve\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("def naïve\n"))
    assert run("-m", checkpoint, "-f", tmp_path / "prompt.py", "--max-tokens", 8) == 0
    assert run("-m", checkpoint, "-", "--max-tokens", 8) == 0
    assert capsys.readouterr().out == 2 * (
        tokenizer.decode(greedy(encode(tokenizer, "def naïve\n"), 8)) + "\n"
    )


def test_an_engine_fits_the_prompts(checkpoint):
    model, params = skv.load(checkpoint), SamplingParams(max_tokens=20)
    fields = {"max_num_seqs": 9}
    options = complete._fitted_options(fields, [Request([5] * 21, params)] * 2, model, stream=False)
    assert (options.max_model_len, options.max_num_seqs, options.decode_steps) == (64, 2, 8)
    long = [Request([5] * (LIMIT - 20), params)]
    options = complete._fitted_options({}, long, model, stream=True)
    assert (options.max_model_len, options.max_num_seqs, options.decode_steps) == (LIMIT, 1, 1)


MISTAKES = [
    (["-p", ""], 2, "the prompt is empty"),
    (["-p", "\udcff x"], 2, "the text is not UTF-8"),
    (["-p", "x", "-o", "/nowhere/out"], 2, "--output /nowhere/out: its folder does not exist"),
    (["-p", "x", "--resume"], 2, "--resume goes with --output"),
    (["-p", "x", "--temperature", "nan"], 2, "--temperature nan must be"),
    (["-p", "x", "--max-tokens", "127"], 2, "above the limit of 128"),
    (
        ["-p", "x", "--n", "5", "--max-tokens", "4", "--max-num-seqs", "4"],
        2,
        "--n 5 samples do not fit into --max-num-seqs 4",
    ),
    (["-p", "x", "--stop", ""], 2, "--stop '' must be"),
    (
        ["-p", "x", "--logit-bias", "999=1", "--max-tokens", "4"],
        2,
        "--logit-bias: token 999 is outside the vocabulary",
    ),
    (["-p", "x", "-i", "y"], 2, "give one of"),
    ([], 2, "nothing to generate from"),
    (["-p", "x", "--max-num-seqs", "0"], 2, "--max-num-seqs 0"),
    (["-p", "x", "--decode-steps", "1000"], 2, "--decode-steps 1000 must be at most 128"),
    (["-p", "x", "--logprobs", "2"], 2, "--logprobs goes with --output or --input"),
    (["-p", "x", "--memory-utilization", "2"], 2, "--memory-utilization 2.0"),
    (
        ["-p", "x", "--max-model-len", "1k"],
        2,
        "--max-model-len 1024 must be from 2 to the model's 256",
    ),
    (["-p", "x", "--kv-cache-memory", "20k", "--max-tokens", "8"], 2, "raise --kv-cache-memory"),
    (["-p", "x" * 300], 2, "above the limit of 128"),
    (["-p", "x" * 30, "--max-tokens", "8", "-c", "16"], 2, "above the limit of 16"),
    (["-p", "ok", "-p", "x" * 300, "--max-tokens", "8"], 2, "prompt 1: the prompt has"),
    (["-p", "x", "--mesh", "2by2"], 2, "--mesh '2by2'"),
    (["-p", "x", "--mesh", "data=1,fsdp=2"], 2, "fsdp is for training"),
    (
        ["-p", "x", "--num-processes", "2"],
        2,
        "--coordinator-address, --num-processes and --process-id go together",
    ),
    (["-p", "x", "--max-tokens", "8", "--attention", "tpu"], 2, "tpu"),
    (["-f", "/nowhere/prompt"], 2, "/nowhere/prompt"),
    (["-i", "/nowhere/rows"], 2, "/nowhere/rows"),
    (["-i", "/dev/null"], 1, "not a regular file"),
]


@pytest.mark.parametrize(("argv", "code", "message"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistakes_are_one_line(checkpoint, run, capsys, argv, code, message):
    assert run("-m", checkpoint, *argv) == code
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and message in last and last.startswith("error: ")


@pytest.mark.parametrize(
    "argv",
    [
        "--max-model-len many",
        "--swiftkv maybe",
        "--nonsense",
        "serfe",
        "--logit-bias 5",
        "--stop-token-ids a",
        "--kv-cache-memory lots",
    ],
)
def test_flags_that_cannot_be_parsed(argv, run, capsys):
    with pytest.raises(SystemExit) as error:
        run(*argv.split())
    assert error.value.code == 2


def test_models_that_are_not_there(run, tmp_path, capsys):
    assert run("-m", tmp_path / "nothing", "-p", "x") in (1, 4)
    assert "nothing" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(checkpoint, tokenizer, run, tmp_path, capsys):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    vocabulary = json.loads((path / "tokenizer.json").read_text())
    for token in range(len(tokenizer), 400):
        vocabulary["model"]["vocab"][f"<{token}>"] = token
    (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert run("-m", path, "-p", "x") == 4
    assert (
        "the tokenizer has 400 tokens, the model 320: these are files of different models"
        in capsys.readouterr().err
    )


def test_added_tokens_beyond_the_vocabulary_are_refused_where_they_are_used(
    checkpoint, tokenizer, run, tmp_path, capsys
):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    extra = [f"<|{number}|>" for number in range(321 - len(tokenizer))]
    larger = type(tokenizer).from_pretrained(checkpoint)
    larger.add_special_tokens({"additional_special_tokens": extra})
    larger.save_pretrained(path)
    assert run("-m", path, "-p", "x", "--max-tokens", 4) == 0
    assert "the tokenizer adds 1 tokens that the model does not have" in capsys.readouterr().err
    assert run("-m", path, "-p", f"x{extra[-1]}", "--max-tokens", 4) == 2
    assert "token id 320 is outside the vocabulary of 320" in capsys.readouterr().err


NO_COMMANDS = [
    ("serving", "'serving' is not a command: choose from generate, chat, serve,"),
    ("generate x", "argument -"),
    ("chat --chat-template /none", "--chat-template /none"),
]


@pytest.mark.parametrize(("argv", "message"), NO_COMMANDS)
def test_commands_that_are_none(argv, message, capsys):
    try:
        code = main(argv.split())
    except SystemExit as error:
        code = error.code
    assert code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_rows_without_an_output_file_are_json_lines(checkpoint, run, tmp_path, capsys):
    (tmp_path / "rows").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": ""}\n')
    assert run("-m", checkpoint, "-i", tmp_path / "rows", "--max-tokens", 3) == 3
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["id"], len(good["token_ids"]), bad["id"]) == ("a", 3, "b")
    assert "is empty" in bad["error"]


def test_without_a_tokenizer_text_is_refused(checkpoint, run, tmp_path, capsys):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("tokenizer*"))
    assert run("-m", path, "-p", "x") == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_the_first_special_token_is_not_doubled(checkpoint, run, capsys):
    assert run("-m", checkpoint, "-p", "<s>def x", "--max-tokens", 8) == 0
    with_token, err = capsys.readouterr()
    assert "a prompt begins with <s>; it is taken as that token" in err
    assert run("-m", checkpoint, "-p", "def x", "--max-tokens", 8) == 0
    assert capsys.readouterr().out == with_token


def test_no_arguments_run_the_demo(checkpoint, tokenizer, greedy, run, capsys, monkeypatch):
    monkeypatch.setattr(demo, "SWIFTKV", checkpoint)
    assert run("--max-tokens", 8, "--temperature", 0) == 0
    out, err = capsys.readouterr()
    assert out == DEMO_PROMPT + tokenizer.decode(greedy(encode(tokenizer, DEMO_PROMPT), 8)) + "\n"
    assert err.startswith("demo: ")
    monkeypatch.setattr(demo, "SWIFTKV", checkpoint / "missing")
    assert run() == 4


def test_the_demo_prompt_is_sampled_where_no_flag_says_otherwise(
    checkpoint, run, capsys, monkeypatch
):
    monkeypatch.setattr(demo, "SWIFTKV", checkpoint)
    monkeypatch.setitem(DEMO_SAMPLING, "temperature", 2.0)
    assert run("--max-tokens", 8) == 0
    sampled = capsys.readouterr().out
    seed, stops = DEMO_SAMPLING["seed"], DEMO_SAMPLING["stop"]
    given = [part for stop in stops for part in ("--stop", stop)]
    flags = ("--max-tokens", 8, "--temperature", 2, "--seed", seed, *given)
    assert run("-m", checkpoint, "-p", DEMO_PROMPT, *flags) == 0
    assert sampled == DEMO_PROMPT + capsys.readouterr().out
    assert run("--max-tokens", 8, "--seed", 4) == 0
    assert capsys.readouterr().out != sampled


@pytest.mark.long
def test_a_mesh_gives_the_same_text(checkpoint, tokenizer, greedy, run, capsys):
    assert run("-m", checkpoint, "-p", "def x", "--max-tokens", 8, "--mesh", "2x2") == 0
    assert capsys.readouterr().out == tokenizer.decode(greedy(encode(tokenizer, "def x"), 8)) + "\n"


def test_as_a_process(checkpoint, tokenizer, greedy, tmp_path):
    flags = (
        f"-p print --max-tokens 8 -c 128 --max-num-batched-tokens 16 --compile-cache "
        f"{tmp_path / 'compiled'}".split()
    )
    command = [sys.executable, "-m", "swiftkv_jax.infer", "-m", str(checkpoint), *flags]
    for _ in ("compiled", "kept"):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[3]
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == tokenizer.decode(greedy(encode(tokenizer, "print"), 8)) + "\n"
        assert os.stat(tmp_path / "compiled").st_mode & 0o77 == 0
        programs = [path.name for path in (tmp_path / "compiled" / "programs").iterdir()]
        assert any(name.startswith("decode-") for name in programs), programs
