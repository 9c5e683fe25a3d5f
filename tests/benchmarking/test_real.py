"""Real models: text and documents that are measured on, what models write, the command, the
table."""

import argparse
import copy
import dataclasses
import json
import math
import shutil
import signal
import threading
from typing import Any

import numpy as np
import pytest

import swiftkv_jax as skv
from benchmarks import distill_real
from benchmarks.real import __main__ as command
from benchmarks.real import cells, corpus, documents, forward, human_eval, measure, parts, table
from benchmarks.real.rows import quiz_rows, text_rows
from swiftkv_jax.demo import SWIFTKV
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import open_tokenizer

SHORT = 512


@pytest.fixture(scope="module")
def demo() -> skv.Model:
    return skv.load(DEMO.model)


@pytest.fixture(scope="module")
def tokenizer():
    """The demo model's."""
    return open_tokenizer(DEMO)


# Documents -------------------------------------------------------------------------


@pytest.mark.parametrize("task", documents.TASKS, ids=lambda task: task.name)
def test_answers_stand_in_the_document(task, tokenizer):
    """Once, behind what is asked for, so that who reads it can answer; and rows score the answers'
    tokens."""
    found = documents.quizzes(task, tokenizer, 1024, 2, seed=3)
    assert found == documents.quizzes(task, tokenizer, 1024, 2, seed=3)
    assert found[0] != found[1] != documents.quizzes(task, tokenizer, 1024, 2, seed=4)[1]
    rows = quiz_rows(found, tokenizer, 1024)
    assert rows.item.max() + 1 == 2 * documents.QUESTIONS[1024]
    number = 0
    for row, quiz in enumerate(found):
        document, questions = quiz.text[: quiz.document], quiz.text[quiz.document :]
        assert len(quiz.answers) == documents.QUESTIONS[1024]
        for start, stop in quiz.answers:
            cue, answer = quiz.text[:start].rpartition("\n")[2], quiz.text[start:stop]
            subject = " ".join(cue.removeprefix("Answer: ").split()[:2])
            if task is documents.PEOPLE:
                (line,) = [line for line in document.splitlines() if line.startswith(subject)]
                assert answer in line and answer not in cue
            else:
                assert document.count(cue.removeprefix("values = ") + answer) == 1
            places = np.flatnonzero(rows.item[row] == number) + 1
            assert answer.strip() in tokenizer.decode(rows.tokens[row, places])
            assert places.min() >= rows.prompts[row], "an answer follows the prompt"
            number += 1
        assert tokenizer.decode(rows.tokens[row, rows.prompts[row] : rows.lengths[row]]).strip()
        assert questions.count("\n") >= documents.QUESTIONS[1024]


def test_a_batch_has_rows_of_padding(tokenizer):
    """No token of them is attended to or scored."""
    found = [quiz for task in documents.TASKS for quiz in _short(task, tokenizer)]
    rows = quiz_rows(found, tokenizer, SHORT)
    (first, whole), (last, padded) = rows.batches(2 * SHORT)
    assert (first.stop, last.stop) == (2, 3) and padded.tokens.shape == whole.tokens.shape
    assert not padded.segment_ids[1].any() and padded.segment_ids[0].sum() == rows.lengths[2]


def _short(task, tokenizer):
    return documents.quizzes(task, tokenizer, SHORT, 1, seed=0)


# Text ------------------------------------------------------------------------------

SENTENCE = "The {} of the {} is counted from the first day of the year, as every {} knows well.\n"
NOUNS = "value name height weight colour price length width depth speed time place".split()


def _source(package: str) -> str:
    """A function with a long docstring."""
    lines = [SENTENCE.format(one, package, other) for one in NOUNS for other in NOUNS[:3]]
    prose = "\n".join("".join(lines[i : i + 3]) for i in range(0, len(lines), 3))
    code = "".join(f"    {package}_{i} = compute({i}, {package!r})\n" for i in range(99))
    return f'def {package}():\n    """{prose}\n    >>> {package}()\n    """\n{code}'


@pytest.fixture
def packages(monkeypatch):
    """Three packages: the training text has one that repeats the held-out one."""
    texts = {name: _source(name) for name in ("held", "kept")} | {"copy": _source("held")}
    monkeypatch.setattr(corpus, "source_files", lambda name: [(f"{name}/a.py", texts[name])])
    monkeypatch.setattr(corpus, "_description", lambda name: "")
    monkeypatch.setattr(corpus, "HELD_OUT", ("held",))
    monkeypatch.setattr(corpus, "PACKAGES", ("copy", "kept"))


