"""Options as fields: the flags that follow from them, and the pages that describe them."""

import argparse
import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from swiftkv_jax.cli import ArgumentParser
from swiftkv_jax.cli.fields import MISSING, add_flags, check_options, given, option, options_of
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.commands.output_options import output
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.serve.options import ServerOptions
from swiftkv_jax.train.calibrate_options import CalibrationOptions
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.run_options import PlanOptions

ROOT = Path(__file__).parents[2]


def parse_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not NAME=VALUE")
    return name, value


@dataclasses.dataclass(frozen=True)
class Options:
    """One field of each kind."""

    steps: int = option(8, "steps to make (default: %(default)s)", at_least=1)
    share: float | None = option(None, "share of them", names=("--share", "-s"))
    kind: Literal["red", "blue"] = option("red", "color", group="looks")
    loud: bool = option(False, "make noise")
    page: bool = option(True, "print the page")
    color: bool = option(True, "no color", names=("--no-color",))
    folder: Path | None = option(None, "where to write")
    texts: tuple[str, ...] = option((), "texts; repeatable")
    pairs: Mapping[str, str] = option({}, "pairs; repeatable", parse=parse_pair)
    size: int = option(3, "twice the number", parse=str, convert=lambda text: 2 * int(text))
    output: Path | None = output()
    plain: int = 5
    """Has no flag."""


def parsed(*argv: str, **how: Any) -> Options:
    parser = ArgumentParser()
    add_flags(parser, Options, **how)
    return Options(**given(Options, parser.parse_args(argv)))


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("", {}),
        ("--steps 3", {"steps": 3}),
        ("-s .5", {"share": 0.5}),
        ("--kind blue", {"kind": "blue"}),
        ("--loud", {"loud": True}),
        ("--no-page", {"page": False}),
        ("--page", {"page": True}),
        ("--no-color", {"color": False}),
        ("--folder a/b", {"folder": Path("a/b")}),
        ("--texts a --texts b", {"texts": ("a", "b")}),
        ("--pairs a=1 --pairs b=2 --pairs a=3", {"pairs": {"a": "3", "b": "2"}}),
        ("--size 4", {"size": 8}),
        ("-o x", {"output": Path("x")}),
    ],
)
def test_a_field_is_a_flag(flags, fields):
    assert parsed(*flags.split()) == Options(**fields)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kind green", "invalid choice: 'green' (choose from 'red', 'blue')"),
        ("--steps x", "argument --steps: invalid int value: 'x'"),
        ("--pairs a", "argument --pairs: 'a' is not NAME=VALUE"),
        ("--plain 3", "unknown flag --plain"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, message, capsys):
    with pytest.raises(SystemExit):
        parsed(*flags.split())
    assert message in capsys.readouterr().err


def test_help_names_the_default_that_counts():
    parser = argparse.ArgumentParser()
    add_flags(parser, Options, shown={"output": "screen"}, leave_out=("share",))
    help = " ".join(parser.format_help().split())
    assert "--steps STEPS steps to make (default: 8) " in help and "(default: screen)" in help
    assert "looks: --kind {red,blue} color --loud" in help and "share" not in help


def test_what_has_no_default_is_required_but_for_a_demo(capsys):
    needs = dataclasses.make_dataclass("Needs", [("model", str, option(MISSING, "or %(demo)s"))])
    parser = ArgumentParser()
    add_flags(parser, needs)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "required: --model" in capsys.readouterr().err
    parser = ArgumentParser()
    add_flags(parser, needs, demo=needs("tiny"))
    assert given(needs, parser.parse_args([])) == {} and "or tiny" in parser.format_help()


def test_values_are_held_to_types_and_smallest_values():
    check_options(Options(steps=1))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steps": 0}, "`steps`=0: must be at least 1"),
        ({"steps": True}, "`steps`=True must be a whole number from 1 up"),
        ({"steps": None}, "`steps`=None must be a whole number from 1 up"),
        ({"steps": np.float32(2)}, "`steps`=2.0 must be a whole number from 1 up"),
        ({"share": "1"}, "`share`='1' must be a number"),
        ({"loud": 1}, "`loud`=1 must be a bool"),
        ({"size": -1}, "`size`=-1 must be above 0"),
    ]
    for fields, message in cases:
        with pytest.raises(UsageError) as error:
            check_options(Options(**fields), above=0)
        assert str(error.value) == message and error.value.option == next(iter(fields))
    with pytest.raises(UsageError, match="^`steps`=0: must be at least 1$") as error:
        parsed("--steps", "0")
    assert (error.value.option, error.value.value, error.value.limit) == ("steps", 0, 1)


def test_numbers_of_numpy_become_pythons():
    fields: dict[str, Any] = {"steps": np.int64(3), "share": np.float32(0.5), "loud": np.True_}
    given = Options(**fields)
    check_options(given)
    assert given == Options(steps=3, share=0.5, loud=True)
    assert [type(value) for value in (given.steps, given.share, given.loud)] == [int, float, bool]


def test_a_flag_of_another_scope_is_not_added(capsys):
    parser = ArgumentParser()
    add_flags(parser, EngineOptions)
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-lora"])
    assert "unknown flag --enable-lora" in capsys.readouterr().err


# The whole tree ----------------------------------------------------------------

REST = {"cli/fields.py", "cli/check_kernels.py", "convert.py"}
"""The module that adds the flags of fields, and commands whose flags are not fields."""


def test_flags_are_fields():
    """All other modules give parsers positional arguments alone."""
    package, found = ROOT / "swiftkv_jax", set()
    for path in sorted(package.rglob("*.py")):
        name, uses, positionals = path.relative_to(package).as_posix(), 0, 0
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            uses += isinstance(node, ast.Attribute) and node.attr == "add_argument"
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                first = ast.literal_eval(node.args[0]) if name not in REST else "-"
                positionals += not first.startswith("-")
        if uses > positionals:
            found.add(name)
    assert found == REST


PAGES = {
    "calibration": (CalibrationOptions, PlanOptions),
    "serving": (EngineOptions, ModelOptions),
    "training": (Recipe,),
    "server": (ServerOptions, EngineOptions, ModelOptions),
}
"""Page -> the classes whose options its tables have."""


def rows(page: str) -> list[tuple[str, str]]:
    """(flag, default) of the rows of a page's tables that state one: a number or a word in
    backticks."""
    found = []
    for line in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        flag = re.match(r"`(--[\w-]+)[^`]*`$", cells[0])
        if flag is None:
            continue
        written = re.search(r"\(default: ([^)]*)\)", line)
        default = written[1] if written else cells[1]
        number = re.fullmatch(r"`?([\d.,e-]+|[a-z-]+(?=`))`?", default)
        found.append((flag[1], number[1].replace(",", "") if number else ""))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_tables_state_the_defaults_of_the_fields(page):
    options = {
        name: option
        for cls in PAGES[page]
        for option in options_of(cls).values()
        for name in option.names
    }
    stated = 0
    for flag, default in rows(page):
        flag = flag.replace("--no-enable", "--enable")
        if page == "server" and flag not in options:
            continue  # those of vLLM, and of the command
        assert flag in options, flag
        value = options[flag].default
        if default and value not in (None, MISSING):
            stated += 1
            same = float(default) == value if isinstance(value, float | int) else default == value
            assert same, f"{page}: {flag} has the default {value}, not {default}"
    assert stated or page in ("server", "calibration")
