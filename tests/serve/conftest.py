"""A server on a model runner without a model, in a thread of the test."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.client
import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.infer.structured.structured_outputs import GrammarCompiler
from swiftkv_jax.serve import app as app_module
from swiftkv_jax.serve import server as server_module
from swiftkv_jax.serve.app import App, Loaded
from swiftkv_jax.serve.options import ServerOptions
from swiftkv_jax.serve.service import service as service_module
from tests.infer import mock_model_runner
from tests.infer.conftest import checkpoint, compilations, greedy
from tests.infer.mock_model_runner import END, VOCAB, MockModelRunner, mock_engine
from tests.serve.parts import entries_of, said

__all__ = ["checkpoint", "compilations", "greedy"]

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] | trim }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER_TOKEN = 96
ROOM = {"max_model_len": 2048, "num_pages": 2048}


def make_tokenizer(*tags: str, special: bool = False, template: str = TEMPLATE) -> Any:
    """One token for each of 94 printable characters of ASCII and the space; the last one begins a
    turn, and none but the template may write it. With `tags` each of them is an added token, as in
    Qwen's tokenizers, and the line break a token, in the place of rare characters."""
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ"]
    vocab = {"<|end|>": END} | {one: index for index, one in enumerate(alphabet, start=1)}
    vocab["<|user|>"] = USER_TOKEN
    assert len(vocab) == VOCAB
    for old, new in zip("^~`@#%$&", ("Ċ", *tags) if tags else (), strict=False):
        vocab[new] = vocab.pop(old)
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>"],
        clean_up_tokenization_spaces=False,
    )
    added = [AddedToken(tag, special=special, normalized=False) for tag in tags]
    tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


def mock_loaded(
    engine: dict[str, Any] | None = None, step_seconds: float = 0.0, tokenizer: Any = None
) -> tuple[Loaded, MockModelRunner]:
    """An engine without a model, with options of `mock_engine`, whose decode calls take
    `step_seconds`; and its model runner."""
    options: dict[str, Any] = {"structured_outputs": True, "max_model_len": 256, "num_pages": 512}
    options |= {"chunk": 64, "slots": 8} | (engine or {})
    made, runner = mock_engine(**options)
    decode = runner.run_decode

    def slow(sequences, call):
        time.sleep(step_seconds)
        return decode(sequences, call)

    runner.run_decode = slow
    tokenizer = tokenizer or make_tokenizer()
    compiler = None
    if made.options.structured_outputs:
        compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=[END])
    return Loaded(made, tokenizer, {}, 0.0, compiler), runner


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), vocab_size=VOCAB, eos_token_ids=[END])


class UncheckedCompiler:
    """In place of `CheckedCompiler`, which starts a process."""

    def __init__(self, compiler: GrammarCompiler):
        self.compile_grammar = compiler.compile_grammar

    def close(self) -> None:
        """Nothing was started."""


