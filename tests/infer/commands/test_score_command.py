"""`score`: log-likelihoods against whole forward passes, and texts split as by
lm-evaluation-harness."""

import json
import math
from pathlib import Path

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import ScoreRequest
from swiftkv_jax.infer.commands.score import perplexity, score_request
from swiftkv_jax.infer.engine import outputs
from tests.infer.commands.test_resume import interrupted_once_written


def scores(run, folder: Path, checkpoint: Path, *rows: dict, code: int = 0) -> list[dict]:
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert (
        run("score", "-m", checkpoint, "-i", folder / "in.jsonl", "-o", folder / "out.jsonl")
        == code
    )
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_scores_are_those_of_a_whole_pass(
    checkpoint, tokenizer, greedy, logprobs, run, tmp_path, capsys
):
    prompt = [5, 9, 200]
    likeliest = [*prompt, *greedy(prompt, 4)]
    text = "for word in argv: print(word)"
    rows = [
        {"id": "a", "token_ids": likeliest, "start": 3},
        {"token_ids": [7, 8, 9] * 20},
        {"prompt": text},
    ]
    rows.append({"context": "for word in ", "continuation": "argv: print"})
    found = scores(run, tmp_path, checkpoint, *rows)
    pair = tokenizer("for word in argv: print")["input_ids"]
    tokens = [
        (likeliest, 3),
        ([7, 8, 9] * 20, 1),
        (tokenizer(text)["input_ids"], 1),
        (pair, len(tokenizer("for word in")["input_ids"])),
    ]
    total, count = 0.0, 0
    for row, (ids, start) in zip(found, tokens, strict=True):
        expected, likely = logprobs(ids, start)
        assert row["tokens"] == ids[start:]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4) and row[
            "logprob"
        ] == pytest.approx(sum(expected), abs=1e-3)
        assert row["is_greedy"] == likely
        assert row["perplexity"] == pytest.approx(math.exp(-row["logprob"] / len(expected)))
        total, count = total + row["logprob"], count + len(expected)
    assert (
        [row["id"] for row in found] == ["a", 1, 2, 3]
        and found[0]["is_greedy"]
        and not found[1]["is_greedy"]
    )
    err = capsys.readouterr().err
    assert (
        f"{count} tokens of 4 rows: log-likelihood {total:.4f}, perplexity "
        f"{math.exp(-total / count):.4f}" in err
    )


def test_scores_of_a_row_come_in_parts(checkpoint, run, tmp_path, monkeypatch):
    rows = [{"token_ids": [5, 9, 7] * 8}, {"token_ids": [7, 5]}]
    whole = scores(run, tmp_path, checkpoint, *rows)
    (tmp_path / "out.jsonl").unlink()
    monkeypatch.setattr(outputs, "MAX_SCORES", 4)
    assert scores(run, tmp_path, checkpoint, *rows) == whole


def test_rows_fail_alone_and_go_to_standard_output(checkpoint, run, tmp_path, capsys):
    rows = [
        {"id": 7, "token_ids": [5, 6, 7], "start": 3},
        {"token_ids": [5, 6, 7], "start": 0},
        {"token_ids": [5, 6, 999]},
        {"token_ids": [5, 6], "begin": 1},
        {"prompt": ["a"]},
        {"context": "a", "continuation": ""},
        {"token_ids": [5] * 300},
        {"token_ids": [5, 6]},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run("score", "-m", checkpoint, "-i", tmp_path / "in.jsonl") == 3
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    messages = [
        "start=3 must be from 1 to 2",
        "start=0 must be",
        "token id 999 is outside",
        "got begin, token_ids",
    ]
    messages += ["prompt must be a string", "adds no token", "above the limit of 128"]
    assert all(message in row["error"] for message, row in zip(messages, found, strict=False))
    assert found[0]["id"] == 7 and found[7]["tokens"] == [6] and err.count("error: ") == 7


def test_an_interrupted_score_goes_on_with_its_total(
    checkpoint, run, tmp_path, capsys, monkeypatch
):
    rows = [{"token_ids": [5, number, 7] * 8} for number in range(5)]
    whole = scores(run, tmp_path, checkpoint, *rows)
    total = capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "out.jsonl").unlink()
    partial = tmp_path / "out.jsonl.partial"
    command = ("score", "-m", checkpoint, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    with interrupted_once_written(partial, monkeypatch):
        assert run(*command) == 130
    assert 0 < partial.read_bytes().count(b"\n") < 5
    assert run(*command, "--resume") == 0
    assert capsys.readouterr().err.splitlines()[-1] == total
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == whole


def test_pairs_are_split_as_the_harness_splits_them(tokenizer):
    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    def request(context: str, continuation: str) -> ScoreRequest:
        return score_request(tokenizer, {"context": context, "continuation": continuation})

    assert (
        request("for word", " in")
        == request("for word ", "in")
        == ScoreRequest(encode("for word in"), len(encode("for word")))
    )
    # A token that the two would share: the context keeps its own, and the continuation is what both
    # have after as many.
    context, both = encode("wor"), encode("word in")
    assert context != both[: len(context)]
    assert request("wor", "d in") == ScoreRequest([*context, *both[len(context) :]], len(context))
    with pytest.raises(UsageError, match="the continuation 'd' adds no token to its context"):
        request("wor", "d")
    assert request("", "for") == ScoreRequest(
        [0, *tokenizer("for", add_special_tokens=False)["input_ids"]], 1
    )
    assert request("  ", "for") == ScoreRequest(
        [0, *tokenizer("  for", add_special_tokens=False)["input_ids"]], 1
    )


def test_texts_need_a_tokenizer():
    with pytest.raises(UsageError, match="prompt: needs a tokenizer"):
        score_request(None, {"prompt": "x"})
    assert score_request(None, {"token_ids": [1, 2]}) == ScoreRequest([1, 2], 1)


def test_perplexity_of_the_impossible():
    assert perplexity(-2.0, 2) == pytest.approx(math.e) and perplexity(-1e6, 1) is None
