"""Teacher and student against the oracle, over the shapes a Llama can take; packing, initial
deltas, and splitting the layers elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.model import boundary, decoder_layers, transformer
from swiftkv_jax.model.attention import DEFAULT
from swiftkv_jax.model.batch import Batch, unpacked_batch
from swiftkv_jax.model.layers import embed, unembed
from swiftkv_jax.model.model import AuxiliaryFiles, cut_of
from swiftkv_jax.model.packed_attention import packed_attention
from swiftkv_jax.model.rope import rope_tables
from swiftkv_jax.model.stacks import split_layers, unstack
from tests import oracle, tiny

# Each row changes what it names; the rest is `tiny.hf_config`: L=6, K=2, g=1, four query heads on
# two key/value heads of 8.
SHAPES = {
    "plain": {},
    "K=1": {"num_key_value_layers": 1},
    "K=L-1": {"num_key_value_layers": 5},
    "K=L": {"num_key_value_layers": 6},
    "g=2": {"key_value_group_size": 2},
    "g=4": {"key_value_group_size": 4},
    "g=3 K=3 one group": {"num_key_value_layers": 3, "key_value_group_size": 3},
    "g=2 multi-head": {"key_value_group_size": 2, "num_key_value_heads": 4},
    "g=2 one kv head": {"key_value_group_size": 2, "num_key_value_heads": 1},
    "wide heads": {"head_dim": 20},
    "narrow heads": {"head_dim": 2, "num_attention_heads": 6, "num_key_value_heads": 3},
    "biases": {"attention_bias": True},
    "biases g=2": {"attention_bias": True, "key_value_group_size": 2},
    "biases multi-head g=4": {
        "attention_bias": True,
        "key_value_group_size": 4,
        "num_key_value_heads": 4,
    },
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}, "key_value_group_size": 2},
    "llama3 rope": {
        "head_dim": 16,  # frequencies fall in all three bands
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "tied": {"tie_word_embeddings": True},
    "tied g=4 biases": {
        "tie_word_embeddings": True,
        "key_value_group_size": 4,
        "attention_bias": True,
    },
    "large eps": {"rms_norm_eps": 0.1},
    "length 1": {"length": 1},
    "length 17": {"length": 17, "key_value_group_size": 2},
}
assert_close = functools.partial(
    np.testing.assert_allclose, atol=3e-5, rtol=1e-5
)  # float32 against float64


@functools.cache
def setup(name: str):
    """(config dict, tensors, model, tokens[2, T]) of a row of `SHAPES`."""
    fields = dict(SHAPES[name])
    length = fields.pop("length", 9)
    hf = tiny.hf_config(**fields)
    tensors = tiny.tensors_for(hf)
    return hf, tensors, tiny.model_of(hf, tensors), tiny.tokens_for(hf, 2, length)


@functools.partial(jax.jit, static_argnums=0)
def run_both(config, llama, delta, batch):
    """For the teacher and, if there is a delta, the student: (logits, inputs of the upper
    layers)."""

    def layer_hook(index, x):  # the sum over layers of this puts each layer's input in its place
        return jnp.zeros((config.num_layers, *x.shape)).at[index].set(x)

    x, rope = transformer.run_lower_layers(config, llama, batch)
    runs = {
        "teacher": transformer.run_upper_layers_teacher(
            config, llama, x, rope, batch.segment_ids, layer_hook=layer_hook
        )
    }
    if delta is not None:
        runs["student"] = transformer.run_upper_layers_student(
            config, llama, delta, x, rope, batch.segment_ids, layer_hook=layer_hook
        )
    return {
        name: (unembed(config, llama, hidden), inputs) for name, (hidden, inputs) in runs.items()
    }


def run(model, batch):
    return run_both(model.config, model.llama, model.swiftkv, batch)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_oracle(name):
    hf, tensors, model, tokens = setup(name)
    runs = run(model, unpacked_batch(jnp.asarray(tokens)))
    assert set(runs) == ({"teacher", "student"} if model.config.num_upper_layers else {"teacher"})
    for who, (logits, inputs) in runs.items():
        expected = oracle.forward_batch(hf, tensors, tokens, swiftkv=who == "student")
        assert logits.dtype == jnp.float32
        assert_close(logits, expected.logits, err_msg=f"{who} logits")
        for j in range(model.config.num_lower_layers, model.config.num_layers):
            assert_close(inputs[j], expected.hidden_states[j], err_msg=f"{who}, input of layer {j}")


@pytest.mark.parametrize("name", ["g=2", "biases multi-head g=4"])
def test_teacher_and_student_differ(name):
    """Otherwise the comparison above proves half of what it seems to."""
    hf, tensors, _, tokens = setup(name)
    teacher, student = (
        oracle.forward_batch(hf, tensors, tokens, swiftkv=on).logits for on in (False, True)
    )
    assert np.abs(teacher - student).max() > 0.1


@pytest.mark.parametrize("name", ["g=2", "g=2 multi-head"])
def test_bfloat16(name):
    """The oracle in float64 on the same rounded weights; six random layers lose about two of
    bfloat16's eight bits."""
    hf, tensors, _, tokens = setup(name)
    model = tiny.model_of(hf, tensors, jnp.bfloat16)
    rounded = {
        key: np.asarray(jnp.asarray(value, jnp.bfloat16), np.float64)
        for key, value in tensors.items()
    }
    for who, (logits, _) in run(model, unpacked_batch(jnp.asarray(tokens))).items():
        expected = oracle.forward_batch(hf, rounded, tokens, swiftkv=who == "student").logits
        error = np.asarray(logits) - expected
        assert np.sqrt(np.mean(error**2)) < 0.02 * expected.std()


