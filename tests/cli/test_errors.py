"""How commands end: exit codes, one line on standard error, names of arguments as flags; and the
log."""

import argparse
import ast
import errno
import logging
from pathlib import Path

import jax
import pytest

from swiftkv_jax import cli
from swiftkv_jax.cli.messages import MessageHandler, with_flags
from swiftkv_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    OutOfMemoryError,
    UsageError,
    spelled,
)
from swiftkv_jax.pallas_kernels import ImplementationError

LIBRARY = logging.getLogger("swiftkv_jax.infer.somewhere")


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-cache-memory")
    parser.add_argument("--attention")
    parser.add_argument("--swiftkv", choices={"auto": None, "on": True})
    parser.add_argument("--memory-utilization", "--gpu-memory-utilization")
    parser.add_argument("--temperature", "--temp")
    parser.add_argument("--max-len", "-c", dest="max_model_len")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument(
        "--no-prefix-caching", dest="enable_prefix_caching", action="store_false", default=None
    )
    commands = parser.add_subparsers()
    sub = commands.add_parser("convert")
    sub.add_argument("src", metavar="SRC")
    sub.add_argument("--num-key-value-layers", "-k", type=int)
    return parser


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "`kv_cache_memory`=3.00 GiB is more than there is: lower `temperature`",
            "--kv-cache-memory 3.00 GiB is more than there is: lower --temperature",
        ),
        ("`memory_utilization`=2.0", "--memory-utilization 2.0"),
        ("`max_model_len`=1", "--max-len 1"),
        ("`enable_prefix_caching` is off", "--enable-prefix-caching is off"),
        ("`src`: not there", "SRC: not there"),
        ("`num_key_value_layers`='x'", "--num-key-value-layers 'x'"),
        ("`page_size`=7 and `q_proj.weight`", "`page_size`=7 and `q_proj.weight`"),
    ],
)
def test_names_of_arguments_become_flags(message, said, parser):
    assert with_flags(message, parser) == said
    assert with_flags(message, None) == message


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("`top_p`=7 and `top_p`", "<top_p> 7 and <top_p>"),
        ("`top_p`", "<top_p>"),
        ("`a b`=1, `q.weight`, `", "`a b`=1, `q.weight`, `"),
        ("`stop`='a`b' of `n`", "<stop> 'a`b' of <n>"),
        ("``n``", "`<n>`"),
        ("`other`=1", "`other`=1"),
    ],
)
def test_names_in_backticks_are_placeholders(message, said):
    def spell(name: str) -> str | None:
        return None if name == "other" else f"<{name}>"

    assert spelled(message, spell, equals=" ") == said


LIBRARIES = {
    "checkpoints/hub.py": "huggingface_hub",
    "checkpoints/orbax_io.py": "tensorstore",
    "cli/exit.py": "JAX",
    "infer/runner/compilation.py": "XLA",
    "infer/runner/memory.py": "XLA",
    "serve/bodies/decoding.py": "msgspec",
    "serve/options.py": "OpenSSL",
    "serve/server.py": "XLA",
}
"""Modules that read the messages of a library, whose errors have no fields."""
READS = ("search", "match", "fullmatch", "sub", "replace", "startswith", "removeprefix", "index")


def reads_a_message(node: ast.AST) -> bool:
    """True if an expression looks for something in `str(error)`, or changes it."""
    if isinstance(node, ast.Compare):
        looks = any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops)
    else:
        function = node.func if isinstance(node, ast.Call) else None
        looks = isinstance(function, ast.Attribute) and function.attr in READS
    texts = ("str(error)", "error.message", "str(again)")
    return looks and any(text in ast.unparse(node) for text in texts)


def test_no_program_reads_a_message():
    """What a program needs of an error of this package is in its fields."""
    package, found = Path(cli.__file__).parents[1], set()
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if reads_a_message(node):
                found.add(path.relative_to(package).as_posix())
    assert found - set(LIBRARIES) == set()


def no_space() -> OSError:
    error = OSError(errno.ENOSPC, "No space left on device")
    error.add_note("cannot write out.json")
    return error


