"""The products of experts are checked where a model has some and the device a kernel for them."""

import dataclasses

from swiftkv_jax.kernel_check import (
    KernelConfig,
    forward_configs,
    serving_configs,
    training_configs,
)
from swiftkv_jax.kernel_check.comparison import compare
from swiftkv_jax.kernel_check.configurations import model_configs
from swiftkv_jax.pallas_kernels import grouped_product
from swiftkv_jax.presets import PRESETS
from tests.pallas_kernels.interpreted import device_of


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
