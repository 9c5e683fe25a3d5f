"""Beside lm-evaluation-harness itself: its windows, its tokens, and tasks of local files. Without
it these fail: `make test-eval`."""

import importlib
import json

import numpy as np
import pytest

from swiftkv_jax import cli
from swiftkv_jax.eval.__main__ import main
from swiftkv_jax.eval.text_model import harness_model
from swiftkv_jax.infer.text import encode_pair
from tests import test_eval
from tests.infer import conftest
from tests.test_eval import ask, ids

checkpoint, greedy = conftest.checkpoint, conftest.greedy
engine, model, reference = test_eval.engine, test_eval.model, test_eval.reference


def test_rolling_loglikelihoods_are_sums_over_windows(model, reference):
    long, short = " ".join([test_eval.TEXT] * 12), "print"
    tokens = model.tok_encode(long)
    most = test_eval.LONGEST - 1
    starts = range(0, len(tokens), most)
    assert len(starts) > 2
    expected = reference([0, *tokens[:most]], 1)[0]
    for start in starts[1:]:
        end = min(start + most, len(tokens))
        expected += reference(tokens[end - most - 1 : end], most + 1 - (end - start))[0]
    found = model.loglikelihood_rolling(ask((long,), (short,)))
    wanted = [expected, reference([0, *model.tok_encode(short)], 1)[0]]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_tokens_are_those_of_the_harness(model, monkeypatch):
    base = importlib.import_module("lm_eval.api.model").TemplateLM
    seen = []
    lm = harness_model(model.engine, model.tokenizer)
    monkeypatch.setattr(
        type(lm), "_loglikelihood_tokens", lambda self, requests, **_: seen.extend(requests) or []
    )
    pairs = [
        ("for  ", "word"),
        ("", " word"),
        ("<s>for", " word"),
        ("", "<s>for"),
        ("for", " word in"),
        ("for ", " word"),
    ]
    base.loglikelihood(lm, ask(*pairs), disable_tqdm=True)
    ours = [encode_pair(model.tokenizer, *pair) for pair in pairs]
    assert [(before, after) for _, before, after in seen] == ours


COMMON = (
    "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: "
    "test\nnum_fewshot: 0\n"
)
CHOICE = (
    "task: local_choice\noutput_type: multiple_choice\ndoc_to_text: "
    "'{{question}}'\ndoc_to_choice: '{{choices}}'\n"
)
CHOICE += (
    "doc_to_target: '{{gold}}'\nmetric_list: [{metric: acc, aggregation: mean, "
    "higher_is_better: true}]\n"
)
TEXTS = (
    "task: local_text\noutput_type: generate_until\ndoc_to_text: "
    "'{{question}}'\ndoc_to_target: '{{text}}'\n"
)
TEXTS += "generation_kwargs: {max_gen_toks: 4, do_sample: false, until: []}\n"
TEXTS += "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"


@pytest.mark.filterwarnings("default")  # the harness and its packages have warnings of their own
def test_tasks_from_local_files(
    checkpoint, tokenizer, greedy, reference, tmp_path, capsys, monkeypatch
):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "hub"))
    questions, choices = [f"for word in argv[{number}:]:" for number in range(5)], ["print", "main"]
    texts = [tokenizer.decode(greedy([0, *ids(tokenizer, question)], 4)) for question in questions]
    rows = [
        {"question": q, "choices": choices, "gold": 0, "text": texts[0] if i < 2 else "none"}
        for i, q in enumerate(questions)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = COMMON.format(data=tmp_path / "rows.jsonl")
    (tmp_path / "choice.yaml").write_text(CHOICE + common)
    (tmp_path / "text.yaml").write_text(TEXTS + common)
    flags = (
        f"-m {checkpoint} --tasks local_choice,local_text --include-path {tmp_path} --swiftkv "
        f"both -o {tmp_path / 'out.json'}"
    )
    engine = (
        "--compile-cache none --max-num-batched-tokens 16 --max-model-len 48 --decode-steps "
        "3 --page-size 8 --max-num-seqs 2"
    )
    assert main([*flags.split(), *engine.split()]) == cli.OK
    found = json.loads((tmp_path / "out.json").read_text())

    def score(question: str, choice: str) -> float:
        before = [0, *ids(tokenizer, question)]
        return reference(before + ids(tokenizer, f" {choice}"), len(before))[0]

    right = [score(question, "print") > score(question, "main") for question in questions]
    student = found["reports"]["student"]["results"]
    assert student["local_choice"]["acc,none"] == pytest.approx(np.mean(right))
    same = [row["text"] == text for row, text in zip(rows, texts, strict=True)]
    assert student["local_text"]["exact_match,none"] == pytest.approx(np.mean(same))
    assert {one["task"] for one in found["differences"]} == {
        "local_choice",
        "local_text",
    } and found["lm_eval"]
    out, err = capsys.readouterr()
    assert (
        out.startswith("| task | shots | filter | metric | teacher | student | difference |")
        and "prefix cache" in err
    )
    assert main([*flags.split(), *engine.split()]) == cli.USAGE  # nothing is overwritten
    assert (
        main(["-m", str(checkpoint), "--tasks", "nonesuch", "--compile-cache", "none"]) == cli.USAGE
    )
    assert "'nonesuch' is not a task of the installed harness" in capsys.readouterr().err
