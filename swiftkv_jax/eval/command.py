"""The command `eval`: runs the tasks on an engine and writes their numbers."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
from collections.abc import Iterator
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
from .comparison import Report, scores, table
from .options import EvalOptions, Sides
from .tasks import open_tasks, run_tasks
from .text_model import harness_model

logger = logging.getLogger(__name__)

MAX_MODEL_LEN = 4096
"""Length of the authors' runs; enough for every task of `options.PAPER`."""
SIDES = {"teacher": "off", "student": "on"}
"""Sides that `--swiftkv both` measures, in this order, and the value of --swiftkv for each."""
REPORT_FIELDS = "results groups group_subtasks n-shot n-samples versions higher_is_better".split()
"""Fields of the harness's report that the output file has."""
SETTINGS = "dtype quantization kv_cache_dtype max_model_len generated_kv exact_tail".split()
"""Flags that the output file records."""


def main(args: argparse.Namespace) -> int:
    options = EvalOptions(**given(EvalOptions, args))
    sides = Sides(**given(Sides, args))
    engine_fields = given(EngineOptions, args)
    runs = options.runs()
    swiftkv = "auto" if sides.compare else sides.swiftkv
    model_options = dataclasses.replace(ModelOptions.from_args(args), swiftkv=swiftkv)
    EngineOptions(**engine_fields)  # mistakes end the run before tasks and weights are read
    check_absent("`output`", options.output)
    manager = open_tasks((name for run in runs for name in run["tasks"]), options.include_path)
    reports = dict[str, Report]()
    for name, engine, tokenizer in _engines(sides, model_options, engine_fields):
        model = harness_model(engine, tokenizer, progress=is_main_process())
        reports[name] = run_tasks(runs, manager, model, options.limit)
        logger.info(
            f"prompts: {engine.stats.prompt_tokens} tokens, "
            f"{engine.prefix_stats.hits / max(engine.prefix_stats.queries, 1):.0%} of them found "
            f"in the prefix cache; generated: {engine.stats.new_tokens} tokens"
        )
        del model, engine
    if is_main_process():
        print(table(reports))
        if options.output:
            adapter = model_options.adapter and str(model_options.adapter)
            settings = {"adapter": adapter, "swiftkv": sides.swiftkv, "limit": options.limit}
            settings |= {name: getattr(args, name) for name in SETTINGS}
            write_json(options.output, document(model_options.path, settings, reports))
    return cli.OK


def _engines(
    sides: Sides, model_options: ModelOptions, engine_fields: dict[str, Any]
) -> Iterator[tuple[str, Engine, Any]]:
    """Yield the name, the engine and the tokenizer of each side, one after the other."""
    measured = SIDES if sides.compare else {"score": model_options.swiftkv}
    mesh = None
    for number, (name, swiftkv) in enumerate(measured.items()):
        side = dataclasses.replace(model_options, swiftkv=swiftkv)
        if number:
            model = read_model(side, mesh)
        else:
            model, mesh = load_model(side)
        if sides.compare and (model.swiftkv is None or model.llama.upper_qkv is None):
            missing = "SwiftKV weights" if model.swiftkv is None else "teacher"
            raise UsageError(f"`swiftkv`=both: the checkpoint has no {missing}")
        tokenizer = model.tokenizer
        longest = min(MAX_MODEL_LEN, model.config.max_position_embeddings)
        defaults: dict[str, Any] = {"scoring": True, "max_model_len": longest}
        options = EngineOptions(**defaults | engine_fields)
        engine = start_engine(model, mesh, options, side)
        del model  # the engine has its own copy of the layers: memory for one, not two
        yield name, engine, tokenizer
        del engine
        gc.collect()  # the next engine needs its memory


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
        facts["differences"] = found = []
        for one in scores(reports):
            assert one.difference is not None
            value, stderr = one.difference
            names = {"task": one.task, "filter": one.filter, "metric": one.metric}
            found.append(names | {"value": value, "stderr": stderr})
    return facts
