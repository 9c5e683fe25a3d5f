"""`python -m swiftkv_jax.eval`: benchmark tasks by lm-evaluation-harness, on this package's engine.

    python -m swiftkv_jax.eval --model llama-3.1-8b-swiftkv --tasks hellaswag,gsm8k --limit 200
    python -m swiftkv_jax.eval --model llama-3.1-8b-swiftkv --paper --swiftkv both -o accuracy.json

Needs `pip install 'swiftkv-jax[eval]'`, and no PyTorch. Log-likelihoods are exact, generations are
the engine's; texts are split, marked and cut as the harness's own models do it, and a text that was
cut is told of. The table goes to stdout. --swiftkv both measures the unmodified teacher and the
student one after the other, and their difference document by document.

--paper runs the seven tasks of the authors' own table with their settings. Four of them come from a
fork of the harness; here they are the harness's own versions, whose prompts and scoring may differ:
arc_challenge_llama, mmlu_llama, mmlu_cot_llama and gsm8k_llama for the fork's arc_challenge_,
mmlu_, mmlu_cot_0shot_ and gsm8k_cot_llama_3.1_instruct.
"""

from __future__ import annotations

from .. import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from .. import cli, demo
from ..errors import UsageError
from ..infer.commands.flags import (
    SWIFTKV,
    add_engine_flags,
    add_model_flags,
    engine_options,
    load_model,
    log,
    start_engine,
    writes,
)
from ..infer.engine.engine import Engine
from ..io.files import check_absent, write_json
from ..io.provenance import provenance
from ..model import Model
from .comparison import Report, difference, scores, table
from .tasks import PAPER, Tasks, TaskSet
from .text_model import TextModel

MAX_MODEL_LEN = 4096
"""As in the authors' runs; enough for every task of `PAPER`."""
SIDES = {"teacher": "off", "student": "on"}
"""What --swiftkv both runs, in this order."""
KEPT = (
    "results",
    "groups",
    "group_subtasks",
    "n-shot",
    "n-samples",
    "versions",
    "higher_is_better",
)
"""Of the harness's report, in the file."""


