"""Options of the model that a command runs, and of the devices that it runs on. `model_loading`
loads it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, Literal, Self

from .. import demo
from ..errors import UsageError
from ..model.config import Quantization
from ..model.mesh_shape import MeshShape, parse_mesh
from ..pallas_kernels import Implementation
from .fields import given, option

DEFAULT_COMPILE_CACHE = "~/.cache/swiftkv-jax/compiled"
SWIFTKV_CHOICES = {"auto": None, "on": True, "off": False}
"""Values of --swiftkv, as the public functions take them."""
NO_CACHE = "none"
"""The value of --compile-cache that turns it off."""


revision = functools.partial(
    option, None, "branch, tag or commit of a model on the Hub (default: main)", metavar="NAME"
)
adapter = functools.partial(
    option,
    None,
    "LoRA adapter of PEFT to merge while weights are read: a directory or its name on the Hub",
    metavar="DIR",
)
coordinator_address = functools.partial(
    option,
    None,
    "address of process 0, unless Slurm, Open MPI, Cloud TPU or Kubernetes provide it",
    metavar="HOST:PORT",
)
num_processes = functools.partial(
    option,
    None,
    "with --coordinator-address; all run the same command, process 0 writes",
    metavar="N",
)
process_id = functools.partial(option, None, "with --coordinator-address", metavar="I")


@dataclasses.dataclass(frozen=True)
class HubOptions:
    """The options of a command that reads a model's files."""

    revision: str | None = revision()


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """The arguments of `distributed.join_processes`."""

    coordinator_address: str | None = coordinator_address()
    num_processes: int | None = num_processes()
    process_id: int | None = process_id()


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Options of loading: which model, how, and onto which devices. A field that is None is chosen
    for the checkpoint or the device."""

    model: str | os.PathLike[str] | None = option(
        None,
        "checkpoint: Hugging Face, Orbax, GGUF, or its name on the Hub (default: the demo model)",
        metavar="DIR",
        names=("--model", "-m"),
    )
    """Path or name as it was typed: a `Path` would lose the `./` that makes it a path."""
    revision: str | None = revision()
    adapter: str | os.PathLike[str] | None = adapter()
    swiftkv: str = option(
        "auto",
        "off runs the unmodified teacher (default: on if the checkpoint has it)",
        choices=SWIFTKV_CHOICES,
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = option(
        None,
        "dtype of weights and cache; auto is the checkpoint's (default: bfloat16 on "
        "accelerators, float32 on a CPU)",
    )
    quantization: Quantization | None = option(
        None, "format of the layers' matrices, made while they are read (default: as stored)"
    )
    mesh: MeshShape = option(
        MeshShape(),
        "devices over rows x devices over heads; on a CPU they are emulated",
        metavar="DATAxMODEL",
        convert=parse_mesh,
    )
    attention: Implementation | None = option(
        None,
        "implementation of attention, and xla also of experts (default: the one for the device)",
    )
    compile_cache: str | None = option(
        None,
        f"where compiled programs are kept, or {NO_CACHE} (default: {DEFAULT_COMPILE_CACHE})",
        metavar="DIR",
    )
    """None keeps none; a command without the flag keeps them in `DEFAULT_COMPILE_CACHE`."""
    coordinator_address: str | None = coordinator_address()
    num_processes: int | None = num_processes()
    process_id: int | None = process_id()

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """The options of a command line. Raises `UsageError` for an invalid mesh."""
        defaults: dict[str, Any] = {"compile_cache": DEFAULT_COMPILE_CACHE}
        options = cls(**defaults | given(cls, args))
        if options.compile_cache == NO_CACHE:
            return dataclasses.replace(options, compile_cache=None)
        return options

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

    @functools.cached_property
    def adapter_path(self) -> Path | None:
        """The adapter's directory. One on the Hub is downloaded. Raises `CheckpointError` if that
        fails."""
        from ..checkpoints.hub import local_path

        return None if self.adapter is None else local_path(self.adapter, weights=False)

    @property
    def name(self) -> str:
        """Name of the model: the one on the Hub, or that of its folder."""
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
