"""Flags for `output.OutputOptions`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_output_arguments(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the flags of every command that writes rows."""
    add = parser.add_argument
    add(
        "--output",
        "-o",
        type=Path,
        metavar="JSONL",
        help=f"a row per row of input, in its order (default: {default})",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the --output of an interrupted run, if there is one",
    )
