"""The model of the harness: log-likelihoods against whole forward passes, texts split and truncated
by its rules, differences by document."""

import dataclasses
import math
import sys
from typing import Any

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import cli
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.eval.__main__ import main
from swiftkv_jax.eval.comparison import scores, table
from swiftkv_jax.eval.generation import generation
from swiftkv_jax.eval.options import EvalOptions
from swiftkv_jax.eval.tasks import RENAMED
from swiftkv_jax.eval.text_model import TextModel
from swiftkv_jax.infer import Engine, EngineOptions, SamplingParams
from tests.infer import conftest

checkpoint, greedy, logprobs = conftest.checkpoint, conftest.greedy, conftest.logprobs

LONGEST = 48
TEXT = "for word in argv: print(word"


@dataclasses.dataclass
class Instance:
    """The part of an `lm_eval.api.instance.Instance` that is read."""

    args: tuple[Any, ...]


def ask(*args: tuple[Any, ...]) -> list[Instance]:
    return [Instance(one) for one in args]


@pytest.fixture(scope="module")
def engine(checkpoint):
    options = EngineOptions(
        max_model_len=LONGEST,
        max_num_seqs=2,
        chunks=(16,),
        decode_rows=(2,),
        decode_steps=3,
        page_size=8,
        scoring=True,
    )
    return Engine.from_model(skv.load(checkpoint), options)


@pytest.fixture
def model(engine, tokenizer):
    yield TextModel(engine, tokenizer)
    assert not engine.pages_in_use


@pytest.fixture
def reference(logprobs):
    """(tokens, start) -> (log-likelihood of tokens[start:], whether each is the likeliest)."""

    def score(tokens: list[int], start: int) -> tuple[float, bool]:
        found, likeliest = logprobs(tokens, start)
        return sum(found), likeliest

    return score


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def near(*expected: tuple[float, bool]) -> list:
    return [(pytest.approx(logprob, abs=1e-3), likely) for logprob, likely in expected]


# Log-likelihoods --------------------------------------------------------------


def test_loglikelihoods_are_those_of_a_whole_pass_in_the_order_of_the_requests(
    model, tokenizer, greedy, reference
):
    first = tokenizer.bos_token_id
    prompt = [first, *ids(tokenizer, TEXT)]
    likely = tokenizer.decode(greedy(prompt, 1))
    pairs = [
        (TEXT, ", main)"),
        (TEXT, likely),
        ("for", " word in argv"),
        ("", "print"),
        ("<s>for", " word"),
        ("", "<s>for"),
    ]
    wholes = [(prompt, ids(tokenizer, ", main)")), (prompt, ids(tokenizer, likely))]
    wholes += [
        ([first, *ids(tokenizer, "for")], ids(tokenizer, " word in argv")),
        ([first], ids(tokenizer, "print")),
    ]
    wholes += [
        ([first, *ids(tokenizer, "for")], ids(tokenizer, " word")),
        ([first], ids(tokenizer, "for")),
    ]
    expected = near(*(reference(before + after, len(before)) for before, after in wholes))
    assert model.loglikelihood(ask(*pairs)) == expected
    assert expected[1][1] and not expected[0][1]
    assert model.loglikelihood(ask(*reversed(pairs))) == expected[::-1]


def test_a_text_that_is_too_long_loses_its_beginning_with_one_warning(
    model, tokenizer, reference, caplog
):
    context, continuation = " ".join([TEXT] * 6), " main main"
    tokens = [tokenizer.bos_token_id, *ids(tokenizer, context + continuation)]
    after = len(ids(tokenizer, continuation))
    found = model.loglikelihood(
        ask((context, continuation), ("for", " word"), (context, continuation))
    )
    assert (
        len(tokens) > LONGEST
        and found[0] == found[2] == near(reference(tokens[-LONGEST:], LONGEST - after))[0]
    )
    assert caplog.messages == [
        f"2 of 3 prompts do not fit into {LONGEST} tokens and lost their beginning: "
        f"raise `max_model_len`"
    ]
    model.loglikelihood(ask(("for", " word")))
    assert len(caplog.messages) == 1


