"""Joining the processes of a job: one process per host, all of them running the same program over
one mesh."""

from __future__ import annotations

import importlib.util
import os

import jax
from jax.sharding import Mesh

from .errors import UsageError

# How many processes a launcher has started. Not SLURM_NTASKS: a script or shell in an allocation
# has that too, on its own.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# The hosts of a TPU slice on GKE, separated by commas, and where to read them or to meet the hosts
# of other slices.
_HOSTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_MEETING_PLACES = ("TPU_PROCESS_ADDRESSES_PATH", "MEGASCALE_COORDINATOR_ADDRESS")


def join_processes(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> int:
    """Connect to the other processes, if there are any; returns how many there are, as far as the
    launcher said, else 1.

    Recognised, and left to JAX to ask for the rest: Slurm (`srun`), Open MPI (`mpirun`), GKE with
    TPUs, Cloud TPU, and Indexed Jobs and JobSets of Kubernetes where `jax[k8s]` is installed. The
    arguments, all three, are for anything else. Must run before JAX touches a device. Raises
    `UsageError` for some of the arguments without the others, and if the others cannot be reached.
    """
    given = (coordinator, num_processes, process_id)
    if any(value is not None for value in given) and None in given:
        raise UsageError("--coordinator-address, --num-processes and --process-id go together")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise UsageError(f"--coordinator-address {coordinator!r}: expected HOST:PORT")
    if coordinator is None and not _is_one_of_several():
        return 1
    # Ours finishes the step, saves and exits on SIGTERM. JAX's would swallow one that comes before
    # the first step.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError, OSError) as error:
        raise UsageError(
            f"cannot join the other processes: {str(error).splitlines()[0]}"
        ) from error
    return num_processes or _announced()


def check_all_take_part(mesh: Mesh) -> None:
    """Raise `UsageError` if a process has no device in `mesh`: it could not compute, and the others
    would wait for it."""
    left_out = jax.process_count() - len({device.process_index for device in mesh.devices.flat})
    if left_out:
        raise UsageError(
            f"--mesh takes {mesh.size} of {jax.device_count()} devices, none of them in "
            f"{left_out} of the {jax.process_count()} "
            "processes; use all, for example with --mesh=-1x1"
        )


def _announced() -> int:
    return max((int(os.environ[name]) for name in _COUNTS if name in os.environ), default=1)


def _is_one_of_several() -> bool:
    several_hosts = any("," in os.environ.get(name, "") for name in _HOSTS) or any(
        name in os.environ for name in _MEETING_PLACES
    )
    return _announced() > 1 or several_hosts or _is_on_cloud_tpu() or _is_indexed_job()


def _is_on_cloud_tpu() -> bool:
    """Whether JAX, when it was imported, found TPU chips and a metadata server that knows all hosts
    of the slice, one or more."""
    return "TPU_ML_PLATFORM" in os.environ and "TPU_SKIP_MDS_QUERY" not in os.environ


def _is_indexed_job() -> bool:
    """Whether JAX can ask Kubernetes, which sets the index but not the number of pods."""
    return (
        "KUBERNETES_SERVICE_HOST" in os.environ
        and "JOB_COMPLETION_INDEX" in os.environ
        and importlib.util.find_spec("kubernetes") is not None
    )
