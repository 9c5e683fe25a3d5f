"""Options that training and calibration share, each with its flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from ..cli.fields import MISSING, check_options, option
from ..cli.model_options import revision
from ..errors import UsageError
from ..model.config import GeneratedKV
from ..model.mesh_shape import MeshShape, parse_mesh
from ..pallas_kernels import Implementation
from ..plan.presets import PRESETS

Init = Literal["closed-form", "leader", "authors"]
"""The start of a fresh delta; see `initialization.Start` for the last two."""


def steering[T](default: T, help: str, **how: Any) -> T:
    """`option` for a field that steers the updates: a run continues only with the same value (see
    `setup.fingerprint`). The others may change when a run is continued: their results are in the
    fingerprint (weights, cut, data, number of steps), or they change only rounding, or what is
    saved, reported and exported."""
    return option(default, help, metadata={"steers": True}, **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A model and its cut, data, an output folder, rows and devices. Raises `UsageError` for values
    that no run can have."""

    model: str = option(
        MISSING,
        "checkpoint: Hugging Face, Orbax, GGUF, or its name on the Hub; with --dry-run also one "
        f"of {', '.join(PRESETS)} (default: demo)",
        group="model and data",
    )
    revision: str | None = revision()
    num_key_value_layers: int | None = option(
        None,
        "layers that keep their own keys and values (default: as in the model's delta, or as an "
        "analysis of the data recommends; demo: half)",
        metavar="K",
        at_least=1,
    )
    """None: as in the model's delta, or as an analysis of the data recommends, see
    `chosen_cut`."""
    analysis: str | None = option(None, "take the cut that this one recommends", metavar="DIR")
    """Folder of an analysis, whose recommendation the fields of the cut that are None come from."""
    key_value_group_size: int | None = option(
        None,
        "upper layers that share one key/value cache, AcrossKV (default: as in the model's delta, "
        "or 1)",
        metavar="G",
        at_least=1,
    )
    prompt_attention_layers: int | None = option(
        None,
        "upper layers, the first ones, of which prompts run the attention, with a linear map in "
        "place of the MLP (default: as in the model's delta, or 0)",
        metavar="M",
    )
    prompt_mlp_neurons: int | None = option(
        None,
        "neurons of each of their MLPs that prompts run beside the map (default: as in the "
        "model's delta, or 0)",
        metavar="N",
    )
    boundary_taps: int | None = option(
        None,
        "1: keys come from the hidden states of a token and of the one before it (default: as in "
        "the model's delta, or 0)",
        choices=(0, 1),
    )
    generated_kv: GeneratedKV | None = option(
        None,
        "own: make, measure and export a student whose generated tokens keep each upper layer's "
        "own keys and values (default: as the model says)",
    )
    exact_tail: int | None = option(
        None,
        "with --generated-kv own: also the last W tokens of a prompt (default: as the model)",
        metavar="W",
    )
    exact_head: int | None = option(
        None,
        "1: the first token of a text runs through all layers and keeps its own keys and values, "
        "an attention sink (default: as the model)",
        choices=(0, 1),
    )
    data: tuple[str, ...] = option(
        MISSING,
        "JSONL, JSON, Parquet or ArrayRecord (rows of messages, prompt and completion, "
        "conversations, instruction and output, or text), text files, a Hugging Face dataset "
        "folder, a folder of such files, a pattern, a prepared folder, or `stdlib`, the source of "
        "Python's standard library, which is always here; repeat to mix, by weight",
        metavar="PATH[:WEIGHT]",
    )
    eval_data: str | None = option(None, "held-out data, in the same forms", metavar="PATH")
    eval_batches: int = option(
        16, "batches of --eval-data used, of --batch-size (default: %(default)s)", at_least=1
    )
    init: Init = "closed-form"
    """Start of the delta if the checkpoint has none at this cut."""
    calibration_tokens: int | None = option(
        None,
        "tokens for a start in closed form (default: 256 per entry of the hidden state, on a CPU "
        "at most 32,768 or 32 per entry)",
        metavar="N",
        at_least=1,
    )
    max_length: int = steering(
        8192, "tokens in a packed row (default: %(default)s; demo: %(demo)s)", at_least=1
    )
    max_unreadable_share: float = option(
        0.01,
        "share of unreadable rows in a source above which the command stops (default: %(default)s)",
        metavar="SHARE",
    )
    output_dir: Path = option(
        MISSING,
        "the exported model, checkpoints, metrics, reports and prepared data (demo: %(demo)s)",
    )
    batch_size: int = steering(
        8,
        "rows in an optimiser step, over all devices (default: %(default)s)",
        group="optimisation",
        at_least=1,
    )
    gradient_accumulation_steps: int = 1
    seed: int = steering(0, "seed of the data order (default: %(default)s)")
    mesh: MeshShape = option(
        MeshShape(),
        "or data=2,fsdp=4,model=2; -1 is the rest; emulated on a CPU (default: %(default)s)",
        metavar="DATAxMODEL",
        convert=parse_mesh,
        group="machine",
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        None, "dtype of the weights (default: bfloat16 on accelerators, float32 on a CPU)"
    )
    """The frozen weights' and the arithmetic's; a delta in training is float32."""
    shard_sequence: bool = False
    attention: Implementation | None = None
    """None: chosen for the device when the model is read."""

    def __post_init__(self):
        check_options(self)
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"`seed`={self.seed}: must be from 0 to {2**32 - 1}", option="seed")
        check_share("max_unreadable_share", self.max_unreadable_share)
        check_calibration_tokens(self.calibration_tokens, self.init)
        parts = self.gradient_accumulation_steps
        if self.batch_size % parts:
            raise UsageError(
                f"`batch_size`={self.batch_size} must be a multiple of "
                f"`gradient_accumulation_steps`={parts}"
            )
        if self.micro_batch_size % self.mesh.rows:
            divided = f" in {parts} micro-batches" if parts > 1 else ""
            raise UsageError(
                f"`batch_size`={self.batch_size}{divided} must be a multiple of the "
                f"{self.mesh.rows} data devices of `mesh`",
                option="batch_size",
            )

    @property
    def micro_batch_size(self) -> int:
        """Rows in a micro-batch, over all devices."""
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def eval_micro_batches(self) -> int:
        """Micro-batches of held-out rows in an evaluation."""
        return self.eval_batches * self.gradient_accumulation_steps


