"""The devices' published figures, against what else the package says of them."""

import pytest

from swiftkv_jax.plan.hardware import hardware_of


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA L4",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA B200",
        "TPU v4",
        "TPU v5 lite",
        "TPU v5",
        "TPU v6 lite",
        "TPU7x",
    ],
)
def test_figures_hang_together(kind):
    """FLOPs per byte from memory lie between 150 and 650 on all of them: a slip of a unit would
    show."""
    device = hardware_of(kind)
    assert device is not None
    assert 150 < device.flops / device.bandwidth < 650
    assert 15e9 < device.memory_bytes < 200e9


def test_names_of_one_chip_agree():
    for name, other in (
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
    ):
        assert hardware_of(name) == hardware_of(other)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 NVL"])
def test_other_devices_are_not_guessed(kind):
    assert hardware_of(kind) is None
