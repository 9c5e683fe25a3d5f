"""`python -m swiftkv_jax.infer [COMMAND]`: run a model.

With no arguments it continues a line of Python with the demo model. `generate` is the default
command:

    python -m swiftkv_jax.infer --model runs/8b/model -p "Once upon a time"
    python -m swiftkv_jax.infer --model runs/8b/model -i prompts.jsonl -o answers.jsonl
"""

from __future__ import annotations

from ..process import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

from .. import cli
from ..cli import flags_elsewhere


class Command(NamedTuple):
    """A command, and its modules, as seen from this package."""

    arguments: str
    """Has `add_arguments`; its docstring is the help. Imports no JAX."""
    module: str
    """Has `main`."""
    purpose: str
    elsewhere: Mapping[str, str] = flags_elsewhere.VLLM | flags_elsewhere.TRANSFORMERS
    """Flags of the command in other programs, and what to write here."""


COMMANDS = {
    "generate": Command(
        "commands.complete_arguments",
        "commands.complete",
        "prompts in, completions out (the default)",
    ),
    "chat": Command("commands.chat_arguments", "commands.chat", "a conversation in the terminal"),
    "serve": Command(".serve.arguments", ".serve.command", "an OpenAI-compatible server"),
    "score": Command(
        "commands.score_arguments", "commands.score", "log-likelihoods of given text, exact"
    ),
    "bench": Command(
        "bench.options", "bench.command", "how fast it is, SwiftKV and its control side by side"
    ),
    "bench serve": Command(
        "bench.serve_arguments",
        "bench.serve",
        "how fast a server answers",
        flags_elsewhere.VLLM_BENCH_SERVE,
    ),
}
"""Commands by the first words of the command line."""


def overview() -> str:
    """Return what `--help` without a command prints."""
    commands = "\n".join(f"    {name:13}{one.purpose}" for name, one in COMMANDS.items())
    return f"{cli.as_called(__doc__ or '')}\ncommands, each with its own --help:\n{commands}\n"


def parser(command: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f".{COMMANDS[command].arguments}", __package__)
    called = cli.prog() if command == "serve" else cli.prog("infer")
    result = cli.ArgumentParser(
        prog=f"{called} {command}",
        description=cli.as_called(module.__doc__ or ""),
        elsewhere=COMMANDS[command].elsewhere,
    )
    module.add_arguments(result)
    result.set_defaults(command=command)
    return result


def main(argv: list[str] | None = None) -> int:
    if argv is None:
        argv = sys.argv[1:]
    if argv and argv[0] in ("--help", "-h"):
        return cli.run(lambda: print(overview()) or cli.OK)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        return cli.fail(
            f"{argv[0]!r} is not a command: choose from {', '.join(COMMANDS)}, or give a prompt "
            f"with --prompt{cli.did_you_mean(argv[0], COMMANDS)}",
            cli.USAGE,
        )
    words = next((n for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), 0)
    command = " ".join(argv[:words]) or "generate"
    argv = argv[words:]
    module = f".{COMMANDS[command].module}"
    return cli.run_command(parser(command), argv, module, __package__ or "")


if __name__ == "__main__":
    cli.end(main())
