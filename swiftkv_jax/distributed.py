"""Joining the processes of a job: one process per host, all of them running the same program over one mesh."""

from __future__ import annotations

import os

import jax

from .errors import UsageError

# Variables in which launchers tell a process how many there are. JAX knows these launchers and finds the rest itself.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES")
# GKE and Cloud TPU name the hosts of a slice, or the coordinator of several slices.
_HOSTS, _COORDINATOR = "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"


def join_processes(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> int:
    """Connect to the other processes, if there are any; returns how many there are, as far as the launcher said, else 1.

    Slurm (`srun`), Open MPI (`mpirun`), GKE and Cloud TPU are recognised; the arguments, all three, are for anything else.
    Must run before JAX touches a device. Raises `UsageError` for some of the arguments without the others, and if the
    others cannot be reached.
    """
    given = (coordinator, num_processes, process_id)
    if any(value is not None for value in given) and None in given:
        raise UsageError("--coordinator-address, --num-processes and --process-id go together")
    if coordinator is None and not _is_one_of_several():
        return 1
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"cannot join the other processes: {str(error).splitlines()[0]}") from error
    return num_processes or _announced()



def _announced() -> int:
    return max((int(os.environ[name]) for name in _COUNTS if os.environ.get(name, "").isdecimal()), default=1)


def _is_one_of_several() -> bool:
    if "SLURM_NTASKS" in os.environ and "SLURM_STEP_NODELIST" not in os.environ:
        return False  # in an allocation, but not started by srun: on its own
    return _announced() > 1 or "," in os.environ.get(_HOSTS, "") or _COORDINATOR in os.environ
