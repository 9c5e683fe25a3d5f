"""The main job on a real model: analyse the cuts of SmolLM2-135M-Instruct, calibrate the one that
is recommended, distil it for a while, and ask teacher and student about a long document. `make
demo-real` fetches the model and runs it, in less than 25 minutes on two cores.

    python -m examples.demo_real MODEL [FOLDER]

MODEL is a GGUF file, a folder or a name on the Hub, of any chat model. FOLDER must be new; the
default, runs/demo-real, is emptied first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import swiftkv_jax as skv
from examples.demo import aligned, request, run, seconds
from swiftkv_jax import cli
from swiftkv_jax.convert import main as convert
from swiftkv_jax.infer import Engine, EngineOptions
from swiftkv_jax.infer.text import encode_chat
from swiftkv_jax.plan.cost import prefill_flops
from swiftkv_jax.train.__main__ import main as train
from swiftkv_jax.train.data.sources import STDLIB
from swiftkv_jax.train.loss.quality import FarLoss
from swiftkv_jax.train.run.metrics import EVAL_FAR_NATS, EVAL_FAR_TOKENS
from swiftkv_jax.train.run.output_folder import EXPORT

DEFAULT_FOLDER = Path("runs/demo-real")
CALIBRATED = "--calibration-tokens 18432".split()
"""The fewest, 32 for each entry of SmolLM2's hidden state, to which a fit is not warned of."""
ANALYZED = "--groups 1 --generated-kv own".split()
EVALUATED = "--max-length 512 --batch-size 8 --eval-batches 2".split()
STEPS = 6
TRAINED = f"--learning-rate 5e-4 --remat none --max-steps {STEPS}".split()
FACTS = (
    "This chapter was written by Elena Vargas.",
    "The chapter was reviewed in the city of Lisbon.",
    "The code name of the next edition is Meridian.",
)
"""Sentences that stand at the beginning, in the middle and near the end of the document."""
QUESTIONS = {
    "Who wrote this chapter?": "Vargas",
    "In which city was the chapter reviewed?": "Lisbon",
    "What is the code name of the next edition?": "Meridian",
}
"""Each with what a right answer holds."""
NEW_TOKENS = 24
STAGES = {
    "inspect": 1,
    "analyse the cuts": 46,
    "calibrate the recommended one": 21,
    "distil it": 27,
    "ask the teacher about a document": 2,
    "ask the student": 3,
}
"""Stages and about how many hundredths of the time they take."""


class Answers(NamedTuple):
    """What a model answered, and how long it took."""

    texts: list[str]
    prompt_tokens: int
    prefill_seconds: float
    """Of the document and a question, without anything cached."""


class Stages:
    """The progress of the run: a heading for each stage, with a bar of what is behind it."""

    def __init__(self) -> None:
        self._began = dict[str, float]()

    def begin(self, name: str) -> None:
        """Print the heading of a stage of `STAGES`."""
        done = sum(STAGES[before] for before in self._began)
        self._began[name] = time.monotonic()
        bar = f"[{'#' * (done // 5):.<20}] {done:2}%"
        print(f"\n{bar}  {len(self._began)} of {len(STAGES)}: {name}", flush=True)

    def minutes(self) -> str:
        """How long everything and the stages took until now."""
        ends = [*self._began.values(), time.monotonic()]
        took = [(end - begin) / 60 for begin, end in itertools.pairwise(ends)]
        each = ", ".join(f"{name} {one:.1f}" for name, one in zip(self._began, took, strict=True))
        return f"{sum(took):.1f} minutes: {each}"


def analyze(model: str, output: Path) -> str:
    """Analyse the cuts of a model; returns the sentence that recommends one."""
    flags = ["--model", model, "--data", STDLIB, *ANALYZED, *CALIBRATED]
    run("train", train, "analyze", *flags, "--output-dir", str(output))
    return json.loads((output / "analysis.json").read_text())["recommendation"]["sentence"]


def calibrate(model: str, analysis: Path, output: Path) -> None:
    """Calibrate the recommended cut."""
    flags = ["--model", model, "--data", STDLIB, "--eval-data", STDLIB, *EVALUATED, *CALIBRATED]
    flags += ["--analysis", str(analysis), "--output-dir", str(output)]
    run("train", train, "calibrate", *flags)


