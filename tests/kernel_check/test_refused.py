"""Devices without kernels, or that do without: what is said of it."""

import logging
import types

import pytest

from swiftkv_jax import kernel_check
from swiftkv_jax.cli import check_kernels
from swiftkv_jax.kernel_check import KernelCheck, checked_implementation, configurations
from swiftkv_jax.pallas_kernels import device


@pytest.fixture
def refused(monkeypatch):
    monkeypatch.setattr(device, "cuda_runtime_version", lambda: 12090)


class H100:
    platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"
    client = types.SimpleNamespace(platform_version="CUDA 12090")


def test_the_library_warns(refused, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("swiftkv_jax"), "propagate", True)
    kernel_check._warn.cache_clear()
    for _ in range(2):
        checked_implementation(None, [], H100(), KernelCheck(device=H100()))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "runs without the hopper kernels" in warning and "this is 12.9" in warning


def test_the_command_says_so(refused, capsys, monkeypatch):
    monkeypatch.setattr(configurations, "standard_configs", lambda kernels: [])
    assert check_kernels.main([], KernelCheck(device=H100())) == 0
    first, title, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("without the hopper kernels") and title.startswith("cudnn kernels on")


def test_no_such_device_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert check_kernels.main([]) == 1
    error = capsys.readouterr().err
    assert "JAX_PLATFORMS='cuda' names no kind of device that is here" in error
    assert error.count("\n") == 1


def test_the_command_without_device_kernels(capsys):
    assert check_kernels.main([]) == 0
    assert capsys.readouterr().out == "no device kernels for cpu: attention runs through XLA\n"
