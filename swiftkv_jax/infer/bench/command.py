"""The command `bench`: SwiftKV and its teacher measured side by side."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ...cli import OK
from ...errors import UsageError
from ...plan.roofline import Roofline, measure_roofline
from ...process.distributed import is_main_process
from ...process.files import check_absent, write_json
from ...process.provenance import provenance
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..runner.choose_shapes import offline_num_seqs
from ..runner.kv_heads import kv_head_copies
from ..runner.model_runner import ModelRunner
from .cells import STUDENT, TEACHER, Cell
from .options import BenchOptions, plan
from .summary import Variant, compare, derive, parameters, table, variant_of
from .timing import Raw, measure
from .variants import Source, open_source

logger = logging.getLogger(__name__)

WARM_UP_SEED = 999_983


@dataclasses.dataclass
class Measured:
    """A variant with its measurements."""

    variant: Variant
    raws: list[list[Raw]]
    """Repetitions of each cell."""
    engine: dict[str, Any]
    """Memory plan, shapes and options of the engine."""


def main(args: argparse.Namespace) -> int:
    options = BenchOptions.from_args(args)
    check_absent("`output`", options.output)
    engine_options, cells = plan(options)
    names = options.swiftkv
    source = open_source(options)
    if options.mode == "offline" and "max_num_seqs" not in options.engine:
        rows = offline_num_seqs(jax.default_backend(), max(cell.prompts for cell in cells))
        engine_options = dataclasses.replace(engine_options, max_num_seqs=rows)
    limit = min(source.config.max_position_embeddings, engine_options.max_model_len or sys.maxsize)
    longest = max(cells, key=lambda cell: cell.length)
    if longest.length > limit:
        raise UsageError(
            f"`input_len`={longest.input_len} and {longest.output_len} new tokens are "
            f"{longest.length} positions, above the limit of {limit}"
        )
    if options.mode == "latency" and jax.process_count() > 1:
        raise UsageError(
            "latency is for one process: several would not agree on when a request has arrived"
        )
    source.check_memory(names, options.mode, cells, engine_options)
    roofline = measure_roofline(source.dtype, source.devices)
    logger.info(
        f"{source.description}; {source.dtype}; {source.devices} x {jax.devices()[0].device_kind}: "
        f"{roofline}"
    )
    groups, order = [names], "in turns"
    if len(names) == 1 or not source.fit_together(cells, engine_options):
        groups, order = [(name,) for name in names], "one after the other"
    logger.info(
        f"{' and '.join(names)}, {order}; {options.repetitions} repetitions of {len(cells)} "
        f"measurements"
    )
    measured: dict[str, Measured] = {}
    for group in groups:
        measured |= _measure_group(options, source, group, cells, engine_options)
    # Again, because other work on the machine may have ended meanwhile.
    roofline = roofline.best(measure_roofline(source.dtype, source.devices))
    rows = _rows(options, cells, measured, roofline)
    document = provenance() | {
        "mode": options.mode,
        "options": {name: _plain(value) for name, value in vars(args).items() if name != "main"},
        "config": dataclasses.asdict(source.config),
        "parameters": parameters(source.config),
        "weights": source.description,
        "order": order,
        "roofline": roofline.to_json(),
        "engines": {name: one.engine for name, one in measured.items()},
        "rows": rows,
    }
    if is_main_process():
        _report(options, document, roofline)
    return OK


def _measure_group(
    options: BenchOptions,
    source: Source,
    names: Sequence[str],
    cells: Sequence[Cell],
    engine_options: EngineOptions,
) -> dict[str, Measured]:
    """Measure variants whose engines are in memory together. The engines are deleted at the end."""
    model = source.model(names)
    alone = len(names) == 1
    engines = {
        name: source.engine(model, name, options, cells, engine_options, alone=alone)
        for name in names
    }
    del model
    for engine in engines.values():
        measure(options.mode, engine, cells[0], options.seed + WARM_UP_SEED)
    raws: dict[str, list[list[Raw]]] = {name: [[] for _ in cells] for name in names}
    for number, cell in enumerate(cells):
        for repetition in range(options.repetitions):
            seed = options.seed + 1000 * number + repetition
            for name in names if repetition % 2 == 0 else reversed(names):
                raw = measure(options.mode, engines[name], cell, seed)
                raws[name][number].append(raw)
                logger.info(
                    f"{options.mode} {cell}, repetition {repetition + 1}: {name} "
                    f"{raw['seconds']:.4g} s"
                )
    found = {}
    for name, engine in engines.items():
        runner = engine.model_runner
        copies = kv_head_copies(source.config, source.mesh)
        variant = variant_of(
            name,
            source.config,
            runner.weights,
            runner.cache_dtype,
            runner.shapes,
            kv_head_copies=copies,
        )
        found[name] = Measured(variant, raws[name], _setup(engine))
    engines.clear()
    gc.collect()  # engines hold their programs in cycles, and the programs hold memory
    return found


def _setup(engine: Engine[ModelRunner]) -> dict[str, Any]:
    runner = engine.model_runner
    assert runner.plan is not None
    return {
        "plan": dataclasses.asdict(runner.plan),
        "shapes": dataclasses.asdict(runner.shapes),
        "kv_bytes_per_token": runner.kv_bytes_per_token,
        "options": dataclasses.asdict(engine.options),
    }


def _rows(
    options: BenchOptions,
    cells: Sequence[Cell],
    measured: dict[str, Measured],
    roofline: Roofline,
) -> list[dict[str, Any]]:
    rows = []
    for number, cell in enumerate(cells):
        raws = {name: one.raws[number] for name, one in measured.items()}
        of_cell = {
            name: derive(options.mode, cell, raws[name], one.variant, roofline)
            for name, one in measured.items()
        }
        if len(of_cell) == 2:
            student, teacher = of_cell[STUDENT], of_cell[TEACHER]
            student |= compare(options.mode, raws[STUDENT], raws[TEACHER])
            student["teacher_flops_over_own"] = teacher["flops"] / student["flops"]
        for name, row in of_cell.items():
            head = {"label": str(cell), "variant": name, "cell": _plain(dataclasses.asdict(cell))}
            rows.append(head | row | {"repetitions": _plain(raws[name])})
    return rows


def _report(options: BenchOptions, document: dict[str, Any], roofline: Roofline) -> None:
    rows = document["rows"]
    print(table(options.mode, rows))
    print(f"\nroofline: {roofline}")
    ratios = [row["teacher_flops_over_own"] for row in rows if "teacher_flops_over_own" in row]
    if options.mode == "prefill" and ratios:
        ideal = statistics.median(ratios)
        print(f"by its operations alone, SwiftKV would be {ideal:.3f} times as fast")
    print(
        f"{document['order']}; compilations while measuring: "
        f"{sum(row['compilations'] for row in rows)}"
    )
    if options.output is not None:
        write_json(options.output, document)


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: infinities and paths become strings, dataclasses objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path) or value == math.inf:
        return str(value)
    return value
