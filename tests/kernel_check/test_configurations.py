"""Which configurations of kernels a model needs."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer import EngineOptions
from swiftkv_jax.infer.runner import build
from swiftkv_jax.kernel_check import (
    KernelConfig,
    forward_configs,
    serving_configs,
    training_configs,
)
from swiftkv_jax.kernel_check.configurations import choose_for, model_configs, standard_configs
from swiftkv_jax.model.config import LayerKind
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.pallas_kernels import choice, grouped_product
from swiftkv_jax.plan.presets import PRESETS
from tests import tiny
from tests.pallas_kernels.interpreted import device, under


@functools.cache
def grouped() -> skv.Model:
    """A model whose upper layers share keys and values in twos: 4 query heads, 2 key/value heads
    of 8."""
    hf = tiny.hf_config(num_hidden_layers=4, num_key_value_layers=2, key_value_group_size=2)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def in_parts(config: KernelConfig) -> KernelConfig:
    return dataclasses.replace(config, parts=True)


def windowed(config: KernelConfig) -> KernelConfig:
    return dataclasses.replace(config, windowed=True)


def serve(config, **options):
    return serving_configs(config, jnp.bfloat16, "int8", 128, **options)


def test_what_a_model_needs():
    config = grouped().config
    prefill = KernelConfig("prefill", 8, 2, "bfloat16", "int8", 128)
    assert serve(config) == [prefill, dataclasses.replace(prefill, op="decode")]
    (one, _) = serve(config, mesh=make_mesh((1, 4)))
    assert one.queries_per_kv_head == 1  # two devices share a key/value head
    packed = KernelConfig("prefill", 8, 2, "float32", "float32", packed=True)
    training = training_configs(config, jnp.float32)
    assert training == [packed, dataclasses.replace(packed, op="gradient")]


def test_what_a_model_with_windows_needs():
    """Both where some layers have a window."""
    config = grouped().config
    window, none = LayerKind(window=5), LayerKind()
    every = dataclasses.replace(config, layer_kinds=(window,) * config.num_layers)
    some = dataclasses.replace(config, layer_kinds=(window,) + (none,) * (config.num_layers - 1))
    in_float32 = (
        functools.partial(f, dtype=jnp.float32) for f in (training_configs, forward_configs)
    )
    for needed in (serve, *in_float32):
        plain = needed(config)
        assert needed(every) == [*map(windowed, plain)]
        assert needed(some) == [*map(windowed, plain), *plain]
        assert needed(every.at_length(5)) == plain


def test_what_a_model_with_two_queries_serves_with():
    plain = grouped().config
    own = dataclasses.replace(plain, generated_kv="own")
    assert own.has_two_caches and not plain.has_two_caches
    both = [*serve(plain), *map(in_parts, serve(plain))]
    assert serve(own) == both
    for implementation in ("hopper", "tpu"):
        needed = model_configs(own, implementation)
        assert sum(one.parts for one in needed) == 6  # both ops with each format
    alone = dataclasses.replace(own, key_value_group_size=1)
    assert serve(alone) == serve(dataclasses.replace(plain, key_value_group_size=1))
    kinds = (LayerKind(window=5), *(LayerKind(),) * (plain.num_layers - 1))
    windows = dataclasses.replace(own, layer_kinds=kinds)
    assert serve(windows) == [*map(windowed, both[:2]), *both]


@pytest.mark.parametrize("options", [{"generated_kv": "own"}, {}])
def test_the_engine_asks_for_parts(options, monkeypatch):
    asked = []

    def ask(attention, configs, device, check):
        asked.extend(configs)
        return attention

    monkeypatch.setattr(build, "checked_implementation", ask)
    options = EngineOptions(
        max_num_seqs=1, page_size=16, max_model_len=16, one_size=True, **options
    )
    build.build_model_runner(grouped(), options)
    plain = [one for one in asked if not one.parts]
    two_caches = options.generated_kv == "own"
    assert asked == plain + [in_parts(one) for one in plain if two_caches]


def test_packed_rows_need_heads_of_twice_the_size():
    """Which go through XLA where no kernel takes them."""
    plain = dataclasses.replace(grouped().config, head_dim=80)
    own = dataclasses.replace(plain, generated_kv="own")
    for needed in (training_configs, forward_configs):
        twice = [dataclasses.replace(one, head_dim=160) for one in needed(plain, jnp.bfloat16)]
        assert needed(own, jnp.bfloat16) == needed(plain, jnp.bfloat16) + twice
    for config in training_configs(own, jnp.bfloat16):
        reason = choose_for(config, device("H100")).reason
        refused = reason is not None and "takes head dims (64, 80, 96, 128, 256)" in reason
        assert refused == (config.head_dim == 160)


def test_cudnn_is_for_plain_prefill(monkeypatch):
    monkeypatch.setattr(choice, "cudnn_version", lambda: 92000)
    taken = [
        config
        for config in standard_configs("cudnn")
        if choose_for(config, device("A100")).reason is None
    ]
    assert {(one.op, one.packed, one.windowed, one.parts) for one in taken} == {
        ("prefill", False, False, False),
        ("gradient", False, False, False),
    }
    assert {one.head_dim for one in taken} == {64, 80, 96, 128}  # wider ones from Hopper on


@pytest.mark.parametrize("kernels", ["hopper", "tpu"])
def test_the_standard_set(kernels):
    """All of it is for the device: nothing is refused, but products on a TPU."""
    configs = standard_configs(kernels)
    assert len(set(configs)) == len(configs) == 76
    kind = device("H100" if kernels == "hopper" else "v5e")
    refused = [one for one in configs if choose_for(one, kind).reason]
    assert [one.op for one in refused] == (
        [] if kernels == "hopper" else ["experts", "fp8_product", "fp8_rows"]
    )


def test_experts_are_checked_on_hopper():
    config = dataclasses.replace(PRESETS["qwen3-30b-a3b"], embed_dim=128, mlp_dim=256)
    experts = KernelConfig("experts", 0, 0, "bfloat16", "bfloat16", embed_dim=128, mlp_dim=256)
    for of_model in (
        serving_configs(config, "bfloat16", "bfloat16", 128),
        training_configs(config, "bfloat16"),
        forward_configs(config, "bfloat16"),
    ):
        assert experts in of_model
    of_plain = model_configs(PRESETS["qwen3-8b"], "hopper")
    assert experts not in of_plain and "fp8_product" in {one.op for one in of_plain}
    assert choose_for(experts, device("H100")).reason is None
    assert choose_for(experts, device("v5e")).reason == "has no kernel for experts"


@pytest.mark.parametrize("widths", [(512, 352), (352, 512), (704, 2048)])
def test_widths_that_the_kernel_refuses_are_no_failure(widths):
    """XLA multiplies there, and the attention kernels stay."""
    config = KernelConfig(
        "experts", 0, 0, "bfloat16", "bfloat16", embed_dim=widths[0], mlp_dim=widths[1]
    )
    with under("H100"):
        assert grouped_product.choose_grouped(widths, "bfloat16") == "xla"
    reason = choose_for(config, device("H100")).reason
    assert reason == "takes inputs in multiples of 64 and outputs of 128"
