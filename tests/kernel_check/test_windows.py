"""Which configurations with windows are checked, and that a wrong edge of a window is noticed."""

import dataclasses
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import swiftkv_jax as skv
from swiftkv_jax.kernel_check import KernelConfig, serving_configs, training_configs
from swiftkv_jax.kernel_check.comparison import compare
from swiftkv_jax.kernel_check.configurations import forward_configs, needed_from
from swiftkv_jax.model.config import LayerKind
from tests.kernel_check.test_kernel_check import small
from tests.tiny import model_of


def serve(config):
    return serving_configs(config, jnp.bfloat16, "int8", 128)


def test_what_a_model_with_windows_needs():
    """Both where some layers have a window; cuDNN has none."""
    config = model_of(*small()).config
    window, none = LayerKind(window=5), LayerKind()
    every = dataclasses.replace(config, layer_kinds=(window,) * config.num_layers)
    some = dataclasses.replace(config, layer_kinds=(window,) + (none,) * (config.num_layers - 1))
    in_float32 = (
        functools.partial(f, dtype=jnp.float32) for f in (training_configs, forward_configs)
    )
    for needed in (serve, *in_float32):
        plain = needed(config)
        windowed = [dataclasses.replace(one, windowed=True) for one in plain]
        assert needed(every) == windowed and needed(some) == windowed + plain
        assert needed(every.at_length(5)) == plain
    assert needed_from("cudnn", serve(some)) == serve(config)[:1]


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("op", ["prefill", "decode", "gradient"])
def test_a_wrong_edge_is_noticed(op, step):
    page = None if op == "gradient" else 32
    config = KernelConfig(op, 64, 2, "bfloat16", "bfloat16", page, windowed=True)

    def moved(attend):
        return lambda *operands, window, **options: attend(
            *operands, window=window + step, **options
        )

    kernels = skv.pallas_kernels
    wrong = SimpleNamespace(
        plan_decode=moved(kernels.plan_decode),
        prefill_attention=moved(kernels.prefill_attention),
        decode_attention=moved(kernels.decode_attention),
    )
    assert compare(config, "xla", positions=70, runs=1).right
    assert compare(config, "xla", ops=wrong, positions=70, runs=1).error > 3
