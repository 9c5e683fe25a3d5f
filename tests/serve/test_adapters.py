"""Adapters as clients see them: names of models, which come and go while requests run."""

import asyncio
import concurrent.futures
import json
import re
import threading
from typing import Any

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.__main__ import parser
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.serve import command
from swiftkv_jax.serve.lora_modules import (
    check_lora_modules,
    parse_lora_module,
    public_name,
)
from tests.infer.mock_model_runner import CONFIG, continuation
from tests.serve.conftest import ROOM, Running, later, make_tokenizer

PROMPT = "what is it?"
IDS = make_tokenizer()(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def lora(start, tmp_path_factory) -> Running:
    """Adapters are folders whose names are numbers."""
    folder = tmp_path_factory.mktemp("loras")
    return start(
        engine=ROOM | {"num_adapters": 2, "slots": 2}, step_seconds=0.01, allow_runtime_lora=folder
    )


def ask(lora: Running, model: str, max_tokens: int = 5) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "model": model}
    status, answer = lora.post("/v1/completions", body | {"return_token_ids": True})
    assert status == 200 and answer["model"] == model, answer
    return answer["choices"][0]["token_ids"]


def expected(adapter: int, max_tokens: int = 5) -> list[int]:
    return continuation(IDS, max_tokens, adapter, ends=False)


def change(lora: Running, what: str, **body: str) -> tuple[int, str]:
    status, _, content = lora.request("POST", f"/v1/{what}_lora_adapter", body)
    return status, content.decode()


def names(lora: Running) -> list[str]:
    return [one["id"] for one in json.loads(lora.request("GET", "/v1/models")[2])["data"]]


def test_loaded_chosen_and_unloaded(lora):
    assert change(lora, "load", lora_name="ten", lora_path="10") == (
        200,
        "Success: LoRA adapter 'ten' added successfully.",
    )
    assert names(lora) == ["tiny", "ten"]
    card = json.loads(lora.request("GET", "/v1/models/ten")[2])
    assert card["parent"] == "tiny" and card["root"].endswith("/10")
    assert [ask(lora, name) for name in ("tiny", "ten")] == [expected(0), expected(10)]
    message: Any = {"role": "user", "content": "hi"}
    for path, body in (
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/messages", {"messages": [message], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/score", {"pairs": [{"context": "a", "continuation": "b"}]}),
    ):
        seen: list[str] = []
        add = lora.app.service.engine.submit
        lora.app.service.engine.submit = lambda number, one: (  # type: ignore[method-assign]
            seen.append(one.adapter),  # noqa: B023
            add(number, one),  # noqa: B023
        )
        assert lora.post(path, body | {"model": "ten"})[0] == 200, path
        lora.app.service.engine.submit = add  # type: ignore[method-assign]
        assert [public_name(one) for one in seen] == ["ten"], path
    status, answer = lora.post("/v1/completions", {"prompt": "a", "model": "another"})
    assert status == 404 and answer["error"]["message"].endswith("served are: 'tiny', 'ten'")
    assert change(lora, "unload", lora_name="ten") == (
        200,
        "Success: LoRA adapter 'ten' removed successfully.",
    )
    status, answer = lora.post("/v1/completions", {"prompt": "a", "model": "ten"})
    assert status == 404 and "the model 'ten' is not served here" in answer["error"]["message"]


def test_a_request_keeps_its_adapter(lora):
    """Requests run and wait, in the engine and before it, while another adapter gets the name."""
    assert change(lora, "load", lora_name="it", lora_path="30")[0] == 200
    asked = [later(ask, lora, "it", 40) for _ in range(9)]
    lora.until(lambda: len(lora.app.service._queue) > 2)
    metrics = lora.request("GET", "/metrics")[2].decode()
    (labels,) = re.findall("vllm:lora_requests_info{(.*)}", metrics)
    for label in ('max_lora="2"', 'running_lora_adapters="it"', 'waiting_lora_adapters="it"'):
        assert label in labels
    assert change(lora, "unload", lora_name="it")[0] == 200
    assert change(lora, "load", lora_name="it", lora_path="31")[0] == 200
    assert ask(lora, "it") == expected(31)
    assert [one.result() for one in asked] == [expected(30, 40)] * 9
    lora.until(lambda: len(lora.app.service.engine._engine.adapters.names) == 1)
    assert change(lora, "unload", lora_name="it")[0] == 200
    lora.check_empty()


def test_pages_of_an_adapter_that_changes_prompts_are_its_own(lora):
    """Where another thread makes their keys: no page is read that another adapter has written, and
    the same bytes find theirs under another name."""
    assert change(lora, "load", lora_name="low", lora_path="130")[0] == 200
    assert change(lora, "load", lora_name="same", lora_path="130")[0] == 200
    prompt = "a prompt of some pages" * 3

    def hits(path: str, model: str) -> int:
        lora.app.service.engine.call(lambda engine: engine.reset_stats()).result(10)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1}
        if path == "/v1/chat/completions":
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        elif path == "/v1/score":
            body = {"pairs": [{"context": prompt, "continuation": "b"}]}
        assert lora.post(path, body | {"model": model})[0] == 200
        return lora.app.service.engine.call(lambda engine: engine.prefix_stats.hits).result(10)

    for path in ("/v1/completions", "/v1/chat/completions"):
        found = [hits(path, model) for model in ("tiny", "low", "tiny", "low", "same")]
        # A test before may have left the beginning of a chat.
        assert max(found[:2]) < 20 and found[2] == found[3] == found[4] > 50, path
    assert hits("/v1/score", "low") == hits("/v1/score", "tiny") > 50
    for name in ("low", "same"):
        assert change(lora, "unload", lora_name=name)[0] == 200