@pytest.mark.parametrize("swiftkv", [False, True, None])
def test_public_logits_choose_the_model(swiftkv):
    hf, tensors, model, tokens = setup("g=2")
    expected = oracle.forward_batch(hf, tensors, tokens, swiftkv=swiftkv is not False).logits
    assert_close(skv.logits(model, jnp.asarray(tokens), swiftkv=swiftkv), expected)


def test_all_layers_lower_is_the_teacher():
    hf, tensors, model, tokens = setup("K=L")
    assert model.swiftkv is None
    expected = oracle.forward_batch(
        hf, tensors, tokens, swiftkv=True
    ).logits  # K = L is also the oracle's teacher
    assert_close(skv.logits(model, jnp.asarray(tokens)), expected)
    with pytest.raises(ValueError, match="no delta"):
        skv.logits(model, jnp.asarray(tokens), swiftkv=True)


# Packing ----------------------------------------------------------------------


def packed(documents, pad_with: int = 0, length: int = 16):
    """One row: the documents one after another, numbered from 1, then padding in segment 0."""
    tokens, positions, segments = [], [], []
    for number, document in enumerate(documents, 1):
        tokens += list(document)
        positions += range(len(document))
        segments += [number] * len(document)
    padding = length - len(tokens)
    tokens, positions, segments = (
        tokens + [pad_with] * padding,
        positions + [0] * padding,
        segments + [0] * padding,
    )
    row = (jnp.asarray([x], jnp.int32) for x in (tokens, positions, segments))
    return Batch(*row, loss_mask=jnp.ones((1, length)))


@pytest.mark.parametrize("name", ["g=2", "llama3 rope"])
def test_packed_documents_are_separate(name):
    hf, tensors, model, _ = setup(name)
    stream = tiny.tokens_for(hf, 1, 13, seed=5)[0]
    documents = stream[:6], stream[6:7], stream[7:]
    runs, repadded = run(model, packed(documents)), run(model, packed(documents, pad_with=7))
    for who, (logits, _) in runs.items():
        expected = np.concatenate(
            [
                oracle.forward(hf, tensors, document, swiftkv=who == "student").logits
                for document in documents
            ]
        )
        assert_close(logits[0, :13], expected, err_msg=who)
        np.testing.assert_array_equal(
            logits[0, :13], repadded[who][0][0, :13], err_msg=f"{who}: padding has an influence"
        )


def test_later_tokens_have_no_influence():
    hf, _, model, tokens = setup("g=2")
    changed = tokens.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % hf["vocab_size"]
    before, after = (run(model, unpacked_batch(jnp.asarray(x))) for x in (tokens, changed))
    for who in "teacher", "student":
        np.testing.assert_array_equal(before[who][0][:, :7], after[who][0][:, :7])
        assert jnp.abs(before[who][0][:, 7:] - after[who][0][:, 7:]).max() > 0.1


# Starting a delta -------------------------------------------------------------