def distil(model: Path, output: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Distil the calibrated student; returns its evaluations before and after."""
    flags = ["--model", str(model), "--data", STDLIB, "--eval-data", STDLIB, *EVALUATED, *TRAINED]
    run("train", train, *flags, "--output-dir", str(output))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval_student_perplexity" in row]
    return evaluations[0], evaluations[-1]


def document() -> str:
    """A chapter of Python's reference in English, about a thousand tokens, with the `FACTS`."""
    paragraphs = topics["objects"].split("\n\n")
    for place, fact in zip((1, len(paragraphs) // 2, -2), FACTS, strict=True):
        paragraphs.insert(place, fact)
    return "\n\n".join(paragraphs)


def ask(model: skv.Model, *, swiftkv: bool) -> Answers:
    """The answers to all `QUESTIONS` about the document, greedy, one after the other."""
    text = document()
    conversations = [
        encode_chat(
            model.tokenizer,
            [{"role": "user", "content": f"{text}\n\nQuestion: {question} Answer briefly."}],
        )
        for question in QUESTIONS
    ]
    longest = max(map(len, conversations)) + NEW_TOKENS
    options = EngineOptions(max_model_len=longest, max_num_seqs=1, chunks=(512,))
    engine = Engine.from_model(model, options, swiftkv=swiftkv)
    warm = [[1] * 600]  # the first chunk and step of a process are slower
    seconds(engine, warm, 2)
    took = seconds(engine, conversations[:1], 1)
    texts = []
    for prompt in conversations:
        stops = set(model.eos_token_ids)
        new = [id for _, out in engine.run([request(prompt, NEW_TOKENS)]) for id in out.token_ids]
        end = next((at for at, id in enumerate(new) if id in stops), len(new))
        texts.append(" ".join(model.tokenizer.decode(new[:end]).split()))
    return Answers(texts, len(conversations[0]), took)


def side_by_side(teacher: Answers, student: Answers) -> str:
    """What both answered to each question."""
    return "\n\n".join(
        f"{question}\n  teacher  {before}\n  student  {after}"
        for question, before, after in zip(QUESTIONS, teacher.texts, student.texts, strict=True)
    )


def table(
    student: skv.Model,
    evaluations: tuple[dict[str, Any], dict[str, Any]],
    answers: tuple[Answers, Answers],
) -> str:
    """What the student costs and loses beside its teacher."""
    config = student.config
    length = answers[0].prompt_tokens
    flops = [prefill_flops(config, length, swiftkv=flag) for flag in (False, True)]
    times = [each.prefill_seconds for each in answers]
    right = [
        sum(expected in text for text, expected in zip(a.texts, QUESTIONS.values(), strict=True))
        for a in answers
    ]
    perplexity = evaluations[0]["eval_teacher_perplexity"]
    lost = [
        f"{value:.3f}  ({value / perplexity - 1:+.2%})"
        for value in (row["eval_student_perplexity"] for row in evaluations)
    ]
    found = (FarLoss(int(row[EVAL_FAR_TOKENS]), row.get(EVAL_FAR_NATS)) for row in evaluations)
    far = [one.cell for one in found]
    rows: list[tuple[str, ...]] = [
        ("", "teacher", "student"),
        (
            f"prefill FLOPs, {length:,} tokens",
            *(f"{value / 1e9:.0f} G  ({value / flops[0]:.0%})" for value in flops),
        ),
        (
            f"prefill time, {length:,} tokens",
            *(f"{value:.2f} s  ({value / times[0]:.0%})" for value in times),
        ),
        ("held-out perplexity, calibrated", f"{perplexity:.3f}", lost[0]),
        (f"the same after {STEPS} steps", f"{perplexity:.3f}", lost[1]),
        ("nats lost on far tokens, calibrated", "", far[0]),
        (f"the same after {STEPS} steps", "", far[1]),
        ("answers that are right", *(f"{count} of {len(QUESTIONS)}" for count in right)),
    ]
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF file, folder, or name on the Hub")
    parser.add_argument(
        "folder", nargs="?", type=Path, help=f"where everything goes (default: {DEFAULT_FOLDER})"
    )
    args = parser.parse_args()
    folder = args.folder or DEFAULT_FOLDER
    if folder == DEFAULT_FOLDER:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        sys.exit(f"error: {folder} exists already")

    analysis, calibrated, distilled = (
        folder / name for name in ("analysis", "calibrated", "distilled")
    )
    stages = Stages()
    stages.begin("inspect")
    run("convert", convert, "inspect", args.model)
    stages.begin("analyse the cuts")
    sentence = analyze(args.model, analysis)
    stages.begin("calibrate the recommended one")
    calibrate(args.model, analysis, calibrated)
    stages.begin("distil it")
    evaluations = distil(calibrated / EXPORT, distilled)
    stages.begin("ask the teacher about a document")
    teacher = ask(skv.load(args.model), swiftkv=False)
    stages.begin("ask the student")
    model = skv.load(distilled / EXPORT)
    student = ask(model, swiftkv=True)
    print(f"\n{sentence}\n\n{side_by_side(teacher, student)}")
    print(f"\n{table(model, evaluations, (teacher, student))}")
    print(f"\n{stages.minutes()}; everything is in {folder}")
    return cli.OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
