"""Students with exact heads, taps and prompt layers in a sweep: equal to building each and running
it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from swiftkv_jax import Config
from swiftkv_jax.calibration import calibrate
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.stacks import split_layers
from swiftkv_jax.train.analysis import cut_boundary
from swiftkv_jax.train.analysis import sweep as sweep_module
from swiftkv_jax.train.analysis.sweep import Sweep
from swiftkv_jax.train.loss import far_tokens
from swiftkv_jax.train.loss.distill import Objective, distill_sums
from swiftkv_jax.train.loss.far_tokens import only_far
from tests.train.test_analyze import CONFIG, fitted_batches, packed_batch, random_llama

TAIL, NEURONS = 3, 12
BATCHES = [packed_batch(1, first=11), packed_batch(2, first=13)]


@pytest.fixture(scope="module")
def sweep():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_tokens, "FAR_NATS", 0.01)
        program: Any = only_far
        program.clear_cache()
        for module in sweep_module, cut_boundary:
            patch.setattr(module, "quarter_of_neurons", lambda config: NEURONS)
        yield Sweep(
            CONFIG,
            random_llama(),
            BATCHES,
            prompt_length=100,
            attention=Attention(),
            calibration=fitted_batches(),
            exact_tail=TAIL,
        )
        program.clear_cache()


def student(cut: Config):
    llama = split_layers(cut, random_llama())
    return llama, calibrate(cut, llama, fitted_batches(), attention=Attention())


def own_batch(batch: Batch) -> Batch:
    """The roles of tokens by the definition: the first half of a row is the prompt."""
    at = np.arange(16)
    own = np.broadcast_to(at >= 8 - TAIL, (4, 16)) & (np.asarray(batch.segment_ids) > 0)
    began = at - np.asarray(batch.positions)
    counted = (at >= 7) & (began < 8 - TAIL)
    return dataclasses.replace(batch, own=own, loss_mask=np.asarray(batch.loss_mask) * counted)


def test_students_at_one_cut_have_the_weights_of_their_serving(sweep):
    """Those with a tail are fitted to what queries behind it read."""
    fits = {}
    for (k, g, generated), start in sweep.starts([(3, 1, "boundary"), (3, 1, "own")]):
        _, fit = student(sweep.at(k, g, generated))
        fits[generated] = [dataclasses.astuple(layer) for layer in start.layers]
        expected = [dataclasses.astuple(layer) for layer in fit.layers]
        np.testing.assert_allclose(fits[generated], expected, rtol=1e-3)
        np.testing.assert_allclose(start.kv.k[:3], fit.delta.k, rtol=1e-2, atol=1e-4)
    assert np.abs(np.subtract(fits["boundary"], fits["own"]))[1:, 1:3].min() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("generated", [pytest.param("boundary", marks=pytest.mark.long), "own"])
def test_a_student_equals_that_of_calibration(generated, sweep):
    compare = jax.jit(distill_sums, static_argnums=0, static_argnames="objective")
    for layers, starts in sweep.improved_starts(2, generated):
        for taps, start in enumerate(starts):
            cut = sweep.at(2, 1, generated, layers, taps, 1)
            assert cut.prompt_mlp_neurons == (NEURONS if layers else 0)
            found = sweep.measure(cut, start)
            llama, fit = student(cut)
            np.testing.assert_allclose(
                [dataclasses.astuple(layer) for layer in start.layers],
                [dataclasses.astuple(layer) for layer in fit.layers],
                rtol=1e-3,
            )
            assert [layer.layer for layer in start.layers] == list(range(2 + layers, 6))
            batches = BATCHES if generated == "boundary" else map(own_batch, BATCHES)
            parts = [
                compare(fit.config, fit.delta, llama, batch, objective=Objective(temperature=1.0))
                for batch in batches
            ]
            expected = jax.tree.map(lambda *leaves: float(sum(leaves)), *parts)
            assert found.tokens == expected.targets > 20
            case = f"M={layers}, {taps} taps"
            np.testing.assert_allclose(
                [found.kl, np.log(found.teacher_perplexity), np.log(found.student_perplexity)],
                np.array([expected.kl, expected.teacher_nll, expected.student_nll])
                / expected.targets,
                rtol=2e-3,
                err_msg=case,
            )
            lost = expected.student_nll - expected.teacher_nll
            np.testing.assert_allclose(
                found.perplexity_loss, np.expm1(lost / expected.targets), rtol=2e-2, atol=1e-5
            )
            of_far = [only_far(cut, Attention(), llama, batch) for batch in BATCHES]
            sums = [compare(fit.config, fit.delta, llama, batch) for batch in of_far]
            lost = sum(float(each.student_nll - each.teacher_nll) for each in sums)
            np.testing.assert_allclose(
                found.far_nats, lost / sweep.far_tokens, rtol=2e-2, atol=1e-4, err_msg=case
            )
        if layers == 2:
            break
