"""Mixtures of experts against sums written from the definition: layouts, groups without rows, 8
bits, meshes, gradients, and the operations that XLA counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.runner.serving_form import serving_weights
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.experts import mixture, route
from swiftkv_jax.model.initialization import init_llama
from swiftkv_jax.model.layers import output_and_mlp
from swiftkv_jax.model.params import Block
from swiftkv_jax.model.quantization import Scheme, dequantize, quantize
from swiftkv_jax.pallas_kernels import grouped_product as grouped
from swiftkv_jax.plan.presets import QWEN3_30B_A3B
from tests.pallas_kernels.interpreted import device_of, under

CONFIG = dataclasses.replace(
    QWEN3_30B_A3B,
    vocab_size=32,
    embed_dim=24,
    mlp_dim=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=8,
    num_experts_per_token=3,
    num_key_value_layers=0,
)


def silu(gate, up):
    return jax.nn.silu(gate) * up


def draw(config=CONFIG, batch=2, length=9, seed=0) -> tuple[Block, jax.Array]:
    """A layer's weights, and hidden states."""
    llama = init_llama(config, jax.random.key(seed), scale=0.5)
    block = jax.tree.map(lambda leaf: leaf[0], llama.lower)
    h = jax.random.normal(jax.random.key(seed + 1), (batch, length, config.embed_dim))
    return block, h


def by_definition(config, block, h, chosen=None) -> np.ndarray:
    """Every token through its experts one by one, in float64."""
    x, router, gate, up, down = (
        np.asarray(leaf, np.float64)
        for leaf in (h, block.router, block.expert_gate, block.expert_up, block.expert_down)
    )
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        logits = router @ x[place]
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        best = np.argsort(-weights, kind="stable")[: config.num_experts_per_token]
        total = weights[best].sum() if config.renormalize_experts else 1.0
        for expert in best:
            inner = gate[expert] @ x[place]
            inner = inner / (1 + np.exp(-inner)) * (up[expert] @ x[place])
            out[place] += weights[expert] / total * (down[expert] @ inner)
    return out


def ways(monkeypatch, way: str) -> None:
    """Have the layout of `way` on this device."""
    monkeypatch.setattr(grouped, "choose_grouped", lambda *_: way)


@pytest.mark.short("64-2-5-xla", "3-3-40-tpu", "8-1-1-tpu", "2-1-200-tpu", "8-3-9-tpu")
@pytest.mark.parametrize("way", ["xla", "tpu"])
@pytest.mark.parametrize(
    ("experts", "per_token", "length"),
    [(8, 3, 9), (8, 1, 1), (3, 3, 40), (64, 2, 5), (2, 1, 200), (1, 1, 7)],
)
def test_sum_over_experts(way, experts, per_token, length, monkeypatch):
    ways(monkeypatch, way)
    config = dataclasses.replace(CONFIG, num_experts=experts, num_experts_per_token=per_token)
    block, h = draw(config, length=length)
    out = mixture(config, block, h, silu, Attention())
    np.testing.assert_allclose(out, by_definition(config, block, h), atol=1e-4)


@pytest.mark.parametrize("way", ["xla", "tpu"])
def test_all_tokens_may_have_one_expert(way, monkeypatch):
    ways(monkeypatch, way)
    config = dataclasses.replace(CONFIG, num_experts_per_token=1, renormalize_experts=False)
    block, h = draw(config, length=150)
    block = dataclasses.replace(block, router=block.router * 0)
    probabilities, chosen = route(config, h[0], block.router)
    assert (chosen == 0).all() and np.allclose(probabilities, 1 / 8)
    out = mixture(config, block, h, silu, Attention())
    np.testing.assert_allclose(out, by_definition(config, block, h), atol=1e-4)


def test_probabilities_may_stay_as_they_are():
    config = dataclasses.replace(CONFIG, renormalize_experts=False)
    block, h = draw(config)
    out = mixture(config, block, h, silu, Attention())
    np.testing.assert_allclose(out, by_definition(config, block, h), atol=1e-4)
    assert not np.allclose(out, by_definition(CONFIG, block, h), atol=1e-2)


@pytest.mark.parametrize("way", ["xla", "tpu"])
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_experts_in_8_bits(format, way, monkeypatch):
    ways(monkeypatch, way)
    block, h = draw()
    names = ("expert_gate", "expert_up", "expert_down")
    eight = {name: quantize(getattr(block, name), 1, Scheme(format)) for name in names}
    wide = {name: dequantize(weight, jnp.float32) for name, weight in eight.items()}
    out = mixture(CONFIG, dataclasses.replace(block, **eight), h, silu, Attention())
    expected = by_definition(CONFIG, dataclasses.replace(block, **wide), h)
    np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("way", ["xla", "tpu"])
