"""The command `eval`: the harness's own command on an engine, for each side of the model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from .. import cli
from ..cli.fields import given
from ..cli.model_loading import open_model, read_model, setup_model_devices
from ..cli.model_options import ModelOptions
from ..errors import UsageError
from ..infer.commands.start import start_engine
from ..infer.engine.options import EngineOptions
from ..process.distributed import is_main_process
from ..process.files import check_absent, write_json
from ..process.provenance import provenance
from .comparison import read_report, scores, table
from .options import EvalOptions
from .text_model import harness, harness_class

MAX_MODEL_LEN = 4096
"""Length of the authors' runs; enough for every task of `PAPER`."""


def main(args: argparse.Namespace) -> int:
    options = EvalOptions(**given(EvalOptions, args))
    engine_fields = given(EngineOptions, args)
    model_options = ModelOptions.from_args(args)
    sides = {
        name: dataclasses.replace(model_options, swiftkv=swiftkv)
        for name, swiftkv in options.sides().items()
    }
    runs = options.runs(args.harness)
    harness_class()  # mistakes end the run before weights are read
    EngineOptions(**engine_fields)
    check_absent("`output`", options.output)
    for side in sides.values():
        open_model(side)
    mesh = setup_model_devices(model_options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.output is not None and is_main_process():
            folder = options.output
        record: dict[str, Any] = {"sides": []}
        for name, side in sides.items():
            model = functools.partial(open_side, side, mesh, engine_fields, record["sides"])
            run_harness(runs, model, folder / name, {"pretrained": str(side.path), "side": name})
        record = provenance() | record
        if len(sides) > 1 and is_main_process():
            found = list(scores(*(read_report(folder / name) for name in sides)))
            print(table(found))
            record["differences"] = found
        if folder == options.output:
            write_json(folder / "swiftkv.json", record)
    return cli.OK


def open_side(
    side: ModelOptions,
    mesh: Mesh | None,
    engine_fields: dict[str, Any],
    records: list[dict[str, Any]],
) -> Any:
    """The harness's model of one side. What it is measured with is appended to `records`."""
    model = read_model(side, mesh)
    facts = {
        "swiftkv": model.uses_swiftkv(side.uses_swiftkv),
        "dtype": str(model.dtype),
        "quantization": side.quantization,
    }
    longest = min(MAX_MODEL_LEN, model.config.max_position_embeddings)
    defaults: dict[str, Any] = {"scoring": True, "max_model_len": longest}
    engine = start_engine(model, mesh, EngineOptions(**defaults | engine_fields), side)
    facts["kv_cache_dtype"] = str(engine.model_runner.layout.cache_dtype)
    facts["generated_kv"] = engine.config.generated_kv
    facts["exact_tail"] = engine.config.exact_tail
    records.append(facts)
    return harness_class()(engine, model.tokenizer, progress=is_main_process())


def run_harness(
    runs: Sequence[Sequence[str]], model: Callable[[], Any], folder: Path, facts: dict[str, str]
) -> None:
    """Make all runs by the harness's command, each with its flags, on the `model` that the first of
    them opens once it has found its tasks. Results and samples go to `folder`, with `facts`. Raises
    `UsageError` for what the harness refuses before that."""
    opened = functools.cache(model)
    ours = ["--model", "swiftkv", "--model_args", json.dumps(facts)]
    ours += ["--log_samples", "--output_path", str(folder)]
    # The command reads `sys.argv`, and its model is made from text by a method of the class. Only
    # the command writes files and prints tables: its functions return numbers.
    before = sys.argv
    try:
        harness_class().create_from_arg_obj = lambda *_: opened()
        for flags in runs:
            sys.argv = ["lm-eval", "run", *flags, *ours]
            with contextlib.redirect_stdout(sys.stdout if is_main_process() else io.StringIO()):
                harness("__main__").cli_evaluate()
    except ValueError as error:
        if opened.cache_info().currsize:
            raise
        raise UsageError(str(error)) from error
    finally:
        sys.argv = before
        del harness_class().create_from_arg_obj
    opened.cache_clear()
    gc.collect()  # the next engine needs its memory
