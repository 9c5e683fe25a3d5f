"""What clients get: objects, streams, log-probabilities, usage."""

import json

import openai
import pytest

from tests.infer.mock_model_runner import END, continuation
from tests.serve.conftest import USER_TOKEN, make_tokenizer

TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def text_of(ids) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def expected(prompt: str | list[int], max_tokens: int, sample: int = 0) -> tuple[str, str]:
    """(text, finish_reason)"""
    ids = ids_of(prompt) if isinstance(prompt, str) else prompt
    found = continuation(ids, max_tokens, sample)
    return text_of(found), "length" if len(found) == max_tokens else "stop"


@pytest.fixture
def client(running):
    with running.openai() as client:
        yield client


PROMPTS = ["hello", "a", "some longer prompt, of several pages", "x" * 70]


def test_completions(client):
    """Of each sample of each prompt, in order."""
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=30, n=2)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert [choice.index for choice in answer.choices] == list(range(8))
    made = 0
    for number, choice in enumerate(answer.choices):
        prompt, sample = PROMPTS[number // 2], number % 2
        assert (choice.text, choice.finish_reason) == expected(prompt, 30, sample)
        made += len(continuation(ids_of(prompt), 30, sample)) + (choice.finish_reason == "stop")
    assert answer.usage.completion_tokens == made


def test_a_stream_is_the_whole_answer(running):
    for prompt in PROMPTS:
        running.checked("/v1/completions", {"prompt": prompt, "max_tokens": 25, "n": 3})


def test_prompts_alone_are_repeated_for_each_sample(running):
    """Texts or token ids, without the engine."""
    steps = running.app.service.engine.snapshot.num_steps
    for prompt in (["abc", "d"], [ids_of("abc"), ids_of("d")]):
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "n": 2}
        _, answer = running.post("/v1/completions", body)
        assert [choice["text"] for choice in answer["choices"]] == ["abc", "abc", "d", "d"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert running.app.service.engine.snapshot.num_steps == steps


def test_a_completion_without_a_limit_has_what_fits(running):
    _, answer = running.post("/v1/completions", {"prompt": [5] * 250, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 6


def test_a_chat(client):
    messages = [{"role": "user", "content": " hi "}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
    ids = [USER_TOKEN, *ids_of("user: hi"), *ids_of("assistant: ")]
    # The template ends a line, which this tokenizer has no token for.
    assert answer.usage.prompt_tokens == len(ids)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == expected(ids, 12)
    parts = [{"type": "text", "text": " h"}, {"type": "text", "text": "i "}]
    again = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_completion_tokens=12
    )
    assert again.choices[0].message.content == choice.message.content


def test_a_chat_without_a_limit_has_the_room_that_there_is(client):
    messages = [{"role": "user", "content": "w" * 150}]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    usage = answer.usage
    assert usage.total_tokens <= 256
    assert answer.choices[0].finish_reason == "stop" or usage.total_tokens == 256


def test_stop_strings_end_the_text(running):
    whole = expected("hello", 60)[0]
    stop = whole[9:12]
    at = whole.index(stop)
    body = {"prompt": "hello", "max_tokens": 60, "stop": stop}
    answer = running.checked("/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["text"] == whole[:at]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == at + len(stop)
    _, answer = running.post("/v1/completions", body | {"include_stop_str_in_output": True})
    assert answer["choices"][0]["text"] == whole[: at + len(stop)]
    ids = continuation(ids_of("hello"), 60)
    token = ids[4]
    body = {"prompt": "hello", "max_tokens": 60, "stop_token_ids": [token]}
    _, answer = running.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["text"] == text_of(ids[: ids.index(token)])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert answer["usage"]["completion_tokens"] == ids.index(token) + 1


def test_log_probabilities_of_a_completion(running):
    ids = continuation(ids_of("hello"), 60)
    body = {"prompt": "hello", "max_tokens": 60, "logprobs": 2, "return_token_ids": True}
    _, answer = running.post("/v1/completions", body)
    (choice,) = answer["choices"]
    lists = choice["logprobs"]
    ended = [END] * (len(ids) < 60)
    assert choice["token_ids"] == [*ids, *ended] and choice["prompt_token_ids"] == ids_of("hello")
    # The mock's log-probability of a token is its negative id; of alternatives it is 0.
    assert lists["token_logprobs"] == [-float(token) for token in [*ids, *ended]]
    assert len(lists["tokens"]) == len(lists["top_logprobs"]) == len(lists["text_offset"])
    assert "".join(lists["tokens"][: len(ids)]) == TOKENIZER.decode(ids)
    events = running.events("/v1/completions", body)[:-1]
    first, *parts = [event["choices"][0]["logprobs"] for event in events]
    assert first is None and events[0]["choices"][0]["prompt_token_ids"] == ids_of("hello")
    for name, values in lists.items():
        assert sum((part[name] for part in parts), []) == values
    found = (event["choices"][0].get("token_ids", []) for event in events)
    assert sum(found, []) == choice["token_ids"]
    body["return_tokens_as_token_ids"] = True
    _, answer = running.post("/v1/completions", body)
    assert answer["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{ids[0]}"


def test_log_probabilities_of_a_chat(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_log_probabilities_of_a_prompt(running, max_tokens):
    body = {"prompt": ["hello", "a"], "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    _, answer = running.post("/v1/completions", body)
    for prompt, choice in zip(body["prompt"], answer["choices"], strict=True):
        ids, lists = ids_of(prompt), choice["logprobs"]
        made = continuation(ids, max_tokens) if max_tokens else []
        ended = bool(max_tokens) and len(made) < max_tokens
        assert choice["text"] == prompt + text_of(made)
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert len(lists["tokens"]) == len(ids) + len(made) + ended
        assert None not in lists["token_logprobs"][1:]
        assert "".join(lists["tokens"][: len(ids)]) == prompt
        assert lists["text_offset"][: len(ids)] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", ["a<|user|>b", [1, USER_TOKEN, 2, 71]])
def test_offsets_of_an_echo_index_its_text(running, prompt, skip):
    """Its special tokens too, which the answer leaves out."""
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 0, "ignore_eos": True}
    _, answer = running.post("/v1/completions", body | {"skip_special_tokens": skip})
    (choice,) = answer["choices"]
    lists, text = choice["logprobs"], choice["text"]
    assert any(token.startswith("<|") for token in lists["tokens"])
    for token, start in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert text.startswith(token, start) or token.startswith("<|")
    assert lists["text_offset"][-1] + len(lists["tokens"][-1]) == len(text)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs(running, max_tokens):
    """As vLLM lists them; the values are those of `echo`."""
    body = {"prompt": ["hello", "a"], "max_tokens": max_tokens, "n": 2, "echo": True, "logprobs": 1}
    _, answer = running.post("/v1/completions", body | {"prompt_logprobs": 3})
    _, more = running.post("/v1/completions", body | {"n": 1, "logprobs": 3})
    _, without = running.post("/v1/completions", body)
    for choice, same in zip(answer["choices"], without["choices"], strict=True):
        found = choice.pop("prompt_logprobs")
        assert choice == same and "prompt_logprobs" not in same
        ids = ids_of(body["prompt"][choice["index"] // 2])
        lists = more["choices"][choice["index"] // 2]["logprobs"]
        assert found[0] is None and len(found) == len(ids)
        for token, entries, value, top in zip(
            ids[1:],
            found[1:],
            lists["token_logprobs"][1 : len(ids)],
            lists["top_logprobs"][1 : len(ids)],
            strict=True,
        ):
            assert entries[str(token)]["logprob"] == value
            assert {one["decoded_token"]: one["logprob"] for one in entries.values()} == top
            ranks = {one["rank"]: one["logprob"] for one in entries.values()}
            assert [ranks[1], ranks[2], ranks[3]] == sorted(top.values())[::-1][:3]
            assert len(entries) == 3 or (len(entries) == 4 and entries[str(token)]["rank"] is None)


def test_prompt_logprobs_of_a_chat(running):
    """Those of its prompt, once."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2}
    chat |= {"prompt_logprobs": 0, "return_token_ids": True}
    _, answer = running.post("/v1/chat/completions", chat)
    body = {"prompt": answer["prompt_token_ids"], "max_tokens": 1, "prompt_logprobs": 0}
    _, same = running.post("/v1/completions", body)
    assert answer["prompt_logprobs"] == same["choices"][0]["prompt_logprobs"]
    assert [set(one) for one in answer["prompt_logprobs"][1:]] == [
        {str(token)} for token in answer["prompt_token_ids"][1:]
    ]
    assert answer["usage"]["completion_tokens"] == 4


def test_seeds_repeat_and_their_absence_does_not(running):
    """The mock draws nothing, so this looks at what the engine is asked."""
    seen = []
    engine = running.app.service.engine
    submit = engine.submit
    engine.submit = lambda number, request: seen.append(request) or submit(number, request)
    try:
        running.post("/v1/completions", {"prompt": ["a", "a"], "max_tokens": 1, "seed": 7})
        running.post("/v1/completions", {"prompt": ["a", "a"], "max_tokens": 1})
    finally:
        engine.submit = submit
    draws = [(request.params.seed, request.rng_stream) for request in seen]
    assert draws[:2] == [(7, 0), (7, 0)]
    assert len(set(draws[2:])) == 2 and draws[2][0] == draws[3][0] > 2**40


def test_cached_tokens_are_reported(running):
    for cached in (0, 68):
        _, answer = running.post("/v1/completions", {"prompt": "q" * 70, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_models_and_tokens(client, running):
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")
    status, found = running.post("/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert status == 200
    assert found == {
        "count": 3,
        "max_model_len": 256,
        "tokens": ids_of("abc"),
        "token_strs": ["a", "b", "c"],
    }
    assert running.post("/detokenize", {"tokens": ids_of("abc")}) == (200, {"prompt": "abc"})
    status, found = running.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert found["tokens"][0] == USER_TOKEN


def test_texts_that_do_not_fit_are_counted(running):
    """A client learns by how much a text is too long, up to four times the limit."""
    assert running.post("/tokenize", {"prompt": ""})[1]["count"] == 0
    status, found = running.post("/tokenize", {"prompt": "a" * 1000, "return_token_strs": True})
    assert status == 200 and found["count"] == 1000 and found["token_strs"] == ["a"] * 1000
    messages = [{"role": "user", "content": "a" * 300}]
    assert running.post("/tokenize", {"messages": messages})[1]["count"] > 300
    status, found = running.post("/tokenize", {"prompt": "a" * 1100})
    assert status == 400 and "your prompt resulted in 1100 tokens" in found["error"]["message"]
    for path, body in (
        ("/v1/completions", {"prompt": "a" * 300}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        assert running.post(path, body)[0] == 400


def test_the_tokenizer_is_told_where_that_is_enabled(running, start):
    status, _, content = running.request("GET", "/tokenizer_info")
    assert status == 404 and b"--enable-tokenizer-info" in content
    told = start(tokenizer_info=True, api_keys={"one": "a-key-of-some-length"})
    assert told.request("GET", "/tokenizer_info")[0] == 401
    key = {"x-api-key": "a-key-of-some-length"}
    status, _, content = told.request("GET", "/tokenizer_info", headers=key)
    assert status == 200 and json.loads(content) == {
        "tokenizer_class": type(TOKENIZER).__name__,
        "bos_token": None,
        "eos_token": "<|end|>",
        "unk_token": None,
        "pad_token": None,
        "added_tokens_decoder": {str(END): "<|end|>", str(USER_TOKEN): "<|user|>"},
        "model_max_length": 256,
        "chat_template": TOKENIZER.chat_template,
    }
