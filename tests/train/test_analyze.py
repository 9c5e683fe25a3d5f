"""The analysis of cuts: equal to building each student and running it, in five programs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from swiftkv_jax import Config, LayerKind, Model, Rope, add_swiftkv
from swiftkv_jax.calibration import LayerFit, calibrate
from swiftkv_jax.calibration.moments import zero_moments
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.initialization import init_llama, init_swiftkv
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.params import Llama, SwiftKV
from swiftkv_jax.model.sharding import batch_sharding, llama_shardings
from swiftkv_jax.model.stacks import split_layers
from swiftkv_jax.model.transformer import run_lower_layers, teacher
from swiftkv_jax.train.analysis import cut_kv, sweep_programs
from swiftkv_jax.train.analysis.cut_kv import plan_passes
from swiftkv_jax.train.analysis.cut_list import possible_cuts
from swiftkv_jax.train.analysis.sweep import Analysis, Sweep, measure_all
from swiftkv_jax.train.loss import far_tokens
from swiftkv_jax.train.loss.distill import Objective, distill_sums
from swiftkv_jax.train.loss.far_tokens import only_far
from swiftkv_jax.train.recipe import Init

CONFIG = Config(
    vocab_size=61,
    embed_dim=32,
    mlp_dim=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    o_bias=True,
)
CUTS, _ = possible_cuts(CONFIG, range(1, 6), (1, 2, 4), "leader")


def packed_batch(seed: int, first: int = 7) -> Batch:
    """Rows with two documents, of which the first has `first` tokens, and some padding."""
    tokens = jax.random.randint(jax.random.key(seed), (4, 16), 0, CONFIG.vocab_size)
    at = jnp.broadcast_to(jnp.arange(16), (4, 16))
    segments = jnp.where(at < first, 1, jnp.where(at < 13, 2, 0))
    mask = ((at != first - 1) & (at < 12)).astype(jnp.float32)
    positions = jnp.where(at < first, at, at - first) * (segments > 0)
    return Batch(tokens, positions, segments, mask)


@functools.cache
def random_llama() -> Llama:
    return init_llama(CONFIG, jax.random.key(0), scale=0.3)


@functools.cache
def measured_batches() -> list[Batch]:
    return [packed_batch(1), packed_batch(2, first=11)]


@functools.cache
def fitted_batches() -> list[Batch]:
    return [packed_batch(seed) for seed in range(3, 7)]


PROGRAMS: tuple[Any, ...] = (
    sweep_programs.teacher_states,
    sweep_programs.cosine_sums,
    sweep_programs.cut_sums,
    cut_kv.teacher_queries,
    cut_kv.add_cut,
)
direct_sums: Any = jax.jit(distill_sums, static_argnums=0, static_argnames="objective")


def analyze_cuts(config: Config, llama: Llama, batches, cuts, **changes) -> Analysis:
    """Of students of boundary at the `cuts` (K, g), sorted."""
    arguments = {"prompt_length": 100, "attention": Attention(), "calibration": fitted_batches()}
    lowest = min(k for k, _ in cuts)
    sweep = Sweep(config, llama, batches, lowest=lowest, **(arguments | changes))
    return sweep.summary(measure_all(sweep, [(k, g, "boundary") for k, g in cuts]))


def analyzed(init: Init = "closed-form", **changes) -> Analysis:
    return analyze_cuts(CONFIG, random_llama(), measured_batches(), CUTS, init=init, **changes)


@pytest.fixture(scope="module", autouse=True)
def small_gaps_are_far():
    """Of a random teacher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_tokens, "FAR_NATS", 0.01)
        program: Any = only_far
        program.clear_cache()
        yield
        program.clear_cache()


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    for program in PROGRAMS:
        program.clear_cache()
    return analyzed()


@pytest.fixture(scope="module")
def copies(analysis) -> dict[Init, Analysis]:
    return {
        "authors": analyzed("authors"),
        "leader": analyzed("leader"),
        "closed-form": analysis,
    }


