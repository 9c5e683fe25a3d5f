"""`python -m swiftkv_jax.train`: distil a SwiftKV delta.

With no --model it distils the demo model on the standard library's source. Example for a real
model, on eight GPUs:

    python -m swiftkv_jax.train --mesh fsdp=8 --model Llama-3.1-70B-Instruct \\
        --data chat.jsonl --output-dir runs/70b

The same command continues an interrupted run. --dry-run says beforehand what it takes and how long.
Further commands of train, each with its own --help:

    analyze    which cut to choose: undistilled divergence, FLOPs and KV bytes of each
    calibrate  a model in closed form, without training
    prepare    read, tokenise and pack the data once, for many runs
    show       look at prepared rows, targets marked
    report     the curves of a run, also while it goes on
"""

from __future__ import annotations

from ..process import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
import dataclasses
import signal
import sys

from .. import cli
from ..cli import flags_elsewhere
from ..cli.fields import add_flags, given, group, option
from ..cli.model_options import ProcessOptions
from . import subcommands
from .recipe import DEMO, RECIPES, Recipe
from .run_options import PlanOptions, make_options


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Flags of the command that are no settings of a run."""

    recipe: str | None = option(
        None,
        "authors: start and losses as in the authors' trainer, also on data with masked "
        "prompts: --init authors --loss-average positions --loss-mask unshifted --padding "
        "joined --hidden-loss absolute --hidden-loss-weight 1",
        choices=tuple(RECIPES),
        group="loss",
    )


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog=cli.prog("train"),
        description=cli.as_called(__doc__ or ""),
        elsewhere=flags_elsewhere.TRAINER,
    )
    add_flags(result, Recipe, demo=DEMO)
    add_flags(group(result, "machine"), ProcessOptions)
    add_flags(result, PlanOptions)
    add_flags(result, TrainCommand)
    return result


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The arguments given, over those of --recipe, over the demo's defaults or the general ones.
    Raises `UsageError`."""
    fields = RECIPES.get(args.recipe, {}) | given(Recipe, args)
    return make_options(fields, demo=DEMO, dry_run=bool(args.dry_run))


def main(argv: list[str] | None = None) -> int:
    if argv is None:
        argv = sys.argv[1:]
    if argv and argv[0] in subcommands.SUBCOMMANDS:
        return subcommands.main(argv[0], argv[1:])
    if argv and not argv[0].startswith("-"):
        known = subcommands.SUBCOMMANDS
        return cli.fail(
            f"{argv[0]!r} is not a command: choose from {', '.join(known)}, or give flags alone "
            f"to train{cli.did_you_mean(argv[0], known)}",
            cli.USAGE,
        )
    flags = parser()
    args = flags.parse_args(argv)

    def command() -> int:
        recipe = recipe_from(args)
        planned = PlanOptions(**given(PlanOptions, args))
        if planned.dry_run:
            from .dry_run import plan_training

            plan_training(recipe, planned.topology)
            return cli.OK
        from ..cli.devices import join_and_emulate, refuse_x64

        refuse_x64()
        join_and_emulate(recipe.mesh, **given(ProcessOptions, args))
        from .run import loop  # after the devices are set up: Orbax and Grain look at them

        result = loop.run(recipe)
        # SIGTERM is an orderly end; Ctrl-C is reported as an interruption.
        return cli.INTERRUPTED if result.stopped_by == signal.SIGINT else cli.OK

    return cli.run(command, flags)


if __name__ == "__main__":
    cli.end(main())
