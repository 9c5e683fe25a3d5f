"""The processes of a job: one per host, all of them running the same program over one mesh.

They join through `join_processes`. Afterwards the functions below are called by all of them, in the
same order: each waits for the others. In a job of one process they return at once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..errors import DataError, UsageError
from . import interrupts

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = "SWIFTKV_JOIN_TIMEOUT"
"""Environment variable with the seconds that a process waits for the others to join."""
DEFAULT_JOIN_TIMEOUT = 300

# How many processes a launcher has started. Not SLURM_NTASKS: a script or shell in an allocation
# has that too, on its own. Beside it, what JAX needs to join them.
_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_JOB_ID SLURM_STEP_NODELIST SLURM_PROCID SLURM_LOCALID".split(),
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK".split(),
}
# The hosts of a TPU slice on GKE, separated by commas, and where to read them or to meet the hosts
# of other slices.
_HOSTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_MEETING_PLACES = ("TPU_PROCESS_ADDRESSES_PATH", "MEGASCALE_COORDINATOR_ADDRESS")


def join_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int | None = None,
) -> int:
    """Connect to the other processes, if there are any. Returns their number as the launcher gives
    it, else 1.

    Recognised, and left to JAX to ask for the rest: Slurm (`srun`), Open MPI (`mpirun`), GKE with
    TPUs, Cloud TPU, and Indexed Jobs and JobSets of Kubernetes where `jax[k8s]` is installed. The
    arguments, all three, are for anything else. `timeout` is in seconds; by default
    `SWIFTKV_JOIN_TIMEOUT` in the environment, or 300. Must run before JAX touches a device. Raises
    `UsageError` for some of the arguments without the others, for variables that a launcher has set
    by half, and if the others cannot be reached.
    """
    given = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in given) and None in given:
        raise UsageError("`coordinator_address`, `num_processes` and `process_id` go together")
    if coordinator_address is not None:
        if not coordinator_address.rpartition(":")[2].isdecimal():
            raise UsageError(f"`coordinator_address`={coordinator_address!r}: expected HOST:PORT")
        assert num_processes is not None and process_id is not None
        if not 0 <= process_id < num_processes:
            raise UsageError(
                f"`process_id`={process_id} must be from 0 to {num_processes - 1}, one less than "
                f"`num_processes`"
            )
    elif not _is_one_of_several():
        return 1
    else:
        _check_launcher()
    timeout = _join_timeout() if timeout is None else timeout
    logger.info("%s, for at most %d s", _waiting(*given), timeout)
    # Training has its own handler of SIGTERM, which finishes the step, saves and exits. JAX's
    # handler would swallow a signal that comes before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        _initialize(*given, timeout=timeout)
    except TimeoutError as error:
        raise UsageError(
            f"cannot join the other processes: after {timeout} s still {_waiting(*given)} "
            f"({JOIN_TIMEOUT} in the environment allows more)"
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise UsageError(
            f"cannot join the other processes: {str(error).splitlines()[0]}"
        ) from error
    return num_processes or _announced()


def announces_several(coordinator_address: str | None = None) -> bool:
    """True if `join_processes` would connect to others, as the address or a launcher says. Touches
    no device."""
    return coordinator_address is not None or _is_one_of_several()


def coordinator_host() -> str:
    """The host of process 0, as all processes have reached it. They have joined before."""
    from jax._src.distributed import global_state  # JAX has no public name for it

    address = global_state.coordinator_address
    assert address is not None
    return address.rpartition(":")[0].strip("[]")


def is_main_process() -> bool:
    """True if this is process 0, which writes and prints. Starts JAX's backend."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until all processes are here. `name` is the same in all of them."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
    """True if `flag` is true in any process; the same answer in all of them."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def smallest(value: int) -> int:
    """The smallest `value` of all processes; the same answer in all of them."""
    if jax.process_count() == 1:
        return value
    # As two halves: JAX would narrow 64-bit numbers.
    halves = np.array([value >> 31, value & (2**31 - 1)], np.int32)
    high, low = np.asarray(multihost_utils.process_allgather(halves)).astype(np.int64).T
    return int(((high << 31) + low).min())


def from_process_0[T](value: T) -> T:
    """Return process 0's `value` in all processes.

    A pytree of arrays and numbers, of the same shapes and types in all processes; arrays come back
    as NumPy's.
    """
    if jax.process_count() == 1:
        return value
    # As bytes: JAX would narrow 64-bit numbers.
    arrays = jax.tree.map(np.asarray, value)
    raw = jax.tree.map(lambda a: np.frombuffer(a.tobytes(), np.uint8), arrays)
    sent = multihost_utils.broadcast_one_to_all(raw)
    return jax.tree.map(_as_before, value, arrays, sent)


def run_on_process_0[T](work: Callable[[], T], otherwise: T) -> T:
    """Return the result of `work` in process 0 in all processes.

    The result is a pytree as `from_process_0` takes it, shaped like `otherwise`. An error of `work`
    is raised in process 0, and in the others a `DataError` that refers to it: none of them waits
    for a process that has ended.
    """
    if jax.process_count() == 1:
        return work()
    result = otherwise
    error = None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    failed, result = from_process_0((error is not None, result))
    if error is not None:
        raise error
    if failed:
        raise DataError("process 0 has failed; its message says why")
    return result


def check_all_take_part(mesh: Mesh) -> None:
    """Raise `UsageError` if a process has no device in `mesh`: it could not compute, and the others
    would wait for it."""
    left_out = jax.process_count() - len({device.process_index for device in mesh.devices.flat})
    if left_out:
        raise UsageError(
            f"`mesh` takes {mesh.size} of {jax.device_count()} devices, none of them in "
            f"{left_out} of the {jax.process_count()} processes; use all, for example `mesh`=-1x1"
        )


def _initialize(*given: Any, timeout: int) -> None:
    """`jax.distributed.initialize` in a thread. Raises what it raises, and `TimeoutError` after
    `timeout` seconds.

    JAX would abort the process when its own time is over, so that is longer. In a thread, because
    an interrupt does not end the call.
    """
    outcome: list[BaseException | None] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(*given, initialization_timeout=2 * timeout + 60)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=initialize, name="join_processes", daemon=True)
    thread.start()
    interrupts.join(thread, timeout)
    if not outcome:
        raise TimeoutError(f"no answer within {timeout} s")
    if outcome[0] is not None:
        raise outcome[0]


def _as_before(given: Any, array: np.ndarray, sent: Any) -> Any:
    """The bytes in `sent` as `given` is: a number of its type, or an array."""
    result = np.frombuffer(np.asarray(sent).tobytes(), array.dtype).reshape(array.shape)
    return type(given)(result.item()) if isinstance(given, bool | int | float) else result


def _waiting(coordinator: str | None, num_processes: int | None, process_id: int | None) -> str:
    """Describe what this process waits for while the processes join."""
    if coordinator is None:
        return "waiting for the other processes that the launcher has announced"
    if process_id == 0:
        return f"waiting at {coordinator} for {(num_processes or 1) - 1} other processes"
    return f"waiting for process 0 at {coordinator}"


def _join_timeout() -> int:
    text = os.environ.get(JOIN_TIMEOUT, str(DEFAULT_JOIN_TIMEOUT))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{JOIN_TIMEOUT}={text!r} in the environment: expected seconds, from 1 up")
    return int(text)


def _announced() -> int:
    """How many processes the launcher says it has started; 1 if it does not say."""
    return max((_count(name) for name in _COUNTS if name in os.environ), default=1)


def _check_launcher() -> None:
    """Raise `UsageError` if a launcher has set how many processes there are, but not all that JAX
    needs with it."""
    for count, others in _COUNTS.items():
        missing = [name for name in others if name not in os.environ]
        if count in os.environ and _count(count) > 1 and missing:
            raise UsageError(
                f"{count}={os.environ[count]} in the environment announces several processes, "
                f"without {' and '.join(missing)}: start them by one launcher, or give "
                f"`coordinator_address`, `num_processes` and `process_id`"
            )


def _count(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} in the environment: expected a number of processes")
    return int(text)


def _is_one_of_several() -> bool:
    several_hosts = any("," in os.environ.get(name, "") for name in _HOSTS) or any(
        name in os.environ for name in _MEETING_PLACES
    )
    return _announced() > 1 or several_hosts or _is_on_cloud_tpu() or _is_indexed_job()


def _is_on_cloud_tpu() -> bool:
    """True if JAX, when it was imported, found TPU chips and a metadata server with the list of all
    hosts of the slice, one or more."""
    return "TPU_ML_PLATFORM" in os.environ and "TPU_SKIP_MDS_QUERY" not in os.environ


def _is_indexed_job() -> bool:
    """True if JAX can ask Kubernetes, which sets the index but not the number of pods."""
    return (
        "KUBERNETES_SERVICE_HOST" in os.environ
        and "JOB_COMPLETION_INDEX" in os.environ
        and importlib.util.find_spec("kubernetes") is not None
    )
