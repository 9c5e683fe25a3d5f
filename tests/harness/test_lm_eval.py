"""Beside lm-evaluation-harness itself: its windows, its tokens, and tasks of local files. Without
it these fail: `make test-eval`."""

import json

import numpy as np
import pytest

from swiftkv_jax import cli
from swiftkv_jax.eval.__main__ import main
from swiftkv_jax.eval.text_model import harness_class
from swiftkv_jax.infer.text import encode_pair
from tests import test_eval
from tests.infer import conftest
from tests.test_eval import ask, ids

checkpoint, greedy, logprobs = conftest.checkpoint, conftest.greedy, conftest.logprobs
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
    seen = []
    lm = harness_class()(model.engine, model.tokenizer)
    monkeypatch.setattr(lm, "_loglikelihood_tokens", lambda asked, **_: seen.extend(asked) or [])
    pairs = [
        ("for  ", "word"),
        ("", " word"),
        ("<s>for", " word"),
        ("", "<s>for"),
        ("for", " word in"),
        ("for ", " word"),
    ]
    lm.loglikelihood(ask(*pairs), disable_tqdm=True)
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
    flags = f"-m {checkpoint} --include-path {tmp_path} --compile-cache none --page-size 8"
    flags += " --max-num-batched-tokens 16 --max-model-len 48 --decode-steps 3 --max-num-seqs 2"
    both = [*flags.split(), "--tasks", "local_choice,local_text", "--swiftkv", "both"]
    both += ["--output", str(tmp_path / "out")]
    assert main(both) == cli.OK
    (results,) = (tmp_path / "out" / "student").rglob("results_*.json")
    student = json.loads(results.read_text())["results"]

    def score(question: str, choice: str) -> float:
        before = [0, *ids(tokenizer, question)]
        return reference(before + ids(tokenizer, f" {choice}"), len(before))[0]

    right = [score(question, "print") > score(question, "main") for question in questions]
    assert student["local_choice"]["acc,none"] == pytest.approx(np.mean(right))
    same = [row["text"] == text for row, text in zip(rows, texts, strict=True)]
    assert student["local_text"]["exact_match,none"] == pytest.approx(np.mean(same))
    record = json.loads((tmp_path / "out" / "swiftkv.json").read_text())
    common = {"dtype": "float32", "quantization": None, "kv_cache_dtype": "float32"}
    common |= {"generated_kv": "boundary", "exact_tail": 0}
    assert record["sides"] == [{"swiftkv": side} | common for side in (False, True)]
    differences = {one["task"]: one for one in record["differences"]}
    assert differences.keys() == {"local_choice", "local_text"} and record["versions"]
    assert all(one["stderr"] is not None for one in differences.values())
    out, err = capsys.readouterr()
    assert "| task | shots | filter | metric | teacher | student | difference |" in out
    assert "cached" in err
    assert main(both) == cli.USAGE  # nothing is overwritten
    assert main([*flags.split(), "--tasks", "nonesuch"]) == cli.USAGE
    assert "Tasks not found: nonesuch" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*flags.split(), "--tasks", "local_text", "--nonesuch"])
    assert "--nonesuch" in capsys.readouterr().err
