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
from ...model.config import Config
from ...plan.roofline import Roofline, measure_roofline
from ...process.distributed import is_main_process
from ...process.files import check_absent, write_json
from ...process.provenance import provenance
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..runner.kv_heads import kv_head_copies
from ..runner.model_runner import ModelRunner
from .cells import STUDENT, TEACHER, Cell, Mode, check_lengths
from .options import BenchOptions, plan
from .summary import Variant, compare, derive, parameters, table, variant_of
from .timing import Raw, measure
from .variants import Source, build, check_memory, fit_together, open_source

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
    positions = source.config.max_position_embeddings
    check_lengths(cells, min(positions, options.engine.get("max_model_len", sys.maxsize)))
    if options.mode == "latency" and jax.process_count() > 1:
        raise UsageError(
            "latency is for one process: several would not agree on when a request has arrived"
        )
    check_memory(source, names, options.mode, cells, engine_options)
    devices = 1 if source.mesh is None else source.mesh.size
    roofline = measure_roofline(source.dtype, devices)
    logger.info(
        f"{source.description}; {source.dtype}; {devices} x {jax.devices()[0].device_kind}: "
        f"{roofline}"
    )
    alone = len(names) == 1 or not fit_together(source, cells, engine_options)
    order = "one after the other" if alone else "in turns"
    logger.info(
        f"{' and '.join(names)}, {order}; {options.repetitions} repetitions of {len(cells)} "
        f"measurements"
    )
    measured: dict[str, Measured] = {}
    for group in [[name] for name in names] if alone else [names]:
        measured |= _measure_group(options, source, group, cells, engine_options)
    # Again, because other work on the machine may have ended meanwhile.
    roofline = roofline.best(measure_roofline(source.dtype, devices))
    rows = _rows(options.mode, cells, measured, roofline)
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
        _report(options, roofline, rows, document)
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
    engines = dict[str, Engine[ModelRunner]]()
    for name in names:
        engines[name] = build(
            source,
            model,
            name,
            options.mode,
            cells,
            engine_options,
            alone=len(names) == 1,
            attention=options.model.attention,
        )
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
    found = {
        name: Measured(_variant(name, source.config, engine), raws[name], _setup(engine))
        for name, engine in engines.items()
    }
    engines.clear()
    gc.collect()  # engines hold their programs in cycles, and the programs hold memory
    return found


def _variant(name: str, config: Config, engine: Engine[ModelRunner]) -> Variant:
    runner = engine.model_runner
    return variant_of(
        name,
        config,
        runner.weights,
        runner.cache_dtype,
        runner.shapes,
        kv_head_copies=kv_head_copies(config, runner.layout.mesh),
    )


def _setup(engine: Engine[ModelRunner]) -> dict[str, Any]:
    runner = engine.model_runner
    return {
        "plan": dataclasses.asdict(runner.plan) if runner.plan else None,
        "shapes": dataclasses.asdict(runner.shapes),
        "kv_bytes_per_token": runner.kv_bytes_per_token,
        "options": dataclasses.asdict(engine.options),
    }


def _rows(
    mode: Mode, cells: Sequence[Cell], measured: dict[str, Measured], roofline: Roofline
) -> list[dict[str, Any]]:
    rows = []
    for number, cell in enumerate(cells):
        of_cell = {
            name: derive(mode, cell, one.raws[number], one.variant, roofline)
            for name, one in measured.items()
        }
        if len(of_cell) == 2:
            student, teacher = (measured[name].raws[number] for name in (STUDENT, TEACHER))
            of_cell[STUDENT] |= compare(mode, student, teacher)
            of_cell[STUDENT]["teacher_flops_over_own"] = (
                of_cell[TEACHER]["flops"] / of_cell[STUDENT]["flops"]
            )
        for name, row in of_cell.items():
            head = {"label": str(cell), "variant": name, "cell": _plain(dataclasses.asdict(cell))}
            rows.append(head | row | {"repetitions": _plain(measured[name].raws[number])})
    return rows


def _report(
    options: BenchOptions,
    roofline: Roofline,
    rows: list[dict[str, Any]],
    document: dict[str, Any],
) -> None:
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
    """`value` as JSON can hold it: infinities and paths become strings."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    text = isinstance(value, Path) or (isinstance(value, float) and math.isinf(value))
    return str(value) if text else value
