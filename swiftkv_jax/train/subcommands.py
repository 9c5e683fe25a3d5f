"""The commands of `train` beside training itself, and the flags of the short ones. Importing this
does not import JAX."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .. import cli
from ..cli import flags_elsewhere
from ..cli.fields import add_flags, group
from ..cli.model_options import ProcessOptions
from . import analyze_options, calibrate_options
from .analyze_options import AnalyzeOptions
from .calibrate_options import CALIBRATION_DEMO, CalibrationOptions
from .data.options import PrepareOptions, ShowOptions
from .run_options import PlanOptions


def add_analyze_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, AnalyzeOptions)


def add_calibrate_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, CalibrationOptions, demo=CALIBRATION_DEMO)
    add_flags(group(parser, "machine"), ProcessOptions)
    add_flags(parser, PlanOptions)


def add_prepare_flags(parser: argparse.ArgumentParser) -> None:
    """Tokenise and pack training data into folders, which --data accepts."""
    add_flags(parser, PrepareOptions)


def add_show_flags(parser: argparse.ArgumentParser) -> None:
    """Print rows of prepared data. Text to be predicted is green on a terminal, and in [[...]]
    elsewhere."""
    parser.add_argument("folder", type=Path, help="folder of prepared data")
    add_flags(parser, ShowOptions)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Write report.html, one page with the curves of a run, into its folder."""
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="the --output-dir of a run, finished or not"
    )


class Subcommand(NamedTuple):
    """A command: its help and flags, and what runs."""

    description: str | None
    add_flags: Callable[[argparse.ArgumentParser], None]
    module: str
    """Name of a module in this package."""
    function: str = "main"


SUBCOMMANDS = {
    "analyze": Subcommand(analyze_options.__doc__, add_analyze_flags, "analysis.analyze"),
    "calibrate": Subcommand(calibrate_options.__doc__, add_calibrate_flags, "calibrate"),
    "prepare": Subcommand(add_prepare_flags.__doc__, add_prepare_flags, "data.commands", "prepare"),
    "show": Subcommand(add_show_flags.__doc__, add_show_flags, "data.commands", "show"),
    "report": Subcommand(add_report_flags.__doc__, add_report_flags, "report.report"),
}
"""Subcommands by the first word of the command line."""


def parser(name: str) -> argparse.ArgumentParser:
    """The parser of the subcommand `name`."""
    result = cli.ArgumentParser(
        prog=cli.prog(f"train {name}"),
        description=cli.as_called(inspect.cleandoc(SUBCOMMANDS[name].description or "")),
        elsewhere=flags_elsewhere.TRAINER,
    )
    SUBCOMMANDS[name].add_flags(result)
    return result


def main(name: str, argv: list[str]) -> int:
    """Run the subcommand `name`; returns its exit code."""
    command = SUBCOMMANDS[name]
    package = __package__ or ""
    return cli.run_command(parser(name), argv, f".{command.module}", package, command.function)