def test_sums_beyond_float16_are_rescaled_first(way, monkeypatch):
    ways(monkeypatch, way)
    config = dataclasses.replace(CONFIG, embed_dim=1024)
    block, h = draw(config)
    block = dataclasses.replace(block, expert_gate=0.01 * jnp.ones_like(block.expert_gate))
    block = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), block)
    h = jnp.abs(4 * h).astype(jnp.float16)
    eight = dataclasses.replace(block, expert_gate=quantize(block.expert_gate, 1, Scheme("fp8")))
    assert jnp.isfinite(mixture(config, eight, h, silu, Attention())).all()


def test_serving_has_inputs_first():
    llama = init_llama(CONFIG, jax.random.key(0), scale=0.5)
    (served,) = serving_weights(llama, None, CONFIG).lower
    block, h = draw()
    assert served.expert_gate.shape == (8, 24, 16)
    np.testing.assert_allclose(
        mixture(CONFIG, served, h, silu, Attention()), by_definition(CONFIG, block, h), atol=1e-4
    )


@pytest.mark.short("8-data=1,fsdp=2,model=2-tpu", "6-1x4-xla")
@pytest.mark.parametrize("way", ["xla", "tpu"])
@pytest.mark.parametrize("mesh", ["1x4", "2x2", "4x1", "data=1,fsdp=2,model=2"])
@pytest.mark.parametrize("experts", [8, 6])  # 6: four devices cannot share them, and have all
def test_gradient_on_meshes(mesh, experts, way, monkeypatch):
    """Output and gradient, in the input and the router, of one device."""
    ways(monkeypatch, way)
    config = dataclasses.replace(CONFIG, num_experts=experts)
    block, h = draw(config, batch=4)
    target = jax.random.normal(jax.random.key(5), h.shape)

    def loss(h, router, attention):
        layer = dataclasses.replace(block, router=router)
        return (mixture(config, layer, h, silu, attention) * target).sum()

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    one = gradient(h, block.router, Attention())
    many = gradient(h, block.router, Attention(skv.make_mesh(mesh)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), many, one)


def test_rows_of_no_expert_may_hold_anything(monkeypatch):
    """On a TPU the product of groups leaves them, and their gradients, as they are in memory."""
    ways(monkeypatch, "tpu")
    product = grouped.rows_product

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def poisoned(x, weight, sizes, inputs, dtype):
        inside = jnp.arange(x.shape[0])[:, None] < sizes.sum()
        return jnp.where(inside, product(x, weight, sizes, inputs, dtype), jnp.nan)

    def forward(x, weight, sizes, inputs, dtype):
        return poisoned(x, weight, sizes, inputs, dtype), (x, weight, sizes)

    def backward(inputs, dtype, saved, gradient):
        x, weight, sizes = saved
        inside = jnp.arange(x.shape[0])[:, None] < sizes.sum()
        call = functools.partial(product, group_sizes=sizes, inputs=inputs, dtype=dtype)
        of_x, of_weight = jax.vjp(call, x, weight)[1](jnp.where(inside, gradient, 0))
        return jnp.where(inside, of_x, jnp.nan), of_weight, None

    poisoned.defvjp(forward, backward)
    block, h = draw(batch=4)

    def loss(h, attention):
        return jnp.square(mixture(CONFIG, block, h, silu, attention)).sum()

    expected = jax.grad(loss)(h, Attention())
    monkeypatch.setattr(grouped, "rows_product", poisoned)
    found = jax.grad(loss)(h, Attention(skv.make_mesh("1x4")))
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_the_backward_pass_gathers_again():
    """No matrix of an expert is kept for it, of which blocks would keep one each."""
    block, h = draw(length=64)

    def run(h):
        return mixture(CONFIG, block, h, silu, Attention())

    kept = jax.eval_shape(lambda h: jax.vjp(run, h)[1], h)
    largest = max(leaf.size for leaf in jax.tree.leaves(kept))
    assert largest <= max(block.expert_gate.size, 2 * h.size * CONFIG.num_experts_per_token)


