"""Which launchers are recognised, with the variables they set, what JAX is then asked, which meshes
leave a process out, and what processes ask each other."""

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from swiftkv_jax.errors import DataError, UsageError
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.process.distributed import (
    announces_several,
    any_process,
    barrier,
    check_all_take_part,
    from_process_0,
    is_main_process,
    join_processes,
    run_on_process_0,
    smallest,
)
from tests.free_port import free_port

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
        lambda *arguments, initialization_timeout: calls.append(arguments),
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
    assert asked == [(None, None, None)]


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
    assert asked == [(None, None, None)] * installed


def test_arguments_come_before_the_launcher(asked, monkeypatch):
    set_all(monkeypatch, SRUN)
    assert join_processes("10.0.0.1:1234", 2, 0) == 2
    assert asked == [("10.0.0.1:1234", 2, 0)]


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


# Launchers that set half of their variables, and numbers that are none ----------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "without OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_LOCAL_RANK: start them by one "
            "launcher, or give `coordinator_address`, `num_processes` and `process_id`",
        ),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "without SLURM_JOB_ID and SLURM_STEP"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4.5"}, "SLURM_STEP_NUM_TASKS='4.5' in the environment"),
        (OPEN_MPI | {"SWIFTKV_JOIN_TIMEOUT": "0"}, "SWIFTKV_JOIN_TIMEOUT='0' in the environment"),
    ],
    ids=["one of three", "half", "no number", "no time"],
)
def test_variables_that_do_not_do(variables, message, asked, monkeypatch):
    set_all(monkeypatch, variables)
    with pytest.raises(UsageError, match=message):
        join_processes()
    assert not asked


def test_the_time_to_wait_comes_from_the_argument_then_the_environment(monkeypatch, caplog):
    """JAX is given longer: it would abort the process."""
    waited = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: waited.wait())
    monkeypatch.setenv("SWIFTKV_JOIN_TIMEOUT", "1")
    with caplog.at_level(logging.INFO, "swiftkv_jax"):
        with pytest.raises(UsageError, match="after 1 s still waiting at host:1 for 1 other"):
            join_processes("host:1", 2, 0)
        monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: None)
        assert join_processes("host:1", 2, 1, timeout=7) == 2
    waited.set()
    assert [record.getMessage() for record in caplog.records] == [
        "waiting at host:1 for 1 other processes, for at most 1 s",
        "waiting for process 0 at host:1, for at most 7 s",
    ]


@pytest.mark.parametrize("process_id", [-1, 2])
def test_a_process_has_a_number_below_their_count(process_id, asked):
    with pytest.raises(UsageError, match=f"`process_id`={process_id} must be from 0 to 1"):
        join_processes("host:1", 2, process_id)
    assert not asked


# What they ask each other -------------------------------------------------------


def test_one_process_answers_itself():
    barrier("here")
    assert is_main_process() and any_process(True) and not any_process(False)
    value = {"a": np.arange(3), "b": 2**40}
    assert from_process_0(value) is value and smallest(2**40) == 2**40
    assert run_on_process_0(lambda: value, {}) is value
    with pytest.raises(DataError, match="no rows"):
        run_on_process_0(fails, 0)


def fails() -> int:
    raise DataError("no rows")


def test_others_are_announced_before_they_are_joined(monkeypatch, asked):
    assert not announces_several() and announces_several("host:1")
    set_all(monkeypatch, SBATCH)
    assert not announces_several()
    set_all(monkeypatch, SRUN)
    assert announces_several() and not asked


PAIR = """
import sys
import jax
import numpy as np
from swiftkv_jax.process import distributed as d
from swiftkv_jax.errors import DataError
me = int(sys.argv[2])
assert d.join_processes(sys.argv[1], 2, me) == 2
jax.config.update("jax_num_cpu_devices", 1)
assert d.is_main_process() == (me == 0)
d.barrier("here")
assert d.any_process(me == 1) and d.any_process(True) and not d.any_process(False)
assert d.from_process_0(2**40 + me) == 2**40
assert d.smallest(2**40 + 5 - me) == 2**40 + 4 and d.smallest(7 + me) == 7
assert d.coordinator_host() == "127.0.0.1"
found = d.from_process_0({"a": np.array([1.5, 2**-60]) + me, "b": (me == 0, np.zeros((0, 3)))})
assert found["a"].dtype == np.float64 and found["a"].tolist() == [1.5, 2**-60]
assert found["b"][0] is True and found["b"][1].shape == (0, 3)
assert d.run_on_process_0(lambda: np.int32(7), np.int32(0)) == 7
def fails():
    raise DataError("no rows")
try:
    d.run_on_process_0(fails, 0)
except DataError as error:
    assert str(error) == ("no rows" if me == 0 else "process 0 has failed; its message says why")
else:
    raise AssertionError
print("fine")
"""


def test_two_processes_answer_alike():
    address = f"127.0.0.1:{free_port()}"
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR, address, str(number)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in pair:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and out.endswith("fine\n"), err
