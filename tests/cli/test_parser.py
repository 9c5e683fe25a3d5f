"""Mistakes in the names of flags, choices and commands, and flags of other programs."""

import re
from pathlib import Path

import pytest

from swiftkv_jax.__main__ import main
from swiftkv_jax.cli import flags_elsewhere
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.infer.__main__ import parser
from swiftkv_jax.train.subcommands import SUBCOMMANDS
from swiftkv_jax.train.subcommands import parser as subcommand_parser

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"


def error_of(line: str, capsys) -> str:
    """The error that ends a command, without its hint at --help."""
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    assert code == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1
    hint = r" \([^()]* --help lists the arguments\)$"
    return re.sub(hint, "", error.rstrip("\n")).removeprefix("error: ")


UNKNOWN = [
    ("infer -p hi --top_pp 0.9", "unknown flag --top-pp: did you mean --top-p?"),
    ("infer -p hi --system-prompt be", "unknown flag --system-prompt"),
    ("infer --system-prompt=be -p hi", "unknown flag --system-prompt"),
    (
        "infer chat --max-model-leng 9",
        "unknown flag --max-model-leng: did you mean --max-model-len?",
    ),
    ("serve model --prot 1", "unknown flag --prot: did you mean --port?"),
    (
        "infer score --inptu x -zz 1",
        "unknown flag --inptu: did you mean --input?; unknown flag -zz",
    ),
    ("convert inspect x --stp 3", "unknown flag --stp: did you mean --step?"),
    ("train calibrate --batch-sizes 2", "unknown flag --batch-sizes: did you mean --batch-size?"),
    ("check-kernels --jsno x", "unknown flag --jsno: did you mean --json?"),
]
VALUES = [
    ("infer --dtype bfloat", "argument --dtype: .*: did you mean bfloat16\\?"),
    ("serve --unknown-fields refused", "argument --unknown-fields: .*: did you mean refuse\\?"),
    ("infer bench prefil", "argument mode: .*: did you mean prefill\\?"),
    ("convert hf2obax a b", "argument .*: did you mean hf2orbax\\?"),
    ("train --kl backward", "argument --kl: .*'jsd'\\)"),
    ("infer -p hi there", "argument -: 'there' belongs to no flag: prompts go after --prompt"),
    ("infer --quantization awq", ".*: leave it out: a quantised checkpoint says how it is stored"),
    ("serve m --dtype half", ".*: use bfloat16 or float32"),
]
COMMANDS = [
    ("server", "serve"),
    ("generate", "infer generate"),
    ("analyse", "train analyze"),
    ("hf2obax", "convert hf2orbax"),
    ("infer serv", "serve"),
    ("train calibrat", "calibrate"),
]
ELSEWHERE = [
    ("serve m --tensor-parallel-size 2", "--tensor-parallel-size 2: use --mesh 1x2"),
    ("serve m --tensor_parallel_size=2", "--tensor-parallel-size 2: use --mesh 1x2"),
    ("serve m -tp 2 -dp 4", "-tp 2: use --mesh 4x2; -dp 4: use --mesh 4x2"),
    ("serve --enforce-eager m", "--enforce-eager m: leave it out: every program is compiled"),
    ("infer -p x --num-scheduler-steps 4", "--num-scheduler-steps 4: use --decode-steps 4"),
    ("infer -p x --num_return_sequences 2", "--num-return-sequences 2: use --n 2"),
    ("infer bench serve --random-input-len 9", "--random-input-len 9: use --input-len 9"),
    (
        "infer bench serve --temperature 0.5",
        "--temperature 0.5: use --extra-body '{\"temperature\": 0.5}'",
    ),
    ("train --lr_scheduler_type cosine", "--lr-scheduler-type cosine: use --lr-schedule cosine"),
    ("train --warmup-steps 9", "--warmup-steps 9: use --warmup-ratio, a share of the steps"),
    ("train calibrate --max-seq-length 9", "--max-seq-length 9: use --max-length 9"),
]


@pytest.mark.parametrize(("line", "message"), UNKNOWN + ELSEWHERE)
def test_unknown_flags_are_named(line, message, capsys):
    assert error_of(line, capsys) == message


@pytest.mark.parametrize(("line", "message"), VALUES)
def test_wrong_values_are_named(line, message, capsys):
    assert re.fullmatch(message, error_of(line, capsys))


@pytest.mark.parametrize(("line", "meant"), COMMANDS)
def test_commands_that_are_misspelt(line, meant, capsys):
    assert error_of(line, capsys).endswith(f": did you mean {meant}?")


