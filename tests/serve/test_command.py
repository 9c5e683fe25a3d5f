"""`infer serve` as a user starts it: a process, a checkpoint, a signal."""

import argparse
import copy
import json
import re
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from swiftkv_jax import demo
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.errors import CheckpointError, UsageError
from swiftkv_jax.infer.__main__ import main
from swiftkv_jax.infer.commands.chat_template import chat_template_text, set_chat_template
from swiftkv_jax.infer.engine.options import EngineOptions, SpeculativeConfig
from swiftkv_jax.serve import arguments, command
from swiftkv_jax.text.chat_template import render_chat
from tests import test_speculator as heads
from tests.checkpoints.test_adapters import adapter
from tests.infer.conftest import CHAT_TEMPLATE
from tests.serve.process import ROOT, SMALL, serving


def test_a_checkpoint_is_served_until_a_signal(checkpoint, tokenizer, greedy, tmp_path):
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("someone: first-key\n")
    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    names = ["--served-model-name", "tiny", "--api-key-file", str(keys)]
    path = adapter(tmp_path / "lora", {"model.layers.1.mlp.down_proj": 1}, checkpoint)
    names += ["--enable-lora", "--max-loras", "1", "--lora-modules", f"tenant={path}"]
    with serving(
        checkpoint, *SMALL, *names, "--chat-template", str(template), "--log-json"
    ) as server:
        key = {"authorization": "Bearer first-key"}
        request = urllib.request.Request(f"{server.url}/metrics", headers=key)
        with urllib.request.urlopen(request) as answer:
            found = re.findall(r"^vllm:prompt_tokens_total{.*} (.*)$", answer.read().decode(), re.M)
        assert found == ["0.0"], "what warms up is not counted"
        prompt = tokenizer("the quick")["input_ids"]
        body = {"prompt": "the quick", "max_tokens": 7, "temperature": 0}
        answer = server.ask("/v1/completions", body | {"return_token_ids": True})
        assert answer["choices"][0]["token_ids"] == greedy(prompt, 7)
        tenant = server.ask("/v1/completions", body | {"model": "tenant"})
        assert tenant["model"] == "tenant" and tenant["choices"] != answer["choices"]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        one, two = (server.ask("/v1/chat/completions", chat | {"seed": 5}) for _ in range(2))
        assert one["choices"] == two["choices"] and one["usage"]["completion_tokens"] == 4
        form = {"structured_outputs": {"regex": "[a-d]{3}"}}
        (bound,) = server.ask("/v1/completions", {"prompt": "the", "seed": 1} | form)["choices"]
        assert re.fullmatch("[a-d]{3}", bound["text"]) and bound["finish_reason"] == "stop"
        keys.write_text("someone: other-key\n")
        server.process.send_signal(signal.SIGHUP)
        before = []
        for line in server.lines:
            before.append(line)
            if "keys read again" in line:
                break
        card = server.ask("/v1/models", key="other-key")["data"][0]
        assert card["id"] == "tiny" and card["default_sampling"] == {}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.ask("/v1/models")
        server.process.send_signal(signal.SIGTERM)
        _, rest = server.process.communicate(timeout=30)
    assert server.process.returncode == 0, rest
    log = [json.loads(line) for line in (*server.start, *before, *rest.splitlines())]
    assert {"time", "level", "message"} <= set.intersection(*map(set, log))
    said = [one["message"] for one in log]
    for text in (
        "listening on",
        "memory per device",
        "tiny is ready",
        "neither checkpoint nor flags set a temperature",
        "keys read",
        "shutting down",
    ):
        assert any(text in one for one in said), text
    requests = [one for one in log if one["message"] == "request"]
    assert {"/v1/completions", "/v1/chat/completions"} <= {one["route"] for one in requests}
    assert {one["level"] for one in log} == {"info"}, said


