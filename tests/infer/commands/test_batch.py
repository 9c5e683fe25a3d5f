"""Files of rows: reading, results, errors of single rows, and the order of the output."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.infer import Request, SamplingParams
from swiftkv_jax.infer.commands import batch
from swiftkv_jax.infer.commands.batch import Row, RowWriter, read_rows, run_rows
from swiftkv_jax.infer.commands.prompts import PromptReader
from swiftkv_jax.infer.commands.results import Completions
from swiftkv_jax.infer.engine.requests import NOT_FINITE
from swiftkv_jax.infer.text import encode
from swiftkv_jax.process.jsonl import parse_object, parse_value, read_lines, scan
from tests.infer.mock_model_runner import continuation, mock_engine


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_file(folder: Path, *rows: dict | str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


# Rows -------------------------------------------------------------------------


def test_rows_fail_alone(checkpoint, tokenizer, greedy, run, tmp_path, capsys):
    rows = rows_file(
        tmp_path,
        {"id": "a", "prompt": "def x"},
        "{not json}",
        {"id": "long", "prompt_token_ids": [5] * 200},
        "",
        {"prompt_token_ids": encode(tokenizer, "print")},
        {"id": "b", "prompt": "x", "maximum": 3},
        {"id": "c", "prompt_token_ids": []},
        {"id": "d", "messages": [{"role": "user", "content": "hi"}]},
        '["prompt"]',
        {"id": "e", "prompt": "x", "max_tokens": 10_000},
        {"id": "f", "prompt": "x", "temperature": "hot"},
        '{"id": "g", "prompt": "x", "temperature": NaN}',
        {"id": "h", "prompt_token_ids": [5, 320]},
        {"id": "l", "prompt_token_ids": [5, -1]},
        {"id": "m", "prompt_token_ids": [5, 10**23]},
        {"id": "i", "prompt": "x", "prompt_token_ids": [5]},
        {"id": {}, "prompt": "x"},
        {"id": "j", "prompt": "x", "n": 3},
        {"id": "k", "prompt": "print", "max_tokens": 2},
    )
    out = tmp_path / "out.jsonl"
    assert run("-m", checkpoint, "-i", rows, "-o", out, "--max-tokens", 8, "--max-num-seqs", 2) == 3
    found = written(out)
    first, second = (greedy(encode(tokenizer, text), 8) for text in ("def x", "print"))
    timing = found[0].pop("timing")
    assert found[0] == {
        "id": "a",
        "text": tokenizer.decode(first),
        "token_ids": first,
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": len(encode(tokenizer, "def x")),
            "completion_tokens": 8,
            "cached_tokens": 0,
        },
    }
    assert 0 <= timing["queue_s"] <= timing["ttft_s"] <= timing["total_s"]
    assert (found[3]["id"], found[3]["token_ids"]) == (3, second)
    assert found[-1]["token_ids"] == second[:2]
    errors = {row["id"]: row["error"] for row in found if "error" in row}
    assert list(errors) == [1, "long", "b", "c", "d", 7, "e", "f", 10, "h", "l", "m", "i", 15, "j"]
    for id, said in {
        1: f"{rows}:2: not valid JSON",
        "long": f"{rows}:3: the prompt has 200 tokens, with 8 new ones that is 208, above the",
        "b": "'maximum' is not a sampling parameter",
        "c": "must not be empty",
        "d": "no chat template",
        7: f"{rows}:9: expected an object",
        "e": "above the limit of 128",
        "f": "temperature='hot' must be a number",
        10: "NaN is not a number",
        "h": "token id 320 is outside the vocabulary of 320",
        "l": "token id -1 is outside the vocabulary of 320",
        "m": "a list of token ids",
        "i": "expected one of prompt, prompt_token_ids, messages; got prompt, prompt_token_ids",
        15: "id, or custom_id, must be a string or a whole number",
        "j": "n=3 samples do not fit into max_num_seqs=2",
    }.items():
        assert said in errors[id]
    assert errors["long"].endswith("(id 'long')")
    out, err = capsys.readouterr()
    assert (out, err.count("error: ")) == ("", 11) and "error: 5 more rows failed" in err
    assert not list(tmp_path.glob("*.partial*"))


def test_rows_have_samples_logprobs_and_stop_strings(checkpoint, tokenizer, greedy, run, tmp_path):
    ids = encode(tokenizer, "def x")
    tokens = greedy(ids, 8)
    text = tokenizer.decode(tokens)
    stop = text[len(text) // 2 :][:3]
    first = {"prompt": "def x", "n": 2, "logprobs": 2, "stop": stop}
    rows = rows_file(tmp_path, first, {"prompt_token_ids": ids, "logprobs": 0, "max_tokens": 3})
    flags = ("--max-tokens", 8, "--max-num-seqs", 2)
    assert run("-m", checkpoint, "-i", rows, "-o", tmp_path / "out.jsonl", *flags) == 0
    several, one = written(tmp_path / "out.jsonl")
    assert [choice.pop("index") for choice in several["choices"]] == [0, 1]
    assert "text" not in several
    assert several["choices"][0] == several["choices"][1]
    choice = several["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == tokens[: len(choice["token_ids"])]
    assert several["usage"]["completion_tokens"] == 2 * len(choice["token_ids"])
    assert [entry["token_id"] for entry in choice["logprobs"]] == choice["token_ids"]
    assert all(
        entry["top"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"]}
        for entry in choice["logprobs"]
    )
    assert all(len(entry["top"]) == 2 and entry["logprob"] < 0 for entry in choice["logprobs"])
    assert [entry["token_id"] for entry in one["logprobs"]] == tokens[:3]
    assert all(entry.keys() == {"token_id", "logprob"} for entry in one["logprobs"])
    assert [entry["logprob"] for entry in one["logprobs"]] == pytest.approx(
        [entry["logprob"] for entry in choice["logprobs"][:3]]
    )
    assert "stop_reason" not in one and one["finish_reason"] == "length"


def test_lines_of_batch_files(tokenizer):
    reader = PromptReader(tokenizer, SamplingParams(seed=1))
    body = {"model": "m", "prompt": "def x", "max_completion_tokens": 3, "stream": False}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    assert reader.from_row(4, line) == Request(
        encode(tokenizer, "def x"), SamplingParams(seed=1, max_tokens=3), rng_stream=4
    )
    body = {"prompt": [5, 6], "seed": 7}
    assert reader.from_row(4, line | {"body": body}) == Request(
        [5, 6], SamplingParams(seed=7), rng_stream=0
    )
    chat = line | {"url": "/v1/chat/completions"}
    wrong = [
        (line | {"url": "/v1/embeddings"}, "method and url must be POST and one of"),
        (line | {"method": "GET"}, "'GET'"),
        (line | {"body": []}, "body must be an object"),
        (chat, "body has no messages"),
        (line | {"extra": 1}, "extra: not a field of a batch line"),
        (line | {"body": {"prompt": ["a", "b"]}}, "prompt is a list of 2 prompts: a row has one"),
        (line | {"body": {"prompt": [[5], [6]]}}, "prompt is a list of 2 prompts: a row has one"),
        (line | {"body": {"prompt": [5, 6.5]}}, "prompt must be a list of whole numbers"),
        (line | {"body": {"prompt": "a", "best_of": 2}}, "`best_of` is not supported"),
    ]
    for row, message in wrong:
        with pytest.raises(UsageError, match=message):
            reader.from_row(0, row)


def test_a_row_on_which_the_chat_template_fails_is_an_error(checkpoint, run, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    (path / "chat_template.jinja").write_text("{{ 1 // (messages | length - 1) }}")
    turn = {"role": "user", "content": "hi"}
    rows = rows_file(tmp_path, {"messages": [turn]}, {"messages": [turn] * 3})
    assert run("-m", path, "-i", rows, "-o", tmp_path / "out", "--max-tokens", 2) == 3
    failed, good = written(tmp_path / "out")
    assert "the chat template fails on the messages: ZeroDivisionError" in failed["error"]
    assert len(good["token_ids"]) == 2


def test_logprobs_of_chat_requests(tokenizer):
    reader = PromptReader(tokenizer, SamplingParams())

    def logprobs(**fields):
        return reader.from_row(0, {"prompt": "x"} | fields).params.logprobs

    assert [logprobs(logprobs=True), logprobs(logprobs=True, top_logprobs=4)] == [0, 4]
    assert [logprobs(logprobs=False), logprobs(logprobs=2)] == [None, 2]
    with pytest.raises(UsageError, match="top_logprobs=5 goes with logprobs true"):
        logprobs(logprobs=False, top_logprobs=5)


def test_rows_with_the_commands_seed_differ(checkpoint, run, tmp_path):
    rows = rows_file(tmp_path, *[{"prompt": "x"}] * 3, *[{"prompt": "x", "seed": 5}] * 2)
    flags = ("--max-tokens", 8, "--max-num-seqs", 2, "--temperature", 5, "--seed", 5)
    for name in ("one", "two"):
        assert run("-m", checkpoint, "-i", rows, "-o", tmp_path / name, *flags) == 0
    texts = [row["token_ids"] for row in written(tmp_path / "one")]
    assert texts == [row["token_ids"] for row in written(tmp_path / "two")]
    assert len({tuple(text) for text in texts[:3]}) == 3 and texts[3] == texts[4] == texts[0]


def test_lines_of_a_file(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    with pytest.raises(DataError, match="empty: no rows"):
        scan(empty)
    path = rows_file(tmp_path, "a", "", "b")
    assert scan(path)[0] == 2
    lines = [(line.where[-2:], line.number, line.content) for line in read_lines(path)]
    assert lines == [(":1", 0, b"a\n"), (":3", 1, b"b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"\xff"', "not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' appears twice in an object"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_lines_that_are_not_json(content, message):
    with pytest.raises(DataError, match=message):
        parse_value(content)


def test_a_value_is_not_an_object():
    assert parse_value(b"[1]") == [1]
    with pytest.raises(DataError, match="expected an object, got list"):
        parse_object(b"[1]")


def test_an_id_that_an_earlier_row_has_is_an_error(tmp_path):
    """Also of a row that an earlier run has written."""
    path = rows_file(tmp_path, {"id": "a"}, {"id": 2}, {"id": 2}, {"custom_id": "a"}, {})

    def build(number, fields):
        return Request([1], SamplingParams()), Completions(None, Request([1], SamplingParams()))

    for skip in (0, 3):
        errors = [row.error for row in read_rows(path, build, skip=skip)]
        expected = [
            None,
            None,
            f"{path}:3: an earlier row has the same id (id 2)",
            f"{path}:4: an earlier row has the same id (id 'a')",
            None,
        ]
        assert errors == expected[skip:]


# The driver, on a device without a model --------------------------------------


class Recorder(RowWriter):
    """A writer that checks the order."""

    def __init__(self):
        self.rows: list[Row] = []

    def write_partial(self, row: Row) -> None:
        assert not row.done

    def write(self, row: Row) -> None:
        assert row.done and row.id == len(self.rows)
        self.rows.append(row)


def test_rows_are_read_as_room_appears_and_written_in_order(monkeypatch):
    monkeypatch.setattr(batch, "MAX_UNWRITTEN", 50)
    engine, _ = mock_engine(max_model_len=512, num_pages=1024)
    recorder, most_ahead, most_known = Recorder(), 0, 0

    def rows():
        nonlocal most_ahead, most_known
        for number in range(1000):
            length = 400 if number == 0 else 1 + number % 5
            request = Request(
                [1 + number % 90, 2, 3], SamplingParams(max_tokens=length, ignore_eos=True)
            )
            yield Row(number, "", request, Completions(None, request))
            most_ahead = max(most_ahead, number - len(recorder.rows))
            most_known = max(most_known, len(engine._requests))

    run_rows(engine, rows(), recorder, in_flight=8)
    assert len(recorder.rows) == 1000 and most_known == 7  # the eighth is being made
    assert (
        most_ahead == 48
    )  # behind the long first row; with the one being made, 50 are not written
    for row in recorder.rows[::97]:
        assert isinstance(row.request, Request) and row.result is not None
        expected = continuation(row.request.prompt, row.request.params.max_tokens, ends=False)
        assert row.result.to_json()["token_ids"] == expected


# What breaks down -------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(checkpoint, tmp_path_factory) -> Path:
    """A checkpoint in which token 5 is not a number."""
    path = tmp_path_factory.mktemp("broken") / "model"
    model = skv.load(checkpoint)
    model = dataclasses.replace(
        model,
        llama=dataclasses.replace(model.llama, embed=model.llama.embed.at[5].set(float("nan"))),
    )
    skv.save_hf(model, path)
    model.tokenizer.save_pretrained(path)
    return path


@pytest.mark.long
def test_a_row_that_breaks_down_is_an_error(broken, greedy, run, tmp_path, capsys):
    rows = rows_file(
        tmp_path,
        {"prompt_token_ids": [7, 8]},
        {"prompt_token_ids": [7, 5, 8], "n": 2},
        {"prompt_token_ids": [9]},
    )
    assert run("-m", broken, "-i", rows, "-o", tmp_path / "out", "--max-tokens", 8) == 3
    first, second, third = written(tmp_path / "out")
    assert [first["token_ids"], third["token_ids"]] == [greedy([7, 8], 8), greedy([9], 8)]
    assert second == {"id": 1, "error": f"{rows}:2: {NOT_FINITE} (id 1)"}
    assert f"error: {second['error']}\n" in capsys.readouterr().err
    rows_file(tmp_path, {"token_ids": [5, 8, 9]}, {"token_ids": [7, 8]})
    assert run("score", "-m", broken, "-i", rows, "-o", tmp_path / "scores") == 3
    bad, good = written(tmp_path / "scores")
    assert bad["error"] == f"{rows}:1: {NOT_FINITE} (id 0)" and good["logprob"] < 0
    with pytest.raises(DataError, match=f"prompt 1: {NOT_FINITE}"):
        skv.generate(skv.load(broken), [[7], [5]], max_tokens=2)