def test_held_out_text_is_not_trained_on(tmp_path, packages):
    corpus.write_training_text(tmp_path / "corpus")
    found = corpus.training_documents(tmp_path / "corpus")
    assert [document[:2] for document in found] == [
        ("english", "kept/a.py (prose)"),
        ("code", "kept/a.py"),
    ]
    assert found[1][2] == _source("kept")
    english = found[0][2]
    assert ">>>" not in english and "compute(" not in english and "\n\n" in english
    held_out = [corpus.held_out_documents(kind) for kind in corpus.KINDS]
    assert [[document[0] for document in each] for each in held_out] == [["held"], ["held"]]
    corpus.write_held_out(tmp_path / "held-out.jsonl", seed=0)
    lines = (tmp_path / "held-out.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["english", "code"]


def test_packages_take_turns():
    found = [("a", str(i), "") for i in range(3)] + [("b", "0", "")]
    order = [document[0] for document in corpus.in_turn(found, seed=0)]
    assert order == ["a", "b", "a", "a"]
    assert list(corpus.in_turn(found, 0)) == list(corpus.in_turn(found, 0))


def test_too_little_text(packages, tokenizer):
    with pytest.raises(UsageError, match="`rows`=2: only 1 held-out documents"):
        text_rows(corpus.held_out_documents("code"), tokenizer, 2)


# Scores ----------------------------------------------------------------------------


@pytest.mark.parametrize("generated_kv, tail", cells.SERVED)
def test_scores_are_those_of_the_logits(demo, tokenizer, generated_kv, tail):
    """Of the student as it is served: the questions keep their own keys and values, and with a
    tail the end of the document."""
    rows = quiz_rows(_short(documents.RECALL, tokenizer), tokenizer, SHORT)
    reference = forward.run_teacher(demo, rows, [4], far=False)
    cell = cells.Cell(4, cells.Program(), generated_kv, tail)
    student, _ = cells.calibrated(cell, demo, [rows.tokens[0, : rows.lengths[0]].tolist()])
    found = forward.run_student(student, reference)
    for model, scores in (demo, reference.scores), (student, found):
        logits = skv.logits(model, rows.tokens, prompt_lengths=rows.prompts)
        following = np.roll(rows.tokens, -1, 1)[rows.scored]
        logits = np.asarray(logits, np.float64)[rows.scored]
        nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), following]
        np.testing.assert_allclose(scores.nll, nll, rtol=1e-4, atol=1e-4)
        assert (scores.first == (logits.argmax(-1) == following)).all()
    assert (found.kl > 0).all() and np.abs(found.nll - reference.scores.nll).max() > 1e-3


def test_far_tokens_lose_much_without_the_far_prompt(tokenizer):
    nll, cut = np.array([1.0, 1.0, 1.0]), np.array([2.5, 1.5, 0.0])
    assert forward.far_dependent(nll, cut).tolist() == [True, False, False]
    rows = quiz_rows(_short(documents.RECALL, tokenizer), tokenizer, SHORT)
    (_, batch), *_ = rows.batches(SHORT)
    segments = forward.cut_away(batch, 100).segment_ids[0]
    assert set(segments[:100]) == {1} and set(segments[100 : rows.lengths[0]]) == {2}


def test_errors_are_of_paired_differences():
    figure = measure.ratio(np.array([1.0, 3.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    assert figure == pytest.approx({"value": 2.0, "stderr": 1 / np.sqrt(3)})
    same = measure.beside([1, 0, 1], [1, 0, 1], "questions")
    assert same["difference"] == {"value": 0.0, "stderr": 0.0} and same["questions"] == 3
    assert measure.ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))["stderr"] == 0


# HumanEval -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, expected",
    [
        ("import math, re\nassert math.sqrt(4) == 2", True),
        ("assert 1 == 2", False),
        ("import os\nos._exit(0)", False),
        ("print('0' * 32)\nraise SystemExit(0)", False),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 2)", False),
        ("import subprocess\nsubprocess.run(['true'])", False),
        ("open('kept', 'w')", False),
        ("x = bytearray(2**31)", False),
    ],
)
def test_what_a_model_wrote_runs_apart(program, expected):
    try:
        assert human_eval.runs(program) is expected
    except UsageError:
        pytest.skip("this machine has no network namespaces")


def test_a_problem_is_the_function_and_its_tests(monkeypatch):
    problem = human_eval.Problem("p", "def f(x):\n", "def check(f):\n    assert f(1) == 2", "f")
    monkeypatch.setattr(human_eval, "runs", lambda program: exec(program, {}) is None)
    assert human_eval.passes(problem, "    return x + 1\n")
    with pytest.raises(AssertionError):
        human_eval.passes(problem, "    return x\n")
    assert human_eval.choose([problem], 5, 0) == [problem]


# Commands --------------------------------------------------------------------------