@pytest.mark.parametrize(("kv_layers", "group"), [(2, 1), (2, 2), (2, 4), (1, 5), (4, 1), (5, 1)])
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
def test_add_swiftkv(kv_layers, group, bias):
    """The delta of spec 2.3, wherever the teacher's layers were split, on buffers of its own; the
    model given is untouched."""
    hf = tiny.hf_config(num_key_value_layers=4, key_value_group_size=1, attention_bias=bias)
    tensors = tiny.tensors_for(hf, seed=2)
    before = tiny.model_of(hf, tensors)
    leaves = jax.tree.leaves(before)
    files = AuxiliaryFiles(hf_config={"swiftkv_far_loss": {}, "other": 1})
    before = dataclasses.replace(before, auxiliary_files=files)
    student = skv.add_swiftkv(before, kv_layers, group)
    assert student.auxiliary_files.hf_config == {"other": 1}, "what another student lost"

    new_hf = hf | {"num_key_value_layers": kv_layers, "key_value_group_size": group}
    expected = tiny.model_of(new_hf, tensors | oracle.initial_delta(new_hf, tensors))
    assert student.config == expected.config
    assert jax.tree.structure(student.swiftkv) == jax.tree.structure(expected.swiftkv)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        student.swiftkv,
        expected.swiftkv,
    )
    jax.tree.map(np.testing.assert_array_equal, student.llama, expected.llama)

    assert before.config == config_from_hf(hf)
    assert all(a is b for a, b in zip(jax.tree.leaves(before), leaves, strict=True))
    again = tiny.model_of(hf, tensors)
    jax.tree.map(
        np.testing.assert_array_equal, (before.llama, before.swiftkv), (again.llama, again.swiftkv)
    )
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((before, student.llama))}
    assert not pointers & {
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(student.swiftkv)
    }


@pytest.mark.parametrize(("group", "first_difference"), [(1, 4), (2, 3)])
def test_where_a_fresh_student_leaves_the_teacher(group, first_difference):
    """Spec 1.6, K=2: with g=1 layer K itself is the teacher's, so hidden states agree up to K+1;
    groups differ one earlier."""
    hf, _, model, tokens = setup("K=L")
    student = skv.add_swiftkv(model, 2, group)
    batch = unpacked_batch(jnp.asarray(tokens))
    runs = run(student, batch)
    difference = np.abs(np.asarray(runs["teacher"][1]) - np.asarray(runs["student"][1])).max(
        axis=(1, 2, 3)
    )
    assert len(difference) == hf["num_hidden_layers"]
    assert max(difference[:first_difference]) < 1e-5
    assert min(difference[first_difference:]) > 1e-2


def test_add_swiftkv_with_every_layer_is_the_teacher():
    _, _, model, tokens = setup("g=2")
    plain = skv.add_swiftkv(model, 6)
    assert plain.swiftkv is None
    np.testing.assert_allclose(
        skv.logits(plain, jnp.asarray(tokens)),
        skv.logits(model, jnp.asarray(tokens), swiftkv=False),
        atol=1e-5,
    )


def test_a_delta_can_be_donated():
    _, _, model, tokens = setup("K=L")
    student = skv.add_swiftkv(model, 2, 2)
    expected = skv.logits(student, jnp.asarray(tokens), swiftkv=False)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(
        student.swiftkv
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(student.swiftkv))
    np.testing.assert_array_equal(skv.logits(student, jnp.asarray(tokens), swiftkv=False), expected)
    assert jax.tree.leaves(doubled)


def test_group_means_are_taken_in_float32():
    hf = tiny.hf_config(num_key_value_layers=2, key_value_group_size=4)
    tensors = tiny.tensors_for(hf)
    delta = skv.add_swiftkv(tiny.model_of(hf, tensors, jnp.bfloat16), 2, 4).swiftkv
    assert delta is not None
    rounded = {
        name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for name, x in tensors.items()
    }
    mean = oracle.initial_delta(hf, rounded)["model.layers.2.self_attn.k_proj_swiftkv.weight"]
    assert delta.k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        delta.k[0].reshape(mean.shape), jnp.asarray(mean, jnp.float32).astype(jnp.bfloat16)
    )