def parser() -> argparse.ArgumentParser:
    # "resolve": --swiftkv is given a value more than elsewhere.
    result = argparse.ArgumentParser(
        prog=cli.prog("eval"),
        description=cli.as_called(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    flag = result.add_argument
    flag(
        "--tasks",
        type=_names,
        metavar="NAME,...",
        help="tasks, groups or tags of the harness, or of --include-path",
    )
    flag(
        "--paper",
        action="store_true",
        help="the seven tasks of the SwiftKV authors, with their settings",
    )
    flag(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples before each question (default: each task's own)",
    )
    flag(
        "--limit",
        type=_limit,
        metavar="N",
        help="only the first N documents of each task; a share if below 1",
    )
    flag(
        "--apply-chat-template",
        action="store_true",
        help="prompts are conversations, by the model's template",
    )
    flag(
        "--fewshot-as-multiturn",
        action="store_true",
        help="with --apply-chat-template: each example is a turn of its own",
    )
    flag(
        "--gen-kwargs",
        metavar="NAME=VALUE,...",
        help="settings of generations, over those of the tasks",
    )
    flag(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="folder with more tasks, YAML files as the harness reads them",
    )
    flag(
        "--output",
        "-o",
        type=Path,
        metavar="JSON",
        help="the numbers, and what they were measured with; a new file",
    )
    add_model_flags(result)
    flag(
        "--swiftkv",
        choices=(*SWIFTKV, "both"),
        default="auto",
        help="off: the unmodified teacher; both: compared (default: on if there)",
    )
    add_engine_flags(result)
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


def task_sets(args: argparse.Namespace) -> tuple[TaskSet, ...]:
    """What the flags ask for. Raises `UsageError`."""
    own = ("tasks", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn", "gen_kwargs")
    if args.paper:
        if given := [name for name in own if getattr(args, name) not in (None, False)]:
            raise UsageError(
                f"--{given[0].replace('_', '-')} does not go with --paper, which has settings of "
                f"its own"
            )
        return PAPER
    if not args.tasks:
        raise UsageError(
            "nothing to run: name some with --tasks, or take the authors' with --paper"
        )
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise UsageError(f"--num-fewshot {args.num_fewshot} must be at least 0")
    if args.fewshot_as_multiturn and not args.apply_chat_template:
        raise UsageError(
            "--fewshot-as-multiturn needs --apply-chat-template: only conversations have turns"
        )
    return (
        TaskSet(
            args.tasks,
            args.num_fewshot,
            args.apply_chat_template,
            args.fewshot_as_multiturn,
            args.gen_kwargs,
        ),
    )


def run(args: argparse.Namespace) -> int:
    sets = task_sets(args)
    engine_options(args)  # mistakes in flags are told before tasks and weights are read
    check_absent("--output", args.output)
    tasks = Tasks(sets, include_path=args.include_path, limit=args.limit)
    sides = SIDES if args.swiftkv == "both" else {"score": args.swiftkv}
    reports: dict[str, Report] = {}
    mesh = None
    for name, swiftkv in sides.items():
        side = argparse.Namespace(**vars(args) | {"swiftkv": swiftkv})
        model, mesh = (_again(args, mesh), mesh) if reports else load_model(side)
        if len(sides) == 2 and (model.swiftkv is None or model.llama.upper_qkv is None):
            raise UsageError(
                "--swiftkv both: the checkpoint has no "
                + ("SwiftKV weights" if model.swiftkv is None else "teacher")
            )
        tokenizer, longest = (
            model.tokenizer,
            min(MAX_MODEL_LEN, model.config.max_position_embeddings),
        )
        engine = start_engine(
            side, model, mesh, engine_options(args, scoring=True, max_model_len=longest)
        )
        del model  # the engine has its own copy of the layers: memory for one, not two
        reports[name] = measure(tasks, engine, tokenizer)
        del engine
        gc.collect()  # the next engine needs its memory
    if writes():
        print(table(reports))
        if args.output:
            write_json(args.output, document(args, reports))
    return cli.OK


def _again(args: argparse.Namespace, mesh: Mesh | None) -> Model:
    """The checkpoint once more, for devices that are settled."""
    from ..checkpoints import load

    return load(
        args.model or demo.SWIFTKV, dtype=args.dtype, mesh=mesh, quantization=args.quantization
    )


def measure(tasks: Tasks, engine: Engine, tokenizer: Any) -> Report:
    """The harness's report of all tasks, by one engine."""
    model = TextModel(engine, tokenizer, log=log, progress=writes())
    tasks.check(model)
    report = tasks.run(model)
    prefix, stats = engine.prefix_stats, engine.stats
    log(
        f"prompts: {stats.prompt_tokens} tokens, {prefix.hits / max(prefix.queries, 1):.0%} of "
        f"them found in the prefix cache; "
        f"generated: {stats.new_tokens} tokens"
    )
    return report


def document(args: argparse.Namespace, reports: dict[str, Report]) -> dict[str, Any]:
    """What --output holds."""
    first = next(iter(reports.values()))
    facts = provenance() | {
        "lm_eval": first.get("lm_eval_version"),
        "model": str(args.model or demo.SWIFTKV),
    }
    facts |= {
        name: getattr(args, name)
        for name in ("swiftkv", "limit", "dtype", "quantization", "kv_cache_dtype", "max_model_len")
    }
    facts["reports"] = {
        name: {part: report[part] for part in KEPT if part in report}
        for name, report in reports.items()
    }
    if len(reports) == 2:
        teacher, student = reports.values()
        pairs = zip(scores(teacher), scores(student), strict=True)
        facts["differences"] = [
            {
                "task": before.task,
                "filter": before.filter,
                "metric": before.metric,
                **vars(difference(teacher, student, before, after)),
            }
            for before, after in pairs
        ]
    return facts


def main(argv: list[str] | None = None) -> int:
    flags = parser()
    args = flags.parse_args(argv)
    return cli.run(lambda: run(args), flags)


if __name__ == "__main__":
    sys.exit(main())
