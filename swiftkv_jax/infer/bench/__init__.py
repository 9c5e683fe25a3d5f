"""`python -m swiftkv_jax.infer bench MODE`: how fast it is, SwiftKV and its teacher side by side.

    prefill   prompts into the cache, nothing else running; and the time to the first token of one prompt alone
    decode    the time per output token of --batch rows of --input-len tokens
    offline   --num-prompts requests at once, continuous batching
    latency   requests that arrive at --request-rate: TTFT, TPOT, inter-token and end-to-end times

Every figure stands beside what the same devices reach in a large matrix product and a large copy,
measured before and after. A model without weights will do:

    python -m swiftkv_jax.infer bench prefill --config llama-3.1-8b --load-format dummy --input-len 512,2k,8k -o result.json

The table goes to standard output, all raw numbers to -o. Prompts are random, and no two are the
same: nothing comes from the prefix cache. Both variants get the same prompts. They take turns,
first one then the other, where both fit into memory; otherwise they run one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ...cli.exit import OK
from ...errors import UsageError
from ...io.files import check_absent, write_json
from ...io.provenance import provenance
from ...mesh import parse_mesh
from ...roofline import Roofline, measure_roofline
from ..commands.flags import add_engine_flags, add_model_flags, engine_options, length, log, writes
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from .cells import MODES, Cell, check_lengths, make_cells
from .plot import check_plot, draw
from .summary import SWIFTKV, TEACHER, Variant, compare, derive, parameters, table, variant_of
from .timing import Raw, measure
from .variants import Source, build, open_source, together

NAMES = {"on": SWIFTKV, "off": TEACHER}
WARM_UP_SEED = 999_983


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES, help="what to measure: see above")
    add_model_flags(parser)
    flag = parser.add_argument_group(
        "what to measure", conflict_handler="resolve"
    ).add_argument  # its own --swiftkv
    flag(
        "--swiftkv",
        type=_variants,
        default=None,
        metavar="on,off",
        help="which to measure (default: both)",
    )
    flag(
        "--config",
        metavar="NAME",
        help="llama-3.1-8b, -70b, -405b, or a folder with a config.json; with --load-format dummy",
    )
    flag(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, made on the device",
    )
    flag(
        "--num-key-value-layers",
        type=int,
        metavar="K",
        help="cut the model here (default: its own cut, or half of its layers)",
    )
    flag(
        "--key-value-group-size",
        type=int,
        metavar="G",
        help="upper layers that share keys and values (default: the model's, or 1)",
    )
    flag(
        "--input-len",
        type=_lengths,
        default=[512, 2048],
        metavar="N,...",
        help="tokens of a prompt (default: 512,2k)",
    )
    flag(
        "--output-len",
        type=length,
        metavar="N",
        help="new tokens of each; not in prefill (default: 128)",
    )
    flag(
        "--batch", type=_counts, metavar="N,...", help="prefill: prompts; decode: rows (default: 1)"
    )
    flag(
        "--num-prompts",
        type=_count,
        metavar="N",
        help="offline and latency: requests (default: 64)",
    )
    flag(
        "--request-rate",
        type=_rates,
        metavar="R,...",
        help="latency: requests a second, or inf (default: 1)",
    )
    flag(
        "--max-concurrency",
        type=_count,
        metavar="N",
        help="latency: most requests inside at a time",
    )
    flag(
        "--repetitions",
        "-r",
        type=_count,
        default=5,
        metavar="N",
        help="of every measurement (default: 5)",
    )
    flag("--seed", type=_seed, default=0, help="of the prompts and arrivals (default: 0)")
    flag(
        "--output",
        "-o",
        type=Path,
        metavar="JSON",
        help="every raw number, and what was measured where",
    )
    flag("--plot", type=Path, metavar="PNG", help="of the table; needs matplotlib")
    add_engine_flags(parser)


def main(args: argparse.Namespace) -> int:
    check_absent("--output", args.output)
    check_absent("--plot", args.plot)
    check_plot(args.plot)
    options, cells = _plan(args)
    names = args.swiftkv or [SWIFTKV, TEACHER]
    source = open_source(args, names)
    check_lengths(
        cells, min(source.config.max_position_embeddings, args.max_model_len or sys.maxsize)
    )
    if args.mode == "latency" and jax.process_count() > 1:
        raise UsageError(
            "latency is for one process: several would not agree on when a request has arrived"
        )
    devices = 1 if source.mesh is None else source.mesh.size
    roofline = measure_roofline(source.dtype, devices)
    log(
        f"{source.description}; {source.dtype}; {devices} x {jax.devices()[0].device_kind}: "
        f"{roofline}"
    )
    alone = len(names) == 1 or not together(source, cells, options)
    order = "one after the other" if alone else "in turns"
    log(
        f"{' and '.join(names)}, {order}; {args.repetitions} repetitions of {len(cells)} "
        f"measurements"
    )
    found = [
        _measure_group(args, source, group, cells, options)
        for group in ([[name] for name in names] if alone else [names])
    ]
    variants = {name: facts for group in found for name, (facts, _, _) in group.items()}
    raws = {name: raw for group in found for name, (_, raw, _) in group.items()}
    roofline = roofline.best(
        measure_roofline(source.dtype, devices)
    )  # what else ran on the machine may have ended meanwhile
    rows = _rows(args.mode, cells, variants, raws, roofline)
    document = provenance() | {
        "mode": args.mode,
        "options": {name: _plain(value) for name, value in vars(args).items() if name != "main"},
        "config": dataclasses.asdict(source.config),
        "parameters": parameters(source.config),
        "weights": source.description,
        "order": order,
        "roofline": roofline.to_json(),
        "engines": {name: engine for group in found for name, (_, _, engine) in group.items()},
        "rows": rows,
    }
    if writes():
        _report(args, roofline, rows, document)
    return OK


def _plan(args: argparse.Namespace) -> tuple[EngineOptions, list[Cell]]:
    """The engine's shapes are those of the cells: no row longer, no call larger than what is asked
    for."""
    direct = args.mode in ("prefill", "decode")
    if args.batch and not direct:
        raise UsageError(
            f"--batch is for prefill and decode: in {args.mode} --max-num-seqs says how many rows "
            f"run together"
        )
    if args.max_num_seqs and direct:
        raise UsageError(
            f"--max-num-seqs is for offline and latency: in {args.mode} --batch says how many "
            f"rows run together"
        )
    if args.mode != "latency" and (args.request_rate or args.max_concurrency):
        raise UsageError(
            f"--request-rate and --max-concurrency are for latency, not for {args.mode}"
        )
    if args.num_prompts and direct:
        raise UsageError(
            f"--num-prompts is for offline and latency: in {args.mode} --batch says how many "
            f"there are"
        )
    if args.output_len and args.mode == "prefill":
        raise UsageError("--output-len is not for prefill, which ends where the first token begins")
    batches = args.batch or [1]
    steps = engine_options(
        args, **({"decode_steps": 1} if args.mode == "prefill" else {})
    ).decode_steps
    cells = make_cells(
        args.mode,
        input_lens=args.input_len,
        output_len=args.output_len or 128,
        batches=batches,
        num_prompts=args.num_prompts or 64,
        request_rates=args.request_rate or [1.0],
        max_concurrency=args.max_concurrency,
        decode_steps=steps,
    )
    defaults: dict[str, Any] = {
        "decode_steps": steps,
        "max_model_len": max(cell.length for cell in cells),
    }
    if direct:
        lanes = parse_mesh(args.mesh).rows
        defaults |= {
            "max_num_seqs": max(batches),
            "decode_rows": tuple(sorted({-(-batch // lanes) for batch in batches})),
        }
    return engine_options(args, **defaults), cells


def _measure_group(
    args: argparse.Namespace,
    source: Source,
    names: Sequence[str],
    cells: Sequence[Cell],
    options: EngineOptions,
) -> dict[str, tuple[Variant, list[list[Raw]], dict[str, Any]]]:
    """Of each engine: what its rates follow from, the repetitions of each cell, and how it was set
    up. The engines are gone after."""
    model, engines = source.model(names), {}
    for name in names:
        engines[name] = build(
            source,
            model,
            name,
            args.mode,
            cells,
            options,
            alone=len(names) == 1,
            attention=args.attention,
        )
    del model
    for engine in engines.values():
        measure(args.mode, engine, cells[0], args.seed + WARM_UP_SEED)
    raws: dict[str, list[list[Raw]]] = {name: [[] for _ in cells] for name in names}
    for number, cell in enumerate(cells):
        for repetition in range(args.repetitions):
            for name in names if repetition % 2 == 0 else reversed(names):
                raw = measure(
                    args.mode, engines[name], cell, args.seed + 1000 * number + repetition
                )
                raws[name][number].append(raw)
                log(
                    f"{args.mode} {cell}, repetition {repetition + 1}: {name} "
                    f"{raw['seconds']:.4g} s"
                )
    found = {
        name: (variant_of(name, source.config, engine), raws[name], _setup(engine))
        for name, engine in engines.items()
    }
    engines.clear()
    gc.collect()  # engines hold their programs in cycles, and the programs hold memory
    return found


def _setup(engine: Engine) -> dict[str, Any]:
    device = engine.model_runner
    return {
        "plan": dataclasses.asdict(device.plan) if device.plan else None,
        "shapes": dataclasses.asdict(device.shapes),
        "kv_bytes_per_token": device.kv_bytes_per_token,
        "options": dataclasses.asdict(engine.options),
    }


def _rows(
    mode,
    cells: Sequence[Cell],
    variants: dict[str, Variant],
    raws: dict[str, list[list[Raw]]],
    roofline: Roofline,
) -> list[dict[str, Any]]:
    rows = []
    for number, cell in enumerate(cells):
        of_cell = {
            name: derive(mode, cell, raws[name][number], variant, roofline)
            for name, variant in variants.items()
        }
        if len(of_cell) == 2:
            of_cell[SWIFTKV] |= compare(mode, raws[SWIFTKV][number], raws[TEACHER][number])
            of_cell[SWIFTKV]["teacher_flops_over_own"] = (
                of_cell[TEACHER]["flops"] / of_cell[SWIFTKV]["flops"]
            )
        for name, row in of_cell.items():
            head = {"label": str(cell), "variant": name, "cell": _plain(dataclasses.asdict(cell))}
            rows.append(head | row | {"repetitions": _plain(raws[name][number])})
    return rows


def _report(
    args: argparse.Namespace,
    roofline: Roofline,
    rows: list[dict[str, Any]],
    document: dict[str, Any],
) -> None:
    print(table(args.mode, rows))
    print(f"\nroofline: {roofline}")
    if args.mode == "prefill" and any("teacher_flops_over_own" in row for row in rows):
        ideal = statistics.median(
            row["teacher_flops_over_own"] for row in rows if "teacher_flops_over_own" in row
        )
        print(f"by its operations alone, SwiftKV would be {ideal:.3f} times as fast")
    print(
        f"{document['order']}; compilations while measuring: "
        f"{sum(row['compilations'] for row in rows)}"
    )
    if args.output is not None:
        write_json(args.output, document)
    if args.plot is not None:
        draw(args.mode, rows, args.plot)


def _plain(value: Any) -> Any:
    """What JSON can say: no infinities, no paths."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return (
        str(value)
        if isinstance(value, Path) or (isinstance(value, float) and math.isinf(value))
        else value
    )


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(NAMES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be on, off, or on,off")
    return [NAMES[name] for name in names]


def _lengths(text: str) -> list[int]:
    found = [length(part) for part in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a prompt to measure has at least 2 tokens")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of requests a second, such as 0.5,2,inf"
        )
    return rates
