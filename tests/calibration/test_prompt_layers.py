"""The fit with prompt attention layers and taps, against least squares on their definition."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.calibration import calibrate
from swiftkv_jax.errors import DivergenceError
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.stacks import split_layers
from tests import oracle, tiny
from tests.calibration.test_calibrate import TOKENS, divergence, linear_teacher, random_teacher

K = 2
ROWS = [(13, 27), (40,), (9, 20), (31, 6)]
"""Lengths of the documents of each row of 40."""


def batch_of(hf) -> Batch:
    rng, length = np.random.default_rng(3), 40
    tokens = rng.integers(0, hf["vocab_size"], (len(ROWS), length))
    segment_ids, positions = (np.zeros((len(ROWS), length), np.int32) for _ in range(2))
    for row, documents in enumerate(ROWS):
        start = 0
        for number, size in enumerate(documents, 1):
            segment_ids[row, start : start + size] = number
            positions[row, start : start + size] = np.arange(size)
            start += size
    return Batch(
        *map(jnp.asarray, (tokens, positions, segment_ids)), loss_mask=jnp.ones(tokens.shape)
    )


def projected(hf, tensors, j, x):
    """Queries, keys and values of the teacher's layer j from its normalised input, not rotated."""
    return [
        oracle.heads_of(hf, oracle.linear(tensors, f"model.layers.{j}.self_attn.{name}_proj", x))
        for name in "qkv"
    ]


def scale_of(tensors, j, name):
    return tensors[f"model.layers.{j}.{name}_layernorm.weight"]


def after_attention(hf, tensors, j, x):
    q, k, v = projected(hf, tensors, j, oracle.rms_norm(x, scale_of(tensors, j, "input"), 1e-5))
    q, k = (oracle.rotate(hf, heads, range(len(x))) for heads in (q, k))
    attended = [oracle.attend(q[t], k[: t + 1], v[: t + 1]) for t in range(len(x))]
    return x + oracle.linear(tensors, f"model.layers.{j}.self_attn.o_proj", np.stack(attended))


