"""Tables and sections of a Markdown page, and the command that writes one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swiftkv_jax import cli


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *parts])


def anchor(title: str) -> str:
    """The fragment that GitHub gives a heading."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def write(
    path: Path, page: Callable[[], str], command: str, about: str | None, argv: list[str] | None
) -> int:
    """Run a `command` that writes `page` to `path`, or with `--check` compares them; returns the
    exit code."""
    parser = argparse.ArgumentParser(
        prog=command, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date")
    if not parser.parse_args(argv).check:
        path.write_text(page(), encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != page():
        print(f"error: docs/{path.name} is out of date: run {command}", file=sys.stderr)
        return cli.ERROR
    return cli.OK
