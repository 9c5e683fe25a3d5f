"""Convert checkpoints and say what is in them: `python -m swiftkv_jax.convert
{hf2orbax,orbax2hf,inspect}`.

Conversion goes leaf by leaf: it needs memory for about three of the model's largest stacked
weights, not for the model.
"""

from __future__ import annotations

from .process import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
from collections.abc import Sequence

from . import cli
from .cli.fields import add_flags
from .cli.model_options import HubOptions

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is that of `cli`."""
    return cli.run_command(parser(), argv, ".cli.conversion", __package__ or "")


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog=cli.prog("convert"), description="Convert and inspect checkpoints."
    )
    commands = result.add_subparsers(required=True, metavar="{hf2orbax,orbax2hf,inspect}")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=name)
        sub.add_argument(
            "src",
            metavar="SRC",
            help="model to read: a directory, a GGUF file or a name on the Hub",
        )
        add_flags(sub, HubOptions)
        return sub

    def target(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "dst", metavar="DST", help="directory to write; must not exist, or be empty"
        )
        sub.add_argument(
            "--dtype", choices=_DTYPES, help="dtype to write (default: the one stored)"
        )
        sub.add_argument(
            "--adapter",
            metavar="DIR",
            help="LoRA adapter of PEFT to merge: a directory or a name on the Hub",
        )

    def base(sub: argparse.ArgumentParser, text: str) -> None:
        sub.add_argument(
            "--base", metavar="DIR", help=f"directory of the base model, of either kind ({text})"
        )

    def of_run(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--step",
            type=int,
            metavar="N",
            help="checkpoint of a training run to read (default: the newest intact one)",
        )
        base(sub, "of a training run that has moved; default: where the run found it")

    hf2orbax = command(
        "hf2orbax",
        "Convert a Hugging Face directory (a model, SwiftKV, or a delta with its base) or a GGUF "
        "file to Orbax.",
    )
    target(hf2orbax)
    base(hf2orbax, "for a SRC written with --format delta")
    hf2orbax.add_argument(
        "--mesh",
        default="1x1",
        metavar="DATAxMODEL",
        help="devices to spread each weight over while converting (1x1)",
    )
    orbax2hf = command(
        "orbax2hf",
        "Convert an Orbax directory, a GGUF file, or a training run, finished or not, to Hugging "
        "Face safetensors; or a Hugging Face directory to another --format or --dtype of them, "
        "decoded where it is quantised, or with an --adapter merged.",
    )
    target(orbax2hf)
    of_run(orbax2hf)
    orbax2hf.add_argument(
        "--format",
        choices=("full", "delta", "expanded"),
        default="full",
        help="full: teacher and delta, which the authors' stack loads unless layers share a "
        "calibrated basis; delta: only what was trained; expanded: as full, but every layer with "
        "its keys and values, which it always loads (full)",
    )
    of_run(command("inspect", "Print what a checkpoint of either kind, or a training run, holds."))
    return result


if __name__ == "__main__":
    cli.end(main())
