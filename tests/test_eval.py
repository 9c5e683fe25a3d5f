"""The model of the harness: log-likelihoods against whole forward passes, texts split and truncated
by its rules, differences by document."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import cli
from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.eval.__main__ import main, parser
from swiftkv_jax.eval.comparison import read_report, scores, table
from swiftkv_jax.eval.options import EvalOptions
from swiftkv_jax.eval.text_model import TextModel, generation, harness_class
from swiftkv_jax.infer import Engine, EngineOptions, SamplingParams
from swiftkv_jax.infer.text import encode_pair
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


def score(model: TextModel, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    """What the model answers to texts that the harness has split."""
    split = [(pair, *encode_pair(model.tokenizer, *pair)) for pair in pairs]
    return model._loglikelihood_tokens(split)


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
    assert score(model, *pairs) == expected
    assert expected[1][1] and not expected[0][1]
    assert score(model, *reversed(pairs)) == expected[::-1]


def test_a_text_that_is_too_long_loses_its_beginning_with_one_warning(
    model, tokenizer, reference, caplog
):
    context, continuation = " ".join([TEXT] * 6), " main main"
    tokens = [tokenizer.bos_token_id, *ids(tokenizer, context + continuation)]
    after = len(ids(tokenizer, continuation))
    found = score(model, (context, continuation), ("for", " word"), (context, continuation))
    assert (
        len(tokens) > LONGEST
        and found[0] == found[2] == near(reference(tokens[-LONGEST:], LONGEST - after))[0]
    )
    score(model, ("for", " word"))
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        f"2 of 3 prompts do not fit into {LONGEST} tokens and lost their beginning: "
        f"raise `max_model_len`"
    ]


def test_choices_share_their_context(engine, model):
    before = dataclasses.replace(engine.prefix_stats)
    score(model, *((f"def main(argv): {TEXT}", f" {choice}") for choice in "abcd"))
    hits, queries = (
        engine.prefix_stats.hits - before.hits,
        engine.prefix_stats.queries - before.queries,
    )
    assert hits >= queries / 3


def test_continuations_that_cannot_be_scored(model, engine, caplog):
    long = (None, [0], [1] * LONGEST)
    with pytest.raises(UsageError, match="request 1: its continuation has .* `max_model_len`"):
        model._loglikelihood_tokens([(None, [0], [1]), long])
    with pytest.raises(DataError, match="1 of 2 requests failed"):
        model._loglikelihood_tokens([(None, [0], [1]), (None, [0], [])])
    assert "request 1: " in caplog.messages[-1]
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
    ("settings", "params"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.5}, {}),
        ({"max_new_tokens": 7, "max_gen_toks": 8}, {"max_tokens": 8}),
        (
            {"until": ["</s>", "\n\n", ""], "stop": "Q:", "top_p": 0.9, "num_beams": 1},
            {"stop_token_ids": (5,), "top_p": 0.9, "stop": ("\n\n", "Q:")},
        ),
    ],
)
def test_settings_of_generations(settings, params):
    expected = SamplingParams(**{"max_tokens": 256} | params)
    assert generation(settings, {"</s>": 5}) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"max_length": 7}, "max_length"),
        ({"n": 2}, "n is not supported"),
        ({"until": 3}, "`stop`"),
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


def write_report(folder: Path, values: dict[str, list[float]], **changed: float) -> None:
    """Files as the harness writes them for tasks with a metric of each document."""
    pooled = [value for numbers in values.values() for value in numbers]
    means = {task: float(np.mean(numbers)) for task, numbers in values.items()} | changed
    tables = {
        "results": {task: {"acc,none": mean, "acc_stderr,none": 1} for task, mean in means.items()},
        "groups": {"both": {"acc,none": float(np.mean(pooled)), "acc_stderr,none": "N/A"}},
        "group_subtasks": {"both": list(values)},
        "n-shot": {"a": 5},
    }
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "results_2026-01-02T03-04-05.json").write_text(json.dumps(tables))
    for task, numbers in values.items():
        samples = (
            {"doc_id": number, "filter": "none", "metrics": ["acc"], "acc": value}
            for number, value in enumerate(numbers)
        )
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (model / f"samples_{task}_2026-01-02T03-04-05.jsonl").write_text(lines)


def test_differences_are_of_the_same_documents(tmp_path):
    write_report(tmp_path / "teacher", {"a": [1, 1, 0, 1], "b_c": [0, 0]})
    write_report(tmp_path / "student", {"a": [1, 0, 0, 1], "b_c": [1, 0]})
    found = list(scores(*(read_report(tmp_path / side) for side in ("teacher", "student"))))
    gaps = [0, -1, 0, 0, 1, 0]
    assert [one["stderr"] for one in found] == [
        pytest.approx(np.std(some, ddof=1) / math.sqrt(len(some)))
        for some in (gaps[:4], gaps[4:], gaps)
    ]
    lines = table(found).splitlines()
    assert lines[2] == "| a | 5 | none | acc | 0.7500 | 0.5000 | -0.2500 ± 0.2500 |"
    assert lines[4].startswith("| both |  | none | acc | 0.5000 | 0.5000 | +0.0000 ±")


@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        ({"a": 0.9}, [1, 0, 0]),  # no mean over documents
        ({}, [1, 0]),  # a document that only the teacher has
    ],
)
def test_a_difference_without_standard_error(tmp_path, teacher, student):
    write_report(tmp_path / "teacher", {"a": [1, 1, 0]}, **teacher)
    write_report(tmp_path / "student", {"a": student})
    found = next(scores(*(read_report(tmp_path / side) for side in ("teacher", "student"))))
    assert found["stderr"] is None and "±" not in table([found])


# The command ------------------------------------------------------------------


def test_flags_that_are_not_ours_go_to_the_harness():
    theirs = "--tasks a,b --num-fewshot 5 --limit 3 --gen_kwargs top-p=1 --samples {} --seed 1 -f 2"
    theirs += " --model_args x-y=1 --config c --device cpu --metadata m=1 --include-path=p-q"
    args = parser().parse_args(["-m", "model", "--swiftkv", "both", *theirs.split()])
    wanted = theirs.replace("-fewshot", "_fewshot").replace("include-path", "include_path").split()
    assert (args.model, args.swiftkv) == ("model", "both")
    assert EvalOptions().runs(args.harness) == [wanted]


def test_the_authors_tasks():
    runs = EvalOptions(paper=True).runs(["--limit", "5"])  # as many as the examples of winogrande
    assert len(runs) == len({run[1] for run in runs}) == 7
    assert all("max_gen_toks=1024" in run and run[-2:] == ["--limit", "5"] for run in runs)


@pytest.mark.parametrize(
    "flag", ["--tasks a", "--tasks=a", "-t a", "--num-fewshot=3", "--gen_kwargs b=1"]
)
def test_the_authors_tasks_keep_their_settings(flag):
    shown = flag.split()[0].replace("-few", "_few")
    with pytest.raises(UsageError, match=f"^{shown} does not go with `paper`"):
        EvalOptions(paper=True).runs(flag.split())


def test_without_the_harness_the_extra_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"] + ["lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    uncached = harness_class.__wrapped__
    monkeypatch.setattr("swiftkv_jax.eval.command.harness_class", uncached)
    assert main(["--tasks", "hellaswag"]) == cli.USAGE
    assert "pip install 'swiftkv-jax[eval]'" in capsys.readouterr().err
