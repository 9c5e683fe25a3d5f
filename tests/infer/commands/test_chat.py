"""Conversations through standard input: replies on standard output and nothing else, and each
command."""

import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from swiftkv_jax.infer import Engine
from tests.infer.conftest import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def chat_model(checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(checkpoint, path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


@pytest.fixture
def chat(chat_model, run, capsys, monkeypatch):
    """Runs a session with these lines: (stdout, stderr)."""

    def session(*lines: str, flags: tuple = ("--max-tokens", 6)) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert run("chat", "-m", chat_model, *flags) == 0
        return capsys.readouterr()

    return session


@pytest.fixture
def reply(tokenizer, greedy):
    """The model's greedy reply to messages [(role, content), ...]."""

    def text(*messages: tuple[str, str], count: int = 6) -> str:
        prompt = (
            "<s>" + "".join(f"[{role}]{content}\n" for role, content in messages) + "[assistant]"
        )
        return tokenizer.decode(
            greedy(tokenizer(prompt, add_special_tokens=False)["input_ids"], count),
            skip_special_tokens=True,
        )

    return text


HELLO, MORE = ("user", "hello"), ("user", "more")


def test_a_conversation(chat, reply):
    flags = ("--max-tokens", 6, "--system-prompt", "be brief")
    out, err = chat(
        "hello", "", "more", "/reset", "hello", "x" * 300, "/exit", "unread", flags=flags
    )
    system = ("system", "be brief")
    first = reply(system, HELLO)
    second = reply(system, HELLO, ("assistant", first), MORE)
    assert out == f"{first}\n{second}\n{first}\n"
    assert re.search(
        r"error: the conversation would have \d+ tokens.*above the limit of 128: /reset", err
    )


def test_a_turn_prefills_only_what_is_new(chat, monkeypatch):
    outputs, step = {}, Engine.step

    def recorded(engine):
        found = step(engine)
        outputs.update((output.request_id, output.num_cached_tokens) for output in found)
        return found

    monkeypatch.setattr(Engine, "step", recorded)
    chat("hello hello hello", "more")
    first, second = outputs.values()
    assert first == 0 < second and second % 8 == 0  # all but the last, unfilled page


def test_two_slashes_send_a_line_that_begins_with_one(chat, reply):
    out, err = chat("//exit", "/nonsense")
    assert out == reply(("user", "/exit")) + "\n"
    assert "/nonsense: no such command" in err and "//nonsense sends the line" in err


def test_the_system_message_may_change(chat, reply):
    lines = ("hello", "/system be kind", "more", "/system", "/nonsense", "/help", "/reset", "hello")
    out, err = chat(*lines)
    first = reply(HELLO)
    second = reply(("system", "be kind"), HELLO, ("assistant", first), MORE)
    assert out == f"{first}\n{second}\n{first}\n"  # the session goes on after an error
    assert "error: /nonsense: no such command" in err and "/system TEXT" in err


def test_ctrl_c_stops_the_reply_and_keeps_the_session(chat, reply, monkeypatch):
    step, steps = Engine.step, []

    def interrupted(engine):
        steps.append(1)
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Engine, "step", interrupted)
    out, err = chat("hello", "/reset", "hello", flags=("--max-tokens", 20))
    stopped, whole = out.splitlines()
    assert (
        whole == reply(HELLO, count=20)
        and whole.startswith(stopped.rstrip("�"))
        and len(stopped) < len(whole)
    )
    assert err.count("(stopped)") == 1 and signal.getsignal(signal.SIGINT) is before


def test_a_conversation_that_fills_the_window(chat):
    out, err = chat("hello", "more", flags=("--max-tokens", 500))
    assert "(the conversation has reached the limit of 128 tokens: /reset)" in err
    assert len(out.splitlines()) >= 1 and "error: the conversation would have" in err


def test_a_template_that_fails_ends_the_session_with_one_line(checkpoint, run, tmp_path, capsys):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    (path / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    assert run("chat", "-m", path) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("ignored", "flags", "message"),
    [
        (
            (),
            (),
            "this checkpoint has no chat template: give one with --chat-template FILE, or use a "
            "chat model, or plain prompts",
        ),
        (("tokenizer*", "vocab*"), (), "this checkpoint has no tokenizer: a chat needs one"),
        (
            ("tokenizer*", "vocab*"),
            ("--chat-template", "plain"),
            "this checkpoint has no tokenizer: a chat needs one",
        ),
    ],
)
def test_what_a_chat_needs(ignored, flags, message, checkpoint, run, capsys, monkeypatch, tmp_path):
    """Before weights are read."""
    monkeypatch.setattr("swiftkv_jax.infer.commands.chat.load_model", None)
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns(*ignored))
    assert run("chat", "-m", path, *flags) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


def test_a_template_of_the_command_line(checkpoint, run, reply, capsys, monkeypatch, tmp_path):
    """For conversations, and for the messages of rows."""
    (tmp_path / "mine.jinja").write_text(CHAT_TEMPLATE)
    template = ("--chat-template", tmp_path / "mine.jinja", "--max-tokens", 6)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run("chat", "-m", checkpoint, *template) == 0
    assert capsys.readouterr().out == f"{reply(HELLO)}\n"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    assert run("generate", "-m", checkpoint, "-i", rows, *template) == 0
    assert json.loads(capsys.readouterr().out)["text"] == reply(HELLO)
    assert run("chat", "-m", checkpoint, "--chat-template", tmp_path / "none") == 2
    assert "--chat-template" in capsys.readouterr().err


def test_the_demo_model_has_a_template(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("chat") == 0
    assert "\ndemo: SwiftKV, prompts run 4 of 8 layers" in "\n" + capsys.readouterr().err
