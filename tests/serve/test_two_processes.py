"""A server over two processes, started as a user does: a checkpoint, requests, signals."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.free_port import free_port
from tests.serve.process import ROOT, SMALL, Server, serving


@contextlib.contextmanager
def two_processes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> Iterator[tuple[Server, subprocess.Popen]]:
    """(process 0, which is ready; process 1)"""
    monkeypatch.setenv("PJRT_NPROC", "4")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    common = [*SMALL, *flags, "--mesh", "1x2", "--coordinator-address", f"127.0.0.1:{free_port()}"]
    common += ["--num-processes", "2", "--process-id"]
    module = [sys.executable, "-m", "swiftkv_jax.infer", "serve", "--model", str(checkpoint)]
    follower = subprocess.Popen(
        [*module, *common, "1"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with serving(checkpoint, *common, "0") as server:
            yield server, follower
    finally:
        follower.kill()
        follower.communicate()


@pytest.mark.long
def test_two_processes_serve_until_a_signal(checkpoint, tokenizer, greedy, monkeypatch):
    drafting = "--speculative-config", '{"enable_adaptive_verification": false}'
    with two_processes(checkpoint, monkeypatch, *drafting) as (server, follower):
        body = {"prompt": "the quick", "max_tokens": 7, "temperature": 0, "return_token_ids": True}
        follower.send_signal(signal.SIGTERM)  # as job managers do, to all
        answer = server.ask("/v1/completions", body)
        prompt = tokenizer("the quick")["input_ids"]
        assert answer["choices"][0]["token_ids"] == greedy(prompt, 7)
        content = {"type": "content", "content": tokenizer.decode(greedy(prompt, 20))}
        answer = server.ask("/v1/completions", body | {"max_tokens": 20, "prediction": content})
        assert answer["choices"][0]["token_ids"] == greedy(prompt, 20)
        counts = answer["usage"]["completion_tokens_details"]
        assert counts["accepted_prediction_tokens"] > 0
        form = {"structured_outputs": {"regex": "[a-d]{3}"}, "bad_words": ["b"]}
        (bound,) = server.ask("/v1/completions", {"prompt": "the", "seed": 1} | form)["choices"]
        assert len(bound["text"]) == 3 and set(bound["text"]) <= set("acd")
        assert follower.poll() is None
        server.process.send_signal(signal.SIGTERM)
        _, rest = server.process.communicate(timeout=30)
        _, log = follower.communicate(timeout=30)
    assert (server.process.returncode, follower.returncode) == (0, 0), rest + log
    assert "error" not in log


@pytest.mark.long
def test_a_killed_follower_ends_process_0(checkpoint, monkeypatch):
    with two_processes(checkpoint, monkeypatch, "--no-structured-outputs") as (server, follower):
        body = {"prompt": "the quick", "max_tokens": 100, "ignore_eos": True}
        answers: list[object] = []

        def ask() -> None:
            try:
                answers.append(server.ask("/v1/completions", body))
            except urllib.error.HTTPError as error:
                answers.append(error.code)

        thread = threading.Thread(target=ask)
        thread.start()
        follower.kill()
        _, rest = server.process.communicate(timeout=30)
        thread.join(30)
    assert server.process.returncode == 1
    assert answers == [500]
    assert "process 1 has ended" in rest and "Traceback" not in rest