EVENTS = "--kv-events-config"
MISTAKES = [
    ("--host 0.0.0.0", "--host 0.0.0.0 can be reached from other machines: give --api-key"),
    ("--api-key short", "must be 8 to 512"),
    ("--port 99999", "--port 99999 must be from 0 to 65535"),
    ("--queue-timeout 0", "--queue-timeout 0.0 must be above 0"),
    ("--keep-alive-timeout nan", "--keep-alive-timeout nan must be above 0"),
    ("--shutdown-delay nan", "--shutdown-delay nan: must be at least 0"),
    ("--api-key-file nothing-here", "nothing-here"),
    ("--temperature -1", "--temperature -1.0"),
    ("one --model two", "one and --model two: give one of them"),
    ("--ssl-certfile missing.pem", "error: --ssl-certfile missing.pem: "),
    (f"{EVENTS} {{", "is not JSON"),
    (f"{EVENTS} []", "must be an object with an `endpoint`"),
    (EVENTS + ' {"topic":"a"}', "must be an object with an `endpoint`"),
    (EVENTS + ' {"endpoint":"a","port":1}', "has no 'port'; there are endpoint, replay"),
    (EVENTS + ' {"endpoint":"a","hwm":0}', "`hwm`=0 is not int"),
    (EVENTS + ' {"endpoint":"a","publisher":"nats"}', "`publisher`='nats'"),
    (EVENTS + ' {"endpoint":"a","topic":null}', "`topic`=None is not str"),
    (EVENTS + ' {"endpoint":"a"} --no-prefix-caching', "--enable-prefix-caching"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_before_anything_is_loaded(arguments, message, capsys):
    """The error is one line."""
    assert main(["serve", *arguments.split()]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_chat_template_is_tried_before_anything_is_compiled(tokenizer, tmp_path, capsys):
    mine = copy.deepcopy(tokenizer)
    with pytest.raises(
        UsageError, match="`chat_template`=mine: the chat template has a mistake in line 1"
    ):
        set_chat_template(mine, "{% for %}", "mine")
    set_chat_template(mine, CHAT_TEMPLATE, "mine")
    missing = tmp_path / "missing.jinja"
    assert main(["serve", "--chat-template", str(missing)]) == 2
    assert "error: --chat-template" in capsys.readouterr().err


def test_the_packaged_chat_template(tokenizer, tmp_path, monkeypatch):
    """A conversation as plain text; a file of its name comes first."""
    mine = copy.deepcopy(tokenizer)
    set_chat_template(mine, chat_template_text(Path("plain")), "plain")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two\nlines"},
    ]
    start = "system: Be brief.\nuser: two\nlines\n"
    assert render_chat(mine, messages, add_generation_prompt=True) == start + "assistant:"
    assert render_chat(mine, messages, add_generation_prompt=False) == start
    messages.append({"role": "assistant", "content": "Yes, and"})
    assert (
        render_chat(mine, messages, add_generation_prompt=False, continue_final_message=True)
        == start + "assistant: Yes, and"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("mine")
    assert chat_template_text(Path("plain")) == "mine"


def test_speculation_is_checked_before_the_model_is_read(tmp_path):
    """The files of a head, by their headers."""
    fields = heads.ARCTIC | {"vocab_size": 2048, "input_hidden_dim": 128}
    head = heads.write(tmp_path / "head", fields, {})
    options = EngineOptions(speculative=SpeculativeConfig(model=str(head)))
    with pytest.raises(CheckpointError, match="head: missing: forget_emb.0.weight"):
        command.check_options(options, open_any(demo.SWIFTKV), None, None)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin: pickle files can run code"):
        command.check_options(options, open_any(demo.SWIFTKV), None, None)


@pytest.mark.long
def test_the_demo_model_takes_chats():
    """As docs/server.md shows. A prediction changes no answer."""
    drafts = "--speculative-config", "{}"
    with serving(demo.SWIFTKV, *SMALL, *drafts, "--chat-template", "plain") as server:
        body = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8}
        answer = server.ask("/v1/chat/completions", body | {"stop": ["\nuser:"]})
        text = answer["choices"][0]["message"]["content"]
        assert text
        body |= {"max_tokens": 40, "temperature": 0}
        plain = server.ask("/v1/chat/completions", body)["choices"]
        content = plain[0]["message"]["content"]
        again = body | {"prediction": {"type": "content", "content": content}}
        answer = server.ask("/v1/chat/completions", again)
        assert answer["choices"] == plain
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_a_port_in_use_is_one_line(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_an_error_in_the_log_of_json(capsys):
    assert main(["serve", "--model", "nothing-here", "--log-json"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["level"] == "error" and "nothing-here: no such file" in found["message"]
    assert main(["serve", "--model", "nothing-here"]) == 4
    assert capsys.readouterr().err.startswith("error: nothing-here"), "and not after it"


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command, "PACKAGES", ("no_such_package",))
    assert main(["serve"]) == 2
    assert "pip install 'swiftkv-jax[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "code", "message"),
    [
        (None, 4, "no such file or directory"),
        ("config.json", 4, "not a checkpoint"),
        ("model.safetensors", 4, "model.safetensors"),
        ("tokenizer.json", 2, "this checkpoint has no tokenizer"),
    ],
)
def test_a_model_that_is_none_ends_before_anything_listens(
    missing, code, message, checkpoint, tmp_path, capsys, monkeypatch
):
    """With its own error, alone."""
    monkeypatch.setattr("swiftkv_jax.serve.server.listen", None)
    folder = tmp_path / "model"
    if missing is not None:
        ignored = {"tokenizer.json": ["tokenizer*", "vocab*"]}.get(missing, [missing])
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(*ignored))
    assert main(["serve", "--model", str(folder), "--port", "0"]) == code
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize("template", [False, True])
def test_a_model_without_a_chat_template_is_told_at_once(template, checkpoint, capsys, monkeypatch):
    def listen(host, port):
        raise UsageError("enough")

    monkeypatch.setattr("swiftkv_jax.serve.server.listen", listen)
    flags = ["--chat-template", "plain"] if template else []
    assert main(["serve", "--model", str(checkpoint), "--port", "0", *flags]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert (first == "error: enough") is template
    assert template or "no chat template: chats will be refused; --chat-template FILE" in first


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host, loopback):
    assert command.is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_hosts_that_are_allowed_are_added_to_the_own(host):
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    words = ["--host", host, "--insecure", "--allowed-hosts", "a.example,b.example"]
    allowed = command.server_options(parser.parse_args(words)).allowed_hosts or ()
    assert {"a.example", "b.example", "127.0.0.1", "localhost", host} <= set(allowed)


def test_flags_of_the_deployment_examples():
    """Every server of examples/deploy starts with flags that there are."""
    folder, commands = ROOT / "examples" / "deploy", []
    for service in yaml.safe_load((folder / "compose.yaml").read_text())["services"].values():
        commands.append(service["command"].split())
    for name in ("kubernetes.yaml", "leader-worker-set.yaml"):
        for document in yaml.safe_load_all((folder / name).read_text()):
            spec = document["spec"]
            group = spec.get("leaderWorkerTemplate", {})
            templates = spec.get("template"), *map(group.get, ("leaderTemplate", "workerTemplate"))
            for template in filter(None, templates):
                (container,) = template["spec"]["containers"]
                words = [*container["command"], *container["args"]]
                commands.append([re.sub(r"\$\(\w+\)", "1", word) for word in words])
    served = [words for words in commands if words[:3] == ["swiftkv", "infer", "serve"]]
    assert len(served) == 5
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments.add_arguments(parser)
    for words in served:
        assert parser.parse_args(words[3:]).host == "0.0.0.0"
