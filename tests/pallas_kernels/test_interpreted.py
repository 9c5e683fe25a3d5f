"""Where device kernels run as they are, interpreted, or not at all."""

from types import SimpleNamespace

import jax
import pytest

from tests.pallas_kernels.interpreted import DEVICES, device_of


@pytest.mark.parametrize(
    ("device", "implementation"),
    [("A100", "hopper"), ("B200", "hopper"), ("v5e", "hopper"), ("H100", "tpu")],
)
def test_kernels_of_another_accelerator_are_skipped(device, implementation, monkeypatch):
    """The interpreter of a kernel is for CPUs."""
    found = DEVICES[device]
    one = SimpleNamespace(platform=found.platform, device_kind=found.device_kind)
    monkeypatch.setattr(jax, "default_backend", lambda: found.platform)
    monkeypatch.setattr(jax, "devices", lambda: [one])
    with (
        pytest.raises(pytest.skip.Exception, match=f"{implementation} kernels do not run on"),
        device_of(implementation),
    ):
        raise AssertionError("not skipped")


def test_kernels_run_as_they_are_on_their_device(monkeypatch):
    one = SimpleNamespace(platform="gpu", device_kind=DEVICES["H200"].device_kind)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [one])
    with device_of("hopper"):
        assert jax.sharding.get_abstract_mesh().abstract_device is None
