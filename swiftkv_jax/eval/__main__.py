"""`python -m swiftkv_jax.eval`: benchmark tasks by lm-evaluation-harness, on this package's engine.

    python -m swiftkv_jax.eval --model runs/8b/model --tasks hellaswag,gsm8k --limit 200
    python -m swiftkv_jax.eval --model runs/8b/model --paper --swiftkv both -o accuracy.json

Needs `pip install 'swiftkv-jax[eval]'`, and no PyTorch. Log-likelihoods are exact, generations are
the engine's; texts are split, marked and truncated as by the harness's own models, with a warning
for those that were truncated. The table goes to stdout. --swiftkv both measures the unmodified
teacher and the student one after the other, and their difference document by document.

--paper runs the seven tasks of the authors' own table with their settings. Four of them come from a
fork of the harness; here they are the harness's own versions, whose prompts and scoring may differ:
arc_challenge_llama, mmlu_llama, mmlu_cot_llama and gsm8k_llama for the fork's arc_challenge_,
mmlu_, mmlu_cot_0shot_ and gsm8k_cot_llama_3.1_instruct.
"""

from __future__ import annotations

from ..process import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
from pathlib import Path

from .. import cli
from ..cli import flags_elsewhere
from ..cli.fields import add_flags, group
from ..cli.model_options import SWIFTKV_CHOICES, ModelOptions
from ..infer.engine.options import EngineOptions


def parser() -> argparse.ArgumentParser:
    # "resolve": --swiftkv is given a value more than elsewhere.
    result = cli.ArgumentParser(
        prog=cli.prog("eval"),
        description=cli.as_called(__doc__ or ""),
        conflict_handler="resolve",
        elsewhere=flags_elsewhere.VLLM,
    )
    add = result.add_argument_group("tasks").add_argument
    add(
        "--tasks",
        type=_names,
        metavar="NAME,...",
        help="tasks, groups or tags of the harness, or of --include-path",
    )
    add(
        "--paper",
        action="store_true",
        help="the seven tasks of the SwiftKV authors, with their settings",
    )
    add(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples before each question (default: each task's own)",
    )
    add(
        "--limit",
        type=_limit,
        metavar="N",
        help="only the first N documents of each task; a share if below 1",
    )
    add(
        "--apply-chat-template",
        action="store_true",
        help="prompts are conversations, by the model's template",
    )
    add(
        "--fewshot-as-multiturn",
        action="store_true",
        help="with --apply-chat-template: each example is a separate turn",
    )
    add(
        "--gen-kwargs",
        metavar="NAME=VALUE,...",
        help="settings of generations, over those of the tasks",
    )
    add(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="folder with more tasks, YAML files as the harness reads them",
    )
    add(
        "--output",
        "-o",
        type=Path,
        metavar="JSON",
        help="the numbers, and what they were measured with; a new file",
    )
    models = result.add_argument_group("model")
    add_flags(models, ModelOptions)
    models.add_argument(
        "--swiftkv",
        choices=(*SWIFTKV_CHOICES, "both"),
        default="auto",
        help="off: the unmodified teacher; both: compared (default: on if there)",
    )
    add_flags(group(result, "engine"), EngineOptions)
    return result


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of tasks, such as hellaswag,gsm8k"
        )
    return names


def _limit(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < 2**31 or (limit >= 1 and limit != int(limit)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number of documents nor a share between 0 and 1"
        )
    return limit if limit < 1 else int(limit)


def main(argv: list[str] | None = None) -> int:
    return cli.run_command(parser(), argv, ".command", __package__ or "")


if __name__ == "__main__":
    cli.end(main())
