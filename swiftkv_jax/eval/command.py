"""The command `eval`: runs the tasks on an engine and writes their numbers."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
from pathlib import Path
from typing import Any

from .. import cli
from ..cli.fields import given
from ..cli.model_loading import load_model, read_model
from ..cli.model_options import ModelOptions
from ..errors import UsageError
from ..infer.commands.start import start_engine
from ..infer.engine.engine import Engine
from ..infer.engine.options import EngineOptions
from ..process.distributed import is_main_process
from ..process.files import check_absent, write_json
from ..process.provenance import provenance
from .comparison import Report, difference, scores, table
from .options import EvalOptions, Sides
from .tasks import PAPER, Tasks, TaskSet
from .text_model import TextModel

logger = logging.getLogger(__name__)

MAX_MODEL_LEN = 4096
"""Length of the authors' runs; enough for every task of `PAPER`."""
SIDES = {"teacher": "off", "student": "on"}
"""Sides that `--swiftkv both` measures, in this order, and the value of --swiftkv for each."""
REPORT_FIELDS = (
    "results",
    "groups",
    "group_subtasks",
    "n-shot",
    "n-samples",
    "versions",
    "higher_is_better",
)
"""Fields of the harness's report that the output file has."""


def task_sets(options: EvalOptions) -> tuple[TaskSet, ...]:
    """Tasks that the options name. Raises `UsageError`."""
    own = ("tasks", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn", "gen_kwargs")
    if options.paper:
        if others := [name for name in own if getattr(options, name) not in (None, False)]:
            raise UsageError(
                f"`{others[0]}` does not go with `paper`, which has settings of its own"
            )
        return PAPER
    if not options.tasks:
        raise UsageError(
            "nothing to run: name some with `tasks`, or take the authors' with `paper`"
        )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UsageError(f"`num_fewshot`={options.num_fewshot} must be at least 0")
    if options.fewshot_as_multiturn and not options.apply_chat_template:
        raise UsageError(
            "`fewshot_as_multiturn` needs `apply_chat_template`: only conversations have turns"
        )
    return (
        TaskSet(
            options.tasks,
            options.num_fewshot,
            options.apply_chat_template,
            options.fewshot_as_multiturn,
            options.gen_kwargs,
        ),
    )


def main(args: argparse.Namespace) -> int:
    options = EvalOptions(**given(EvalOptions, args))
    sides = Sides(**given(Sides, args))
    engine_fields = given(EngineOptions, args)
    sets = task_sets(options)
    swiftkv = "auto" if sides.compare else sides.swiftkv
    model_options = dataclasses.replace(ModelOptions.from_args(args), swiftkv=swiftkv)
    EngineOptions(**engine_fields)  # mistakes end the run before tasks and weights are read
    check_absent("`output`", options.output)
    tasks = Tasks(sets, include_path=options.include_path, limit=options.limit)
    reports = _measure(sides, tasks, model_options, engine_fields)
    if is_main_process():
        print(table(reports))
        if options.output:
            settings = {"swiftkv": sides.swiftkv, "limit": options.limit} | {
                name: getattr(args, name)
                for name in (
                    "dtype",
                    "quantization",
                    "kv_cache_dtype",
                    "max_model_len",
                    "generated_kv",
                    "exact_tail",
                )
            }
            write_json(options.output, document(model_options.path, settings, reports))
    return cli.OK


def _measure(
    sides: Sides, tasks: Tasks, model_options: ModelOptions, engine_fields: dict[str, Any]
) -> dict[str, Report]:
    """A report for each side, one after the other."""
    measured = SIDES if sides.compare else {"score": model_options.swiftkv}
    reports: dict[str, Report] = {}
    mesh = None
    for name, swiftkv in measured.items():
        side = dataclasses.replace(model_options, swiftkv=swiftkv)
        if reports:
            model = read_model(side, mesh)
        else:
            model, mesh = load_model(side)
        if sides.compare and (model.swiftkv is None or model.llama.upper_qkv is None):
            missing = "SwiftKV weights" if model.swiftkv is None else "teacher"
            raise UsageError(f"`swiftkv`=both: the checkpoint has no {missing}")
        tokenizer = model.tokenizer
        longest = min(MAX_MODEL_LEN, model.config.max_position_embeddings)
        defaults: dict[str, Any] = {"scoring": True, "max_model_len": longest}
        engine = start_engine(model, mesh, EngineOptions(**defaults | engine_fields), side)
        del model  # the engine has its own copy of the layers: memory for one, not two
        reports[name] = measure(tasks, engine, tokenizer)
        del engine
        gc.collect()  # the next engine needs its memory
    return reports


def measure(tasks: Tasks, engine: Engine, tokenizer: Any) -> Report:
    """The harness's report of all tasks, by one engine."""
    model = TextModel(engine, tokenizer, progress=is_main_process())
    tasks.check(model)
    report = tasks.run(model)
    prefix = engine.prefix_stats
    stats = engine.stats
    logger.info(
        f"prompts: {stats.prompt_tokens} tokens, {prefix.hits / max(prefix.queries, 1):.0%} of "
        f"them found in the prefix cache; "
        f"generated: {stats.new_tokens} tokens"
    )
    return report


def document(model: Path, settings: dict[str, Any], reports: dict[str, Report]) -> dict[str, Any]:
    """Content of the output file."""
    first = next(iter(reports.values()))
    facts = provenance() | {"lm_eval": first.get("lm_eval_version"), "model": str(model)}
    facts |= settings
    facts["reports"] = {
        name: {part: report[part] for part in REPORT_FIELDS if part in report}
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