@pytest.mark.parametrize(
    ("kv_layers", "group", "field"),
    [(7, 1, "num_key_value_layers"), (2, 3, "key_value_group_size")],
)
def test_a_cut_that_does_not_fit(kv_layers, group, field):
    with pytest.raises(skv.ConfigError, match=field):
        skv.add_swiftkv(setup("K=L")[2], kv_layers, group)


def test_a_student_with_an_exact_head_can_be_cut_in_groups_without_it():
    _, _, model, _ = setup("plain")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, exact_head=1))
    assert skv.add_swiftkv(model, np.int64(3)).config.exact_head == 1  # type: ignore[arg-type]
    with pytest.raises(skv.UsageError, match="`num_key_value_layers`=True must be a whole number"):
        skv.add_swiftkv(model, True)
    assert cut_of(model, 2, 2, exact_head=0).exact_head == 0

    with pytest.raises(skv.UsageError, match="`data`"):
        skv.calibrate(model, [], 2, 2, exact_head=0)


def test_no_delta_without_the_teachers_upper_projections():
    _, _, model, tokens = setup("g=2")
    slim = dataclasses.replace(model, llama=dataclasses.replace(model.llama, upper_qkv=None))
    np.testing.assert_array_equal(
        skv.logits(slim, jnp.asarray(tokens)), skv.logits(model, jnp.asarray(tokens))
    )
    with pytest.raises(ValueError, match="upper q, k, v were dropped"):
        skv.add_swiftkv(slim, 2)
    with pytest.raises(ValueError, match="upper q, k, v were dropped"):
        skv.logits(slim, jnp.asarray(tokens), swiftkv=False)


# Stacks of layers -------------------------------------------------------------


def test_the_split_does_not_change_the_teacher():
    hf, tensors, model, tokens = setup("biases")
    expected = oracle.forward_batch(hf, tensors, tokens, swiftkv=False).logits
    for cut in range(1, 7):
        moved = split_layers(model.config.cut(cut), model.llama)
        there = tiny.model_of(
            hf | {"num_key_value_layers": cut},
            tensors | oracle.initial_delta(hf | {"num_key_value_layers": cut}, tensors),
        )
        jax.tree.map(np.testing.assert_array_equal, moved, there.llama)
        jax.tree.map(np.testing.assert_array_equal, split_layers(model.config, moved), model.llama)
        if cut in (1, 6):
            logits = skv.logits(skv.Model(moved, None, there.config), jnp.asarray(tokens))
            assert_close(logits, expected, err_msg=f"{cut=}")


@pytest.mark.parametrize("name", ["plain", "biases"])
def test_unstack(name):
    _, _, model, _ = setup(name)
    layers = unstack(model.llama.lower_qkv)
    assert len(layers) == 2
    for j, layer in enumerate(layers):
        jax.tree.map(
            np.testing.assert_array_equal,
            layer,
            jax.tree.map(lambda leaf, j=j: leaf[j], model.llama.lower_qkv),
        )


def test_layers_one_by_one_equal_the_scan():
    """As serving runs them: unstacked layers in a Python loop, keys and values of each group from
    `project_kv`."""
    _, _, model, tokens = setup("biases g=2")
    config, llama, delta = model.config, model.llama, model.swiftkv
    assert delta is not None
    batch = unpacked_batch(jnp.asarray(tokens))
    attend = packed_attention(config, DEFAULT, batch.segment_ids, None)
    x, (rope,) = embed(config, llama.embed, batch.tokens), rope_tables(config, batch.positions)
    for block, qkv in zip(unstack(llama.lower), unstack(llama.lower_qkv), strict=True):
        x, _ = decoder_layers.self_layer(config, block, qkv, x, rope, attend)
    keys, values = boundary.project_kv(config, delta, x, rope)
    assert keys.shape == (
        config.num_kv_groups,
        2,
        config.num_kv_heads,
        tokens.shape[1],
        config.head_dim,
    )
    queries = unstack(decoder_layers.delta_queries(delta))
    for i, block in enumerate(unstack(llama.upper)):
        group = i // config.key_value_group_size

        def read(q, group=group):
            return DEFAULT.prefill(q, keys[group], values[group], segment_ids=batch.segment_ids)

        x = decoder_layers.cross_layer(config, block, queries[i], x, rope, read)
    assert_close(unembed(config, llama, x), skv.logits(model, jnp.asarray(tokens)))
