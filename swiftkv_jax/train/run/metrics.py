"""The metrics of a run: one row of numbers per logged step and per evaluation.

`metrics.jsonl` is always written; a resumed run and the report read it. TensorBoard and Weights &
Biases get the same rows on request. The numbers of a step are read after the next step has been
started, so that the devices do not wait for the host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import DivergenceError
from ...process.distributed import is_main_process
from ...process.files import write_atomic
from ..loss.quality import FarLoss, PerplexityLoss, StudentLoss
from ..recipe import Recipe, report_package
from .progress import Progress
from .step import learning_rate

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
EVAL_LOSS = "eval_loss"
"""Name of the held-out loss in a row."""
EVAL_FAR_NATS = "eval_far_nats"
"""Name of the nats lost on held-out far tokens, see `far_tokens`."""
EVAL_FAR_KL = "eval_far_kl"
"""Name of the KL divergence from the teacher there."""
EVAL_PERPLEXITY_ERROR = "eval_perplexity_loss_error"
"""Name of the standard error of the share of the teacher's perplexity that is lost."""
EVAL_FAR_TOKENS = "eval_far_tokens"
"""Name of their number."""


class MetricsLog:
    """The rows of a run, in every place named in `report_to`. Only process 0 of several writes.

    A resumed run continues after `first_step`: rows of later steps by an earlier attempt are
    removed, so that there is one row for each step. None keeps every row.

    Rows may hold device scalars; writing such a row waits for them.
    """

    def __init__(self, folder: Path, *, first_step: int | None, report_to: Sequence[str]):
        self._sinks: list[_JsonLines | _TensorBoard | _WeightsAndBiases] = []
        if is_main_process():
            self._sinks.append(_JsonLines(folder / METRICS, first_step))
            if "tensorboard" in report_to:
                self._sinks.append(_TensorBoard(folder / "tensorboard", first_step))
            if "wandb" in report_to:
                self._sinks.append(_WeightsAndBiases(folder))

    def write(self, row: dict[str, Any]) -> None:
        """A row with its "step". Names of held-out numbers begin with `eval_`."""
        if self._sinks:
            row = {
                name: value if isinstance(value, int | str) else float(value)
                for name, value in row.items()
            }
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, in order. A last line that is still being written is left
    out."""
    return [row for _, row in _complete_rows(path)]


def loss_of(row: Mapping[str, Any]) -> StudentLoss:
    """The loss in an evaluation's row."""
    share = row["eval_student_perplexity"] / row["eval_teacher_perplexity"] - 1
    return StudentLoss(
        PerplexityLoss(share, row.get(EVAL_PERPLEXITY_ERROR)),
        FarLoss(int(row.get(EVAL_FAR_TOKENS, 0)), row.get(EVAL_FAR_NATS), row.get(EVAL_FAR_KL)),
    )