def test_possible_cuts():
    assert CUTS == [(1, 1), (2, 1), (2, 2), (2, 4), (3, 1), (4, 1), (4, 2), (5, 1)]
    normed = dataclasses.replace(CONFIG, qk_norm="head")
    cuts, reasons = possible_cuts(normed, [2, 4], (1, 2), "leader")
    assert (cuts, reasons) == ([(2, 1), (2, 2), (4, 1), (4, 2)], {})
    cuts, reasons = possible_cuts(normed, [2, 4], (1, 2), "closed-form")
    assert cuts == [(2, 1), (4, 1)] and "no closed form" in reasons[2]
    kinds = tuple(LayerKind(None if layer == 3 else Rope()) for layer in range(6))
    mixed = dataclasses.replace(CONFIG, layer_kinds=kinds)
    assert possible_cuts(mixed, [2, 4], (1, 2), "leader") == ([(2, 1), (4, 1), (4, 2)], {})
    _, reasons = possible_cuts(mixed, [2], (2,), "leader")
    assert "layers 2 to 3 would share rotated keys" in reasons[2]


def test_all_cuts_take_five_programs(analysis):
    assert [program._cache_size() for program in PROGRAMS] == [1, 1, 1, 1, 1]


@pytest.mark.long
def test_more_layers_take_no_more_programs():
    """Not even small ones."""
    compiled = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    counts = []
    for num_layers in (3, 5):
        config = dataclasses.replace(CONFIG, num_layers=num_layers, num_key_value_layers=0)
        llama = init_llama(config, jax.random.key(0))
        cuts, _ = possible_cuts(config, range(1, num_layers), (1, 2), "closed-form")
        compiled.clear()
        analyze_cuts(config, llama, measured_batches(), cuts)
        counts.append(compiled.count("/jax/core/compile/backend_compile_duration"))
    assert 5 < counts[1] <= counts[0]


def student_of(k: int, g: int, init: Init) -> tuple[Config, Llama, SwiftKV, list[LayerFit]]:
    config = CONFIG.cut(k, g)
    llama = split_layers(config, random_llama())
    if init == "closed-form":
        fit = calibrate(config, llama, fitted_batches(), attention=Attention())
        return fit.config, llama, fit.delta, list(fit.layers)
    return config, llama, init_swiftkv(config, llama, start=init), []


