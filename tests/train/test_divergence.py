"""Divergences and their gradients through the output matrix, against float64 NumPy that
differentiates nothing by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.train.loss import distill
from swiftkv_jax.train.loss.divergence import describe

ROWS, LENGTH, VOCABULARY, WIDTH = 2, 13, 61, 16


def inputs():
    """Hidden states, head, next tokens and weights; four positions carry no weight."""
    draw = np.random.default_rng(0).standard_normal
    student, teacher, head = (
        draw((ROWS, LENGTH, WIDTH)),
        draw((ROWS, LENGTH, WIDTH)),
        draw((VOCABULARY, WIDTH)),
    )
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH))
    weights = np.random.default_rng(2).uniform(size=(ROWS, LENGTH)) * (np.arange(LENGTH) > 3)
    return student, teacher, head, tokens, weights


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(kind, student, teacher, temperature, top_k):
    """As the textbooks write it, over logits at once; complex numbers pass through, for
    differentiation."""
    if top_k is not None:
        order = np.argsort(-teacher, axis=-1)[..., :top_k]
        student, teacher = (np.take_along_axis(x, order, -1) for x in (student, teacher))

    def softmax(x):
        e = np.exp((x - x.real.max(-1, keepdims=True)) / temperature)
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(teacher), softmax(student)
    m = (p + q) / 2
    terms = {
        "forward": p * np.log(p / q),
        "reverse": q * np.log(q / p),
        "jsd": (p * np.log(p / m) + q * np.log(q / m)) / 2,
    }
    return temperature**2 * terms[kind].sum(-1)


def gradient(kind, student_x, teacher_x, head, weights, temperature, top_k):
    """By complex steps (Squire and Trapp, 1998): exact to rounding, and nothing of the formula
    under test."""
    teacher, step, result = teacher_x @ head.T, 1e-30, np.zeros_like(student_x)
    for d in range(WIDTH):
        moved = student_x.astype(complex)
        moved[..., d] += 1j * step
        result[..., d] = divergence(kind, moved @ head.T, teacher, temperature, top_k).imag / step
    return weights[..., None] * result


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("top_k", [None, 7])
@pytest.mark.parametrize(("positions", "temperature"), [(5, 2.0), (1000, 4.0)])
def test_value_and_gradient(monkeypatch, kind, top_k, positions, temperature):
    """Chunks with a ragged last one, and a single chunk. The first three positions of both have no
    weight."""
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", positions * ROWS * VOCABULARY)
    student, teacher, head, tokens, weights = inputs()
    arrays = [jnp.asarray(x, jnp.float32) for x in (student, teacher, head)] + [
        jnp.asarray(tokens),
        jnp.asarray(weights, jnp.float32),
    ]

    def loss(student_x):
        sums = distill.linear_kl(temperature, student_x, *arrays[1:], divergence=kind, top_k=top_k)
        return sums[0], jnp.stack(sums)

    (value, sums), found = jax.value_and_grad(loss, has_aux=True)(arrays[0])
    logits = student @ head.T, teacher @ head.T
    expected = (
        weights * divergence(kind, logits[0].astype(complex), logits[1], temperature, top_k).real
    ).sum()
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(
        loss(arrays[0])[1], sums, rtol=1e-6, err_msg="with and without a gradient"
    )
    exact = gradient(kind, student, teacher, head, weights, temperature, top_k)
    assert np.abs(found - exact).max() <= 1e-5 * max(np.abs(exact).max(), 0.1)

    likeliest = [x.argmax(-1) for x in logits]
    nll = [
        -np.take_along_axis(log_softmax(x), tokens[..., None], -1)[..., 0]
        for x in (logits[1], logits[0])
    ]
    np.testing.assert_allclose(sums[1], (weights * (likeliest[0] == likeliest[1])).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums[2:4], [(weights * x).sum() for x in nll], rtol=1e-5)
    log_q, log_p = (log_softmax(x) for x in logits)
    kl = (weights * (np.exp(log_p) * (log_p - log_q)).sum(-1)).sum()
    np.testing.assert_allclose(
        sums[4], kl, rtol=1e-5, err_msg="at temperature 1 over the whole vocabulary, always"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("forward", 1.0), "KL(teacher || student) at temperature 1"),
        (("forward", 2.0), "4 KL(teacher || student) at temperature 2"),
        (
            ("reverse", 1.5, 1000),
            "2.25 KL(student || teacher) at temperature 1.5, of the teacher's 1,000 likeliest "
            "tokens",
        ),
        (("jsd", 2.0), "4 Jensen-Shannon divergence at temperature 2"),
    ],
)
def test_the_loss_in_words(arguments, text):
    assert describe(*arguments) == text


def test_one_likeliest_token_says_nothing():
    """Renormalised over a single token both distributions are certain."""
    student, teacher, head, tokens, weights = (jnp.asarray(x) for x in inputs())
    assert distill.linear_kl(1.0, student, teacher, head, tokens, weights, top_k=1)[0] == 0


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_improbable_tokens_do_not_make_nan(kind):
    """A softmax that underflows to zero makes p log p a NaN when it is not taken from
    logarithms."""
    student = jnp.array([[[200.0, 0.0]]])

    def loss(x):
        return distill.linear_kl(
            2.0,
            x,
            -student,
            jnp.eye(2),
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones((1, 1)),
            divergence=kind,
        )[0]

    value, found = jax.value_and_grad(loss)(student)
    assert np.isfinite(value) and np.isfinite(found).all()
    assert value == pytest.approx(
        {"forward": 400, "reverse": 400, "jsd": 4 * np.log(2)}[kind], rel=1e-5
    )


def test_no_whole_logits_in_the_compiled_gradient(monkeypatch):
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", 4 * ROWS * VOCABULARY)
    student, teacher, head, tokens, weights = (jnp.asarray(x) for x in inputs())
    compiled = (
        jax.jit(jax.grad(lambda x: distill.linear_kl(2.0, x, teacher, head, tokens, weights)[0]))
        .lower(student)
        .compile()
    )
    text = compiled.as_text() or ""
    assert f"[{ROWS},4,{VOCABULARY}]" in text, (
        "the chunk's logits should be there: the pattern below would not match anything"
    )
    assert (
        f"[{ROWS},{LENGTH},{VOCABULARY}]" not in text
        and f"[{ROWS * LENGTH},{VOCABULARY}]" not in text
    )