def test_choices_share_their_context(engine, model):
    before = dataclasses.replace(engine.prefix_stats)
    model.loglikelihood(ask(*((f"def main(argv): {TEXT}", f" {choice}") for choice in "abcd")))
    hits, queries = (
        engine.prefix_stats.hits - before.hits,
        engine.prefix_stats.queries - before.queries,
    )
    assert hits >= queries / 3


@pytest.mark.parametrize(
    ("pair", "error", "message"),
    [
        (("for", ""), DataError, "request 1: the continuation '' adds no token"),
        (("", ""), DataError, "request 1: the continuation '' adds no token"),
        (
            ("for", " main" * LONGEST),
            UsageError,
            "request 1: its continuation has .* raise `max_model_len`",
        ),
    ],
)
def test_continuations_that_cannot_be_scored(model, engine, pair, error, message):
    with pytest.raises(error, match=message):
        model.loglikelihood(ask(("for", " word"), pair))
    assert not engine.has_work  # nothing is left behind


# Generations ------------------------------------------------------------------


def test_generations_are_the_likeliest_tokens_up_to_a_stop_string(model, tokenizer, greedy):
    prompts = [TEXT, "def main", "print"]
    texts = [tokenizer.decode(greedy([0, *ids(tokenizer, prompt)], 12)) for prompt in prompts]
    settings = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    assert (
        model.generate_until(ask(*((prompt, settings | {"until": []}) for prompt in prompts)))
        == texts
    )
    stop = texts[0][3:5]
    found = model.generate_until(ask(*((prompt, settings | {"until": stop}) for prompt in prompts)))
    assert found == [text.partition(stop)[0] for text in texts] and found[0] != texts[0]


def test_a_prompt_that_is_too_long_loses_its_beginning(model, tokenizer, greedy, caplog):
    long = " ".join([TEXT] * 6)
    kept = ids(tokenizer, long)[-(LONGEST - 8) :]
    assert model.generate_until(ask((long, {"max_gen_toks": 8}))) == [
        tokenizer.decode(greedy(kept, 8))
    ]
    assert caplog.messages[0].startswith("1 of 1 prompts do not fit")
    with pytest.raises(UsageError, match=f"max_gen_toks={LONGEST} leaves no room"):
        model.generate_until(ask((long, {"max_gen_toks": LONGEST})))


def test_repeated_prompts_draw_differently_and_the_same_again(model):
    requests = ask(*[(TEXT, {"do_sample": True, "max_gen_toks": 12})] * 3)
    texts = model.generate_until(requests)
    assert len(set(texts)) == 3 and model.generate_until(requests) == texts


@pytest.mark.parametrize(
    ("settings", "params", "stops"),
    [
        ({}, {"max_tokens": 256}, []),
        ({"temperature": 0.5}, {"temperature": 0.5, "max_tokens": 256}, []),
        ({"do_sample": True}, {"temperature": 1.0, "max_tokens": 256}, []),
        ({"do_sample": False, "temperature": 0.5}, {"max_tokens": 256}, []),
        ({"max_new_tokens": 7, "max_gen_toks": 8}, {"max_tokens": 8}, []),
        (
            {"until": ["</s>", "\n\n", ""], "stop": "Q:", "top_p": 0.9, "num_beams": 1},
            {"max_tokens": 256, "stop_token_ids": (5,), "top_p": 0.9},
            ["\n\n", "Q:"],
        ),
    ],
)
def test_settings_of_generations(settings, params, stops):
    assert generation(settings, {"</s>": 5}) == (SamplingParams(**params), stops)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"max_length": 7}, "max_length"),
        ({"n": 2}, "n is not supported"),
        ({"until": 3}, "until=3"),
        ({"do_sample": "maybe"}, "do_sample='maybe'"),
        ({"temperature": -1}, "`temperature`=-1"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        generation(settings, {})


# Conversations ----------------------------------------------------------------


def test_conversations(engine, tokenizer):
    with pytest.raises(UsageError, match="no chat template"):
        TextModel(engine, tokenizer).apply_chat_template([{"role": "user", "content": "hi"}])
    chat = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    chat.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}<s>"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if "
        "add_generation_prompt %}[assistant]{% endif %}"
    )
    model = TextModel(engine, chat)
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = model.apply_chat_template(turns)
    assert text == "<s>[user]hi\n[assistant]"
    assert model.tok_encode(text).count(tokenizer.bos_token_id) == 1
    open_end = model.apply_chat_template(
        [turns[1], {"role": "assistant", "content": "The answer is"}], add_generation_prompt=False
    )
    assert open_end == "<s>[user]hi\n[assistant]The answer is"


