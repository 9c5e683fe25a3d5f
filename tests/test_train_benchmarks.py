"""The benchmarks of training: products are counted as often as they run, both losses agree, and no
failure loses a row."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge

from benchmarks import loss, report, train_step, train_variants, two_models
from benchmarks.hlo_flops import MatmulFlops, matmul_flops
from benchmarks.timing import SMOKE_PLAN
from benchmarks.worker import WorkerError
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.initialization import init_llama, init_swiftkv
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.plan.roofline import Roofline
from swiftkv_jax.train.loss.distill import mean_loss

CONFIG = Config(
    vocab_size=256,
    embed_dim=128,
    mlp_dim=448,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    num_key_value_layers=2,
)
LENGTH = 16
ROOFLINE = Roofline(
    flops=100e12, bandwidth=1e12, devices=1, dtype="bfloat16", tried={}, published=None
)


@pytest.fixture
def quick_compilation():
    """Not where products are counted: without optimisation nothing is left out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def optimised(function, *shapes) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().as_text() or ""


def test_products_of_loops_and_branches():
    def layers(x, weights, batched, much):
        x = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]
        x = jax.lax.cond(much > 0, lambda: jnp.tanh(x @ weights[0]) @ weights[1], lambda: x)
        return x, jnp.einsum("nij,njk->nik", batched, batched)

    found = matmul_flops(optimised(layers, (8, 16), (5, 16, 16), (3, 4, 4), ()))
    assert found == MatmulFlops(plain=(5 + 2) * 2 * 8 * 16 * 16, batched=3 * 2 * 4 * 4 * 4)


def test_a_loop_of_unknown_length_is_refused():
    def until(x, weight):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ weight, x)

    with pytest.raises(ValueError, match="unknown length"):
        matmul_flops(optimised(until, (8, 16), (16, 16)))


@functools.cache
def model():
    llama = init_llama(CONFIG, jax.random.key(0), scale=0.3)
    return llama, jax.tree.map(lambda leaf: 1.1 * leaf, init_swiftkv(CONFIG, llama))