@pytest.fixture
def measured(demo, packages, monkeypatch, tmp_path):
    """The command on the demo model with one row of each text, without tasks."""
    monkeypatch.setattr(corpus, "PACKAGES", ("kept",))
    flags = "--rows 1 --documents 0 --calibration-tokens 512 --programs base --cuts 6,4"
    output = tmp_path / "result.json"
    arguments = [DEMO.model, *flags.split(), "--corpus", str(tmp_path / "corpus")]
    return [*arguments, "--output", str(output)], output


@pytest.mark.long
def test_the_command_continues(measured, capsys):
    arguments, output = measured
    assert command.main([*arguments, "--served", "own", "--cuts", "6"]) == 0
    first = json.loads(output.read_text())
    assert len(first["cells"]) == 1 and first["model"]["name"] == "llama"
    assert command.main([*arguments, "--served", "own"]) == 0
    second = json.loads(output.read_text())
    assert second["cells"][:1] == first["cells"], "what was measured is not measured again"
    assert [cell["num_key_value_layers"] for cell in second["cells"]] == [6, 4]
    assert command.main([*arguments, "--rows", "2"]) == 2
    assert "measured with other settings" in capsys.readouterr().err
    assert "| 6 (75%) | closed form |" in table.section([second])
    assert command.main([*arguments, "--student", str(SWIFTKV), "--trained-tokens", "512"]) == 0
    *others, student = json.loads(output.read_text())["cells"]
    assert others == second["cells"]
    assert (student["num_key_value_layers"], student["trained_tokens"]) == (4, 512)


@pytest.mark.long
def test_a_plan_is_trained_and_measured(demo, packages, monkeypatch, tmp_path):
    """Two sources, two students: trained, then measured from what was kept; one that is measured is
    not trained again."""
    monkeypatch.setattr(corpus, "PACKAGES", ("kept",))
    output = tmp_path / "result.json"
    flags = ["--rows", "1", "--documents", "0", "--program", "base", "--output", str(output)]
    folders = ["--corpus", str(tmp_path / "corpus"), "--folder", str(tmp_path / "run")]
    arguments = ["tiny", "--model", DEMO.model, *flags, *folders]
    assert distill_real.main([*arguments, "--train-only"]) == 0
    assert not output.exists()
    monkeypatch.setattr(distill_real.loop, "run", None)
    assert distill_real.main(arguments) == 0
    document = json.loads(output.read_text())
    assert [cell["num_key_value_layers"] for cell in document["cells"]] == [4, 6]
    for cell in document["cells"]:
        assert cell["trained_tokens"] == 512
        assert [row["step"] for row in cell["training"]["evaluations"]] == [0, 2]
    shutil.rmtree(tmp_path / "run/deltas")
    assert distill_real.main(arguments) == 0
    assert json.loads(output.read_text()) == document


def test_the_time_may_end_outside_training():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            distill_real.stop_after(0)
            threading.Event().wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("data", "share", "expected"),
    [
        (["text"], 0.5, ("text:0.5", "examples:0.5")),
        (["a:1", "b:9"], 0.5, ("a:0.05", "b:0.45", "examples:0.5")),
        (["a:3", "b:1"], 0.0, ("a:3.0", "b:1.0")),
        (["a", "b"], 0.0, ("a", "b")),
    ],
)
def test_shares_of_training_text(data, share, expected, tmp_path):
    (tmp_path / "held-out.jsonl").touch()
    args = argparse.Namespace(folder=tmp_path, data=data, restated="examples", restated_share=share)
    unused: Any = None
    assert distill_real.training_data(args, distill_real.PLANS["tiny"], unused) == expected


def test_plans():
    both = cells.PROGRAMS["both"]
    for name, plan in distill_real.PLANS.items():
        tokens = sum(cell.tokens for cell in plan.cells(30, both))
        assert tokens <= 100.1e6, name
    cuts = {cell.num_key_value_layers for cell in distill_real.PLANS["gpu"].cells(30, both)}
    assert cuts == {15, 18, 20, 23}


def test_cells_name_the_programs():
    config = dataclasses.replace(LLAMA_8B.cut(30), num_layers=30, mlp_dim=1536)
    found = cells.untrained_cells(config, (20, 15), ["both", "base"], ["own"])
    assert [str(cell) for cell in found][1:3] == [
        "K=15, closed form, own, tail 64",
        "K=20, tap, attention of 2, own, tail 64",
    ]
    assert found[2].program.options == {"boundary_taps": 1, "prompt_attention_layers": 2}
    (one,) = cells.untrained_cells(config, (20,), ["tap-neurons-head"], ["own"])
    assert str(one.program) == "tap, attention of 2, 384 neurons, exact head"
    assert one.key["prompt_mlp_neurons"] == one.program.options["prompt_mlp_neurons"] == 384
    (last,) = cells.untrained_cells(config, (28,), ["attention"], ["own"])
    assert last.program.prompt_attention_layers == 1, "one of two upper layers is projected to"
    with pytest.raises(UsageError, match="`programs`='none'"):
        cells.untrained_cells(config, (20,), ["none"], ["own"])
    experts = dataclasses.replace(config, num_experts=4, num_experts_per_token=2)
    with pytest.raises(UsageError, match="`programs`='neurons': this model has no MLP"):
        cells.untrained_cells(experts, (20,), ["neurons"], ["own"])