# Teacher and student ----------------------------------------------------------


def report(values: dict[str, list[float]]) -> dict[str, Any]:
    samples = {
        task: [
            {"doc_id": number, "filter": "none", "acc": value}
            for number, value in enumerate(numbers)
        ]
        for task, numbers in values.items()
    }
    pooled = [value for numbers in values.values() for value in numbers]
    results = {
        task: {"alias": task, "acc,none": float(np.mean(n)), "acc_stderr,none": 0.25}
        for task, n in values.items()
    }
    groups = {"both": {"acc,none": float(np.mean(pooled)), "acc_stderr,none": "N/A"}}
    return {
        "results": results,
        "groups": groups,
        "group_subtasks": {"both": list(values)},
        "samples": samples,
        "n-shot": {"a": 5},
    }


def test_differences_are_of_the_same_documents():
    sides = {
        "teacher": report({"a": [1, 1, 0, 1], "b": [0, 0]}),
        "student": report({"a": [1, 0, 0, 1], "b": [1, 0]}),
    }
    a, _, both = scores(sides)
    assert (a.task, a.filter, a.metric, a.shots) == ("a", "none", "acc", 5)
    assert a.values == ((0.75, 0.25), (0.5, 0.25)) and both.values[0][1] is None
    assert a.difference == (-0.25, pytest.approx(0.5 / math.sqrt(4)))
    gaps = [0, -1, 0, 0, 1, 0]
    assert both.difference == (0, pytest.approx(np.std(gaps, ddof=1) / math.sqrt(6)))
    lines = table(sides).splitlines()
    row = "| a | 5 | none | acc | 0.7500 ± 0.2500 | 0.5000 ± 0.2500 | -0.2500 ± 0.2500 |"
    assert lines[2] == row and len(lines) == 5
    (alone, *_), width = scores({"score": sides["teacher"]}), len(lines[0].split("|"))
    assert alone.difference is None
    assert len(table({"score": sides["teacher"]}).split("\n")[0].split("|")) == width - 2


def test_a_metric_that_is_no_mean_over_documents_has_no_stderr():
    teacher, student = report({"a": [1, 1, 0]}), report({"a": [1, 0, 0]})
    teacher["results"]["a"]["acc,none"] = 0.9

    def error() -> float | None:
        score = next(scores({"teacher": teacher, "student": student}))
        assert score.difference is not None
        return score.difference[1]

    assert error() is None
    teacher["results"]["a"]["acc,none"] = 2 / 3
    assert error() is not None
    del student["samples"]["a"][0]
    assert error() is None


# The command ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "nothing to run: name some with --tasks"),
        ("--paper --num-fewshot 3", "--num-fewshot does not go with --paper"),
        ("--tasks a --fewshot-as-multiturn", "--fewshot-as-multiturn needs --apply-chat-template"),
        ("--tasks a --num-fewshot -1", "--num-fewshot -1"),
    ],
)
def test_flags_that_do_not_fit(flags, message, capsys):
    assert main(flags.split()) == cli.USAGE
    assert message in capsys.readouterr().err


def test_the_authors_tasks():
    runs = EvalOptions(paper=True).runs()
    names = [name for run in runs for name in run["tasks"]]
    assert len(names) == len(runs) == 7
    assert set(RENAMED.values()) == {name for name in names if name.endswith("llama")}
    shots = {run["tasks"][0]: run["num_fewshot"] for run in runs if run["apply_chat_template"]}
    assert shots["mmlu_llama"] == 5 and shots["gsm8k_llama"] == 8 and len(shots) == 4


def test_without_the_harness_the_extra_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"] + ["lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--tasks", "hellaswag"]) == cli.USAGE
    assert "pip install 'swiftkv-jax[eval]'" in capsys.readouterr().err
