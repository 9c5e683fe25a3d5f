"""The model that a command runs, and the devices that it runs on: the arguments, and loading it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import Mesh

from .. import demo
from ..errors import CheckpointError, UsageError
from ..mesh import MeshShape, parse_mesh
from ..model import Model
from ..pallas_kernels import IMPLEMENTATIONS, Implementation
from .devices import DEFAULT_COMPILE_CACHE, setup_devices

if TYPE_CHECKING:
    from ..checkpoints.source import Quantization, Source

logger = logging.getLogger(__name__)

SWIFTKV_CHOICES = {"auto": None, "on": True, "off": False}
"""Values of --swiftkv, as the public functions take them."""
NO_CACHE = "none"
"""The value of --compile-cache that turns it off."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """What to load, how, and onto which devices. A field that is None is chosen for the checkpoint
    or the device."""

    model: Path | None = None
    """Checkpoint directory; None is the demo model."""
    swiftkv: str = "auto"
    """A key of `SWIFTKV_CHOICES`."""
    dtype: str | None = None
    quantization: Quantization | None = None
    mesh: MeshShape = MeshShape()
    attention: Implementation | None = None
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    compile_cache: str | None = None
    """Folder of compiled programs; None keeps none."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Make options from the arguments of `add_model_arguments`. Raises `UsageError` for an
        invalid mesh."""
        names = (field.name for field in dataclasses.fields(cls))
        given: dict[str, Any] = {name: getattr(args, name, None) for name in names}
        given["mesh"] = parse_mesh(given["mesh"] or "1x1")
        given["swiftkv"] = given["swiftkv"] or "auto"
        if given["compile_cache"] == NO_CACHE:
            given["compile_cache"] = None
        return cls(**given)

    @property
    def path(self) -> Path:
        """The checkpoint directory; of the output folder of a run or a calibration, the exported
        model."""
        from ..checkpoints.training_run import exported_model

        return demo.SWIFTKV if self.model is None else exported_model(self.model)

    @property
    def uses_swiftkv(self) -> bool | None:
        """True runs the student, False the teacher, None the student if there is one."""
        return SWIFTKV_CHOICES[self.swiftkv]


def add_model_arguments(parser: argparse._ActionsContainer, *, demo: bool = True) -> None:
    """The fields of `ModelOptions`. With `demo`, the demo model is the default; else --model is
    required."""
    add, default = parser.add_argument, " (default: the demo model)" if demo else ""
    add(
        "--model",
        "-m",
        type=Path,
        metavar="DIR",
        required=not demo,
        help=f"checkpoint, Hugging Face or Orbax{default}",
    )
    add(
        "--swiftkv",
        choices=SWIFTKV_CHOICES,
        default="auto",
        help="off runs the unmodified teacher (default: on if the checkpoint has it)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights and cache (default: bfloat16 on accelerators, float32 on a CPU)",
    )
    add(
        "--quantization",
        choices=("none", "fp8", "int8"),
        help="format of the layers' matrices, made while they are read (default: as stored)",
    )
    add(
        "--mesh",
        metavar="DATAxMODEL",
        default="1x1",
        help="devices over rows x devices over heads; on a CPU they are emulated",
    )
    add(
        "--attention",
        choices=IMPLEMENTATIONS,
        help="implementation of attention, and xla also of experts (default: the one for the "
        "device)",
    )
    add(
        "--compile-cache",
        metavar="DIR",
        default=DEFAULT_COMPILE_CACHE,
        help=f"where compiled programs are kept, or {NO_CACHE} (default: {DEFAULT_COMPILE_CACHE})",
    )
    add_process_arguments(parser)


def add_process_arguments(parser: argparse._ActionsContainer) -> None:
    """The arguments of `distributed.join_processes`, to a parser or a group of its arguments."""
    add = parser.add_argument
    add(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="address of process 0, unless Slurm, Open MPI, Cloud TPU or Kubernetes provide it",
    )
    add(
        "--num-processes",
        type=int,
        metavar="N",
        help="with --coordinator-address; all run the same command, process 0 writes",
    )
    add("--process-id", type=int, metavar="I", help="with --coordinator-address")


def load_model(options: ModelOptions) -> tuple[Model, Mesh | None]:
    """The model on its devices, which are set up first, and their mesh if there are several.

    Raises `UsageError` and `CheckpointError`.
    """
    mesh = setup_model_devices(options)
    return read_model(options, mesh), mesh


def open_model(options: ModelOptions) -> Source:
    """Open the checkpoint without its weights, before the devices are set up. Most user errors are
    found here. Raises `UsageError` and `CheckpointError`."""
    from ..checkpoints import open_any

    _check_demo(options)
    source = open_any(options.path)
    _check_parts(options, source.has_delta, source.has_teacher)
    return source


def setup_model_devices(options: ModelOptions) -> Mesh | None:
    """The devices of `load_model`, as `setup_devices` returns them. Raises `UsageError`, and
    `CheckpointError` if there is no demo model."""
    _check_demo(options)
    return setup_devices(
        options.mesh,
        coordinator_address=options.coordinator_address,
        num_processes=options.num_processes,
        process_id=options.process_id,
        compile_cache=options.compile_cache,
    )


def read_model(options: ModelOptions, mesh: Mesh | None) -> Model:
    """The model on devices that are set up. Raises `UsageError` if it cannot run as `swiftkv` says,
    and `CheckpointError`."""
    from ..checkpoints import load  # after the devices are set up

    path = options.path
    model = load(path, dtype=options.dtype, mesh=mesh, quantization=options.quantization)
    _check_parts(options, model.swiftkv is not None, model.llama.upper_qkv is not None)
    logger.info("%s: %s", path, describe(model, model.uses_swiftkv(options.uses_swiftkv)))
    _check_tokenizer(model, path)
    return model


def _check_demo(options: ModelOptions) -> None:
    if options.model is None and not (options.path / "config.json").exists():
        raise CheckpointError(
            f"the demo model is not in this installation ({options.path}): name one with `model`"
        )


def _check_parts(options: ModelOptions, has_delta: bool, has_teacher: bool) -> None:
    """Raise `UsageError` if a model cannot run as `swiftkv` says."""
    if options.uses_swiftkv is True and not has_delta:
        raise UsageError(f"`swiftkv`=on: {options.path} has no SwiftKV weights")
    if options.uses_swiftkv is False and not has_teacher:
        raise UsageError(
            f"`swiftkv`=off: {options.path} has no teacher: its upper q, k, v were dropped"
        )


def describe(model: Model, swiftkv: bool) -> str:
    """One line for people: how many layers run for prompts, the weights' type, and the devices."""
    config = model.config
    if swiftkv:
        mode = (
            f"SwiftKV, prompts run {config.num_lower_layers} of {config.num_layers} layers, "
            f"{config.num_cache_layers} layers of KV"
        )
    else:
        kind = config.family if model.swiftkv is None else "teacher"
        mode = f"{kind}, {config.num_layers} layers"
    weights = "" if model.quantization is None else f", {model.quantization}"
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return f"{mode}; {model.dtype}{weights} on {device}"


def _check_tokenizer(model: Model, path: Path) -> None:
    """Raise `CheckpointError` for a vocabulary larger than the model's: it is another model's.

    Tokens added to it, such as one for padding that no prompt ever holds, are common, and work: a
    prompt that does hold one is refused by name.
    """
    if model.tokenizer is None:
        return
    base, known = model.tokenizer.vocab_size, model.config.vocab_size
    if base > known:
        raise CheckpointError(
            f"{path}: the tokenizer has {base} tokens, the model {known}: these are files of "
            f"different models"
        )
    if (added := len(model.tokenizer) - known) > 0:
        logger.warning(
            "%s: the tokenizer adds %d tokens that the model does not have; prompts with "
            "them are refused",
            path,
            added,
        )
