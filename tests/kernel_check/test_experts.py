"""The products of experts are checked where a model has some and the device a kernel for them."""

import dataclasses

import pytest

from swiftkv_jax.kernel_check import (
    KernelConfig,
    forward_configs,
    serving_configs,
    training_configs,
)
from swiftkv_jax.kernel_check.comparison import compare, verdict_on
from swiftkv_jax.kernel_check.configurations import model_configs
from swiftkv_jax.pallas_kernels import grouped_product
from swiftkv_jax.plan.presets import PRESETS
from tests.pallas_kernels.interpreted import device_of, under


def test_experts_are_checked_on_hopper(monkeypatch):
    """Models that have some need it; the kernel in the interpreter is right, and one that takes
    other experts' matrices is not."""
    config = dataclasses.replace(PRESETS["qwen3-30b-a3b"], embed_dim=128, mlp_dim=256)
    experts = KernelConfig("experts", 0, 0, "bfloat16", "bfloat16", embed_dim=128, mlp_dim=256)
    for of_model in (
        serving_configs(config, "bfloat16", "bfloat16", 128),
        training_configs(config, "bfloat16"),
        forward_configs(config, "bfloat16"),
        model_configs(config, "hopper"),
    ):
        assert experts in of_model
    assert experts not in model_configs(config, "tpu")
    assert experts not in model_configs(PRESETS["qwen3-8b"], "hopper")
    with device_of("hopper"):
        assert compare(experts, "hopper", runs=1).right
    product = grouped_product.block_product

    def shifted(x, weight, blocks, *options):
        return product(x, weight, blocks._replace(group=blocks.group ^ 1), *options)

    monkeypatch.setattr(grouped_product, "block_product", shifted)
    assert compare(experts, "xla", runs=1).error > 3


@pytest.mark.parametrize("widths", [(512, 352), (352, 512)])
def test_widths_that_the_kernel_refuses_are_no_failure(widths):
    """XLA multiplies there, and the attention kernels stay."""
    embed_dim, mlp_dim = widths
    config = KernelConfig(
        "experts", 0, 0, "bfloat16", "bfloat16", embed_dim=embed_dim, mlp_dim=mlp_dim
    )
    with under("H100"):
        assert grouped_product.choose_grouped(widths, "bfloat16") == "xla"
        verdict = verdict_on(config, "hopper")
    assert (verdict.outcome, verdict.usable) == ("unsupported", True)
    assert "takes inputs in multiples of 64 and outputs of 128" in verdict.detail
