"""Write docs/flags.md: every flag of every command, as `--help` has them.

    python -m docs.flags
    python -m docs.flags --check     exit 1 if the page is out of date

The parsers of the commands are read, whose options are fields of dataclasses.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.markdown import anchor, section, table, write
from swiftkv_jax import cli, convert
from swiftkv_jax.cli import check_kernels
from swiftkv_jax.eval import __main__ as evaluation
from swiftkv_jax.infer import __main__ as infer
from swiftkv_jax.train import __main__ as training
from swiftkv_jax.train import subcommands

PAGE = Path(__file__).with_suffix(".md")
COMMAND = "python -m docs.flags"
ABOUT = (
    f"<!-- Written by {COMMAND}: change the options, not this. -->",
    "What `swiftkv COMMAND --help` prints. `swiftkv serve` is `swiftkv infer serve`, and `swiftkv "
    "infer` without a command is `infer generate`. Hyphens in a flag may be underscores, and a "
    "flag may be shortened while it stays the only one that begins so. [Serving](serving.md"
    "#options), [the server](server.md) and [training](training.md) say when to change which.",
)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    found = {f"infer {name}": infer.parser(name) for name in infer.COMMANDS}
    found["train"] = training.parser()
    found |= {f"train {name}": subcommands.parser(name) for name in subcommands.SUBCOMMANDS}
    (conversions,) = convert.parser()._subparsers._group_actions  # type: ignore[union-attr]
    found |= {f"convert {name}": one for name, one in conversions.choices.items()}  # type: ignore
    return found | {"eval": evaluation.parser(), "check-kernels": check_kernels.parser()}


def flags_of(parser: argparse.ArgumentParser) -> str:
    """A table for each group of arguments."""
    formatter = parser._get_formatter()
    parts = []
    for group in parser._action_groups:
        shown = (action for action in group._group_actions if action.dest != "help")
        if rows := [(spelling(action, formatter), meaning(action, formatter)) for action in shown]:
            parts.append(table((f"{group.title}", ""), rows))
    return "\n\n".join(parts)


def spelling(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """`--flag VALUE`, then its other names."""
    if not action.option_strings:
        return f"`{formatter._format_args(action, action.dest)}`"
    value = ""
    if action.nargs != 0:
        default = formatter._get_default_metavar_for_optional(action)
        value = f" {formatter._format_args(action, default)}"
    first, *others = sorted(action.option_strings, key=lambda flag: flag[:2] != "--")
    return ", ".join(f"`{flag}`" for flag in (first + value, *others))


def meaning(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    return formatter._expand_help(action).replace("|", "\\|") if action.help else ""


@contextlib.contextmanager
def called_as_script() -> Iterator[None]:
    """Commands are named in help as they were called: let it be `swiftkv`."""
    before = sys.argv
    sys.argv = [cli.messages.SCRIPT]
    try:
        yield
    finally:
        sys.argv = before


def page() -> str:
    with called_as_script():
        commands = parsers()
        parts = [
            section(f"swiftkv {name}", (parser.description or "").strip(), flags_of(parser))
            for name, parser in commands.items()
        ]
    contents = " · ".join(f"[{name}](#{anchor(f'swiftkv {name}')})" for name in commands)
    return "\n\n".join(["# All flags", contents, *ABOUT, *parts]) + "\n"


def main(argv: list[str] | None = None) -> int:
    return write(PAGE, page, COMMAND, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