ENDS = [
    (UsageError("`kv_cache_memory`=0"), 2, "--kv-cache-memory 0"),
    (NotImplementedError("no such kernel"), 2, "no such kernel"),
    (ImplementationError("tpu", "needs a TPU"), 2, "--attention 'tpu' needs a TPU"),
    (CheckpointError("broken"), 4, "broken"),
    (ConfigError("odd"), 4, "odd"),
    (DataError("row 3"), 1, "row 3"),
    (DivergenceError("step 5: loss is nan"), 1, "step 5: loss is nan"),
    (OutOfMemoryError("lower `max_model_len`"), 5, "lower --max-len"),
    (FileNotFoundError(2, "No such file", "a.txt"), 2, "cannot use a.txt: no such file"),
    (OSError(18, "Other device", "a", None, "b"), 1, "cannot use a or b: other device"),
    (OSError("checkpoint 7 could not be saved"), 1, "checkpoint 7 could not be saved"),
    (no_space(), 1, "cannot write out.json: no space left on device"),
    (MemoryError(), 5, "out of host memory"),
    (MemoryError("Unable to allocate 9 GiB\nmore"), 5, "out of host memory: Unable to allocate"),
    (ValueError("RESOURCE_EXHAUSTED: 70 GiB\nplan"), 5, "out of device memory: RESOURCE_EXHAUSTED"),
    (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        5,
        "out of device memory: RESOURCE_EXHAUSTED: Out of memory",
    ),
    (KeyError("x"), 1, "unexpected KeyError: 'x' (set SWIFTKV_TRACEBACK=1 for the traceback)"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS, ids=lambda value: repr(value)[:50])
def test_errors_are_one_line_and_an_exit_code(error, code, line, parser, capsys):
    def main() -> int:
        raise error

    assert cli.run(main, parser) == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith(f"error: {line}")


def test_the_traceback_is_there_on_request(capsys, monkeypatch):
    monkeypatch.setenv("SWIFTKV_TRACEBACK", "1")

    def main() -> int:
        raise KeyError("x")

    assert cli.run(main) == cli.ERROR
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: unexpected KeyError")


def test_a_code_is_passed_on_and_exits_are_too():
    assert cli.run(lambda: cli.SOME_ROWS_FAILED) == 3

    def main() -> int:
        raise SystemExit(2)

    with pytest.raises(SystemExit):
        cli.run(main)


# The log ------------------------------------------------------------------------


def test_the_log_goes_to_standard_error_as_messages(parser, capsys):
    def main() -> int:
        LIBRARY.info("%d rows, by `kv_cache_memory`", 3)
        LIBRARY.warning("few rows")
        LIBRARY.debug("details")
        cli.log("done: 100%")
        return cli.OK

    assert cli.run(main, parser) == cli.OK
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "3 rows, by --kv-cache-memory\nwarning: few rows\ndone: 100%\n"


def test_a_traceback_follows_its_message(capsys):
    def main() -> int:
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("swiftkv_jax.x").exception("it failed")
        return 0

    cli.run(main)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["error: it failed", "Traceback (most recent call last):"]
    assert lines[-1] == "KeyError: 'x'"


def test_handlers_of_other_libraries_do_not_repeat_the_log(capsys, caplog):
    def main() -> int:
        LIBRARY.info("once")
        return cli.OK

    with caplog.at_level(logging.INFO):
        assert cli.run(main) == cli.OK
        assert not caplog.records and capsys.readouterr().err == "once\n"
        LIBRARY.info("of a program that calls the library")
        assert len(caplog.records) == 1


def test_there_is_one_handler(parser):
    cli.configure_logging(parser)
    cli.configure_logging()
    handlers = logging.getLogger("swiftkv_jax").handlers
    found = [handler for handler in handlers if isinstance(handler, MessageHandler)]
    assert len(found) == 1 and found[0].parser is None


@pytest.mark.parametrize(("index", "joined", "lines"), [(0, True, 1), (1, True, 0), (1, False, 1)])
def test_only_process_0_logs_once_they_have_joined(index, joined, lines, capsys, monkeypatch):
    """Before that JAX is not asked, which would start a backend."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    cli.log("hello")
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_errors_are_told_by_every_process(capsys, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert cli.fail("here", cli.USAGE) == cli.USAGE
    assert capsys.readouterr().err == "error: here\n"


def test_a_progress_bar_stays_below_messages(capsys):
    from tqdm import tqdm

    with tqdm(total=2, desc="rows") as bar:
        bar.update()
        cli.log("a message")
    assert "a message" in [line.strip() for line in capsys.readouterr().err.splitlines()]
