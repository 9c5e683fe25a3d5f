"""`python -m swiftkv_jax.infer [COMMAND]`: run a model.

With no arguments it continues a line of Python with the demo model. `generate` is the default
command:

    python -m swiftkv_jax.infer --model llama-3.1-8b-swiftkv -p "Once upon a time"
    python -m swiftkv_jax.infer --model llama-3.1-8b-swiftkv -i prompts.jsonl -o answers.jsonl
"""

from __future__ import annotations

from .. import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
import importlib
import sys

from .. import cli

COMMANDS = {  # the first argument -> module with `add_flags` and `main`, and what it is for
    "generate": ("commands.complete", "prompts in, completions out (the default)"),
    "chat": ("commands.chat", "a conversation in the terminal"),
    "serve": ("serve.command", "an OpenAI-compatible server"),
    "score": ("commands.score", "log-likelihoods of given text, exact"),
    "bench": ("bench", "how fast it is, SwiftKV and its control side by side"),
    "bench serve": ("bench.serve", "how fast a server answers"),
}


def overview() -> str:
    """What `--help` without a command says."""
    commands = "\n".join(f"    {name:13}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return f"{cli.as_called(__doc__ or '')}\ncommands, each with its own --help:\n{commands}\n"


def parser(command: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f".{COMMANDS[command][0]}", __package__)
    result = cli.ArgumentParser(
        prog=f"{cli.prog('infer')} {command}",
        description=cli.as_called(module.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_flags(result)
    result.set_defaults(main=module.main, command=command)
    return result


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("--help", "-h"):
        return cli.run(lambda: print(overview()) or cli.OK)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        return cli.fail(
            f"{argv[0]!r} is not a command: choose from {', '.join(COMMANDS)}, or give a prompt "
            f"with --prompt",
            cli.USAGE,
        )
    words = next((n for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), 0)
    command, argv = " ".join(argv[:words]) or "generate", argv[words:]
    flags = parser(command)
    args = flags.parse_args(argv)
    return cli.run(lambda: args.main(args), flags)


if __name__ == "__main__":
    cli.end(main())