def test_parts(tmp_path):
    file, folder = tmp_path / "model.gguf", tmp_path / "parts"
    file.write_bytes(bytes(range(250)))
    parts.split(file, folder, part_bytes=100)
    assert sorted(part.stat().st_size for part in folder.glob("part-*")) == [50, 100, 100]
    joined = distill_real.join(folder, tmp_path / "parts")
    assert (tmp_path / "parts" / "model.gguf").read_bytes() == file.read_bytes()
    assert joined == str(folder / "model.gguf")
    (folder / "part-01").write_bytes(b"other")
    with pytest.raises(UsageError, match="part-01: missing or damaged"):
        parts.join(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


# The table -------------------------------------------------------------------------


def test_table():
    """Rows are sorted by cut, program, serving and tokens; of a cell the figures over the most
    documents count, and of those the newest."""
    figure = {"value": 0.0123, "stderr": 0.004}
    text = {
        "tokens": 256,
        "teacher_perplexity": 8.0,
        "above": figure,
        "kl": figure,
        "agreement": {"value": 0.9, "stderr": 0.0},
    }
    task = {"questions": 44, "teacher": 0.75, "student": 0.5} | {
        "difference": {"value": -0.25, "stderr": 0.0653},
        "lost": {"value": 0.6, "stderr": 0.07},
    }
    figures = {
        "prefill_share": 0.6042,
        "texts": {"english": text, "code": text},
        "far": {"tokens": 99, "lost": {"value": 0.664, "stderr": 0.05}, "kl": figure},
        "tasks": {one.name: task for one in documents.TASKS},
    }
    base, both = cells.PROGRAMS["base"], cells.PROGRAMS["both"]
    made = [
        cells.Cell(15, base, "boundary", 0),
        cells.Cell(15, both, "own", 64, 262_144, 0.5),
        cells.Cell(20, base, "own", 64),
    ]
    document = {
        "model": {"name": "m", "layers": 30, "parameters": 1e6},
        "settings": {"calibration_tokens": 24_576, "documents": 1},
        "cells": [cell.key | figures for cell in made],
    }
    newer = copy.deepcopy(document)
    newer["cells"] = [newer["cells"][2] | {"human_eval": task | {"problems": 5}}]
    lines = table.table([document, newer]).splitlines()[2:]
    assert lines[0] == (
        "| 20 (67%) | closed form | `own`, 64 |  | 60.4% | +1.2% ± 0.4 | +1.2% ± 0.4 | 0.012 "
        "| 90.0% | +0.66 ± 0.05 | 44 |" + " -25 ± 7, +0.60 ± 0.07 |" * 3 + " -25 ± 7 |"
    )
    starts = ["| 15 (50%) | closed form | `boundary` |  |"]
    starts += ["| 15 (50%) | tap, attention of 2 | `own`, 64 | 0.26M, 50% restated |"]
    assert [line[: len(start)] for line, start in zip(lines[1:], starts, strict=True)] == starts
    section = table.section([document, newer])
    assert "75% of 44 of `recall`" in section
    assert "| 0.012 | 90.0% | +0.66 ± 0.05 | 44 | -25 ± 7 | -25 ± 7 | -25 ± 7 |" in section
    assert section.count(" -25 ± 7 | -25 ± 7 | -25 ± 7 |") == 3
    several = copy.deepcopy(newer)
    several["settings"]["documents"] = 4
    for task in several["cells"][0]["tasks"].values():
        task |= {"questions": 176, "teacher": 0.8}
    section = table.section([several, document, newer])
    assert "75% of 44 of `recall`" in section and "80% of 176 of `recall`" in section
    assert section.count("± 0.05 | 176 | ") == 1 and section.count("± 0.05 | 44 | ") == 2


def test_errors_of_tasks_are_those_of_documents():
    """Answers about one document come right or wrong together."""
    right = np.array([True, True, False, False])
    alone = measure.beside(right, ~right, "questions")["difference"]
    together = measure.beside(right, ~right, "questions", np.array([0, 0, 1, 1]))["difference"]
    assert alone["value"] == together["value"] == 0
    assert alone["stderr"] == pytest.approx(1 / math.sqrt(3))  # 2 / sqrt(4) * sqrt(1 / 3)
    assert together["stderr"] == pytest.approx(1)
