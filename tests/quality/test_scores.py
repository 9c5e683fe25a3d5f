"""Scores of every position: far-dependent tokens, serving modes, and the package's own sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality import held_out, scores
from swiftkv_jax import Model, calibrate, logits
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.train.loss.distill import Objective, distill_sums
from tests import tiny

T, PROMPT, KEPT = held_out.LENGTH, held_out.PROMPT, scores.KEPT


@dataclasses.dataclass
class Tiny:
    plain: Model
    held_out: held_out.HeldOut
    teacher: scores.Teacher


HF = tiny.hf_config(max_position_embeddings=T)


def rows_of_noise(lengths: list[int], vocabulary: int) -> held_out.HeldOut:
    """Random tokens; every row is a document."""
    random = np.random.default_rng(0)
    shape = len(lengths), T
    tokens = np.where(
        np.arange(T) < np.array(lengths)[:, None], random.integers(1, vocabulary, shape), 0
    )
    return held_out.HeldOut(
        [str(number) for number in range(len(lengths))],
        tokens.astype(np.int32),
        np.array(lengths, np.int32),
        np.arange(len(lengths), dtype=np.int32),
        np.zeros(shape, bool),
    )


@pytest.fixture(scope="module")
def small() -> Tiny:
    """A random teacher of six layers on three rows, one shorter than the prompt."""
    mesh = make_mesh("1x1")
    plain = tiny.model_of(
        HF | {"num_key_value_layers": 6}, tiny.tensors_for(HF | {"num_key_value_layers": 6})
    )
    text = rows_of_noise([T, 400, 100, 0], HF["vocab_size"])
    teacher = scores.run_teacher(plain.config, plain.llama, text, mesh, batch_size=2, layers=(2, 4))
    return Tiny(plain, text, teacher)


def test_far_dependent_tokens(small):
    """Against the teacher on rows that begin where the prompt's end is kept: with rotary embeddings
    only distances count, so it is the same model."""
    text, found = small.held_out, small.teacher
    full, cut = (
        np.asarray(jax.nn.log_softmax(logits(small.plain, text.tokens[:2, start:])))
        for start in (0, PROMPT - KEPT)
    )
    for row, length in ((0, T), (1, 400)):
        for token in range(PROMPT, length):
            chosen = text.tokens[row, token]
            lost = full[row, token - 1, chosen] - cut[row, token - 1 - (PROMPT - KEPT), chosen]
            if abs(lost - scores.FAR_NATS) > 1e-3:
                assert found.masks["far"][row, token - 1] == (lost > scores.FAR_NATS)
    far, others, answers = (found.masks[name] for name in ("far", "others", "answers"))
    assert 5 < far.sum() < answers.sum() / 2 and not (far & others).any()
    np.testing.assert_array_equal(far | others, answers)
    np.testing.assert_array_equal(answers.sum(1), [T - PROMPT, 400 - PROMPT, 0, 0])


def test_the_far_prompt_is_cut_away():
    batch = scores.cut_away(rows_of_noise([8], 9).batch(slice(0, 1)), 3)
    assert batch.segment_ids[0, :10].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 0, 0]
    assert batch.positions[0, :8].tolist() == list(range(8))
    nll, cut = np.array([1.0, 1.0, 5.0]), np.array([1.9, 2.1, 4.0])
    assert scores.far_dependent(nll, cut).tolist() == [False, True, False]


@pytest.fixture(scope="module")
def calibrated(small) -> Model:
    """A student of two layers that share a cache, with mixes."""
    return calibrate(
        small.plain,
        small.held_out.tokens[:2].tolist(),
        num_key_value_layers=2,
        key_value_group_size=2,
    ).model


def test_scores_are_those_of_the_package(small, calibrated):
    """Summed over all predictions: what distillation reports at temperature 1."""
    assert calibrated.config.shared_kv_heads is not None
    found = scores.score_student(calibrated, small.teacher, make_mesh("1x1"), scores.MODES[0])
    batch = jax.tree.map(jnp.asarray, small.held_out.batch(slice(0, 4)))
    wanted = jax.jit(distill_sums, static_argnames=("config", "objective"))(
        calibrated.config,
        calibrated.swiftkv,
        calibrated.llama,
        batch,
        objective=Objective(temperature=1.0),
    )
    mask, teacher = small.teacher.masks["all"], small.teacher.scores
    for ours, theirs in (
        (found.nll, wanted.student_nll),
        (teacher.nll, wanted.teacher_nll),
        (found.kl, wanted.kl),
        (found.agreement, wanted.agreement),
    ):
        np.testing.assert_allclose(ours[mask].sum(), theirs, rtol=1e-4)
    assert teacher.agreement[mask].all() and np.abs(teacher.kl[mask]).max() < 1e-5
    assert 0 < found.first[mask].mean() < 1


@pytest.mark.parametrize("mode", scores.MODES, ids=lambda mode: mode.name)
def test_serving_modes(mode, small):
    """As `logits` computes them for whole rows with a prompt of `PROMPT` tokens."""
    student = tiny.model_of(HF, tiny.tensors_for(HF))
    found = scores.score_student(student, small.teacher, make_mesh("1x1"), mode)
    if mode.exact_tail is not None:
        config = dataclasses.replace(student.config, generated_kv="own", exact_tail=mode.exact_tail)
        student = dataclasses.replace(student, config=config)
    tokens = small.held_out.tokens[:2]
    whole = np.asarray(
        jax.nn.log_softmax(logits(student, tokens, swiftkv=True, prompt_lengths=[PROMPT] * 2))
    )
    wanted = -np.take_along_axis(whole, np.roll(tokens, -1, 1)[..., None], -1)[..., 0]
    mask = small.held_out.answers[:2]
    np.testing.assert_allclose(found.nll[:2][mask], wanted[mask], rtol=1e-4, atol=1e-4)
    assert found.nll[2:].any() == (mode.exact_tail is None), "short rows have no answers"
