"""Devices of a command: the share of a GPU, amounts of memory, the compile cache, meshes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from swiftkv_jax.cli import parse_size
from swiftkv_jax.cli.devices import (
    enable_compilation_cache,
    refuse_x64,
    set_gpu_memory_fraction,
    setup_devices,
)
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.mesh import MeshShape

ROOT = Path(__file__).parents[2]
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.mark.parametrize("given", [{}, *({name: "0.5"} for name in FRACTIONS)], ids=str)
def test_jax_may_use_most_of_a_gpu(given, monkeypatch):
    for name in FRACTIONS:
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_gpu_memory_fraction()
    found = {name: os.environ[name] for name in FRACTIONS if name in os.environ}
    assert found == (given or {"XLA_CLIENT_MEM_FRACTION": "0.95"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("24g", 24 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("2t", 2 << 40), ("100", 100)],
)
def test_amounts_of_memory(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "g", "lots", "-1g", "0", "infg", "nan", "1e999"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(UsageError, match="is not an amount of memory, such as 24g or 512m"):
        parse_size(text)


def test_one_device_has_no_mesh_and_several_have_one():
    assert setup_devices(MeshShape()) is None
    mesh = setup_devices(MeshShape(data=2, model=2))
    assert mesh is not None and dict(mesh.shape) == {"data": 2, "fsdp": 1, "model": 2}


def test_fsdp_is_for_training():
    with pytest.raises(UsageError, match="`mesh`=data=1,fsdp=2,model=1: fsdp is for training"):
        setup_devices(MeshShape(fsdp=2))


def test_64_bit_numbers_are_refused_for_training():
    with jax.enable_x64(True), pytest.raises(UsageError, match="JAX_ENABLE_X64"):
        refuse_x64()
    refuse_x64()


# The compile cache --------------------------------------------------------------

PROGRAM = """
import sys, jax
from swiftkv_jax.cli.devices import enable_compilation_cache
enable_compilation_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
print(sum("cache_hit" in event for event in hits))
"""


def test_what_was_compiled_serves_the_next_start(tmp_path):
    def hits() -> int:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "new" / "cache")],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    assert hits() == 0
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    assert hits() > 0


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="others can write there, and what is there is trusted"):
        enable_compilation_cache(tmp_path)


def test_a_file_is_not_a_folder(tmp_path):
    path = tmp_path / "file"
    path.touch()
    for given in (path, path / "cache"):
        with pytest.raises(UsageError, match=f"`compile_cache`={given}: is not a folder"):
            enable_compilation_cache(given)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners on this system")
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        enable_compilation_cache(tmp_path)
