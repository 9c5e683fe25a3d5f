"""The process that tries grammars: its limits, its end, and that of the server."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.structured.structured_outputs import StructuredOutputs, json_grammar
from swiftkv_jax.serve.text import grammar_process
from swiftkv_jax.serve.text.grammar_process import (
    COMPILE_SECONDS,
    CheckedCompiler,
    GrammarProcess,
    GrammarProcessError,
)
from tests.infer.mock_model_runner import END, VOCAB
from tests.serve.conftest import until
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


def endless() -> str:
    return StructuredOutputs(grammar=ENDLESS).to_grammar()


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


def test_what_takes_long_is_killed(process):
    """Two at once, and what comes meanwhile is not held up."""
    seconds, messages = [], []

    def check() -> None:
        begun = time.monotonic()
        with pytest.raises(UsageError) as caught:
            process.check(endless())
        seconds.append(time.monotonic() - begun)
        messages.append(str(caught.value))

    process.check(json_grammar(True))  # it has started
    threads = [threading.Thread(target=check) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    process.check(json_grammar(True))
    assert time.monotonic() - begun < COMPILE_SECONDS
    for thread in threads:
        thread.join()
    assert messages == ["the grammar takes more than 2 s to compile"] * 2
    assert all(0.9 * COMPILE_SECONDS < one < COMPILE_SECONDS + 2 for one in seconds)


@needs_proc
def test_memory_is_limited(process):
    """The limit is set in the process, which is started with another one here."""
    code = (
        "import socket, sys; from swiftkv_jax.serve.text import grammar_process;"
        f"grammar_process.COMPILE_BYTES = {20 * 2**20};"
        "grammar_process.main(socket.socket(fileno=int(sys.argv[1])))"
    )
    process.check(LARGE)
    kept = subprocess.Popen

    def changed(command, **options):
        return kept([sys.executable, "-P", "-c", code, command[-1]], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_process.subprocess, "Popen", changed)
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait()
        with pytest.raises(UsageError, match="too much memory"):
            process.check(LARGE)
        process.check(json_grammar(True))
    os.kill(process.pid, signal.SIGKILL)
    process._process.wait()
    process.check(LARGE)


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


@needs_proc
def test_closing_ends_what_is_compiled(compiler):
    checked, caught = CheckedCompiler(compiler), []

    def compile_it() -> None:
        with pytest.raises(GrammarProcessError) as error:
            checked.compile_grammar(endless())
        caught.append(str(error.value))

    checked.compile_grammar(json_grammar(True))
    thread, pid = threading.Thread(target=compile_it), checked._process.pid
    thread.start()
    until(lambda: children(pid))
    (child,) = children(pid)
    checked.close()
    thread.join(10)
    assert not thread.is_alive() and caught == ["the server ends"]
    until(lambda: not (PROC / str(child)).exists() and not (PROC / str(pid)).exists())


@needs_proc
def test_closing_does_not_wait_for_what_is_killed(compiler, monkeypatch):
    """The child still compiles when the one that waited for it has been told."""
    process, caught = GrammarProcess(compiler.describe_tokenizer()), []

    def check() -> None:
        with pytest.raises(GrammarProcessError) as error:
            process.check(endless())
        caught.append(str(error.value))

    process.check(json_grammar(True))
    thread = threading.Thread(target=check)
    thread.start()
    until(lambda: children(process.pid))
    (child,) = children(process.pid)
    os.kill(child, signal.SIGSTOP)  # it does not reach one of its limits meanwhile
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "_kill", lambda process: None)
        process.close()
        thread.join(10)
        still = (PROC / str(child)).exists()
    os.killpg(process.pid, signal.SIGKILL)
    process._process.wait()
    assert still and caught == ["the server ends"]


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
