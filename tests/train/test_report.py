"""The page of a run: its content follows from the rows, at any moment of the run, and it is one
file."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from swiftkv_jax.train.__main__ import main
from swiftkv_jax.train.report import report
from swiftkv_jax.train.run.metrics import METRICS

RECIPE = {
    "model": "llama <8B>",
    "data": ["a.jsonl", "b.jsonl"],
    "eval_data": None,
    "max_steps": 40,
    "num_key_value_layers": None,
    "temperature": 2.0,
    "kl": "jsd",
    "kl_top_k": None,
    "mfu_of": "an abacus",
    "config": {"num_key_value_layers": 16},
}


def evaluation(step: int, student: float) -> dict:
    numbers = {
        "teacher_perplexity": 10.0,
        "student_perplexity": student,
        "agreement": 0.9,
        "logits_loss": 0.2,
        "kl": 0.06,
        "hidden_loss": 0.1,
        "loss": 0.3,
        "far_nats": 0.25,
        "far_tokens": 1200,
    }
    return {"step": step} | {f"eval_{name}": value for name, value in numbers.items()}


def step_row(step: int) -> dict:
    losses = {
        "loss": 1 / step,
        "logits_loss": 0.5 / step,
        "kl": 0.15 / step,
        "hidden_loss": 0.5 / step,
        "agreement": 0.8,
        "grad_norm": 2.0,
        "learning_rate": 1e-4,
    }
    return (
        {"step": step}
        | losses
        | {
            "tokens_per_second": 1000.0 * step,
            "useful_tokens_per_second": 900.0 * step,
            "mfu": 0.4,
            "seconds": 60.0,
        }
    )


FINISHED = [evaluation(0, 12.0), step_row(20), step_row(40), evaluation(40, 10.5)]


def write_run(folder: Path, rows: list[dict] = FINISHED) -> None:
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.json").write_text(json.dumps(RECIPE))


def page(folder: Path, rows: list[dict]) -> str:
    write_run(folder, rows)
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def cells(text: str, tag: str = "td") -> list[list[str]]:
    return [
        re.findall(f"<{tag}>(.*?)</{tag}>", line)
        for line in re.findall("<tr>(.*?)</tr>", text)
        if f"<{tag}>" in line
    ]


@pytest.mark.usefixtures("no_curves")
def test_a_finished_run(tmp_path):
    text = page(tmp_path, FINISHED)
    assert cells(text, "th")[0] == ["held-out", "before training", "after step 40"]
    rows = {row[0]: row[1:] for row in cells(text)}
    assert rows["perplexity, student"] == ["12", "10.5"]
    assert rows["student&#x27;s perplexity above the teacher&#x27;s"] == ["+20.00%", "+5.00%"]
    assert rows["next token agrees with the teacher"] == ["90.0%", "90.0%"]
    assert rows["KL, nats per token"] == ["0.06", "0.06"]
    assert rows["distillation loss"] == ["4 Jensen-Shannon divergence at temperature 2"]
    assert ["distillation loss", "0.2", "0.2"] in cells(text)
    assert rows["far tokens, nats lost"] == ["+0.250 (1,200 tokens)", "+0.250 (1,200 tokens)"]
    assert rows["model"] == ["llama &lt;8B&gt;"], "escaped"
    assert (
        rows["data"] == ["a.jsonl, b.jsonl"]
        and rows["mfu_of"] == ["an abacus"]
        and "eval_data" not in rows
    )
    assert rows["num_key_value_layers"] == ["16"], "the cut that was taken"
    warning = "Warning: the student loses 5.0% of perplexity on held-out text, more than 2%, and "
    warning += "0.250 nats on 1,200 tokens that depend on the far prompt, more than 0.15: do not"
    assert warning in text and "not measured" not in text
    assert (
        "step 40 of 40; 02:00 in logged steps; median 30,000 tokens/s (27,000 without padding), "
        "MFU 40.0%" in text
    )


def test_the_picture_is_in_the_page(tmp_path):
    text = page(tmp_path, FINISHED)
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])
    words = {
        "".join(node.itertext()).strip() for node in svg.iter("{http://www.w3.org/2000/svg}text")
    }
    titles = {
        "Loss",
        "Held-out perplexity",
        "KL(teacher ‖ student)",
        "Lost on held-out far tokens: 1,200 tokens",
        "Learning rate",
        "Speed",
        "tokens per second",
        "teacher",
        "student",
        "step",
    }
    assert titles <= words
    assert not re.findall(r'(?:src|href)="(?!#)', text), "nothing is fetched"


@pytest.mark.usefixtures("no_curves")
@pytest.mark.short("3")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_that_goes_on(count, tmp_path):
    """Before the first step, at the first step, in the middle."""
    text = page(tmp_path, FINISHED[:count])
    assert cells(text, "th")[0] == ["held-out", "before training"]
    assert f"step {FINISHED[count - 1]['step']} of 40" in text


def test_a_mean_over_few_far_tokens_is_not_shown():
    row = evaluation(0, 12.0) | {"eval_far_tokens": 15}
    assert ("far tokens, nats lost", "(15 tokens, too few to say)") in report.outcomes([row])[1]


def test_a_run_without_held_out_data_or_speeds(tmp_path):
    text = page(tmp_path, [{"step": 1, "loss": 2.0, "grad_norm": 1.0}])
    assert (
        "held-out</th>" not in text and "step 1 of 40" in text and "tokens per second" not in text
    )


def test_without_matplotlib_nothing_fails(tmp_path, monkeypatch, log):
    write_run(tmp_path)
    monkeypatch.setattr(report, "matplotlib_missing", lambda: "pip install it")
    report.write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert log.messages[-1] == "no report.html: pip install it"


def test_matplotlib_is_looked_for(monkeypatch):
    assert report.matplotlib_missing() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'swiftkv-jax[report]'" in (report.matplotlib_missing() or "")


@pytest.mark.short('{"model": -not valid JSON')
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ('{"model": ', "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"max_steps": 4}', "not written by a training run"),
    ],
)
def test_a_damaged_recipe_is_named(recipe, message, tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "recipe.json").write_text(recipe)
    assert main(["report", str(tmp_path)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'recipe.json'}: ") and message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no recipe.json in it"), ("", "metrics.jsonl: nothing is logged yet")],
)
def test_folders_without_a_run(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "recipe.json").write_text("{}")
        (tmp_path / METRICS).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and message in error[0]