def received(hf, q, k):
    """The squared probabilities that each token gets, summed over heads and later tokens."""
    q, k = (oracle.rotate(hf, heads, range(len(q))) for heads in (q, k))
    total, share = np.zeros(len(q)), q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for t in range(len(q)):
            scores = k[: t + 1, head // share] @ q[t, head] / np.sqrt(q.shape[-1])
            total[: t + 1] += oracle.softmax(scores) ** 2
    return total


def least_squares(s, y, weights, ridge, prior):
    """W that minimises the weighted squares of y - W s and a penalty on W - prior."""
    root = np.sqrt(weights / len(s))[:, None]
    trace = np.sum((root * s) ** 2)
    penalty = np.sqrt(ridge * trace / s.shape[1]) * np.eye(s.shape[1])
    inputs = np.concatenate([root * s, penalty])
    outputs = np.concatenate([root * (y - s @ prior.T), np.zeros((len(penalty), y.shape[1]))])
    return prior + np.linalg.lstsq(inputs, outputs)[0].T


def chosen_neurons(tensors, j, m, count: int):
    """Gate and up of the neurons that add most where the MLP reads `m`, and their activations."""
    gate, up, down = (tensors[f"model.layers.{j}.mlp.{name}_proj.weight"] for name in MLP)
    gated = m @ gate.T
    active = gated / (1 + np.exp(-gated)) * (m @ up.T)
    worth = (active**2).mean(0) * (down**2).sum(0)
    chosen = sorted(np.argsort(-worth)[:count])
    return gate[chosen], up[chosen], active[:, chosen]


MLP = "gate", "up", "down"


def expected(hf, tensors, batch: Batch, layers: int, taps: int, head: int = 0, neurons: int = 0):
    """Maps, gate and up of neurons, and for every projected layer [outputs, inputs] of keys and of
    values."""
    documents = [
        (row, np.flatnonzero(batch.segment_ids[row] == number))
        for row, sizes in enumerate(ROWS)
        for number in range(1, len(sizes) + 1)
    ]
    states = [
        oracle.forward(hf, tensors, batch.tokens[row, at].tolist(), swiftkv=False).hidden_states
        for row, at in documents
    ]
    y, maps, rows = [of[K] for of in states], [], []
    for j in range(K, K + layers):
        u = [after_attention(hf, tensors, j, x) for x in y]
        m = [oracle.rms_norm(x, scale_of(tensors, j, "post_attention"), 1e-5) for x in u]
        inputs, left = np.concatenate(m), np.concatenate([of[j + 1] for of in states])
        left = left - np.concatenate(u)
        *of_neurons, active = chosen_neurons(tensors, j, inputs, neurons)
        rows.append(of_neurons)
        inputs = np.concatenate([inputs, active], 1)
        none = np.zeros((hf["hidden_size"], inputs.shape[1]))
        maps.append(least_squares(inputs, left, np.ones(len(left)), 1e-3, none))
        ends = np.cumsum([len(x) for x in u])[:-1]
        y = [a + b for a, b in zip(u, np.split(inputs @ maps[-1].T, ends), strict=True)]
    s = [oracle.rms_norm(x, scale_of(tensors, K + layers, "input"), 1e-5) for x in y]
    if taps:
        before = [np.concatenate([np.zeros_like(x[:1]), x[:-1]]) for x in s]
        s = [np.concatenate(pair, 1) for pair in zip(s, before, strict=True)]
    inputs = np.concatenate(s)
    if hf["attention_bias"]:
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    found, width = [], hf["hidden_size"]
    for j in range(K + layers, hf["num_hidden_layers"]):
        own = [
            projected(hf, tensors, j, oracle.rms_norm(of[j], scale_of(tensors, j, "input"), 1e-5))
            for of in states
        ]
        weights = [received(hf, q, k) for q, k, _ in own]
        counted = [np.arange(len(weight)) >= head for weight in weights]
        for row in range(len(ROWS)):
            at = [i for i, (where, _) in enumerate(documents) if where == row]
            total = np.concatenate([weights[i][counted[i]] for i in at])
            limit = 1000 * np.median(total)
            for i in at:
                weights[i] = np.minimum(weights[i], limit) * len(total) * counted[i]
                weights[i] /= np.minimum(total, limit).sum()
        for name, index in ("k", 1), ("v", 2):
            values = np.concatenate([heads[index].reshape(len(heads[index]), -1) for heads in own])
            layer = f"model.layers.{j}.self_attn.{name}_proj"
            read = inputs
            if taps and name == "v":  # not the token before
                read = np.delete(inputs, slice(width, 2 * width), axis=1)
            prior = np.zeros((values.shape[1], read.shape[1]))
            prior[:, :width] = tensors[f"{layer}.weight"]
            if hf["attention_bias"]:
                prior[:, -1] = tensors[f"{layer}.bias"]
            found.append(least_squares(read, values, np.concatenate(weights), 1e-4, prior))
    return maps, rows, found[::2], found[1::2]


@pytest.mark.short("3-1-True-0-0", "2-1-False-0-5", "1-0-False-0-12")
@pytest.mark.parametrize(
    ("layers", "taps", "bias", "head", "neurons"),
    [
        (0, 1, True, 0, 0),
        (1, 0, False, 0, 12),
        (2, 1, False, 0, 5),
        (3, 1, True, 0, 0),
        (0, 1, False, 1, 0),
    ],
)
def test_it_is_the_least_squares_of_the_definition(layers, taps, bias, head, neurons):
    hf = tiny.hf_config(attention_bias=bias)
    tensors = tiny.tensors_for(hf)
    model, batch = tiny.model_of(hf, tensors), batch_of(hf)
    fields = {"prompt_attention_layers": layers, "prompt_mlp_neurons": neurons}
    config = model.config.cut(K, boundary_taps=taps, **fields)
    config = dataclasses.replace(config, exact_head=head)
    llama = split_layers(config, model.llama)
    fit = calibrate(config, llama, [batch], attention=Attention())
    assert [layer.layer for layer in fit.layers] == list(range(K + layers, 6))
    assert fit.tokens == sum(map(sum, ROWS))
    maps, rows, keys, values = expected(hf, tensors, batch, layers, taps, head, neurons)
    delta, qkv, size = fit.delta, llama.upper_qkv, hf["hidden_size"]
    if layers:
        close(delta.mlp_map, np.stack(maps)[..., :size])
    if neurons:
        close(delta.mlp_down, np.stack(maps)[..., size:])
        for name, of in ("mlp_gate", 0), ("mlp_up", 1):
            np.testing.assert_allclose(getattr(delta, name), np.stack([row[of] for row in rows]))
    assert (delta.mlp_map is None, delta.mlp_gate is None) == (not layers, not neurons)
    np.testing.assert_array_equal(delta.norm, llama.upper.attn_norm[layers])
    for name, wanted in ("k", keys), ("v", values):
        shape = (len(wanted), config.num_kv_heads, config.head_dim, -1)
        wanted = np.stack(wanted).reshape(shape)
        own = getattr(delta, name)
        np.testing.assert_array_equal(own[:layers], getattr(qkv, name)[:layers])
        close(own[layers:], wanted[..., :size])
        if taps and name == "k":
            close(delta.k_tap, wanted[..., size : 2 * size])
        if bias:
            own, teachers = (getattr(of, f"{name}_bias") for of in (delta, qkv))
            np.testing.assert_array_equal(own[:layers], teachers[:layers])
            close(own[layers:], wanted[..., -1])


def close(found, wanted):
    scale = np.abs(wanted).max()
    assert scale > 0.05
    np.testing.assert_allclose(found, wanted, atol=2e-3 * scale)


@pytest.mark.short("2-1")
@pytest.mark.parametrize(("layers", "taps"), [(2, 1), (2, 0), (0, 1)])
def test_groups_of_a_model_with_linear_upper_layers_are_fitted_exactly(layers, taps):
    teacher = linear_teacher(2, attention_bias=True)
    student, fits = skv.calibrate(
        teacher, TOKENS, K, 2, prompt_attention_layers=layers, boundary_taps=taps
    )
    assert [fit.layer for fit in fits] == list(range(K + layers, 6))
    np.testing.assert_allclose(
        [(fit.r2_k, fit.r2_v, fit.kept_k, fit.kept_v) for fit in fits], 1, atol=1e-4
    )
    heads = student.config.shared_kv_heads
    assert heads is not None and heads[:layers] == ((0, 1),) * layers
    expected = np.asarray(skv.logits(student, TOKENS[:3], swiftkv=False))
    found = skv.logits(student, TOKENS[:3], swiftkv=True)
    np.testing.assert_allclose(found, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.long
def test_it_is_nearer_to_the_teacher():
    """A tap brings the student nearer, and prompt attention layers nearer still: after those a
    random teacher's keys have nothing of the token before."""
    rows, teacher = np.random.default_rng(1).integers(0, 61, (64, 40)), random_teacher()

    def loss(layers: int, taps: int, neurons: int = 0) -> float:
        fields: Any = {"prompt_attention_layers": layers, "prompt_mlp_neurons": neurons}
        return divergence(skv.calibrate(teacher, rows, K, boundary_taps=taps, **fields).model)

    plain, tapped, attended, both = (loss(*cut) for cut in ((0, 0), (0, 1), (2, 0), (2, 1)))
    assert max(attended, both) < tapped < plain
    assert loss(2, 0, 24) < 0.9 * attended


def test_first_tokens_that_keep_their_own_bring_it_nearer():
    rows, teacher = np.random.default_rng(1).integers(0, 61, (64, 40)), random_teacher()

    def loss(layers: int, head: int) -> float:
        model = skv.calibrate(
            teacher, rows, K, prompt_attention_layers=layers, exact_head=head
        ).model
        assert model.config.exact_head == head
        return divergence(model)

    assert loss(0, 1) < loss(0, 0) and loss(2, 1) < loss(2, 0)


@pytest.mark.long
def test_layers_with_keys_of_their_own_are_not_scaled():
    """Beside tokens' own keys, fitted ones are scaled without groups, and queries with groups."""
    teacher = random_teacher()
    fit = functools.partial(
        skv.calibrate, teacher, TOKENS, K, prompt_attention_layers=2, boundary_taps=1
    )
    qkv = teacher.llama.upper_qkv
    assert qkv is not None
    for group in (1, 2):
        plain, fits = fit(key_value_group_size=group)
        own = fit(key_value_group_size=group, generated_kv="own").model
        assert plain.swiftkv is not None and own.swiftkv is not None
        np.testing.assert_array_equal(own.swiftkv.k[:2], qkv.k[:2])
        np.testing.assert_allclose(own.swiftkv.q[:2], qkv.q[:2], rtol=1e-6)
        if group == 2:
            ratio = own.swiftkv.q[2:] / plain.swiftkv.q[2:]
            assert np.min(ratio) > 0.99 and np.max(ratio) > 1.02
            np.testing.assert_array_equal(own.swiftkv.k, plain.swiftkv.k)
            continue
        np.testing.assert_array_equal(own.swiftkv.q, plain.swiftkv.q)
        for name, at in ("k", 2), ("k_tap", 0):
            scale = getattr(own.swiftkv, name)[at:] / getattr(plain.swiftkv, name)[at:]
            shares = 1 / np.asarray(scale)[:, :, 0, 0].mean(1)
            np.testing.assert_allclose(shares, [max(fit.r2_k, 0.5) for fit in fits], rtol=0.05)
            assert shares.max() < 0.99


def test_a_teacher_that_is_not_finite_is_named():
    teacher = random_teacher()
    config = teacher.config.cut(K, prompt_attention_layers=2)
    llama = split_layers(config, teacher.llama)
    upper = dataclasses.replace(llama.upper, down=llama.upper.down.at[1].set(np.nan))
    broken = dataclasses.replace(teacher, llama=dataclasses.replace(llama, upper=upper))
    with pytest.raises(DivergenceError, match="layer 3: weights of the teacher, or its hidden"):
        skv.calibrate(broken, TOKENS, K, prompt_attention_layers=2)


def test_without_a_token_there_is_nothing_to_fit_to():
    teacher = random_teacher()
    config = teacher.config.cut(K, prompt_attention_layers=1)
    llama = split_layers(config, teacher.llama)
    with pytest.raises(ValueError, match="no token to calibrate on"):
        calibrate(config, llama, [], attention=Attention())
    with pytest.raises(ValueError, match="no token to calibrate on"):  # all keep their own
        skv.calibrate(teacher, [[5], [6]], K, exact_head=1)


@pytest.mark.parametrize("layers", [4, -1])
def test_cuts_that_do_not_fit(layers):
    with pytest.raises(skv.ConfigError, match=f"prompt_attention_layers={layers} must be from 0"):
        skv.calibrate(random_teacher(), TOKENS, K, prompt_attention_layers=layers)
    with pytest.raises(skv.ConfigError, match="boundary_taps=2 must be 0 or 1"):
        skv.add_swiftkv(random_teacher(), K, boundary_taps=2)
