"""Attention to a part of the keys: which configurations are checked, and that a mistake in
`kv_lengths` or in the log-sum-exp is noticed."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer import EngineOptions
from swiftkv_jax.infer.runner import build
from swiftkv_jax.kernel_check import KernelConfig, serving_configs, training_configs
from swiftkv_jax.kernel_check.comparison import compare, verdict_on
from swiftkv_jax.kernel_check.configurations import forward_configs, model_configs, needed_from
from swiftkv_jax.model.config import LayerKind
from swiftkv_jax.pallas_kernels.ops import choose_implementation
from tests import tiny
from tests.kernel_check.stand_in import Kernels
from tests.pallas_kernels.interpreted import device_of, under


@functools.cache
def grouped() -> skv.Model:
    """A model whose upper layers share keys and values in twos."""
    hf = tiny.hf_config(num_hidden_layers=4, num_key_value_layers=2, key_value_group_size=2)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def in_parts(config: KernelConfig) -> KernelConfig:
    return dataclasses.replace(config, parts=True)


def serve(config, **options):
    return serving_configs(config, jnp.bfloat16, "int8", 128, **options)


# Configurations ---------------------------------------------------------------------


def test_what_a_model_with_two_queries_serves_with():
    plain = grouped().config
    own = dataclasses.replace(plain, generated_kv="own")
    assert own.has_two_caches and not plain.has_two_caches
    both = [*serve(plain), *map(in_parts, serve(plain))]
    assert serve(own) == serve(plain, two_caches=True) == both
    assert needed_from("cudnn", serve(own)) == serve(plain)[:1]
    for implementation in ("hopper", "tpu"):
        needed = model_configs(own, implementation)
        assert sum(one.parts for one in needed) == 6  # both ops with each format
    alone = dataclasses.replace(own, key_value_group_size=1)
    assert serve(alone) == serve(dataclasses.replace(plain, key_value_group_size=1))
    kinds = (LayerKind(window=5), *(LayerKind(),) * (plain.num_layers - 1))
    windows = dataclasses.replace(own, layer_kinds=kinds)
    assert serve(windows) == [*(dataclasses.replace(x, windowed=True) for x in both[:2]), *both]


@pytest.mark.parametrize("options", [{"generated_kv": "own"}, {}])
def test_the_engine_asks_for_them(options, monkeypatch):
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
    with under("H100"):
        for one in training_configs(own, jnp.bfloat16)[2:]:
            verdict = verdict_on(one, "hopper", positions=70, runs=1)
            assert verdict.usable and "takes head dims (64, 80, 96, 128, 256)" in verdict.detail
        q = jnp.zeros((1, 16, 4, 160), jnp.bfloat16)
        k, ids = jnp.zeros((1, 2, 16, 160), jnp.bfloat16), jnp.ones((1, 16), jnp.int32)
        assert choose_implementation("prefill", None, q, k, segment_ids=ids) == "xla"
        q, k = q[..., :128], k[..., :128]
        assert choose_implementation("prefill", None, q, k, segment_ids=ids) == "hopper"


# Mistakes ---------------------------------------------------------------------------


class Planted(Kernels):
    """XLA's ops with the mistake of a mode in what is of parts."""

    def prefill_attention(self, *operands, kv_lengths, **options):
        most = operands[1].shape[2] * options["page_table"].shape[1]
        step = {"too many": 1, "too few": -1}.get(self._mode, 0)
        kv_lengths = jnp.clip(kv_lengths + step, 0, most)
        if self._mode == "all":
            kv_lengths = jnp.full_like(kv_lengths, most)
        if self._mode == "one for nothing":
            kv_lengths = jnp.maximum(kv_lengths, 1)
        found = super().prefill_attention(*operands, kv_lengths=kv_lengths, **options)
        return self._changed(*found)

    def decode_attention(self, *operands, **options):
        return self._changed(*super().decode_attention(*operands, **options))

    def _changed(self, out, lse):
        if self._mode == "lse":
            lse = lse + math.log(2)
        if self._mode == "base two":
            lse = lse * math.log2(math.e)
        if self._mode == "finite":
            lse = jnp.maximum(lse, -1e30)
        if self._mode == "infinite":
            lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
        return out, lse


CONFIG = KernelConfig("prefill", 64, 2, "bfloat16", "bfloat16", 32, parts=True)


@pytest.mark.parametrize("mode", ["lse", "base two", "finite", "infinite"])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_mistake_in_the_log_sum_exp_is_noticed(op, mode):
    config = dataclasses.replace(CONFIG, op=op)
    assert compare(config, "xla", ops=Planted("none"), positions=70, runs=1).error < 0.7
    wrong = compare(config, "xla", ops=Planted(mode), positions=70, runs=1)
    assert wrong.error > 3 and not wrong.right
    verdict = verdict_on(config, "xla", ops=Planted(mode), positions=70, runs=1)
    assert verdict.outcome == "wrong"


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("mode", ["too many", "too few", "all", "one for nothing"])
def test_a_mistake_in_the_lengths_of_keys_is_noticed(mode, cache_dtype):
    config = dataclasses.replace(CONFIG, cache_dtype=cache_dtype)
    assert compare(config, "xla", ops=Planted(mode), positions=70, runs=1).error > 3


@pytest.mark.parametrize(
    ("step", "row"), [(1, 0), (1, 1), (1, 2), (1, 3), (-1, 0), (-1, 1), (-1, 2)]
)
def test_each_end_of_the_visible_keys_is_looked_at(step, row):
    """A mistake in one row alone is noticed: keys that end inside a page, with it, one before its
    end, and before the first."""

    def moved(*operands, kv_lengths, **options):
        kv_lengths = jnp.asarray(kv_lengths).at[row].add(step)
        return Kernels("-").prefill_attention(*operands, kv_lengths=kv_lengths, **options)

    ops = SimpleNamespace(prefill_attention=moved)
    assert compare(CONFIG, "xla", ops=ops, positions=70, runs=1).error > 3


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_the_hopper_kernels_in_the_interpreter(op):
    config = dataclasses.replace(CONFIG, op=op, page_size=64)
    with device_of("hopper"):
        assert compare(config, "hopper", positions=150, runs=1).right
