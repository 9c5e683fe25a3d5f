"""Arguments of commands."""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UsageError
from .exit import USAGE, run
from .flags_elsewhere import advice


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Values are called N and X where they are numbers, and a flag has no name for them."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names = {int: "N", float: "X", Path: "PATH"}
        return names.get(action.type) or action.dest.upper()  # type: ignore[arg-type]


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are one line, as all errors are.

    Flags may be written with underscores. One that is unknown is named, with the flag that it was
    meant for; `elsewhere` says what other programs call the flags.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] | None = None, **options: Any):
        super().__init__(*args, **{"formatter_class": HelpFormatter} | options)
        self._elsewhere = dict(elsewhere or {})

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {message} ({self.prog} --help lists the arguments)\n")

    def parse_known_args(self, args=None, namespace=None, **options):  # type: ignore[override]
        args = self._hyphenated(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # they see their own arguments
            self._refuse_unknown_flags(args)
        return super().parse_known_args(args, namespace, **options)

    def _hyphenated(self, args: Sequence[str]) -> list[str]:
        """The arguments, with hyphens in the names of flags."""
        result = list(args)
        for number, word in enumerate(result):
            if word == "--":
                break
            if found := re.match(r"--\w[\w-]*(?==|\Z)", word):
                name = found[0].replace("_", "-")
                if found[0] not in self._option_string_actions:
                    result[number] = name + word[found.end() :]
        return result

    def _refuse_unknown_flags(self, args: Sequence[str]) -> None:
        """Name the flags that there are not, before their values are taken for something else."""
        unknown = []
        for number, word in enumerate(args):
            if word in ("--", "-h", "--help"):
                break
            if not self._is_unknown(word):
                continue
            name, equals, value = word.partition("=")
            after = args[number + 1 : number + 2]
            if equals:
                unknown.append((name, value))
            elif after and not after[0].startswith("-"):
                unknown.append((name, after[0]))
            else:
                unknown.append((name, None))
        if unknown:
            instead = advice(self._elsewhere, unknown)
            self.error("; ".join(map(self._describe, unknown, instead)))

    def _is_unknown(self, word: str) -> bool:
        """Return whether this is spelled like a flag, and is none, nor the beginning of one."""
        name = word.partition("=")[0]
        known = self._option_string_actions
        if not re.match(r"--?[A-Za-z]", word) or " " in word or word in known or name in known:
            return False
        if name.startswith("--"):
            return not any(option.startswith(name) for option in known)
        return word[:2] not in known  # -mDIR is -m DIR

    def _describe(self, flag: tuple[str, str | None], instead: str | None) -> str:
        if instead is not None:
            return f"{' '.join(filter(None, flag))}: {instead}"
        name = flag[0]
        return f"unknown flag {name}{did_you_mean(name, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        message = f"invalid choice: {value!r} (choose from {', '.join(map(repr, choices))})"
        flags = (f"{flag} {value}" for flag in action.option_strings)
        instead = next((self._elsewhere[flag] for flag in flags if flag in self._elsewhere), None)
        if instead is None:
            message += did_you_mean(str(value), choices)
        else:
            message += f": {instead}"
        raise argparse.ArgumentError(action, message)


def closest(given: str, known: Iterable[str]) -> str | None:
    """The one of the `known` that is most like what was `given`, None if none is like it."""
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), folded, n=1, cutoff=0.7)
    return folded[close[0]] if close else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`: did you mean X?`, X being the `closest`; empty if there is none."""
    if close := closest(given, known):
        return f": did you mean {close}?"
    return ""


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    module: str,
    package: str,
    function: str = "main",
) -> int:
    """Parse `argv`, import `module` of `package`, and call its `function` with the arguments;
    returns the exit code.

    Parsing comes first: neither help nor a wrong flag waits for JAX.
    """
    args = parser.parse_args(argv)
    return run(lambda: getattr(importlib.import_module(module, package), function)(args), parser)


def parse_size(text: str) -> int:
    """`"24g"` -> bytes; k, m, g and t are powers of 1024. Raises `UsageError`."""
    units = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    number = text
    unit = units.get(text[-1:].lower(), 1)
    if unit > 1:
        number = text[:-1]
    try:
        size = float(number) * unit
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise UsageError(f"{text!r} is not an amount of memory, such as 24g or 512m")
    return int(size)


def token_count(text: str) -> int:
    """`"8k"` -> 8192 tokens. Raises `UsageError`."""
    match = re.fullmatch(r"(\d{1,9})([kK]?)", text)
    if not match:
        raise UsageError(f"{text!r} is not a number of tokens, such as 4096 or 4k")
    return int(match[1]) * (1024 if match[2] else 1)
