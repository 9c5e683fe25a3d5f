"""Train students of a real model, one after another, and measure each as `benchmarks.real` does.

    python -m benchmarks.distill_real gpu --model PARTS --seconds 780    one H100, in 15 minutes
    python -m benchmarks.distill_real gpu --model PARTS --train-only     trained, measured later
    python -m benchmarks.distill_real cpu --model MODEL                  two cores, a night

The model is a folder, a GGUF file, or a folder of parts (`benchmarks.real.parts`). Training text is
English and code of this machine's packages (`benchmarks.real.corpus`), what the model itself
writes, and examples whose answers repeat parts of their prompts (`swiftkv train restate`), or
packed datasets given as `--data`. Training is that of `swiftkv train`, with its checkpoints.

Every student that is finished is measured and added to the JSON of its model in
`benchmarks/results`, as are the evaluations of one that is not. When the time is over the run at
hand is saved. The same command continues: with the next step, or with the next student.

With `--train-only` nothing is measured. What was trained of each student is kept in FOLDER/deltas,
in bfloat16, and the command without the flag measures it, on another machine too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

import swiftkv_jax as skv
from swiftkv_jax import cli
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.checkpoints.hf_write import write_hf
from swiftkv_jax.checkpoints.source import from_model
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.stacks import split_layers
from swiftkv_jax.model.transformer import Remat
from swiftkv_jax.process import files
from swiftkv_jax.train.data import restated
from swiftkv_jax.train.data.prepare import Preparation
from swiftkv_jax.train.data.sources import DataSource, parse_source
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.run import loop
from swiftkv_jax.train.run.metrics import METRICS, read_metrics
from swiftkv_jax.train.run.setup import open_tokenizer
from swiftkv_jax.train.run.start import calibration_tokens

from .real import corpus, generations, parts, table
from .real.__main__ import add_flags, name_of, settings_of
from .real.cells import NAMES, SERVED, Cell, Program, program_of
from .real.measure import Bench
from .real.results import Results

HELD_OUT = "held-out.jsonl"
DELTA = "delta"
TRAINING = "training.json"
"""In the folder of a student: what was trained, and where, with the trainer's held-out figures."""
GENERATED_SHARE = 1, 9
"""Weights of what the model wrote and of the packages' text."""

logger = logging.getLogger("swiftkv_jax.benchmarks")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Students in the order in which they are trained."""

    runs: tuple[tuple[float, int], ...]
    """(share of the layers that are lower ones, tokens)."""
    batch_size: int
    """Rows of an optimiser step."""
    max_length: int
    learning_rate: float
    generated_tokens: int
    """That the model writes before."""
    sequences: int
    """That it writes together."""
    restated: int
    """Examples that are made of the packages' text."""
    evaluations: int
    """During a run, beside the first and the last."""
    eval_batches: int
    remat: Remat = "mlp"
    calibration_tokens: int | None = None
    """Of the start in closed form; None is the trainer's default."""

    def cells(self, num_layers: int, program: Program, restated_share: float = 0.0) -> list[Cell]:
        """The students; tokens are rounded to whole steps."""
        per_step = self.batch_size * self.max_length
        own, boundary = SERVED
        served = boundary if program.key_value_group_size else own  # as `swiftkv train` takes them
        return [
            Cell(cut, program.at(num_layers - cut), *served, steps * per_step, restated_share)
            for cut, tokens in ((round(num_layers * share), tokens) for share, tokens in self.runs)
            for steps in [max(1, round(tokens / per_step))]
        ]


SHARES = (1 / 2, 2 / 3, 3 / 5, 23 / 30)
"""K = 15, 20, 18 and 23 of 30 layers: the cuts of the bars first."""
PLANS = {
    "gpu": Plan(
        tuple((share, 40_000_000 if share == 1 / 2 else 20_000_000) for share in SHARES),
        batch_size=32,
        max_length=1024,
        learning_rate=1e-3,
        generated_tokens=500_000,
        sequences=256,
        restated=8192,
        evaluations=3,
        eval_batches=2,
        remat="none",
    ),
    "cpu": Plan(
        tuple((share, tokens) for tokens in (2**18, 2**20) for share in SHARES),
        batch_size=8,
        max_length=512,
        learning_rate=5e-4,
        generated_tokens=24_576,
        sequences=16,
        restated=1152,
        evaluations=0,
        eval_batches=2,
        calibration_tokens=24_576,
    ),
    "tiny": Plan(
        ((1 / 2, 512), (3 / 4, 512)),
        batch_size=2,
        max_length=128,
        learning_rate=1e-3,
        generated_tokens=512,
        sequences=2,
        restated=8,
        evaluations=0,
        eval_batches=1,
        calibration_tokens=1024,
    ),
}
"""`tiny` only shows that everything runs."""


