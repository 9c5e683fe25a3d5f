"""Which launchers are recognised, with the variables they set, what JAX is then asked, and which
meshes leave a process out."""

import importlib.util
import os

import jax
import pytest

from swiftkv_jax.distributed import check_all_take_part, join_processes
from swiftkv_jax.errors import UsageError
from swiftkv_jax.mesh import make_mesh

SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
"""What a batch script sees, and everything it starts without srun."""
SRUN = SBATCH | {
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
GKE = {"TPU_WORKER_ID": "0", "TPU_SKIP_MDS_QUERY": "true"}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture(autouse=True)
def asked(monkeypatch) -> list:
    """An environment without launchers, and the arguments of every call of JAX."""
    for name in os.environ:
        if name.startswith(
            ("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JOB_COMPLETION_")
        ):
            monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *arguments, initialization_timeout: calls.append(
            (*arguments, initialization_timeout)
        ),
    )
    monkeypatch.setattr(
        jax.config, "update", lambda name, value: None
    )  # the setting would outlive the test
    return calls


def set_all(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


JOINED = {
    "srun": (SRUN, 4),
    "mpirun": (OPEN_MPI, 2),
    "mpirun in an allocation of Slurm": (SBATCH | OPEN_MPI, 2),
    "GKE, TPU": (GKE | {"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, 1),
    "GKE, TPU, newer": (GKE | {"TPU_PROCESS_ADDRESSES": "host-0:8476,host-1:8476"}, 1),
    "GKE, TPU, in a file": (GKE | {"TPU_PROCESS_ADDRESSES_PATH": "/hosts"}, 1),
    "several TPU slices": (
        GKE | {"TPU_WORKER_HOSTNAMES": "host-0", "MEGASCALE_COORDINATOR_ADDRESS": "host-0"},
        1,
    ),
    "Cloud TPU": ({"TPU_ML_PLATFORM": "JAX"}, 1),
}
ALONE = {
    "no launcher": {},
    "sbatch without srun": SBATCH,
    "one task of srun": SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    "the shell of salloc": SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
    "mpirun -n 1": OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    "one TPU host of GKE": GKE | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ML_PLATFORM": "JAX"},
    "a pod": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
}


@pytest.mark.parametrize("launcher", JOINED)
def test_one_of_several_joins_with_what_jax_finds(launcher, asked, monkeypatch):
    variables, announced = JOINED[launcher]
    set_all(monkeypatch, variables)
    assert join_processes() == announced
    assert asked == [(None, None, None, 300)]


@pytest.mark.parametrize("launcher", ALONE)
def test_one_on_its_own_does_not_wait_for_others(launcher, asked, monkeypatch):
    set_all(monkeypatch, ALONE[launcher])
    assert join_processes() == 1
    assert not asked


@pytest.mark.parametrize("installed", [True, False])
def test_a_kubernetes_job_joins_if_jax_can_ask_kubernetes(installed, asked, monkeypatch):
    set_all(monkeypatch, INDEXED_JOB)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: object() if name == "kubernetes" and installed else None,
    )
    assert join_processes() == 1
    assert asked == [(None, None, None, 300)] * installed


def test_arguments_come_before_the_launcher(asked, monkeypatch):
    set_all(monkeypatch, SRUN)
    assert join_processes("10.0.0.1:1234", 2, 0) == 2
    assert asked == [("10.0.0.1:1234", 2, 0, 300)]


@pytest.mark.parametrize(
    "given",
    [("host:1", None, None), (None, 2, None), (None, None, 0), ("host:1", 2, None), (None, 2, 0)],
)
def test_arguments_go_together(given, asked):
    with pytest.raises(UsageError, match="go together"):
        join_processes(*given)
    assert not asked


def test_an_address_has_a_port(asked):
    with pytest.raises(UsageError, match="`coordinator_address`='host': expected HOST:PORT"):
        join_processes("host", 2, 0)
    assert not asked


@pytest.mark.parametrize("error", [RuntimeError, ValueError, ConnectionError])
def test_failing_to_join_is_one_line(error, monkeypatch):
    def fail(*arguments, **options):
        raise error("the coordinator does not answer\nand a long explanation")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(UsageError) as raised:
        join_processes("host:1", 2, 1)
    assert str(raised.value) == "cannot join the other processes: the coordinator does not answer"


def test_a_mesh_that_leaves_a_process_out_is_refused(monkeypatch):
    """--mesh 1x1, the default, in a job of two processes."""
    mesh = make_mesh((1, 1))
    check_all_take_part(mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        UsageError, match="takes 1 of 8 devices, none of them in 1 of the 2 processes; use all"
    ):
        check_all_take_part(mesh)
