"""The commands of `train` beside training itself, and the flags of the short ones. Importing this
does not import JAX."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any, NamedTuple

from .. import cli
from ..cli import flags_elsewhere
from ..cli.fields import add_flags
from ..cli.model_options import ProcessOptions
from . import analyze_options, calibrate_options
from .analyze_options import AnalyzeOptions
from .calibrate_options import CALIBRATION_DEMO, CalibrationOptions
from .data.options import PrepareOptions, RestateOptions, ShowOptions
from .run_options import PlanOptions


class Subcommand(NamedTuple):
    """A command: its help, its flags and the function that runs it."""

    description: str | None
    options: tuple[type, ...]
    """Classes whose fields are flags."""
    module: str
    """Name of a module in this package."""
    function: str = "main"
    folder: dict[str, Any] | None = None
    """Arguments of `add_argument` for the positional argument, a folder."""
    demo: Any = None
    """Options where no model is named."""


SUBCOMMANDS = {
    "analyze": Subcommand(analyze_options.__doc__, (AnalyzeOptions,), "analysis.analyze"),
    "calibrate": Subcommand(
        calibrate_options.__doc__,
        (CalibrationOptions, ProcessOptions, PlanOptions),
        "calibrate",
        demo=CALIBRATION_DEMO,
    ),
    "prepare": Subcommand(
        "Tokenise and pack training data into folders, which --data accepts.",
        (PrepareOptions,),
        "data.commands",
        "prepare",
    ),
    "restate": Subcommand(
        "Write training examples whose answers repeat parts of their prompts in another order:\n"
        "lines and sentences of a text, or records invented from its words. Mixed with other data\n"
        "they teach a student to read its prompt.",
        (RestateOptions,),
        "data.commands",
        "restate",
    ),
    "show": Subcommand(
        "Print rows of prepared data. Text to be predicted is green on a terminal, and in [[...]]\n"
        "elsewhere.",
        (ShowOptions,),
        "data.commands",
        "show",
        {"help": "folder of prepared data"},
    ),
    "report": Subcommand(
        "Write report.html, one page with the curves of a run, into its folder.",
        (),
        "report.report",
        folder={"metavar": "RUN", "help": "the --output-dir of a run, finished or not"},
    ),
}
"""Subcommands by the first word of the command line."""


def parser(name: str) -> argparse.ArgumentParser:
    """The parser of the subcommand `name`."""
    command = SUBCOMMANDS[name]
    result = cli.ArgumentParser(
        prog=cli.prog(f"train {name}"),
        description=cli.as_called(inspect.cleandoc(command.description or "")),
        elsewhere=flags_elsewhere.TRAINER,
    )
    if command.folder is not None:
        result.add_argument("folder", type=Path, **command.folder)
    for options in command.options:
        add_flags(result, options, demo=command.demo)
    return result


def main(name: str, argv: list[str]) -> int:
    """Run the subcommand `name`; returns its exit code."""
    command = SUBCOMMANDS[name]
    package = __package__ or ""
    return cli.run_command(parser(name), argv, f".{command.module}", package, command.function)