def check_calibration_tokens(tokens: int | None, init: Init) -> None:
    """Raise `UsageError` for a number of tokens that no start of `init` is fitted to."""
    if tokens is not None and init != "closed-form":
        raise UsageError(
            f"`calibration_tokens`={tokens} needs `init`=closed-form, and it is {init}"
        )


def check_share(name: str, value: float) -> None:
    """Raise `UsageError` for a share of one or more."""
    if not 0 <= value < 1:
        raise UsageError(f"`{name}`={value}: must be from 0 to below 1", option=name)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The flags that ask for a plan in the place of a run. Raises `UsageError` for half of them."""

    dry_run: bool = option(
        False,
        "print memory, operations and predicted times, from config.json alone",
        group="machine",
    )
    topology: str | None = option(
        None,
        "with --dry-run: compile for h100:8, h200:1, v5p:2x2x1, v6e:4x4, ... without having it",
        metavar="NAME",
    )

    def __post_init__(self):
        if self.topology and not self.dry_run:
            raise UsageError("`topology` goes with `dry_run`: a run uses the devices that are here")


_NEEDS = {
    "speculator_steps": "speculator",
    "speculator_learning_rate": "speculator",
    "eval_batches": "eval_data",
}
"""Options that do nothing without another."""
_NEEDED = {"data": "`data` (a path, or stdlib)", "output_dir": "`output_dir`"}
"""Options that a model needs unless it is the demo's."""


def make_options[T: RunOptions](given: dict[str, Any], *, demo: T, dry_run: bool) -> T:
    """The `given` fields over those of `demo` where no model is named, else over the defaults of
    its class. Raises `UsageError` for what is missing, and for what does nothing."""
    options = _make_options(given, demo=demo, dry_run=dry_run)
    for name, other in _NEEDS.items():
        if name in given and getattr(options, other) is None:
            raise UsageError(f"`{name}`={given[name]} needs `{other}`", option=name)
    return options


def _make_options[T: RunOptions](given: dict[str, Any], *, demo: T, dry_run: bool) -> T:
    if "analysis" in given:
        demo = dataclasses.replace(demo, num_key_value_layers=None)
    if "max_steps" in given and "num_train_epochs" in given:
        raise UsageError("give `max_steps` or `num_train_epochs`, not both")
    if "model" not in given:
        if "revision" in given:
            raise UsageError(f"`revision`={given['revision']} goes with `model`")
        if "num_train_epochs" in given:
            given = given | {"max_steps": None}  # the demo's own number of steps
        if "data" in given and "eval_data" not in given:
            given = given | {"eval_data": None}  # the demo's held-out text belongs to its data
        return dataclasses.replace(demo, **given)
    model = given["model"]
    if dry_run:  # needs the model's config only
        given = {"data": (), "output_dir": Path(".")} | given
    elif model in PRESETS and not Path(model).exists():
        raise UsageError(
            f"`model`={model}: the name of a shape, for `dry_run` only; name a checkpoint directory"
        )
    elif missing := [text for name, text in _NEEDED.items() if name not in given]:
        raise UsageError(f"`model` also needs {' and '.join(missing)}")
    options = type(demo)(**given)  # what is wrong with it is said before a download
    from ..checkpoints.hub import local_path  # imports JAX

    path = local_path(model, options.revision, weights=not dry_run)
    return dataclasses.replace(options, model=str(path))
