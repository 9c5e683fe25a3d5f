"""/v1/score: log-likelihoods of continuations."""

from tests.infer.mock_model_runner import next_token
from tests.serve.test_answers import ids_of, text_of


def test_scores_are_those_of_the_continuation(running):
    pairs = [
        {"context": "hello", "continuation": " there"},
        {"context": "a", "continuation": "b"},
        {"context": "hello there, ", "continuation": "you"},
    ]
    status, answer = running.post("/v1/score", {"pairs": pairs, "top_logprobs": 2})
    assert status == 200 and answer["object"] == "list" and answer["model"] == "tiny"
    for number, (pair, row) in enumerate(zip(pairs, answer["data"], strict=True)):
        whole = ids_of(pair["context"] + pair["continuation"])
        before = len(ids_of(pair["context"].rstrip()))
        assert row["index"] == number and row["token_ids"] == whole[before:]
        # The mock's log-probability of an entry is the negative id of what it finds likeliest.
        likeliest = [next_token(whole[:at]) for at in range(before, len(whole))]
        assert row["token_logprobs"] == [-float(token) for token in likeliest]
        assert row["logprob"] == sum(row["token_logprobs"])
        assert row["is_greedy"] == (likeliest == whole[before:])
        assert [len(one) for one in row["top_logprobs"]] == [2] * len(likeliest)
    assert answer["usage"]["prompt_tokens"] == sum(
        len(ids_of(pair["context"] + pair["continuation"])) for pair in pairs
    )


def test_scores_of_long_texts_are_whole(start):
    """The engine gives them in parts of 2,048."""
    running = start(engine={"max_model_len": 4096, "num_pages": 4096, "chunk": 512})
    ids = ids_of(text := "the quick brown fox " * 150)
    logprobs = [-float(next_token(ids[:at])) for at in range(1, len(ids))]
    pairs = {"pairs": [{"context": text[0], "continuation": text[1:]}]}
    (row,) = running.post("/v1/score", pairs)[1]["data"]
    assert row["token_logprobs"] == logprobs and row["token_ids"] == ids[1:]
    echo = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = running.post("/v1/completions", echo)[1]["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, *logprobs]
    assert "".join(choice["logprobs"]["tokens"]) == text == choice["text"]
    running.check_empty()
    assert sum(running.app.service.metrics.ttft.counts) == 2, (
        "one for each request, not for each part"
    )


def test_a_continuation_that_is_greedy_says_so(running):
    ids = ids_of("hello")
    for _ in range(3):
        ids.append(next_token(ids, ends=False))
    context, continuation = "hello", text_of(ids[5:])
    _, answer = running.post(
        "/v1/score", {"pairs": [{"context": context, "continuation": continuation}]}
    )
    (row,) = answer["data"]
    expected = [next_token(ids[:at]) for at in range(5, len(ids))]
    assert row["is_greedy"] == (expected == ids[5:])


def test_scores_need_a_server_that_has_programs_for_them(start):
    running = start()
    running.app.scoring = False
    chat = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0}
    for path, body, param in (
        ("/v1/score", {"pairs": [{"context": "a", "continuation": "b"}]}, "pairs"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/chat/completions", chat, "prompt_logprobs"),
    ):
        status, answer = running.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert "the server's --enable-scoring" in answer["error"]["message"]