def lazily(name: str) -> Any:
    """A module that is not imported before it is used: each process of pytest imports all files of
    tests, and runs a third of them."""
    if name not in sys.modules:
        spec: Any = importlib.util.find_spec(name)
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def read_all(connection: socket.socket, end: bytes | None = None) -> bytes:
    """All that comes until there is `end`, or the server closes, also with a reset."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while (end is None or end not in found) and (more := connection.recv(65536)):
            found += more
    return found


def later[T](ask: Callable[..., T], *args: Any) -> concurrent.futures.Future[T]:
    """The result of something that is done meanwhile."""
    found = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            found.set_result(ask(*args))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


@dataclasses.dataclass
class Running:
    """A server that runs."""

    port: int
    app: App
    runner: Any
    stop: Callable[[], None]
    """What a signal does."""
    thread: threading.Thread
    code: list[int]
    """The exit code, once it has ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self) -> openai.OpenAI:
        """The official client, which asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, content)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            content, given = None, dict(headers or {})
            if body is not None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                given.setdefault("content-type", "application/json")
            connection.request(method, path, content, given)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """(status, JSON)"""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        status, _, content = self.request("POST", path, body, named)
        return status, json.loads(content)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, [DONE] as a text."""
        status, headers, content = self.request("POST", path, body | {"stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        lines = [line for line in content.decode().split("\n\n") if line]
        data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    def send(self, content: bytes) -> socket.socket:
        """A connection that has sent these bytes."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        found.sendall(content)
        return found

    def busy(self, body: Any, path: str = "/v1/completions", *, rows: int = 1) -> socket.socket:
        """A connection whose request runs, with so many rows of the engine."""
        found = self.connect(body, path)
        engine = self.app.service.engine
        self.until(lambda: engine.snapshot.load.num_running == rows)
        return found

    def connect(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """A connection that has sent a request."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return self.send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def checked(self, path: str, body: Any) -> Any:
        """The answer to a body, of which a stream has the same choices and counts."""
        status, answer = self.post(path, body)
        assert status == 200, answer
        *events, last, done = self.events(path, body | {"stream_options": {"include_usage": True}})
        assert done == "[DONE]" and last["choices"] == []
        assert len({(event["id"], event["created"]) for event in (*events, last)}) == 1
        for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
            assert last["usage"][name] == answer["usage"][name]
        for whole in answer["choices"]:
            parts = [one for event in events for one in event["choices"]]
            parts = [one for one in parts if one["index"] == whole["index"]]
            ends = [one["finish_reason"] for one in parts]
            assert ends == [None] * (len(ends) - 1) + [whole["finish_reason"]]
            if "text" in whole:
                assert "".join(one["text"] for one in parts) == whole["text"]
                continue
            deltas = [one["delta"] for one in parts]
            assert said(deltas) == said([whole["message"]])
            assert entries_of(parts) == entries_of([whole])
            content = next((at for at, one in enumerate(deltas) if one.get("content")), len(deltas))
            assert not any(one.get("reasoning") for one in deltas[content + 1 :])
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the values that /metrics reports under a name, with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        found = text_string_to_metric_families(self.request("GET", "/metrics")[2].decode())
        values = [
            sample.value
            for family in found
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"there is no {name}"
        return sum(values)

    def check_end(self, code: int = 0) -> None:
        """The server ends, with this exit code."""
        self.thread.join(10)
        assert self.code == [code]

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        until(condition, seconds)

    def check_empty(self) -> None:
        """Nothing is held any more, soon."""
        service = self.app.service
        admission = service.admission
        engine = service.engine
        self.until(lambda: service.num_admitted == 0 and engine.snapshot.load.pages_in_use == 0)
        self.until(lambda: not engine._ids)
        self.until(lambda: not any((admission.sequences, admission.tokens, admission.bytes)))
        assert not admission.sequences_of and not service._parts and not service._queue._queues


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a server: options of `ServerOptions`, `engine` for those of `mock_engine`, and
    `step_seconds` that a decode call takes. `send_buffer` are bytes of the system's buffer,
    `tokenizer` is another one than that of `make_tokenizer`. `on_load` is called in place of a
    model that loads, and the server is not ready before it returns. Grammars are compiled without
    the process that tries them, unless `checks_grammars`. `listener` is another socket."""
    started: list[Running] = []
    checked = app_module.CheckedCompiler

    def begin(
        *,
        engine: dict[str, Any] | None = None,
        step_seconds: float = 0.0,
        send_buffer: int | None = None,
        tokenizer: Any = None,
        on_load: Callable[[server_module.Report], None] | None = None,
        checks_grammars: bool = False,
        listener: socket.socket | None = None,
        **options: Any,
    ) -> Running:
        compiler = checked if checks_grammars else UncheckedCompiler
        patch.setattr(app_module, "CheckedCompiler", compiler)
        loaded, runner = mock_loaded(engine, step_seconds, tokenizer)
        listener = listener or server_module.listen("127.0.0.1", 0)
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        apps: list[tuple[App, Callable[[], None]]] = []
        code: list[int] = []

        def load(report: server_module.Report) -> Loaded:
            if on_load is not None:
                on_load(report)
            return loaded

        def run() -> None:
            with asyncio.Runner(loop_factory=server_module.loop_factory()) as runner:
                code.append(
                    runner.run(
                        server_module.serve(
                            ServerOptions(**options),
                            "tiny",
                            listener,
                            load,
                            handle_signals=False,
                            on_start=lambda app, stop: apps.append((app, stop)),
                        )
                    )
                )

        thread = threading.Thread(target=run, daemon=True)
        port = 0 if listener.family == socket.AF_UNIX else listener.getsockname()[1]
        thread.start()
        while not apps or (on_load is None and apps[0][0].service.state == "starting"):
            assert thread.is_alive()
            time.sleep(0.005)
        app, stop = apps[0]
        loop = app.service._loop
        running = Running(
            port, app, runner, lambda: loop.call_soon_threadsafe(stop) and None, thread, code
        )
        started.append(running)
        return running

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_module, "TICK_SECONDS", 0.1)  # not to wait long for deadlines
        yield begin
    for running in started:
        if running.thread.is_alive():
            running.stop()
            running.stop()
    for running in started:
        running.thread.join(20)
        assert not running.thread.is_alive()


@pytest.fixture
def says(monkeypatch):
    """Lets the model of a chat say a text, and end. `prompt` is how the template ends prompts."""

    def say(text: str, tokenizer: Any = None, prompt: str = "assistant: ") -> None:
        tokenizer = tokenizer or make_tokenizer()
        before, answer = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]

        def next_token(tokens, sample=0, ends=True):
            given = list(tokens)
            at = max(
                at for at in range(len(given) + 1) if given[max(at - len(before), 0) : at] == before
            )
            return [*answer, END][len(given) - at]

        monkeypatch.setattr(mock_model_runner, "next_token", next_token)

    return say


@pytest.fixture(scope="module")
def shared(start) -> Running:
    """A server with the defaults."""
    return start()


@pytest.fixture
def running(shared) -> Iterator[Running]:
    """The same for all tests of a module; afterwards it holds nothing."""
    yield shared
    shared.check_empty()


@pytest.fixture(scope="module")
def server(start) -> Running:
    """A server with room for tools, which it reads in Llama's format."""
    return start(engine=ROOM, tool_call_parser="llama3_json")


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    """The official client of `server`, which holds nothing afterwards."""
    with server.openai() as client:
        yield client
    server.check_empty()