def _complete_rows(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


class _JsonLines:
    """Keeps the rows up to the step that a resumed run starts from, with the evaluation of that
    step if it was made before the step was saved."""

    def __init__(self, path: Path, first_step: int | None):
        kept = []
        if path.exists():
            kept = [line for line, row in _complete_rows(path) if _is_kept(row, first_step)]
        write_atomic(path, "".join(kept).encode())
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _is_kept(row: dict[str, Any], first_step: int | None) -> bool:
    return first_step is None or 0 < first_step and row["step"] <= first_step


class _TensorBoard:
    """Event files in one folder, one for each start of the run. In older files TensorBoard skips
    the steps from `purge_step` on."""

    def __init__(self, folder: Path, first_step: int | None):
        purge_step = first_step and first_step + 1
        suffix = f".{first_step}"  # two attempts in one second would otherwise share a file
        self._writer = report_package("tensorboard").SummaryWriter(
            str(folder), purge_step=purge_step, filename_suffix=suffix
        )

    def write(self, row: dict[str, Any]) -> None:
        for name, value in _grouped(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()  # a killed run must not lose rows that the JSON lines have

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run for all attempts: its id is kept in the run's folder. W&B leaves out steps that
    it has already."""

    def __init__(self, folder: Path):
        wandb = report_package("wandb")
        kept_id = folder / "wandb_id"
        known = kept_id.read_text().strip() if kept_id.exists() else None
        self._run = wandb.init(
            project="swiftkv-jax", name=folder.name, dir=str(folder), id=known, resume="allow"
        )
        kept_id.write_text(self._run.id + "\n")

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(_grouped(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _grouped(row: dict[str, Any]) -> dict[str, Any]:
    """Names as both boards group them: `train/loss`, `eval/agreement`."""
    values = {name: value for name, value in row.items() if name != "step"}
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": v
        for name, v in values.items()
    }


# Recording --------------------------------------------------------------------


class _UnreadStep(NamedTuple):
    """A step whose numbers have not been read yet."""

    step: int
    values: dict[str, jax.Array]
    row_ids: list[str]


class MetricsRecorder:
    """Writes metrics, shows progress, and checks that the loss of every step is finite. The numbers
    of a step are read one step late."""

    def __init__(
        self,
        recipe: Recipe,
        progress: Progress,
        *,
        first_step: int,
        steps: int,
        newest_saved: Callable[[], int | None],
    ):
        """`newest_saved` returns the newest step that can be continued from, None for none."""
        self._recipe = recipe
        self._progress = progress
        self._steps = steps
        self._newest_saved = newest_saved
        self._rate = learning_rate(recipe, steps)
        self._unread: _UnreadStep | None = None
        self.held_out_losses = held_out_losses(recipe.output_dir / METRICS, first_step)
        """Step -> loss of every evaluation so far, those before a restart included."""
        self._log = MetricsLog(recipe.output_dir, first_step=first_step, report_to=recipe.report_to)

    def is_logged(self, step: int) -> bool:
        """True if the numbers of a step are written."""
        return step % self._recipe.logging_steps == 0 or step == self._steps

    def record(self, step: int, values: dict[str, jax.Array], row_ids: list[str]) -> None:
        """Call this when `step` has been started: it reads the step before. Raises
        `DivergenceError` if the loss or the gradient of that one is not finite."""
        self._progress.advance(values["loss"])
        self.flush()
        self._unread = _UnreadStep(step, values, row_ids)

    def flush(self) -> None:
        """Read the last step now: the state of a step that diverged must not be saved or exported.
        Raises `DivergenceError`."""
        if self._unread is None:
            return
        unread = self._unread
        self._unread = None
        numbers = self._read(unread)
        if self.is_logged(unread.step):
            useful = numbers.pop("tokens") / (self._recipe.batch_size * self._recipe.max_length)
            numbers["learning_rate"] = float(jnp.asarray(self._rate(unread.step - 1)))
            speed = self._progress.report(unread.step, numbers, useful_share=useful)
            self._log.write({"step": unread.step} | numbers | speed)

    def _read(self, unread: _UnreadStep) -> dict[str, float]:
        numbers = {name: float(value) for name, value in unread.values.items()}
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            rows = ", ".join(unread.row_ids[:8]) + (", ..." if len(unread.row_ids) > 8 else "")
            saved = self._newest_saved()
            before = (
                f"{self._recipe.output_dir} holds no checkpoint from before"
                if saved is None
                else f"the newest checkpoint in {self._recipe.output_dir} is that of step {saved}"
            )
            raise DivergenceError(
                f"step {unread.step}: loss {numbers['loss']}, gradient norm "
                f"{numbers['grad_norm']} on batch {unread.step - 1} (rows {rows}); {before}"
            )
        return numbers

    def record_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Held-out numbers of the state after `step`, with names that begin with `eval_`."""
        shown = [
            f"{_in_words(name)} {value:.4f}"
            for name, value in results.items()
            if name not in (EVAL_FAR_TOKENS, EVAL_FAR_NATS, EVAL_FAR_KL, EVAL_PERPLEXITY_ERROR)
        ]
        if EVAL_FAR_NATS in results:
            shown.append(f"far KL {results[EVAL_FAR_KL]:.4f}")
            shown.append(f"far nats {loss_of(results).far}")
        logger.info("step %d: held-out %s", step, "  ".join(shown))
        self._log.write({"step": step} | results)
        self.held_out_losses[step] = results[EVAL_LOSS]

    def close(self) -> None:
        """Close all outputs. A last step that was not read is not written, as after a kill."""
        with contextlib.closing(self._log):
            self._progress.close()


def _in_words(name: str) -> str:
    words = {"eval_kl": "KL", "eval_logits_loss": "distillation loss"}
    return words.get(name, name.removeprefix("eval_").replace("_", " "))


def held_out_losses(path: Path, first_step: int) -> dict[int, float]:
    """Step -> held-out loss, of the rows that a run keeps which continues after `first_step`."""
    if not path.exists():
        return {}
    return {
        row["step"]: row[EVAL_LOSS]
        for row in read_metrics(path)
        if EVAL_LOSS in row and _is_kept(row, first_step)
    }
