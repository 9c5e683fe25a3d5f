"""The process that tries grammars: its limits, its end, and that of the server."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.structured.structured_outputs import StructuredOutputs, json_grammar
from swiftkv_jax.serve.text import grammar_process
from swiftkv_jax.serve.text.grammar_process import (
    CheckedCompiler,
    GrammarProcess,
    GrammarProcessError,
)
from tests.infer.mock_model_runner import END, VOCAB
from tests.serve.conftest import later, until
from tests.serve.test_grammars import ENDLESS

PROC = Path("/proc")
needs_proc = pytest.mark.skipif(not PROC.is_dir(), reason="there is no /proc")
LARGE = StructuredOutputs(regex="(((a{100}){100}){100}){100}").to_grammar()
"""Takes 70 MB to compile."""


@pytest.fixture(scope="module")
def process(compiler) -> Iterator[GrammarProcess]:
    found = GrammarProcess(compiler.describe_tokenizer())
    yield found
    found.close()


def children(pid: int) -> list[int]:
    found = (PROC / str(pid) / "task" / str(pid) / "children").read_text()
    return [int(one) for one in found.split()]


def test_it_says_what_the_compiler_says(process, compiler):
    process.check(json_grammar(True))
    for grammar in ("nonsense", StructuredOutputs(regex="(a").to_grammar()):
        messages = []
        for check in (process.check, compiler.compile_grammar):
            with pytest.raises(UsageError) as caught:
                check(grammar)
            messages.append(str(caught.value))
        assert messages[0] == messages[1] and "refused" in messages[0]


def test_it_knows_the_tokenizer(compiler):
    """Equal to that of the server, end tokens among it."""
    found = compiler.describe_tokenizer()
    assert (found.vocab_size, found.eos_token_ids) == (VOCAB, [END])
    assert found.make().vocab_size == VOCAB and found.make().eos_token == END


@needs_proc
def test_memory_is_limited(process):
    """The limits are set in the process, which is started with others here: on a busy machine its
    time may be over first."""
    code = (
        "import socket, sys; from swiftkv_jax.serve.text import grammar_process;"
        "grammar_process.COMPILE_SECONDS, grammar_process.COMPILE_BYTES = 60.0, {};"
        "grammar_process.main(socket.socket(fileno=int(sys.argv[1])))"
    )
    kept = subprocess.Popen

    def start_again(limit: int) -> None:
        def changed(command, **options):
            return kept([sys.executable, "-P", "-c", code.format(limit), command[-1]], **options)

        patch.setattr(grammar_process.subprocess, "Popen", changed)
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_process, "COMPILE_SECONDS", 60.0)
        start_again(grammar_process.COMPILE_BYTES)
        process.check(LARGE)
        start_again(20 * 2**20)
        with pytest.raises(UsageError, match="too much memory"):
            process.check(LARGE)
        process.check(json_grammar(True))
    os.kill(process.pid, signal.SIGKILL)
    process._process.wait()


def test_one_that_has_ended_begins_again(process):
    process.check(json_grammar(True))
    before = process.pid
    os.kill(before, signal.SIGKILL)
    process.check(json_grammar(True))
    assert process.pid != before


def test_one_that_hangs_is_replaced(process, monkeypatch):
    process.check(json_grammar(True))
    before = process.pid
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr(grammar_process, "START_SECONDS", 1.0)
    process.check(json_grammar(True))
    assert process.pid != before


@needs_proc
def test_it_has_nothing_of_the_server(process):
    """No socket but its own, no JAX, one thread, and no process that is left over."""
    process.check(json_grammar(True))
    status = PROC / str(process.pid)
    links = [os.readlink(one) for one in (status / "fd").iterdir()]
    assert sum(link.startswith("socket:") for link in links) == 1, links
    assert len(list((status / "task").iterdir())) == 1
    assert "jaxlib" not in (status / "maps").read_text()
    until(lambda: not children(process.pid))


def compiling(compile_it: Callable[[str], object], pid: int) -> tuple[Future[object], int]:
    """(what will come of a grammar without an end, the process that compiles it)"""
    until(lambda: not children(pid))  # that of the grammar before may still be ending
    asked = later(compile_it, StructuredOutputs(grammar=ENDLESS).to_grammar())
    until(lambda: children(pid))
    (child,) = children(pid)
    return asked, child


@needs_proc
def test_closing_ends_what_is_compiled(compiler):
    checked = CheckedCompiler(compiler)
    checked.compile_grammar(json_grammar(True))
    pid = checked._process.pid
    asked, child = compiling(checked.compile_grammar, pid)
    checked.close()
    with pytest.raises(GrammarProcessError, match="the server ends"):
        asked.result(10)
    until(lambda: not (PROC / str(child)).exists() and not (PROC / str(pid)).exists())


@needs_proc
def test_closing_does_not_wait_for_what_is_killed(compiler, monkeypatch):
    """The child still compiles when the one that waited for it has been told."""
    process = GrammarProcess(compiler.describe_tokenizer())
    process.check(json_grammar(True))
    asked, child = compiling(process.check, process.pid)
    os.kill(child, signal.SIGSTOP)  # it does not reach one of its limits meanwhile
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "_kill", lambda process: None)
        process.close()
        with pytest.raises(GrammarProcessError, match="the server ends"):
            asked.result(10)
        still = (PROC / str(child)).exists()
    os.killpg(process.pid, signal.SIGKILL)
    process._process.wait()
    assert still


@needs_proc
def test_it_dies_with_the_server(compiler, tmp_path):
    """Also with one that is killed."""
    code = (
        "import sys, time;"
        "from swiftkv_jax.serve.text.grammar_process import GrammarProcess, TokenizerDescription;"
        "found = GrammarProcess(TokenizerDescription.read(sys.stdin));"
        'found.check(\'{"grammars":[{"lark_grammar":"start: /a/"}]}\');'
        "print(found.pid, flush=True); time.sleep(60)"
    )
    path = tmp_path / "tokenizer"
    with path.open("w", encoding="utf-8") as file:
        compiler.describe_tokenizer().write(file)
    with (
        path.open(encoding="utf-8") as file,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=file,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        ) as server,
    ):
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert (PROC / str(pid)).exists()
        server.kill()
    until(lambda: not (PROC / str(pid)).exists())
