"""The distillation loss against float64 NumPy, and the properties training relies on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax import Config, Model, add_swiftkv, distill_loss, logits
from swiftkv_jax.model.batch import Batch, unpacked_batch
from swiftkv_jax.model.initialization import init_llama
from swiftkv_jax.train.loss import distill

CONFIG = Config(
    vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=8
)


def make_model(num_key_value_layers=3, group=1, *, noise=0.0) -> Model:
    llama = init_llama(CONFIG, jax.random.key(0), scale=0.3)
    model = add_swiftkv(
        Model(llama=llama, swiftkv=None, config=CONFIG), num_key_value_layers, group
    )
    leaves, tree = jax.tree.flatten(model.swiftkv)
    noisy = [
        leaf + noise * jax.random.normal(jax.random.key(i), leaf.shape)
        for i, leaf in enumerate(leaves)
    ]
    return dataclasses.replace(model, swiftkv=jax.tree.unflatten(tree, noisy))


def make_tokens(batch=2, length=13):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, CONFIG.vocab_size)


@pytest.mark.parametrize("hidden_layer", [-2, -1, 4])
def test_a_student_that_equals_its_teacher_has_no_loss(hidden_layer):
    model = make_model(
        num_key_value_layers=5
    )  # the only upper layer computes the very same keys, values and queries
    loss, metrics = distill_loss(model, make_tokens(), jnp.ones((2, 13)), hidden_layer=hidden_layer)
    assert float(loss) < 1e-6, (
        "rounding in two separate sums of exponentials is all that may be left"
    )
    assert set(metrics) == {"logits_loss", "hidden_loss"}


@pytest.mark.long
def test_hidden_layers_are_counted_as_hugging_face_does():
    model, tokens, mask = make_model(noise=0.2), make_tokens(), jnp.ones((2, 13))
    hidden = {
        i: float(distill_loss(model, tokens, mask, hidden_layer=i)[1]["hidden_loss"])
        for i in (0, 3, 4, 5, 6, -2, -1)
    }
    assert hidden[-2] == hidden[5] and hidden[-1] == hidden[6]
    assert hidden[0] == hidden[3] == 0, "up to layer K both models are one"
    assert 0 < hidden[4] < hidden[5]
    for wrong in (7, -8):
        with pytest.raises(ValueError, match="hidden_layer=.* must be from -7 to 6"):
            distill_loss(model, tokens, mask, hidden_layer=wrong)


def test_gradient_agrees_with_finite_differences_and_reaches_only_the_delta():
    model, tokens = make_model(noise=0.05, group=3), make_tokens()
    mask = jnp.ones((2, 13)).at[0, :9].set(0)

    def loss(delta, llama):
        student = dataclasses.replace(model, swiftkv=delta, llama=llama)
        return distill_loss(student, tokens, mask, hidden_weight=1e-3)[0]

    of_delta, of_llama = jax.jit(jax.grad(loss, argnums=(0, 1)))(model.swiftkv, model.llama)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(of_delta))
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(of_llama))
    direction = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(9), leaf.shape), model.swiftkv
    )
    step = 1e-3
    ahead, behind = (
        jax.tree.map(lambda p, d, s=s: p + s * d, model.swiftkv, direction) for s in (step, -step)
    )
    numeric = (loss(ahead, model.llama) - loss(behind, model.llama)) / (2 * step)
    exact = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(of_delta), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(numeric, exact, rtol=1e-2)


def test_the_loss_and_its_gradient_are_float32_under_x64():
    model, tokens, mask = make_model(), np.asarray(make_tokens()), np.ones((2, 13))

    def loss(delta):
        return distill_loss(dataclasses.replace(model, swiftkv=delta), tokens, mask)[0]

    with jax.enable_x64(True):
        traced = jax.eval_shape(jax.value_and_grad(loss), model.swiftkv)
    assert {leaf.dtype for leaf in jax.tree.leaves(traced)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("remat", ["mlp", "layer"])
def test_recomputation_changes_nothing(remat):
    model = make_model(noise=0.1, group=3)
    batch = unpacked_batch(make_tokens())

    def gradient(remat):
        def loss(delta):
            sums = distill.distill_sums(model.config, delta, model.llama, batch, remat=remat)
            return sums.divergence / sums.targets + sums.hidden / sums.tokens

        return jax.jit(jax.grad(loss))(model.swiftkv)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        gradient("none"),
        gradient(remat),
    )


def test_an_average_over_positions_is_the_public_loss():
    """On a masked prompt: `swiftkv_jax.distill_loss` divides the KL by all positions, training by
    the targets unless told otherwise."""
    model, tokens = make_model(noise=0.1), make_tokens()
    mask = (jnp.arange(13) >= 8).astype(jnp.float32) * jnp.ones((2, 1))
    batch = unpacked_batch(tokens, mask)
    loss, parts = distill_loss(model, tokens, mask)
    sums = sums_of(model, batch)
    positions, targets = sums.means("positions"), sums.means("targets")
    np.testing.assert_allclose(positions["logits_loss"] + positions["hidden_loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(positions["logits_loss"], parts["logits_loss"], rtol=1e-6)
    np.testing.assert_allclose(targets["logits_loss"], parts["logits_loss"] * 13 / 5, rtol=1e-6)
    np.testing.assert_allclose(targets["hidden_loss"], parts["hidden_loss"], rtol=1e-6)
    np.testing.assert_array_equal(targets["kl"], positions["kl"])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"divergence": "reverse"},
        {"divergence": "jsd", "top_k": 5, "temperature": 3.0},
    ],
    ids=str,
)
def test_kl_is_that_of_the_logits_whatever_is_minimised(options):
    """Recomputed from the logits of both models, in float64: at temperature 1, a mean over the
    targets."""
    model, tokens = make_model(noise=0.1, group=3), make_tokens()
    mask = (np.arange(13) >= 4).astype(np.float32) * np.ones((2, 1), np.float32)
    means = sums_of(model, unpacked_batch(tokens, jnp.asarray(mask)), **options).means()
    student, teacher = (
        np.asarray(logits(model, tokens, swiftkv=swiftkv), np.float64) for swiftkv in (True, False)
    )
    log_q, log_p = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (student, teacher))
    kl = ((np.exp(log_p) * (log_p - log_q)).sum(-1) * mask).sum() / mask.sum()
    assert kl > 1e-3
    np.testing.assert_allclose(means["kl"], kl, rtol=1e-4)
    next_tokens = np.roll(np.asarray(tokens), -1, axis=1)[..., None]
    nll = -np.take_along_axis(log_p, next_tokens, -1)[..., 0]
    np.testing.assert_allclose(means["teacher_loss"], (nll * mask).sum() / mask.sum(), rtol=1e-4)
    same = np.isclose(float(means["logits_loss"]), kl, rtol=1e-3)
    assert same == (options == {"temperature": 1.0})


@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
def test_chunks_change_nothing(chunk):
    model, batch = make_model(noise=0.1), unpacked_batch(make_tokens())
    delta = model.swiftkv
    assert delta is not None

    def sums(chunk):
        distill_sums = jax.jit(distill.distill_sums, static_argnums=0, static_argnames="chunk")
        return distill_sums(model.config, delta, model.llama, batch, chunk=chunk)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums(chunk), sums(None))


def test_packed_documents_weigh_as_they_would_alone():
    """Sums of a packed row equal the sums of its documents; padding and masked positions add
    nothing."""
    model = make_model(noise=0.1)
    a, b = make_tokens(1, 5), make_tokens(1, 6) + 1
    zeros = jnp.zeros((1, 2), jnp.int32)
    packed = Batch(
        tokens=jnp.concatenate([a, b, zeros + 7], axis=1),
        positions=jnp.concatenate([jnp.arange(5), jnp.arange(6), jnp.arange(2)])[None],
        segment_ids=jnp.concatenate(
            [zeros[:, :1].repeat(5, 1) + 1, zeros[:, :1].repeat(6, 1) + 2, zeros], axis=1
        ),
        loss_mask=jnp.array([[0, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] + [0, 0]], jnp.float32),
    )
    alone = [
        unpacked_batch(a, packed.loss_mask[:, :5]),
        unpacked_batch(b, packed.loss_mask[:, 5:11]),
    ]
    distill_sums = jax.jit(distill.distill_sums, static_argnums=0)
    sums = [
        distill_sums(model.config, model.swiftkv, model.llama, batch) for batch in (packed, *alone)
    ]
    expected = jax.tree.map(lambda x, y: x + y, sums[1], sums[2])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), sums[0], expected)
    assert float(sums[0].tokens) == 11 and float(sums[0].targets) == 8


def test_a_model_without_delta_is_refused():
    model = dataclasses.replace(make_model(), swiftkv=None)
    with pytest.raises(ValueError, match="needs a model with a delta"):
        distill_loss(model, make_tokens(), jnp.ones((2, 13)))


def sums_of(model, batch, **options):
    objective = distill.Objective(**options)
    run = jax.jit(distill.distill_sums, static_argnums=0, static_argnames="objective")
    return run(model.config, model.swiftkv, model.llama, batch, objective=objective)


def test_the_relative_error_of_a_hidden_state():
    """Of each token relative to the teacher's mean square there: twice the stream in all weights
    that write to it is the same relative error, four times the absolute one."""
    model, batch = make_model(noise=0.1), unpacked_batch(make_tokens())
    llama = model.llama

    def doubled(block):
        return dataclasses.replace(block, o=2 * block.o, down=2 * block.down)

    twice = dataclasses.replace(
        model,
        llama=dataclasses.replace(
            llama,
            embed=2 * llama.embed,
            lower=doubled(llama.lower),
            upper=doubled(llama.upper),
            lm_head=llama.lm_head,
        ),
    )
    for hidden, ratio in (("relative", 1), ("absolute", 4)):
        once, both = (float(sums_of(m, batch, hidden=hidden).hidden) for m in (model, twice))
        np.testing.assert_allclose(both, ratio * once, rtol=1e-3)


def test_tokens_of_their_own_give_the_shared_projections_no_gradient():
    """A batch of own tokens alone: the student's keys and values are the teacher's projections, so
    that only queries are trained; with one prompt token all are."""
    model, batch = make_model(noise=0.1), unpacked_batch(make_tokens())

    def gradient(own):
        def loss(delta):
            fields = dataclasses.replace(batch, own=own)
            sums = distill.distill_sums(model.config, delta, model.llama, fields)
            return sums.divergence + sums.hidden

        return jax.jit(jax.grad(loss))(model.swiftkv)

    everything = jnp.ones(batch.tokens.shape, bool)
    alone = gradient(everything)
    assert not np.any(alone.k) and not np.any(alone.v) and np.any(alone.q)
    first = gradient(everything.at[:, 0].set(False))
    assert np.any(first.k) and np.any(first.v)
    nothing = gradient(~everything)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), nothing, gradient(None)
    )