def test_a_request_that_is_tokenized_keeps_its_adapter(lora, monkeypatch):
    assert change(lora, "load", lora_name="it", lora_path="40")[0] == 200
    started, go_on = threading.Event(), threading.Event()
    encode = lora.app.encoder.encode

    async def slow(*given):
        started.set()
        await asyncio.to_thread(go_on.wait, 10)
        return await encode(*given)

    with monkeypatch.context() as patch:
        patch.setattr(lora.app.encoder, "encode", slow)
        asked = later(ask, lora, "it")
        assert started.wait(10)
    assert change(lora, "unload", lora_name="it")[0] == 200
    assert lora.app.service.engine.call(lambda engine: len(engine.adapters.names)).result(10)
    go_on.set()
    assert asked.result() == expected(40)
    lora.until(lambda: not lora.app.service.engine._engine.adapters.names)


def test_a_load_ends_with_the_engine(start, tmp_path):
    """Whether it was asked for before or after, and another thread waits for it or a client."""
    failing = start(engine=ROOM | {"num_adapters": 2}, allow_runtime_lora=tmp_path)
    thread = failing.app.service.engine

    def fail(_):
        started.set()
        go_on.wait(3)
        thread._take_snapshot = None  # type: ignore[assignment,method-assign]

    started, go_on = threading.Event(), threading.Event()
    thread.call(fail)
    assert started.wait(10)
    asked = later(lambda: change(failing, "load", lora_name="one", lora_path="1"))
    waiting = thread.call(lambda _: None)
    failing.until(lambda: len(thread._calls) == 2)
    go_on.set()
    for one in (waiting, thread.call(lambda _: None)):
        with pytest.raises(concurrent.futures.BrokenExecutor):
            one.result(10)
    status, text = asked.result()
    assert status == 503 and "the server is failed" in text


def test_what_is_refused(lora, start):
    same = [later(lambda: change(lora, "load", lora_name="one", lora_path="1")) for _ in range(3)]
    assert sorted(one.result()[0] for one in same) == [200, 400, 400]
    for body, status, text in [
        ({"lora_name": "one", "lora_path": "2"}, 400, "'one' has already been loaded"),
        ({"lora_name": "tiny", "lora_path": "2"}, 400, "'tiny' is the name of the model"),
        ({"lora_name": "", "lora_path": "2"}, 400, "1 to 256 printable characters"),
        ({"lora_name": "a,b", "lora_path": "2"}, 400, "printable characters without commas"),
        ({"lora_name": "two", "lora_path": "../2"}, 400, "not below the server's --allow-runti"),
        ({"lora_name": "two", "lora_path": "/2"}, 400, "not below the server's --allow-runti"),
        ({"lora_name": "two", "lora_path": "."}, 400, "not below the server's --allow-runti"),
        ({"lora_name": "two", "lora_path": "2\0"}, 400, "`lora_path` is not a path"),
        ({"lora_name": "two", "lora_path": "2"}, 200, "Success"),
        ({"lora_name": "three", "lora_path": "3"}, 400, "end, or raise `--max-loras`"),
    ]:
        found = change(lora, "load", **body)
        assert found[0] == status and text in found[1], found
    assert change(lora, "unload", lora_name="four")[0] == 404
    for name in ("one", "two"):
        assert change(lora, "unload", lora_name=name)[0] == 200
    assert "--allow-runtime-lora" in change(start(), "unload", lora_name="one")[1]


def test_work_that_is_cancelled_ends_nothing(lora):
    """A connection that the server closes cancels what it waits for."""
    engine = lora.app.service.engine
    started, go_on = threading.Event(), threading.Event()

    def wait(_):
        started.set()
        go_on.wait(10)

    running, waiting = engine.call(wait), engine.call(lambda _: pytest.fail("was cancelled"))
    assert started.wait(10)
    assert not running.cancel() and waiting.cancel()
    go_on.set()
    running.result(10)
    assert ask(lora, "tiny")


def test_flags(tmp_path):
    """As vLLM takes them: several values of a flag, also in JSON."""
    texts = ["a=runs/a", '{"name": "b", "path": "runs/b=1", "base_model_name": "x"}']
    args = parser("serve").parse_args(["DIR", "--lora-modules", *texts, "--lora-modules", "c=d"])
    found = command.given(command.ServeCommand, args)["lora_modules"]
    assert found == {"a": "runs/a", "b": "runs/b=1", "c": "d"}
    for text in ("a", "=b", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "b", "c": 1}'):
        with pytest.raises(UsageError, match="is not"):
            parse_lora_module(text)
    args = parser("serve").parse_args(["DIR", "--lora-modules", "a=b", "--lora-modules", "a=c"])
    with pytest.raises(UsageError, match="`lora_modules`: a name is given twice"):
        command.given(command.ServeCommand, args)
    for name, text in (("tiny", "'tiny' is the name of the model"), ("a,b", "without commas")):
        with pytest.raises(UsageError, match=text):
            options = EngineOptions(enable_lora=True)
            check_lora_modules({name: tmp_path}, options, CONFIG, ["tiny"])
    args = parser("serve").parse_args(["--allow-runtime-lora", str(tmp_path)])
    with pytest.raises(UsageError, match="`allow_runtime_lora` needs `api_key`"):
        command.server_options(args)
