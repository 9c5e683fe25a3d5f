"""docs/python.md has every public name, and the options with their defaults; its code runs."""

import ast
import contextlib
import dataclasses
import io
import re
from pathlib import Path

import pytest

import swiftkv_jax as skv
from swiftkv_jax import infer, nnx

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_public_name_is_on_the_page():
    public = {*skv.__all__, *infer.__all__, nnx.LlamaForCausalLM.__name__}
    assert not {name for name in public if not re.search(rf"\b{name}\b", PAGE)}


@pytest.mark.parametrize("options", [infer.EngineOptions, infer.SamplingParams])
def test_every_option_has_its_default(options):
    table = PAGE.split(f"## {options.__name__}\n")[1].split("\n## ")[0]
    found = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, defaults = (re.findall("`([^`]+)`", cell) for cell in line.split(" | ")[:2])
            defaults *= len(names) if len(defaults) == 1 else 1
            found |= dict(zip(names, map(ast.literal_eval, defaults), strict=True))
    assert found == {field.name: default_of(field) for field in dataclasses.fields(options)}


def default_of(field: dataclasses.Field) -> object:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


@pytest.mark.long
def test_its_code_runs():
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<docs/python.md>", "exec"), {"__name__": "__main__"})
    assert "length" in printed.getvalue() and "(1, 3, " in printed.getvalue()