def test_nothing_is_meant_by_a_word_that_is_like_none(capsys):
    assert "did you mean" not in error_of("xyz", capsys)
    assert "did you mean" not in error_of("infer --xyzzy", capsys)


def test_underscores_stand_for_hyphens_in_names_alone():
    flags = parser("generate")
    words = ["--max_model_len", "8k", "--top_p=0.5", "-p", "a_b", "--stop=--x_y", "--no_stream"]
    args = flags.parse_args(words)
    assert (args.max_model_len, args.top_p, args.prompt) == (8192, 0.5, ["a_b"])
    assert (args.stop, args.stream) == (["--x_y"], False)
    assert flags.parse_args(["-p", "--top_p is text here"]).prompt == ["--top_p is text here"]
    assert flags.parse_args(["-mDIR", "--no-enable-prefix-caching"]).model == "DIR"


def test_a_dash_reads_standard_input():
    assert parser("generate").parse_args(["--max-tokens", "4", "-"]).stdin == "-"


def test_values_of_vllm_with_the_same_meaning():
    line = "m --reasoning-parser {} --kv-cache-dtype fp8_e4m3 --dtype auto"
    for name in ("qwen3", "deepseek_r1", "think"):
        args = parser("serve").parse_args(line.format(name).split())
        assert (args.reasoning_parser, args.kv_cache_dtype) == ("think", "fp8")
        assert ModelOptions.from_args(args).dtype == "auto"


ORIGINS = [
    ("https://a.example", ("https://a.example",)),
    ("https://a.example, http://localhost:3000", ("https://a.example", "http://localhost:3000")),
    ('["*"]', ("*",)),
    ('["https://a.example","null"]', ("https://a.example", "null")),
    ('"http://[::1]:8000"', ("http://[::1]:8000",)),
    ("*", ("*",)),
]
NO_ORIGINS = ["app.example", '["*", 1]', '["*"', "https://a.example/", "https://a.example/x", ""]
NO_ORIGINS += ["https://*.example", "HTTPS://a.example", "[]x", "a,b", "https://a.example,,"]


@pytest.mark.parametrize(("text", "origins"), ORIGINS)
def test_origins(text, origins):
    assert parser("serve").parse_args(["--allowed-origins", text]).allowed_origins == origins


@pytest.mark.parametrize("text", NO_ORIGINS)
def test_what_no_origin_can_match(text, capsys):
    with pytest.raises(SystemExit):
        parser("serve").parse_args([f"--allowed-origins={text}"])
    assert "argument --allowed-origins: " in capsys.readouterr().err


def test_no_flag_of_the_tables_is_one_of_ours():
    """Such an entry would never be read."""

    def flags_of(flags) -> set[str]:
        return set(flags._option_string_actions)

    served = flags_of(parser("serve"))
    assert not served & flags_elsewhere.VLLM.keys()
    assert not flags_of(parser("generate")) & flags_elsewhere.TRANSFORMERS.keys()
    assert not flags_of(parser("bench serve")) & flags_elsewhere.VLLM_BENCH_SERVE.keys()
    trained = set().union(*(flags_of(subcommand_parser(name)) for name in SUBCOMMANDS))
    assert not trained & flags_elsewhere.TRAINER.keys()


def test_the_flags_that_the_tables_name_exist():
    own = [parser(name) for name in ("serve", "generate", "bench", "bench serve")]
    own += [subcommand_parser("calibrate")]
    known = {flag for flags in own for flag in flags._option_string_actions}
    from swiftkv_jax.train.__main__ import parser as train

    known |= set(train()._option_string_actions)
    for table in (flags_elsewhere.VLLM, flags_elsewhere.TRANSFORMERS, flags_elsewhere.TRAINER):
        for text in table.values():
            assert set(re.findall(r"--[a-z][a-z-]*", text)) <= known, text
    for text in flags_elsewhere.VLLM_BENCH_SERVE.values():
        assert set(re.findall(r"--[a-z][a-z-]*", text)) <= set(own[3]._option_string_actions), text


def test_the_page_has_the_table_of_vllm():
    """docs/from-vllm.md."""
    flags_of_text: dict[str, list[str]] = {}
    for flag in flags_elsewhere.VLLM:
        (text,) = flags_elsewhere.advice(flags_elsewhere.VLLM, [(flag, "N")])
        assert text is not None
        flags_of_text.setdefault(text, []).append(f"`{flag}`")
    rows = [f"| {', '.join(flags)} | {text} |" for text, flags in flags_of_text.items()]
    section = PAGE.read_text(encoding="utf-8").partition("## Flags with other names\n")[2]
    found = [line for line in section.partition("\n## ")[0].splitlines() if line[:3] == "| `"]
    assert found == rows
