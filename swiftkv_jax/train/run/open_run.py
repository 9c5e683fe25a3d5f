"""The beginning that training and calibration share: devices, cut, output folder, data, model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from ...checkpoints import open_any
from ...checkpoints.source import Source
from ...checkpoints.training_run import EXPORT
from ...kernel_check import KernelConfig, checked_implementation
from ...model.config import Config
from ...model.mesh import MeshShape, make_mesh
from ...model.model import Model
from ...process.distributed import check_all_take_part
from ..analysis.chosen_cut import with_cut
from ..data.loader import DatasetMixture
from ..run_options import RunOptions
from .setup import cut_model, load_data, load_model, open_tokenizer, source_dtype


class OpenRun[T: RunOptions](NamedTuple):
    """Options, model and data that a run works with."""

    options: T
    """Options with numbers in the place of -1 and None: the mesh, the cut if one was recommended,
    and the implementation of attention, which was checked."""
    mesh: Mesh
    source: Source
    """The checkpoint."""
    model: Model
    """Model at the cut of the options, with the checkpoint's delta if it has this cut."""
    data: DatasetMixture
    eval_data: DatasetMixture | None
    export_dtype: jnp.dtype

    @property
    def exported(self) -> Path:
        """The folder of the exported model."""
        return self.options.output_dir / EXPORT


def open_run[T: RunOptions](
    options: T,
    check: Callable[[T, Source, Config], None],
    kernels: Callable[[Config, jnp.dtype, Mesh], Sequence[KernelConfig]],
) -> OpenRun[T]:
    """Set up everything that comes before the first computation, in a folder that is held.

    `check` raises for options, a checkpoint and an architecture at its cut that do not go together,
    before data and weights are read. `kernels` are the configurations of kernels that the run
    needs. With several processes, all of them call this. Raises `UsageError`, `DataError`,
    `CheckpointError` or `OutOfMemoryError`.
    """
    mesh = make_mesh(options.mesh)
    check_all_take_part(mesh)
    # The options are checked again, now that -1 is a number.
    options = dataclasses.replace(options, mesh=MeshShape(*mesh.devices.shape))
    source = open_any(options.model)
    options = with_cut(options, source, mesh)
    config = cut_model(options, source.config)
    check(options, source, config)
    data, eval_data = load_data(options, open_tokenizer(options))
    model = load_model(options, config, mesh)
    needed = kernels(config, model.dtype, mesh)
    attention = checked_implementation(options.attention, needed, mesh.local_devices[0])
    options = dataclasses.replace(options, attention=attention)
    return OpenRun(options, mesh, source, model, data, eval_data, source_dtype(model))
