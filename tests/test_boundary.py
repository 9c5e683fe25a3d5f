"""`boundary` against its definition, written out token by token in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import ConfigError
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.boundary import boundary_kv, previous_tokens
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.initialization import init_llama, init_swiftkv
from swiftkv_jax.model.layers import norm
from swiftkv_jax.model.params import Llama, SwiftKV
from swiftkv_jax.model.transformer import (
    run_lower_layers,
    run_upper_layers_student,
    student,
    teacher,
)

LAYERS, K = 7, 2
BASE = Config(
    vocab_size=61,
    embed_dim=16,
    mlp_dim=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    num_key_value_layers=K,
    qkv_bias=True,
)
CUTS = [
    (0, 1, 1, 0),
    (1, 0, 1, 0),
    (2, 1, 1, 0),
    (1, 1, 2, 0, 24),
    (3, 0, 2, 0),
    (3, 1, 1, 1, 5),
]
"""(M, taps, group size, exact head, neurons)"""


def model_of(
    layers: int, taps: int, group: int, head: int = 0, neurons: int = 0, **fields: Any
) -> tuple[Config, Llama, SwiftKV]:
    """A random model in which nothing of the boundary is zero or one."""
    config = dataclasses.replace(
        BASE,
        prompt_attention_layers=layers,
        prompt_mlp_neurons=neurons,
        boundary_taps=taps,
        key_value_group_size=group,
        exact_head=head,
        **fields,
    )
    llama = init_llama(config, jax.random.key(0), scale=0.3)
    delta = init_swiftkv(config, llama)
    leaves, tree = jax.tree.flatten(delta)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return config, llama, jax.tree.unflatten(tree, drawn)


def two_segments(length: int = 11) -> Batch:
    tokens = jax.random.randint(jax.random.key(2), (2, length), 0, BASE.vocab_size)
    segment_ids = jnp.asarray([[1] * 4 + [2] * 7, [1] * 9 + [0] * 2])
    positions = jnp.asarray([[*range(4), *range(7)], [*range(9), 0, 0]])
    return Batch(tokens, positions, segment_ids, loss_mask=jnp.ones((2, length)))


def normed(x, scale):
    return x / np.sqrt(np.mean(x**2) + BASE.norm_eps) * scale


def rotated(x, position):
    half = BASE.head_dim // 2
    angle = position * 10000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def mlp(gate, up, down, m):
    gated = gate @ m
    return down @ (gated / (1 + np.exp(-gated)) * (up @ m))


def expected_kv(config: Config, llama: Llama, delta: SwiftKV, states):
    """Keys and values (J T K H, rotated) of one document from its hidden states at layer K."""
    llama, delta = jax.tree.map(np.float64, (llama, delta))
    y, keys, values = [np.float64(x) for x in states], [], []

    def project(name, j, x):
        return getattr(delta, name)[j] @ x + getattr(delta, name + "_bias")[j]

    for j in range(config.prompt_attention_layers):
        block = jax.tree.map(lambda leaf, j=j: leaf[j], llama.upper)
        k = [rotated(project("k", j, normed(x, block.attn_norm)), t) for t, x in enumerate(y)]
        v = [project("v", j, normed(x, block.attn_norm)) for x in y]
        if config.exact_head:
            teachers, h = llama.upper_qkv, normed(y[0], block.attn_norm)
            assert teachers is not None
            k[0] = teachers.k[j] @ h + teachers.k_bias[j]  # not rotated at position 0
            v[0] = teachers.v[j] @ h + teachers.v_bias[j]
        after = []
        for t, x in enumerate(y):
            q = rotated(project("q", j, normed(x, block.attn_norm)), t)
            attended = []
            for head in range(config.num_heads):
                reads = head // (config.num_heads // config.num_kv_heads)
                scores = [q[head] @ k[s][reads] / config.head_dim**0.5 for s in range(t + 1)]
                weights = np.exp(scores - np.max(scores))
                weights /= weights.sum()
                attended.append(sum(w * v[s][reads] for s, w in enumerate(weights)))
            u = x + np.einsum("dnh,nh->d", block.o, np.stack(attended))
            m = normed(u, block.mlp_norm)
            if config.exact_head and t == 0:
                after.append(u + mlp(block.gate, block.up, block.down, m))
                continue
            y_t = u + delta.mlp_map[j] @ m
            if config.prompt_mlp_neurons:
                y_t += mlp(delta.mlp_gate[j], delta.mlp_up[j], delta.mlp_down[j], m)
            after.append(y_t)
        y = after
        keys.append(k)
        values.append(v)
    s = [normed(x, delta.norm) for x in y]
    for g in range(config.num_projected_groups):
        j, k, v = config.prompt_attention_layers + g, [], []
        for t in range(len(s)):
            tapped = delta.k_tap[g] @ s[t - 1] if config.boundary_taps and t else 0.0
            k.append(rotated(project("k", j, s[t]) + tapped, t))
            v.append(project("v", j, s[t]))
        keys.append(k)
        values.append(v)
    return np.array(keys), np.array(values)


@pytest.mark.parametrize("cut", CUTS)
def test_keys_and_values_are_those_of_the_definition(cut):
    config, llama, delta = model_of(*cut)
    batch = two_segments()
    x, tables = run_lower_layers(config, llama, batch)
    k, v = boundary_kv(config, llama, delta, x, tables, batch.segment_ids)
    assert k.shape == (config.num_kv_groups, 2, config.num_kv_heads, 11, config.head_dim)
    for row, document in ((0, slice(0, 4)), (0, slice(4, 11)), (1, slice(0, 9))):
        expected = expected_kv(config, llama, delta, np.asarray(x[row, document]))
        for got, wanted in zip((k, v), expected, strict=True):
            got = np.asarray(got[:, row, :, document]).transpose(0, 2, 1, 3)
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("cut", [(2, 1, 1, 1), (1, 1, 2, 0)])
def test_documents_of_a_row_do_not_see_each_other(cut):
    config, llama, delta = model_of(*cut)
    batch = two_segments()
    packed = student(config, llama, delta, batch)[0, 4:]
    one = skv.logits(
        skv.Model(llama, delta, config), np.asarray(batch.tokens[:1, 4:]), swiftkv=True
    )
    head = llama.lm_head
    logits = norm(config, packed, llama.final_norm) @ head.T
    np.testing.assert_allclose(logits, one[0], rtol=1e-4, atol=1e-4)


def test_a_fresh_delta_adds_nothing():
    """Taps, maps and what neurons add start at zero, and with all layers' own projections the first
    upper layer is the teacher's."""
    fields = {"prompt_attention_layers": 2, "prompt_mlp_neurons": 3, "boundary_taps": 1}
    config = dataclasses.replace(BASE, **fields)
    llama = init_llama(config, jax.random.key(0), scale=0.3)
    delta = init_swiftkv(config, llama)
    for name in ("k_tap", "mlp_map", "mlp_down"):
        assert not np.any(getattr(delta, name)), name
    assert delta.k_tap.shape == (3, 2, 4, 16) and delta.mlp_map.shape == (2, 16, 16)
    np.testing.assert_array_equal(delta.norm, llama.upper.attn_norm[2])
    np.testing.assert_array_equal(delta.mlp_up, llama.upper.up[:2, :3])