def test_two_models_have_the_loss_of_one(quick_compilation):
    """Value and gradient, on packed rows: what is compared is the same step."""
    (llama, delta), mesh = model(), make_mesh((1, 1))
    batch: Batch = jax.tree.map(
        lambda field: field[0], train_variants.packed_batch(CONFIG, 64, 2, mesh, seed=1)
    )
    shared = jax.jit(jax.value_and_grad(lambda delta: mean_loss(CONFIG, delta, llama, batch)[0]))(
        delta
    )
    attention: Any = two_models.DenseAttention()
    loss_of_two = functools.partial(
        two_models.two_model_loss, CONFIG, remat="none", attention=attention
    )
    two = jax.jit(jax.value_and_grad(lambda delta: loss_of_two(delta, llama, llama, batch)))(delta)
    np.testing.assert_allclose(two[0], shared[0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(two[1]), jax.tree.leaves(shared[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4 * float(abs(b).max()))


def test_what_the_shared_prefix_saves():
    """The student's lower layers, and nothing else; near the formula of `cost`."""
    row = two_models.saving(CONFIG, LENGTH, LENGTH, "layer")
    counted, formula = row["counted"], row["formula"]
    assert counted["two_models"] - counted["shared"] == pytest.approx(
        formula["two_models"] - formula["shared"], rel=1e-6
    )
    assert counted["saved"] == pytest.approx(formula["saved"], abs=0.01)
    assert counted["saved"] > 0.16


def test_packed_rows():
    batch = train_variants.packed_batch(CONFIG, 64, 2, make_mesh((1, 1)), seed=0)
    lengths = train_variants.documents(64)
    ids, mask = np.asarray(batch.segment_ids)[0, 1], np.asarray(batch.loss_mask)[0, 1]
    assert sum(lengths) == 64 and len(lengths) > 1 and np.bincount(ids).tolist() == [0, *lengths]
    assert mask.sum() == 64 - len(lengths) and not mask[np.cumsum(lengths) - 1].any()
    assert np.asarray(batch.positions)[0, 0, np.cumsum(lengths) - 1].tolist() == [
        length - 1 for length in lengths
    ]


def test_a_step_is_timed(quick_compilation):
    size = train_variants.SIZES["smoke"]
    row = train_variants.run_step(
        size, size.variants[1], 0, dataclasses.replace(SMOKE_PLAN, seconds=0.0, max_rounds=3)
    )
    assert row["tokens_per_second"] == pytest.approx(2 * size.length / row["seconds"])
    assert row["model_tflops"] == row["computed_tflops"] > 0 and np.isfinite(row["loss"])
    assert row["planned_bytes"] > row["argument_bytes"] > 0


def fail(*_):
    raise MemoryError("more than there is")


def test_rows_of_train_step(tmp_path, monkeypatch, capsys):
    """One variant fails, the others are there all the same."""
    right = {"seconds": 1.0, "tokens_per_second": 2.0, "model_tflops": 30.0}
    right |= {"computed_tflops": 40.0, "compiled_peak_bytes": 100, "planned_bytes": 95.0}
    results = [WorkerError("MemoryError: more than there is"), right]

    def alone(function, *args, seconds=None):
        if function is not train_step.run_step:
            return ROOFLINE if function is report.roofline else facts
        if isinstance(result := results.pop(0), Exception):
            raise result
        return result

    def held(*_, **__):
        raise AssertionError("the device belongs to the processes of the variants")

    facts = report.environment(0)
    facts["device"] |= {"platform": "tpu", "kind": "TPU v5 lite"}
    monkeypatch.setattr(train_step, "alone", alone)
    monkeypatch.setattr(xla_bridge, "backends", held)
    path = tmp_path / "step.json"
    assert train_step.main(["--shapes", "smoke", "--output", str(path)]) == 1
    broken, right = json.loads(path.read_text())["rows"]
    assert (
        "more than there is" in broken["error"] and "more than there is" in capsys.readouterr().out
    )
    assert (
        right["mfu_of_product"] == 0.3
        and right["busy_of_product"] == 0.4
        and right["plan_error"] == pytest.approx(-0.05)
        and right["mfu_of_peak"] == pytest.approx(30 / 197)
    )


@pytest.mark.long
def test_loss_smoke(tmp_path, monkeypatch, quick_compilation):
    path, chosen = (
        tmp_path / "loss.json",
        [loss.Case(naive=True), loss.Case(), loss.Case(positions=16)],
    )
    monkeypatch.setattr(loss, "cases", lambda size: chosen)
    assert loss.main(["--shapes", "smoke", "--seed", "1", "--output", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert (
        list(rows) == [case.name for case in chosen]
        and rows["forward, fused, chunks of 16"]["chunks"] == 3
    )
    for row in rows.values():
        assert (
            row["seconds"] > 0 and row["flops"] == row["least_flops"] and row["temporary_bytes"] > 0
        )
        assert row["naive"] or not row["wrong"]


def test_a_wrong_gradient_is_seen(quick_compilation):
    size, case = loss.SIZES["smoke"], loss.Case()
    operands = loss.draw(size, jax.random.key(0))
    wanted = jax.jit(loss.naive(case))(*operands)
    sums, gradient = jax.jit(loss.fused(case))(*operands)
    assert not loss.compare((sums, gradient), wanted)["wrong"]
    assert loss.compare((sums, 1.05 * gradient), wanted)["wrong"]
    assert loss.compare((sums, gradient * jnp.nan), wanted)["wrong"]


def test_a_broken_case_is_a_row(monkeypatch):
    monkeypatch.setattr(loss, "count", fail)
    row = loss.measure_row(loss.Case(), loss.SIZES["smoke"], None, [], None, SMOKE_PLAN)
    assert row["error"] == "MemoryError: more than there is"
