"""`swiftkv COMMAND ...`, the same as `python -m swiftkv_jax.COMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from . import __version__
from .process import interrupts

COMMANDS = {  # the first argument -> module with `main`, and what it is for
    "infer": ("infer.__main__", "run a model: completions, chat, scores, speed"),
    "serve": ("infer.__main__", "an OpenAI-compatible server, the same as `infer serve`"),
    "train": ("train.__main__", "distil a SwiftKV delta from a Llama model"),
    "convert": ("convert", "convert checkpoints, and say what is in them"),
    "eval": ("eval.__main__", "accuracy on benchmark tasks"),
    "check-kernels": (
        "cli.check_kernels",
        "compare the device's attention kernels with the reference",
    ),
}


def overview() -> str:
    """Return what `--help` prints."""
    from . import cli

    commands = "\n".join(f"    {name:15}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return (
        f"usage: {cli.prog()} COMMAND ...\n\nSwiftKV for JAX {__version__}. The commands, each "
        f"with its own --help:\n{commands}\n\n--version prints the version."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from . import cli

    if argv is None:
        argv = sys.argv[1:]
    choices = f"choose from {', '.join(COMMANDS)}"
    if not argv:
        return cli.fail(f"a command is missing: {choices}", cli.USAGE)
    command = argv[0]
    if command == "--version":
        return cli.run(lambda: print(f"swiftkv-jax {__version__}") or cli.OK)
    if command in ("--help", "-h"):
        return cli.run(lambda: print(overview()) or cli.OK)
    if command not in COMMANDS:
        message = f"{command!r} is not a command: {choices}{_meant(command)}"
        return cli.fail(message, cli.USAGE)
    if command != "serve":  # the others' modules are of their own
        argv = argv[1:]
    return importlib.import_module(f".{COMMANDS[command][0]}", __package__).main(argv)


def _meant(name: str) -> str:
    """A question for the command, or the command of a command, that `name` may stand for."""
    from . import cli
    from .infer.__main__ import COMMANDS as infer
    from .train.subcommands import SUBCOMMANDS as train

    known = {command: command for command in COMMANDS}
    known |= {command: f"infer {command}" for command in infer if command not in known}
    known |= {command: f"train {command}" for command in train}
    known |= {command: f"convert {command}" for command in ("hf2orbax", "orbax2hf", "inspect")}
    if close := cli.closest(name, known):
        return f": did you mean {known[close]}?"
    return ""


def program() -> NoReturn:
    """The whole program `swiftkv`: handles SIGINT, and ends with the command's exit code."""
    interrupts.install()  # before the imports that take a second
    code = main()
    from . import cli

    cli.end(code)


if __name__ == "__main__":
    program()