def test_gradient_is_that_of_all_experts():
    """The one of the dense sum, in which every token runs through every expert."""
    block, h = draw()
    target = jax.random.normal(jax.random.key(5), h.shape)

    def dense(h):
        weights = jax.nn.softmax(h @ block.router.T)
        best, chosen = jax.lax.top_k(weights, 3)
        best = best / best.sum(-1, keepdims=True)
        inner = jax.nn.silu(jnp.einsum("BTD,EFD->BTEF", h, block.expert_gate))
        inner *= jnp.einsum("BTD,EFD->BTEF", h, block.expert_up)
        out = jnp.einsum("BTEF,EDF->BTED", inner, block.expert_down)
        picked = jnp.take_along_axis(out, chosen[..., None], axis=2)
        return (picked * best[..., None] * target[:, :, None]).sum()

    def sparse(h):
        return (mixture(CONFIG, block, h, silu, Attention()) * target).sum()

    np.testing.assert_allclose(jax.grad(sparse)(h), jax.grad(dense)(h), atol=2e-4)


def test_operations_are_those_of_the_chosen_experts():
    """By XLA's count at most a third above them, where all experts would be 16 times as many."""
    config = dataclasses.replace(
        CONFIG, embed_dim=64, mlp_dim=64, num_experts=32, num_experts_per_token=2
    )
    block, h = draw(config, batch=1, length=2048)
    layer = jax.jit(lambda h: output_and_mlp(config, block, h, jnp.zeros((1, 2048, 2, 8))))
    cost = layer.lower(h).compile().cost_analysis()
    assert cost is not None
    # XLA counts the body of a loop once: its steps are blocks of 32, of which there are 5.
    blocks = grouped.blocks_of_groups(jnp.zeros(4096, jnp.int32), 32, "xla").row
    assert blocks.shape == (64, 128)
    chosen = 2 * 3 * 2 * 2048 * 64 * 64
    assert blocks.size * 2 * 3 * 64 * 64 <= 2 * chosen
    assert cost["flops"] < 2.5 * chosen


# Blocks -----------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "hopper"])
@pytest.mark.parametrize(("rows", "groups"), [(1, 5), (7, 3), (300, 4), (64, 64), (1000, 3)])
def test_every_row_has_a_place_in_a_block_of_its_group(rows, groups, implementation):
    """Those of no group (here number `groups`) have none."""
    group = np.random.default_rng(rows).integers(0, groups + 1, rows)
    blocks = grouped.blocks_of_groups(jnp.asarray(group), groups, implementation)
    count, size = blocks.row.shape
    assert implementation == "xla" or size in (64, 128)
    place, row = np.asarray(blocks.place), np.asarray(blocks.row).reshape(-1)
    inside = group < groups
    assert (place[~inside] == count * size).all()
    assert (row[place[inside]] == np.flatnonzero(inside)).all()
    assert (row < rows).sum() == inside.sum()
    assert (np.asarray(blocks.group)[place[inside] // size] == group[inside]).all()
    used = int(blocks.used[0])
    assert used == sum(-(-(group == g).sum() // size) for g in range(groups)) <= count


def test_the_implementation_follows_the_device():
    sizes = 2048, 768
    assert grouped.choose_grouped(sizes, jnp.bfloat16) == "xla"
    with under("H200"):
        assert grouped.choose_grouped(sizes, jnp.bfloat16) == "hopper"
        assert grouped.choose_grouped(sizes, jnp.float32) == "xla"
        assert grouped.choose_grouped((2048, 760), jnp.bfloat16) == "xla"
    with under("A100"):
        assert grouped.choose_grouped(sizes, jnp.bfloat16) == "xla"
    with under("v5e"):
        assert grouped.choose_grouped(sizes, jnp.bfloat16) == "tpu"


@pytest.mark.short("64-first", "64-last")
@pytest.mark.parametrize("inputs", ["first", "last"])
@pytest.mark.parametrize("size", [64, 128])
def test_kernel_on_hopper(inputs, size):
    """Interpreted where there is none; some matrices are not needed, and a block has no rows."""
    rng = np.random.default_rng(size)
    x = jnp.asarray(rng.standard_normal((4, size, 128)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((5, 128, 256)), jnp.bfloat16)
    group, used = jnp.asarray([3, 0, 3, 4], jnp.int32), jnp.asarray([3], jnp.int32)
    blocks = grouped.Blocks(group, used, jnp.zeros((4, size), int), jnp.zeros(0, int))
    stored = weight if inputs == "first" else weight.swapaxes(1, 2)
    expected = grouped.block_product(x, stored, blocks, inputs, "xla", x.dtype)
    with device_of("hopper"):
        found = grouped.block_product(x, stored, blocks, inputs, "hopper", x.dtype)
    np.testing.assert_allclose(
        np.asarray(found[:3], np.float32), np.asarray(expected[:3], np.float32), rtol=2e-2, atol=0.1
    )