def main(argv: list[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.distill_real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("plan", choices=PLANS)
    flag("--model", required=True, help="folder, GGUF file or folder of parts")
    flag(
        "--program",
        choices=NAMES,
        default="tap",
        help="(default: %(default)s)",
    )
    flag("--seconds", type=float, help="stop and save after so many seconds")
    flag("--folder", type=Path, default=Path("runs/distill-real"), help="(default: %(default)s)")
    flag("--students", metavar="K:TOKENS,...", help="instead of the plan's, as 15:40e6,20:20e6")
    flag("--data", metavar="PATH:WEIGHT", action="append", help="text instead of the two sources")
    flag("--restated", metavar="PATH", help="examples instead of those made of the packages' text")
    flag("--restated-share", type=float, default=0.5, help="of the rows (default: %(default)s)")
    flag("--train-only", action="store_true", help="measure nothing, and keep what was trained")
    add_flags(parser)
    args = parser.parse_args(argv)
    return cli.run(lambda: run(args), parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    plan = PLANS[args.plan]
    started = time.perf_counter()
    if parts.is_split(Path(args.model)):
        args.folder.mkdir(parents=True, exist_ok=True)
        args.model = join(Path(args.model), args.folder)
    config = open_any(args.model).config
    program = program_of(config, args.program)
    if args.students:
        runs = parse_students(args.students, config.num_layers)
        plan = dataclasses.replace(plan, runs=runs)
    if not 0 <= args.restated_share < 1:
        raise UsageError(f"`restated_share`={args.restated_share}: must be from 0 to below 1")
    cells = plan.cells(config.num_layers, program, args.restated_share)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.seconds is not None:
        stop_after(args.seconds)
    teacher = skv.load(args.model)
    results = Results.open(name_of(args), teacher, settings_of(args), args.output)
    cells = [cell for cell in cells if not _is_measured(results, cell)]
    all_trained = all(delta_of(args, cell).exists() for cell in cells)
    data = () if all_trained else training_data(args, plan, teacher)
    bench = None
    if not args.train_only:
        bench = Bench(teacher, settings_of(args), [cell.num_key_value_layers for cell in cells])
    for number, cell in enumerate(cells, 1):
        passed = time.perf_counter() - started
        kept = delta_of(args, cell)
        logger.info("%d of %d after %.0f s: %s", number, len(cells), passed, cell)
        if not kept.exists():
            recipe = recipe_of(plan, cell, args, data)
            finished = loop.run(recipe)
            if finished.exported is None:
                results.note(f"unfinished: {cell}", evaluations(recipe))
                return cli.INTERRUPTED
            keep_delta(args.model, finished.exported, kept, describe_training(recipe, config))
        if bench is None:
            continue
        training = json.loads((kept / TRAINING).read_text(encoding="utf-8"))
        found = bench.figures(load_delta(kept / DELTA, teacher)) | {"training": training}
        results.add(cell, found)
        logger.info("%s: %s", cell, table.summary(found))
    if bench is not None:
        print(table.table([results.document]))
        logger.info("written to %s", results.path)
    return cli.OK


def delta_of(args: argparse.Namespace, cell: Cell) -> Path:
    """The folder that keeps what was trained of a student."""
    return args.folder / "deltas" / _name(args, cell)


def _name(args: argparse.Namespace, cell: Cell) -> str:
    restated = f"-{cell.restated_share:g}" if cell.restated_share else ""
    return f"{cell.num_key_value_layers}-{args.program}-{cell.tokens}{restated}"


def parse_students(text: str, num_layers: int) -> tuple[tuple[float, int], ...]:
    """The runs of a plan with `--students`. Raises `UsageError`."""
    try:
        pairs = [one.split(":") for one in text.split(",")]
        found = [(int(cut), int(float(tokens))) for cut, tokens in pairs]
    except (ValueError, OverflowError):
        found = []
    if not found or any(tokens < 1 or not 0 < cut < num_layers for cut, tokens in found):
        raise UsageError(
            f"`students`={text!r}: expected K:TOKENS, K below {num_layers}, as 15:40e6,20:20e6"
        )
    return tuple((cut / num_layers, tokens) for cut, tokens in found)


def keep_delta(model: str, exported: Path, target: Path, training: dict[str, Any]) -> None:
    """Write the delta of a trained student in bfloat16, as one of the model's weights in float32,
    which are the same on every machine, and `training` beside it."""
    base, student = (skv.load(str(path), dtype="float32") for path in (model, exported))
    llama = split_layers(student.config, base.llama)
    student = dataclasses.replace(base, config=student.config, llama=llama, swiftkv=student.swiftkv)
    with files.new_directory(target) as made:
        write_hf(from_model(student), made / DELTA, format="delta", dtype="bfloat16")
        files.write_json(made / TRAINING, training)


def join(folder: Path, target: Path) -> str:
    """The file of the parts, joined into a folder if it is not there."""
    file = target / parts.name_of(folder)
    if not file.exists():
        parts.join(folder, file)
    return str(file)


def stop_after(seconds: float) -> None:
    """Ask the trainer to save and stop, as SIGTERM does, in so many seconds. Where no training is
    under way, everything is written and the signal interrupts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    timer = threading.Timer(seconds, functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def _is_measured(results: Results, cell: Cell) -> bool:
    if (found := results.find(cell)) is None:
        return False
    logger.info("measured before: %s", cell)
    return bool(found)


def training_data(args: argparse.Namespace, plan: Plan, teacher: Model) -> tuple[str, ...]:
    """The sources in the form of `Recipe.data`: text, and the share of examples that restate it.
    Writes the held-out text beside them. What is there is used again."""
    if not held_out_file(args).exists():
        corpus.write_held_out(held_out_file(args), settings_of(args).seed)
    text = list(map(parse_source, args.data or ())) or text_sources(args, plan, teacher)
    share = args.restated_share
    if share:
        total = sum(source.weight or 1 for source in text) / (1 - share)
        text = [DataSource(source.path, (source.weight or 1) / total) for source in text]
        text.append(DataSource(args.restated or restated_source(args, plan), share))
    return tuple(map(str, text))


def text_sources(args: argparse.Namespace, plan: Plan, teacher: Model) -> list[DataSource]:
    """What the model wrote and the packages' text, as packed rows."""
    documents = corpus.training_documents(args.corpus)
    written = args.folder / f"generated-{plan.generated_tokens}.jsonl"
    if not written.exists():
        logger.info("the model writes %s tokens", f"{plan.generated_tokens:,}")
        generations.write(
            teacher, documents, written, tokens=plan.generated_tokens, sequences=plan.sequences
        )
    sources = written, args.corpus / corpus.TRAIN
    return [
        DataSource(prepared(args, plan, path), weight)
        for path, weight in zip(sources, GENERATED_SHARE, strict=True)
    ]


def restated_source(args: argparse.Namespace, plan: Plan) -> str:
    """Examples made of the packages' text, as packed rows."""
    corpus.training_documents(args.corpus)
    file = args.folder / f"restated-{plan.restated}.jsonl"
    if not file.exists():
        logger.info("%s examples restate the text", f"{plan.restated:,}")
        text = [str(args.corpus / corpus.TRAIN)]
        restated.write(text, tokenizer_of(args), file, plan.restated, plan.max_length)
    return prepared(args, plan, file)


def prepared(args: argparse.Namespace, plan: Plan, file: Path) -> str:
    """The folder of a file's packed rows, which are made if they are not there."""
    made = Preparation(DataSource(str(file)), tokenizer_of(args), plan.max_length)
    return str(made.prepare(args.folder / "data").path)


def tokenizer_of(args: argparse.Namespace) -> Any:
    return open_tokenizer(Recipe(model=args.model, data=(), output_dir=args.folder))


def held_out_file(args: argparse.Namespace) -> Path:
    return args.folder / HELD_OUT


def recipe_of(plan: Plan, cell: Cell, args: argparse.Namespace, data: tuple[str, ...]) -> Recipe:
    """What `swiftkv train` is given for a student."""
    steps = cell.tokens // (plan.batch_size * plan.max_length)
    settings: dict[str, Any] = cell.program.options
    return Recipe(
        model=args.model,
        data=data,
        output_dir=args.folder / _name(args, cell),
        num_key_value_layers=cell.num_key_value_layers,
        generated_kv=cell.generated_kv,
        exact_tail=cell.exact_tail,
        calibration_tokens=plan.calibration_tokens,
        eval_data=str(held_out_file(args)),
        max_length=plan.max_length,
        batch_size=plan.batch_size,
        max_steps=steps,
        learning_rate=plan.learning_rate,
        remat=plan.remat,
        eval_steps=max(1, steps // (plan.evaluations + 1)) if plan.evaluations else None,
        eval_batches=plan.eval_batches,
        save_steps=max(8, steps // 16),
        save_total_limit=1,
        logging_steps=max(1, steps // 50),
        **settings,
    )


def describe_training(recipe: Recipe, config: Config) -> dict[str, Any]:
    """The device, the tokens of the start in closed form, and the trainer's held-out figures."""
    return {
        "device": jax.devices()[0].device_kind,
        "calibration_tokens": calibration_tokens(recipe, config),
        "evaluations": evaluations(recipe),
    }


def evaluations(recipe: Recipe) -> list[dict[str, Any]]:
    """The trainer's rows of held-out figures so far."""
    rows = read_metrics(recipe.output_dir / METRICS)
    return [row for row in rows if any(name.startswith("eval_") for name in row)]


if __name__ == "__main__":
    sys.exit(main())
