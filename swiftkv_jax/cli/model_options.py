"""The model that a command runs, and the devices that it runs on: the arguments. `model_loading`
loads it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .. import demo
from ..errors import UsageError
from ..model.mesh_shape import MeshShape, parse_mesh
from ..pallas_kernels import IMPLEMENTATIONS, Implementation

if TYPE_CHECKING:
    from ..checkpoints.source import Quantization

DEFAULT_COMPILE_CACHE = "~/.cache/swiftkv-jax/compiled"
SWIFTKV_CHOICES = {"auto": None, "on": True, "off": False}
"""Values of --swiftkv, as the public functions take them."""
NO_CACHE = "none"
"""The value of --compile-cache that turns it off."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """What to load, how, and onto which devices. A field that is None is chosen for the checkpoint
    or the device."""

    model: str | os.PathLike[str] | None = None
    """Checkpoint directory, GGUF file, or a name on the Hub, as it was typed: a `Path` would lose
    the `./` that makes it a path. None is the demo model."""
    swiftkv: str = "auto"
    """A key of `SWIFTKV_CHOICES`."""
    dtype: str | None = None
    """`auto` is the checkpoint's."""
    quantization: Quantization | None = None
    mesh: MeshShape = MeshShape()
    attention: Implementation | None = None
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    compile_cache: str | None = None
    """Folder of compiled programs; None keeps none."""
    revision: str | None = None
    """Of a model on the Hub."""

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

    @functools.cached_property
    def path(self) -> Path:
        """The checkpoint directory; of the output folder of a run or a calibration, the exported
        model. A model on the Hub is downloaded. Raises `CheckpointError` if that fails."""
        from ..checkpoints.hub import local_path
        from ..checkpoints.training_run import exported_model

        if self.model is None:
            if self.revision is not None:
                raise UsageError(f"`revision`={self.revision} goes with `model`")
            return demo.SWIFTKV
        return exported_model(local_path(self.model, self.revision))

    @property
    def name(self) -> str:
        """What the model is called: its name on the Hub, or that of its folder."""
        from ..checkpoints.hub import is_repository, repository_of

        if self.model is not None and is_repository(self.model):
            return str(self.model)
        path = self.path.resolve()
        repository = repository_of(path)
        return path.name if repository is None else repository[0]

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
        metavar="DIR",
        required=not demo,
        help=f"checkpoint: Hugging Face, Orbax, GGUF, or its name on the Hub{default}",
    )
    add_revision(parser)
    add(
        "--swiftkv",
        choices=SWIFTKV_CHOICES,
        default="auto",
        help="off runs the unmodified teacher (default: on if the checkpoint has it)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of weights and cache; auto is the checkpoint's (default: bfloat16 on "
        "accelerators, float32 on a CPU)",
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


def add_revision(parser: argparse._ActionsContainer) -> None:
    """The argument `revision` of `checkpoints.hub.local_path`."""
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the Hub (default: main)",
    )


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
