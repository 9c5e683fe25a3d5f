"""The comparison of a configuration with the reference: right by XLA, and mistakes are noticed."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from swiftkv_jax import pallas_kernels
from swiftkv_jax.kernel_check import KernelConfig, configurations
from swiftkv_jax.kernel_check.comparison import compare, verdict_on
from swiftkv_jax.pallas_kernels import fp8_product, fp8_rows, grouped_product
from tests.kernel_check.stand_in import Kernels
from tests.pallas_kernels.interpreted import device_of

PREFILL = KernelConfig("prefill", 64, 2, "bfloat16", "bfloat16", 32)
PARTS = dataclasses.replace(PREFILL, parts=True)
EXPERTS = KernelConfig("experts", 0, 0, "bfloat16", "bfloat16", embed_dim=128, mlp_dim=256)
FP8_PRODUCT = dataclasses.replace(EXPERTS, op="fp8_product", embed_dim=256)
FP8_ROWS = dataclasses.replace(EXPERTS, op="fp8_rows", embed_dim=384, mlp_dim=6144)


def error(config: KernelConfig, ops: Any = pallas_kernels) -> float:
    return compare(config, "xla", ops=ops, positions=70, runs=1).error


def test_the_standard_set_is_right_by_xla():
    """One of each op and format, with smaller pages: the operands and the reference fit
    together."""
    configs = configurations.standard_configs("hopper")
    configs = [c for c in configs if c.dtype != "float16" and c.cache_dtype != "float8_e4m3fn"]
    kinds = {(c.op, c.cache_dtype, c.windowed, c.parts): c for c in configs}
    assert len(kinds) == 17
    for config in kinds.values():
        small = dataclasses.replace(config, head_dim=64, page_size=config.page_size and 32)
        small = dataclasses.replace(small, embed_dim=128, mlp_dim=256)
        assert compare(small, "xla", positions=70, runs=1).error < 0.7, config


@pytest.mark.parametrize("op", ["prefill", "gradient"])
def test_a_missing_mask_of_documents_is_noticed(op):
    config = KernelConfig(op, 64, 2, "bfloat16", "bfloat16", packed=True)

    def one_document(*operands, segment_ids=None, **options):
        return pallas_kernels.prefill_attention(*operands, **options)

    assert error(config) < 1
    assert error(config, SimpleNamespace(prefill_attention=one_document)) > 3


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("op", ["prefill", "decode", "gradient"])
def test_a_wrong_edge_of_a_window_is_noticed(op, step):
    page = None if op == "gradient" else 32
    config = KernelConfig(op, 64, 2, "bfloat16", "bfloat16", page, windowed=True)

    def moved(attend):
        return lambda *operands, window, **options: attend(
            *operands, window=window + step, **options
        )

    wrong = SimpleNamespace(
        plan_decode=moved(pallas_kernels.plan_decode),
        prefill_attention=moved(pallas_kernels.prefill_attention),
        decode_attention=moved(pallas_kernels.decode_attention),
    )
    assert error(config) < 1
    assert error(config, wrong) > 3


LOG_SUMS = {
    "half of the sum": lambda lse: lse + math.log(2),
    "base two": lambda lse: lse * math.log2(math.e),
    "finite for nothing": lambda lse: jnp.maximum(lse, -1e30),
    "infinite for nothing": lambda lse: jnp.where(lse == -jnp.inf, jnp.inf, lse),
}


@pytest.mark.parametrize("mistake", LOG_SUMS)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_mistake_in_the_log_sum_exp_is_noticed(op, mistake):
    config = dataclasses.replace(PARTS, op=op)

    def changed(attend):
        def call(*operands, **options):
            out, lse = attend(*operands, **options)
            return out, LOG_SUMS[mistake](lse)

        return call

    right = Kernels("is right")
    wrong = SimpleNamespace(
        prefill_attention=changed(right.prefill_attention),
        decode_attention=changed(right.decode_attention),
        plan_decode=right.plan_decode,
    )
    verdict = verdict_on(config, "xla", ops=wrong, positions=70, runs=1)
    assert verdict.outcome == "wrong"


def with_kv_lengths(change):
    """The ops, with another number of visible keys: `change` of it and of the positions."""

    def prefill(*operands, kv_lengths, page_table, **options):
        most = operands[1].shape[2] * page_table.shape[1]
        kv_lengths = jnp.clip(change(jnp.asarray(kv_lengths), most), 0, most)
        options |= {"kv_lengths": kv_lengths, "page_table": page_table}
        return Kernels("is right").prefill_attention(*operands, **options)

    return SimpleNamespace(prefill_attention=prefill)


KV_LENGTHS = {
    "all": lambda lengths, most: jnp.full_like(lengths, most),
    "one for nothing": lambda lengths, most: jnp.maximum(lengths, 1),
    **{
        f"row {row}, {step:+}": lambda lengths, most, row=row, step=step: lengths.at[row].add(step)
        for row, step in [(0, 1), (1, 1), (2, 1), (3, 1), (0, -1), (1, -1), (2, -1)]
    },
}
"""Keys end inside a page, with it, one before its end, and before the first."""


@pytest.mark.parametrize("mistake", KV_LENGTHS)
def test_a_mistake_in_the_lengths_of_keys_is_noticed(mistake):
    config = dataclasses.replace(PARTS, cache_dtype="int8" if mistake == "all" else "bfloat16")
    assert error(config, with_kv_lengths(KV_LENGTHS[mistake])) > 3


@pytest.mark.parametrize(
    ("mode", "verdict"),
    [
        ("is not finite", "wrong, results are not finite"),
        ("raises", "failed, RuntimeError: ptxas exited with 255"),
    ],
)
def test_what_a_verdict_says(mode, verdict):
    config = dataclasses.replace(PREFILL, op="decode")
    found = verdict_on(config, "xla", ops=Kernels(mode), positions=70, runs=1)
    assert str(found) == verdict


def test_other_experts_matrices_are_noticed(monkeypatch):
    product = grouped_product.block_product

    def shifted(x, weight, blocks, *options):
        return product(x, weight, blocks._replace(group=blocks.group ^ 1), *options)

    monkeypatch.setattr(grouped_product, "block_product", shifted)
    assert compare(EXPERTS, "xla", runs=1).error > 3


def test_other_fp8_scales_are_noticed(monkeypatch):
    product = fp8_product.fp8_product

    def shifted(x, weight, x_scale, *others):
        return product(x, weight, jnp.roll(x_scale, 1), *others)

    monkeypatch.setattr(fp8_product, "fp8_product", shifted)
    assert compare(FP8_PRODUCT, "xla", runs=1).error > 3


def test_fp8_rows(monkeypatch):
    """Those of the kernels are right, and others are noticed: a row's scale with another row."""
    with device_of("hopper"):
        assert compare(FP8_ROWS, "hopper", runs=1).right
        norm = fp8_rows.fp8_norm

        def shifted(*operands):
            total, values, scale = norm(*operands)
            return total, values, jnp.roll(scale, 1)

        monkeypatch.setattr(fp8_rows, "fp8_norm", shifted)
        assert compare(FP8_ROWS, "hopper", runs=1).error > 3


@pytest.mark.long
@pytest.mark.parametrize("config", [PREFILL, PARTS, EXPERTS, FP8_PRODUCT], ids=str)
def test_the_hopper_kernels_in_the_interpreter(config):
    small = dataclasses.replace(config, page_size=config.page_size and 64)
    with device_of("hopper"):
        assert compare(small, "hopper", positions=150, runs=1).right
