"""Arguments of commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .exit import USAGE


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are one line, as all errors are."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {message} ({self.prog} --help lists the arguments)\n")
