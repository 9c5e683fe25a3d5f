"""The API reference has every name, field and default, the page of flags every flag; the page on
planning prints a plan as the command does."""

import ast
import dataclasses
import inspect
import re

import pytest

import swiftkv_jax as skv
from docs import flags
from swiftkv_jax import infer
from swiftkv_jax.__main__ import main
from tests.test_docs import ROOT, blocks, commands, run, text_of

PYTHON = ROOT / "docs" / "python.md"
PLANNING = ROOT / "docs" / "planning.md"


@pytest.mark.parametrize("of", [infer.EngineOptions, infer.SamplingParams])
def test_the_reference_has_every_field_and_its_default(of):
    text = text_of(PYTHON)
    _, _, section = text.partition(f"\n## {of.__name__}\n")
    found = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert found == [
        (field.name, repr(getattr(of(), field.name)).replace("'", '"'))
        for field in dataclasses.fields(of)
    ]


@pytest.mark.parametrize("of", [infer.Request, infer.ScoreRequest, infer.RequestOutput])
def test_the_reference_has_the_fields_of_requests_and_outputs(of):
    (row,) = re.findall(rf"^\| `{of.__name__}` \| (.*) \|$", text_of(PYTHON), re.MULTILINE)
    found = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row))
    assert found == [field.name for field in dataclasses.fields(of)]


def test_the_reference_has_every_public_name():
    text = text_of(PYTHON)
    for name in (*skv.__all__, *infer.__all__):
        assert re.search(rf"`{name}\b", text), name
    for name in "load", "save_hf", "calibrate", "add_swiftkv", "logits", "distill_loss":
        (written,) = re.findall(rf"^\| `{name}\((.*?)\)` \|", text, re.MULTILINE)
        (function,) = ast.parse(f"def {name}({written}): ...").body
        assert isinstance(function, ast.FunctionDef)
        parameters = inspect.signature(getattr(skv, name)).parameters.values()
        arguments, values = function.args, []
        given = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
        assert given == [parameter.name for parameter in parameters], name
        for value in (*arguments.defaults, *arguments.kw_defaults):
            if value is not None:
                values.append(ast.literal_eval(value))
        defaults = [each.default for each in parameters if each.default is not each.empty]
        assert values == defaults, name


def test_the_page_of_flags_is_up_to_date(capsys):
    assert flags.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.long
def test_the_python_of_the_reference_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(PYTHON, "python"))
    assert "length" in run(code)


def test_the_plan_that_is_printed_is_the_one_of_the_command(capsys):
    command = next(words for words in commands(PLANNING) if "--dry-run" in words)
    assert main(command[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    (block,) = [block for block in blocks(PLANNING, "") if "tokens/s" in block]
    missing = [line for line in block.splitlines() if line and line not in printed]
    assert not missing, missing
    (rate,) = re.findall(r"8 x H100 SXM +([\d,]+) tokens/s", block)
    hours = 1e9 / int(rate.replace(",", "")) / 3600
    assert f"tokens at {rate} tokens per second are {hours:.1f} hours" in text_of(PLANNING)