def test_the_first_token_is_the_teachers():
    """Whatever the delta is, with an exact head; and its keys and values are what later tokens
    attend to."""
    config, llama, delta = model_of(2, 1, 1, head=1)
    batch = two_segments()
    own = student(config, llama, delta, batch)
    expected = teacher(config, llama, batch)
    first = np.array([[0, 4], [0, 9]])
    for row in range(2):
        np.testing.assert_allclose(own[row, first[row]], expected[row, first[row]], atol=1e-5)
    assert np.abs(own[0, 1:4] - expected[0, 1:4]).max() > 0.1
    x, tables = run_lower_layers(config, llama, batch)
    config = dataclasses.replace(config, prompt_attention_layers=0, boundary_taps=0)
    delta = dataclasses.replace(delta, k_tap=None).with_prompt_mlp(None)
    marked = jnp.zeros(x.shape[:2], bool).at[jnp.arange(2)[:, None], first].set(True)

    def run(exact_head, own):
        cut = dataclasses.replace(config, exact_head=exact_head)
        return run_upper_layers_student(cut, llama, delta, x, tables, batch.segment_ids, own=own)[0]

    np.testing.assert_array_equal(run(1, None), run(0, marked))


def test_the_token_before():
    x, segments = jnp.arange(1.0, 7.0)[None, :, None], jnp.asarray([[1, 1, 2, 2, 0, 0]])
    assert previous_tokens(x, segments)[0, :, 0].tolist() == [0, 1, 0, 3, 0, 5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_attention_layers": 5}, "from 0 to 4"),
        ({"prompt_attention_layers": -1}, "from 0 to 4"),
        ({"prompt_attention_layers": True}, "whole number"),
        ({"prompt_attention_layers": 1, "prompt_mlp_neurons": 25}, "from 0 to mlp_dim=24"),
        ({"prompt_attention_layers": 1, "prompt_mlp_neurons": -1}, "from 0 to mlp_dim=24"),
        ({"prompt_attention_layers": 1, "prompt_mlp_neurons": 2.0}, "whole number"),
        ({"prompt_mlp_neurons": 8}, "prompt_mlp_neurons=8 needs prompt_attention_layers"),
        (
            {
                "prompt_attention_layers": 1,
                "prompt_mlp_neurons": 8,
                "num_experts": 4,
                "num_experts_per_token": 1,
            },
            "prompt_mlp_neurons=8 must be 0: tokens choose among num_experts=4",
        ),
        ({"boundary_taps": 2}, "must be 0 or 1"),
        ({"boundary_taps": True}, "must be 0 or 1"),
        ({"exact_head": 2}, "must be 0 or 1"),
        ({"exact_head": 1, "key_value_group_size": 5}, "needs key_value_group_size=1"),
        ({"prompt_attention_layers": 2, "key_value_group_size": 2}, "must divide the 3 layers"),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **fields)


def test_groups_begin_after_the_prompt_attention_layers():
    config = dataclasses.replace(BASE, prompt_attention_layers=1, key_value_group_size=2)
    assert [list(group) for group in config.kv_groups] == [[2], [3, 4], [5, 6]]
    assert [config.kv_group(layer) for layer in range(2, 7)] == [0, 1, 1, 2, 2]
    assert config.num_cache_layers == 5
    assert config.cut(2, 2) == config
    assert config.cut(3, 2).prompt_attention_layers == 0
    more = config.cut(2, 2, prompt_mlp_neurons=8)
    assert more.cut(2, 2) == more and more.cut(2, 1, prompt_attention_layers=1) == config.cut(
        2, 1, prompt_attention_layers=1
    )
    plain = config.cut(LAYERS)
    assert (plain.prompt_attention_layers, plain.boundary_taps) == (0, 0)
