"""lm-evaluation-harness as a client of the server: the sums of `infer score`, over HTTP."""

import importlib
import json
import random

import pytest

from swiftkv_jax import cli, demo
from swiftkv_jax.infer.__main__ import main
from tests.serve.process import serving
from tests.test_eval import ask

ROWS = 200
WORDS = "for while return import def class None True self print (x) [0] : = == # not in".split()


def pairs(count: int) -> list[tuple[str, str]]:
    """Contexts and continuations of many lengths, as the tasks of the harness have them."""
    draw = random.Random(0)

    def text(longest: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    return [(text(60), " " + text(8)) for _ in range(count)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server of the demo model, which takes messages by a template of ours."""
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text(
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    flags = "--enable-scoring --enable-tokenizer-info --served-model-name demo".split()
    flags += "--api-key first-key --max-num-seqs 8".split()
    flags += (
        "--port 0 --max-model-len 512 --max-num-batched-tokens 256 --compile-cache none".split()
    )
    with serving(demo.SWIFTKV, *flags, "--chat-template", str(template)) as server:
        yield server.url


@pytest.mark.filterwarnings("default")  # the harness and its packages have warnings of their own
def test_sums_are_those_of_the_command(url, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "first-key")
    clients = importlib.import_module("lm_eval.models.openai_completions")
    model = clients.LocalCompletionsAPI(
        model="demo",
        base_url=f"{url}/v1/completions",
        tokenizer=str(demo.SWIFTKV),
        tokenizer_backend="huggingface",
        batch_size=8,
        add_bos_token=True,
        max_length=512,
    )
    chosen = pairs(ROWS)
    found = model.loglikelihood(ask(*chosen), disable_tqdm=True)
    rows, output = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    lines = (json.dumps({"context": before, "continuation": after}) for before, after in chosen)
    rows.write_text("\n".join(lines))
    flags = ["-i", str(rows), "-o", str(output), "--max-model-len", "512"]
    assert main(["score", *flags, "--compile-cache", "none"]) == cli.OK
    wanted = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(found) == len(wanted) == ROWS
    for (logprob, greedy), row in zip(found, wanted, strict=True):
        assert logprob == pytest.approx(row["logprob"], abs=1e-4)
        assert greedy == row["is_greedy"]
    assert 0 < sum(row["is_greedy"] for row in wanted) < ROWS


@pytest.mark.filterwarnings("default")
def test_the_tokenizer_of_the_server_is_that_of_the_checkpoint(url, monkeypatch):
    """`tokenizer_backend=remote` asks /tokenizer_info, /tokenize and /detokenize."""
    monkeypatch.setenv("OPENAI_API_KEY", "first-key")
    clients = importlib.import_module("lm_eval.models.openai_completions")
    settings = {"model": "demo", "base_url": f"{url}/v1/completions", "batch_size": 8}
    here = clients.LocalCompletionsAPI(
        tokenizer=str(demo.SWIFTKV), tokenizer_backend="huggingface", max_length=512, **settings
    )
    there = clients.LocalCompletionsAPI(
        tokenizer_backend="remote", auth_token="first-key", max_length=512, **settings
    )
    assert here.eot_token_id == there.eot_token_id is not None
    assert here.eos_string == there.eos_string is not None
    assert here.tokenizer.bos_token_id == there.tokenizer.bos_token_id is not None
    assert "message['content']" in there.tokenizer.tokenizer_info["chat_template"]
    chosen = pairs(20)
    assert [there.tok_encode(text) for text, _ in chosen] == [
        here.tok_encode(text) for text, _ in chosen
    ]
    wanted, found = (one.loglikelihood(ask(*chosen), disable_tqdm=True) for one in (here, there))
    for (logprob, greedy), (other, same) in zip(wanted, found, strict=True):
        assert logprob == pytest.approx(other, abs=1e-4) and greedy == same


PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def", "import os\nimport"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_generation_is_that_of_the_command(chat, url, tmp_path, monkeypatch):
    """Greedy, up to a stop string."""
    monkeypatch.setenv("OPENAI_API_KEY", "first-key")
    clients = importlib.import_module("lm_eval.models.openai_completions")
    instance = importlib.import_module("lm_eval.api.instance").Instance
    as_messages = importlib.import_module("lm_eval.models.api_models").JsonChatStr
    prompts: list = PROMPTS
    if chat:
        model = clients.LocalChatCompletion(
            model="demo", base_url=f"{url}/v1/chat/completions", tokenizer_backend=None
        )
        messages = ([{"role": "user", "content": prompt}] for prompt in PROMPTS)
        prompts = [as_messages(json.dumps(message)) for message in messages]
    else:
        model = clients.LocalCompletionsAPI(
            model="demo",
            base_url=f"{url}/v1/completions",
            tokenizer=str(demo.SWIFTKV),
            tokenizer_backend="huggingface",
            batch_size=1,
            add_bos_token=True,
            max_length=512,
        )
    settings = {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0}
    requests = [
        instance("generate_until", {}, (prompt, dict(settings)), number)
        for number, prompt in enumerate(prompts)
    ]
    found = model.generate_until(requests, disable_tqdm=True)
    rows, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    lines = (json.dumps({"prompt": prompt}) for prompt in PROMPTS)
    rows.write_text("\n".join(lines))
    flags = ["-i", str(rows), "-o", str(output), "--max-tokens", "24", "--temperature", "0"]
    flags += ["--stop", "\n\n", "--max-model-len", "512", "--compile-cache", "none"]
    assert main(["generate", *flags]) == cli.OK
    wanted = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert found == wanted and any(wanted)