@pytest.mark.short("2-4-closed-form", "4-2-leader", "5-1-authors")
@pytest.mark.parametrize("init", get_args(Init))
@pytest.mark.parametrize(("k", "g"), [(1, 1), (2, 4), (4, 2), (5, 1)])
def test_a_cut_equals_its_student(k, g, init, copies):
    """The one that training starts from, with groups that share caches and layers that mix."""
    analysis = copies[init]
    cut = analysis.cuts[CUTS.index((k, g))]
    assert (cut.num_key_value_layers, cut.key_value_group_size) == (k, g)
    config, llama, delta, layers = student_of(k, g, init)
    assert (delta.mix is not None) == (g > 1 and init == "closed-form")
    objective = Objective(temperature=1.0)
    far = [only_far(config, Attention(), llama, batch) for batch in measured_batches()]
    expected, of_far = (
        jax.tree.map(
            lambda *parts: float(sum(parts)),
            *(direct_sums(config, delta, llama, batch, objective=objective) for batch in batches),
        )
        for batches in (measured_batches(), far)
    )
    np.testing.assert_allclose(cut.kl, expected.kl / expected.targets, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(cut.agreement, expected.agreement / expected.targets, rtol=1e-6)
    np.testing.assert_allclose(
        np.log(cut.student_perplexity), expected.student_nll / expected.targets, rtol=1e-4
    )
    np.testing.assert_allclose(
        np.log(analysis.teacher_perplexity), expected.teacher_nll / expected.targets, rtol=1e-4
    )
    assert analysis.tokens == expected.targets
    assert 3 < analysis.far_tokens == of_far.targets < expected.targets / 4
    lost = (of_far.student_nll - of_far.teacher_nll) / of_far.targets
    np.testing.assert_allclose(cut.far_nats, lost, rtol=1e-3, atol=1e-5)
    assert [fit.layer for fit in cut.layers] == [fit.layer for fit in layers]
    ours, theirs = ([dataclasses.astuple(fit) for fit in fits] for fits in (cut.layers, layers))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert [each.layer for each in cut.r2] == [fit.layer for fit in layers]


def test_r2_is_of_the_variance_that_keys_and_values_follow(analysis):
    """Squared correlations of each head's entries, of all tokens but first ones."""
    config, llama, delta, _ = student_of(3, 1, "closed-form")
    parts = []
    for batch in measured_batches():
        inputs, _ = sweep_programs.teacher_states(CONFIG, Attention(), random_llama(), batch)
        segments = np.asarray(batch.segment_ids)
        counted = (segments > 0) & (np.asarray(batch.positions) > 0)

        def normed(layer, inputs=inputs):
            x = np.asarray(inputs[layer], np.float64)
            scale = np.asarray(random_llama().lower.attn_norm[layer])
            return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale

        layers = []
        for index, layer in enumerate(range(3, 6)):
            own = random_llama().lower_qkv
            pairs = [
                (own.k[layer], own.k_bias[layer], delta.k[index], delta.k_bias[index]),
                (own.v[layer], own.v_bias[layer], delta.v[index], delta.v_bias[index]),
            ]
            layers.append(
                [
                    [
                        np.einsum("BTD,KHD->BTKH", s, np.asarray(w, np.float64)) + np.asarray(b)
                        for s, w, b in ((normed(layer), *pair[:2]), (normed(3), *pair[2:]))
                    ]
                    for pair in pairs
                ]
            )
        parts.append(np.array(layers)[:, :, :, counted])  # U P 2 n K H
    y, ours = np.moveaxis(np.concatenate(parts, 3), 2, 0)  # U P n K H
    y, ours = (x - x.mean(2, keepdims=True) for x in (y, ours))
    both, one, other = ((a * b).sum((2, 4)) for a, b in ((y, ours), (y, y), (ours, ours)))
    expected = (both**2 / one / other).mean(-1)  # U P
    found = analysis.cuts[CUTS.index((3, 1))].r2
    assert [each.layer for each in found] == [3, 4, 5]
    np.testing.assert_allclose([[each.r2_k, each.r2_v] for each in found], expected, rtol=1e-3)
    assert 0.1 < expected[1:].min() and expected[1:].max() < 0.95 and expected[0].min() > 0.999


def test_only_the_closed_form_counts_calibration_tokens(copies):
    counted = {init: found.calibration_tokens for init, found in copies.items()}
    assert counted == {"authors": 0, "leader": 0, "closed-form": len(fitted_batches()) * 4 * 13}


def planned(lower: Sequence[int], mesh: Mesh | None = None) -> list[tuple[int, dict[int, int]]]:
    passes = plan_passes(CONFIG, [(k, 0) for k in lower], mesh)
    return [(entries, {k: at for (k, _), at in chosen.items()}) for entries, chosen in passes]


def test_passes_over_the_calibration_tokens_change_nothing(analysis, monkeypatch):
    """Room for the moments of one K: as many passes as there are K, all with stacks of one size."""
    monkeypatch.setattr(cut_kv, "MOMENTS_BYTES", 1)
    assert planned(sorted({k for k, _ in CUTS})) == [
        (5, {1: 0}),
        (5, {2: 0}),
        (5, {3: 0, 4: 3}),
        (5, {5: 0}),
    ]
    np.testing.assert_allclose(
        [cut.kl for cut in analyzed().cuts], [cut.kl for cut in analysis.cuts], rtol=1e-3, atol=1e-6
    )


def test_moments_stay_within_their_bytes(monkeypatch):
    """On a mesh each device has a part of them."""
    for mesh in (None, make_mesh("fsdp=2,model=2")):
        leaves = jax.tree.leaves(zero_moments(CONFIG, mesh, 1))
        layer = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        monkeypatch.setattr(cut_kv, "MOMENTS_BYTES", 7 * layer)
        passes = planned([1, 2, 3, 4, 5], mesh)
        assert passes == [(7, {1: 0}), (7, {2: 0, 3: 4}), (7, {4: 0, 5: 2})]
        monkeypatch.setattr(cut_kv, "MOMENTS_BYTES", 2**33)
        assert planned([1, 5], mesh) == [(6, {1: 0, 5: 5})]


def test_without_a_token_to_calibrate_on(monkeypatch):
    """There is none where each text is a first token, which keeps its own."""
    with pytest.raises(ValueError, match="no token to calibrate on"):
        analyzed(calibration=[])
    monkeypatch.setattr(cut_kv, "teacher_queries", lambda *arguments: None)
    fitter = cut_kv.Fitter(CONFIG, random_llama(), Attention(), lowest=1, exact_tail=0)
    head = dataclasses.replace(CONFIG.cut(1), exact_head=1)
    lone = dataclasses.replace(packed_batch(0), segment_ids=jnp.tile(jnp.arange(1, 17), (4, 1)))
    states: Any = [(lone, None, None)]
    assert fitter.gather(CONFIG, 1, {}, states).tokens == 64
    with pytest.raises(ValueError, match="no token to calibrate on"):
        fitter.gather(head, 1, {}, states)


def test_costs(analysis):
    """K = 2 of 6 layers in pairs: 2 layers and 2 projections against 5 layers and 1; 4 cache layers
    against 6."""
    cut = analysis.cuts[CUTS.index((2, 2))]
    assert cut.kv_bytes_per_token == 4 * 2 * 2 * 8 * 4
    assert cut.kv_bytes_share == pytest.approx(4 / 6)
    assert 2 / 5 < cut.prefill_flops_share < 3 / 6


def test_similarity_is_the_mean_cosine_of_real_tokens(analysis):
    """The embedding, the input of layer 3 and the last layer's output, in float64."""
    model = add_swiftkv(Model(llama=random_llama(), swiftkv=None, config=CONFIG), 3)
    cosines, real = np.zeros((3, 3)), 0
    for batch in measured_batches():
        states = [
            random_llama().embed[batch.tokens],
            run_lower_layers(model.config, model.llama, batch)[0],
            teacher(CONFIG, random_llama(), batch),
        ]
        units = np.stack(
            [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in np.asarray(states, np.float64)]
        )
        keep = np.asarray(batch.segment_ids) > 0
        cosines, real = (
            cosines + np.einsum("iBTD,jBTD,BT->ij", units, units, keep),
            real + keep.sum(),
        )
    np.testing.assert_allclose(
        np.array(analysis.similarity)[np.ix_([0, 3, 6], [0, 3, 6])], cosines / real, atol=1e-5
    )


@pytest.mark.long
def test_a_mesh_gives_the_same(analysis):
    mesh = make_mesh((2, 2))
    llama = jax.device_put(random_llama(), llama_shardings(CONFIG, mesh))
    batches = [jax.device_put(batch, batch_sharding(mesh)) for batch in measured_batches()]
    others = [jax.device_put(batch, batch_sharding(mesh)) for batch in fitted_batches()]
    attention = Attention(mesh)
    ours = analyze_cuts(CONFIG, llama, batches, CUTS, attention=attention, calibration=others)
    np.testing.assert_allclose(
        [cut.kl for cut in ours.cuts], [cut.kl for cut in analysis.cuts], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(ours.similarity, analysis.similarity, atol=1e-5)
