"""A delta in closed form: whole models that it fits exactly, and what becomes of the student."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import calibration
from swiftkv_jax.calibration import moments
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.errors import DivergenceError
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.initialization import init_swiftkv
from swiftkv_jax.model.model import AuxiliaryFiles, Model
from swiftkv_jax.model.rope import paired_dims
from swiftkv_jax.model.stacks import split_layers
from tests import tiny

RNG = np.random.default_rng(0)
HF = tiny.hf_config()


# Whole models -----------------------------------------------------------------


def linear_teacher(group: int, seed: int = 0, rotated: int = 8, **overrides) -> Model:
    """A Llama whose upper layers add next to nothing to the stream: their keys and values are
    linear in the input of layer K, but by other matrices than their own, for each has another norm.
    In a group they are those of the first layer, with each rotary pair of the keys turned and
    scaled, values mixed, heads in another order."""
    hf = HF | overrides | {"key_value_group_size": group}
    model = tiny.model_of(hf, tiny.tensors_for(hf, seed))
    config, llama = tiny.rotating(model.config, rotated), model.llama
    rng = np.random.default_rng(seed)
    upper = llama.upper
    norms = rng.uniform(0.7, 1.4, upper.attn_norm.shape).astype(np.float32)
    upper = dataclasses.replace(
        upper,
        attn_norm=jnp.array(norms),
        down=jnp.zeros_like(upper.down).at[-1].set(upper.down[-1]),
        o=(1e-3 * upper.o).at[-1].set(upper.o[-1]),
    )
    if upper.o_bias is not None:
        upper = dataclasses.replace(upper, o_bias=jnp.zeros_like(upper.o_bias))
    qkv = jax.tree.map(np.array, llama.upper_qkv)
    (first, second), half = paired_dims(config), config.head_dim // 2
    for layer in range(config.num_upper_layers):
        leader = layer - layer % group
        if layer == leader:
            continue
        order = rng.permutation(config.num_kv_heads)
        factor = rng.uniform(0.5, 2, (2, half)) * np.exp(1j * rng.uniform(0, 6, (2, half)))
        mix = rng.normal(size=(2, config.head_dim, config.head_dim))
        for target in (qkv.k, qkv.k_bias):
            if target is None:
                continue
            z = target[leader][:, first] + 1j * target[leader][:, second]
            z = z * factor.reshape(2, half, *(1,) * (z.ndim - 2))
            target[layer][:, first], target[layer][:, second] = z.real[order], z.imag[order]
        for target in (qkv.v, qkv.v_bias):
            if target is not None:
                target[layer] = np.einsum("kgh,kh...->kg...", mix, target[leader])[order]
        for target in (qkv.k, qkv.v):
            target[layer] *= norms[leader] / norms[layer]
    llama = dataclasses.replace(llama, upper=upper, upper_qkv=jax.tree.map(jnp.array, qkv))
    return Model(llama, None, config)


TOKENS = RNG.integers(0, HF["vocab_size"], (12, 40))


@pytest.mark.short("2-True-8", "4-False-8")
@pytest.mark.parametrize(
    ("group", "bias", "rotated"),
    [
        *((group, group == 2, 8) for group in (1, 2, 4)),
        (2, True, 4),
        *(pytest.param(group, group != 2, 8, marks=pytest.mark.long) for group in (1, 2, 4)),
    ],
)
def test_a_model_with_linear_upper_layers_is_fitted_exactly(group, bias, rotated):
    teacher = linear_teacher(group, rotated=rotated, attention_bias=bias)
    files = AuxiliaryFiles(hf_config={"swiftkv_far_loss": {}})  # of the student before
    teacher = dataclasses.replace(teacher, auxiliary_files=files)
    student, layers = skv.calibrate(teacher, TOKENS, 2, group)
    assert student.auxiliary_files.hf_config == {}
    assert [fit.layer for fit in layers] == [2, 3, 4, 5]
    shares = [(fit.r2_k, fit.r2_v, fit.kept_k, fit.kept_v) for fit in layers]
    np.testing.assert_allclose(shares, 1, atol=1e-4)
    assert np.max(shares) <= 1, "they are shares"
    expected = skv.logits(student, TOKENS[:3], swiftkv=False)
    np.testing.assert_allclose(
        skv.logits(student, TOKENS[:3], swiftkv=True), expected, atol=5e-3 * np.abs(expected).max()
    )
    # The control: a copy, which here also keeps layer K's norm, is far away
    far = np.abs(skv.logits(skv.add_swiftkv(teacher, 2, group), TOKENS[:3]) - expected).max()
    assert far > 0.05 * np.abs(expected).max()


OWN, CLOSER = {"generated_kv": "own"}, {"prompt_attention_layers": 2, "boundary_taps": 1}


@pytest.mark.short("boundary")
@pytest.mark.parametrize("flags", [{}, OWN, OWN | CLOSER], ids=["boundary", "own", "closer"])
def test_the_fit_does_not_depend_on_the_size_of_a_batch(flags, monkeypatch):
    """Nor does the scale of queries beside own keys, on the first tokens of some rows. The rows
    are of different lengths."""
    monkeypatch.setattr(calibration, "SLOPE_TOKENS", 130)
    teacher, rows = random_teacher(), [row[: 40 - at] for at, row in enumerate(TOKENS)]

    def fit(size):
        student, layers = skv.calibrate(teacher, rows, 2, 2, batch_size=size, **flags)
        return student.swiftkv, [dataclasses.astuple(layer) for layer in layers]

    expected, shares = fit(1)
    for size in (5, 12):
        found, found_shares = fit(size)
        np.testing.assert_allclose(found_shares, shares, rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected
        )


def test_few_tokens_are_warned_of(caplog):
    """32 per entry of the hidden state are enough."""
    teacher = random_teacher()
    few, enough = TOKENS[:1, :30], RNG.integers(0, 61, (1, 32 * 32))
    skv.calibrate(teacher, few, 2)
    (record,) = caplog.records
    assert record.message.startswith("calibrated on 30 tokens only, for a hidden state of 32")
    skv.calibrate(teacher, enough, 2)
    assert len(caplog.records) == 1


def random_teacher(**overrides) -> Model:
    hf = HF | overrides
    return dataclasses.replace(tiny.model_of(hf, tiny.tensors_for(hf)), swiftkv=None)


def divergence(model: Model, tokens=TOKENS) -> float:
    teacher, student = (
        jax.nn.log_softmax(skv.logits(model, tokens, swiftkv=swiftkv)) for swiftkv in (False, True)
    )
    return float((jnp.exp(teacher) * (teacher - student)).sum(-1).mean())


@pytest.mark.parametrize("group", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_the_fit_is_nearer_to_the_teacher_than_a_copy(group):
    teacher = random_teacher()
    copied = skv.add_swiftkv(teacher, 2, group)
    fitted = skv.calibrate(teacher, RNG.integers(0, 61, (64, 40)), 2, group).model
    assert divergence(fitted) < 0.8 * divergence(copied)


@pytest.mark.parametrize("leaf", ["o", "mlp_norm"])
def test_a_teacher_that_is_not_finite_is_named(leaf):
    teacher = random_teacher()
    llama = split_layers(teacher.config.cut(2), teacher.llama)
    upper = dataclasses.replace(llama.upper, **{leaf: getattr(llama.upper, leaf).at[0].set(np.nan)})
    broken = dataclasses.replace(teacher, llama=dataclasses.replace(llama, upper=upper))
    with pytest.raises(DivergenceError, match="layer [23]: weights of the teacher, or its hidden"):
        skv.calibrate(broken, TOKENS, 2)


def test_layer_k_keeps_its_own_projections():
    """States up to the input of layer K + 1 are the teacher's, without groups."""
    teacher = random_teacher()
    delta, qkv = skv.calibrate(teacher, TOKENS, 2).model.swiftkv, teacher.llama.upper_qkv
    assert delta is not None and qkv is not None
    np.testing.assert_allclose(delta.k[0], qkv.k[0], atol=1e-4)
    np.testing.assert_allclose(delta.v[0], qkv.v[0], atol=1e-4)
    assert np.abs(delta.k[1] - qkv.k[1]).max() > 0.1


def test_keys_beside_those_of_generated_tokens_are_not_attenuated():
    """Where generated tokens keep their own keys, each head's regressed ones are divided by its
    R2; all else is the same without a tail, and layer K is exact either way."""
    teacher = random_teacher()
    plain, layers = skv.calibrate(teacher, TOKENS, 2)
    own = skv.calibrate(teacher, TOKENS, 2, generated_kv="own").model
    assert (own.config.generated_kv, own.config.exact_tail) == ("own", 0)
    assert plain.swiftkv is not None and own.swiftkv is not None
    scale = own.swiftkv.k / plain.swiftkv.k  # U K H D
    np.testing.assert_allclose(scale, scale[..., :1, :1] * jnp.ones_like(scale), rtol=1e-4)
    expected = [max(fit.r2_k, 0.5) for fit in layers]
    assert min(expected) < 0.95
    np.testing.assert_allclose(1 / scale[0, :, 0, 0], 1, rtol=1e-4)
    np.testing.assert_allclose((1 / scale[:, :, 0, 0]).mean(1), expected, rtol=0.05)
    jax.tree.map(
        np.testing.assert_array_equal,
        dataclasses.replace(own.swiftkv, k=plain.swiftkv.k),
        plain.swiftkv,
    )


def test_the_order_of_a_layers_heads_does_not_matter():
    """The heads of one layer in another order are the same teacher, and give the same student."""
    teacher = random_teacher()
    order, queries = jnp.array([1, 0]), jnp.array([2, 3, 0, 1])
    qkv, upper = teacher.llama.upper_qkv, teacher.llama.upper
    assert qkv is not None
    permuted = dataclasses.replace(
        teacher.llama,
        upper=dataclasses.replace(upper, o=upper.o.at[1].set(upper.o[1][:, queries])),
        upper_qkv=dataclasses.replace(
            qkv,
            q=qkv.q.at[1].set(qkv.q[1][queries]),
            k=qkv.k.at[1].set(qkv.k[1][order]),
            v=qkv.v.at[1].set(qkv.v[1][order]),
        ),
    )
    students = [
        skv.calibrate(dataclasses.replace(teacher, llama=llama), TOKENS, 2, 2).model
        for llama in (teacher.llama, permuted)
    ]
    heads = [student.config.shared_kv_heads for student in students]
    assert heads[0] is not None and heads[1] is not None
    assert heads[0][1] != heads[1][1] and heads[0][0] == heads[1][0]
    for swiftkv in (False, True):
        first, second = (skv.logits(student, TOKENS[:2], swiftkv=swiftkv) for student in students)
        np.testing.assert_allclose(first, second, atol=1e-3)


def test_padding_counts_nowhere():
    teacher = random_teacher()
    config = teacher.config.cut(2)
    llama = split_layers(config, teacher.llama)
    tokens = TOKENS[:2]
    padded = np.pad(tokens, ((0, 1), (0, 5)))
    batch = unpacked_batch(jnp.array(padded))
    segments = np.pad(np.ones_like(tokens), ((0, 1), (0, 5)))
    batch = dataclasses.replace(batch, segment_ids=jnp.array(segments))
    attention = Attention()
    plain, with_padding = (
        moments.add_batch(config, attention, moments.zero_moments(config, None), llama, b)
        for b in (unpacked_batch(jnp.array(tokens)), batch)
    )
    assert float(plain.tokens) == tokens.size == float(with_padding.tokens)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max()),
        plain,
        with_padding,
    )


# What becomes of the student --------------------------------------------------


@pytest.fixture(scope="module")
def mixed() -> Model:
    """A student whose layers mix shared values and read heads in different orders."""
    model = skv.calibrate(random_teacher(), TOKENS, 2, 2).model
    heads = ((0, 1), (1, 0), (1, 0), (0, 1))
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, shared_kv_heads=heads)
    )


def test_it_is_served_as_the_full_pass_computes_it(mixed):
    prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :30].tolist(), TOKENS[2, :1].tolist()]
    found = skv.generate(mixed, prompts, max_tokens=6, ignore_eos=True)
    for prompt, answer in zip(prompts, found, strict=True):
        row = np.array([prompt + answer])
        best = np.argmax(skv.logits(mixed, row)[0], -1)
        np.testing.assert_array_equal(best[len(prompt) - 1 : -1], answer)


@pytest.mark.parametrize("format", ["full", "expanded", "delta"])
def test_it_comes_back_from_every_format(mixed, format, tmp_path):
    skv.save_hf(mixed, tmp_path / "hf", format=format)
    if format == "delta":
        plain = dataclasses.replace(mixed, swiftkv=None)
        back = load_delta(tmp_path / "hf", plain)
    else:
        back = skv.load(tmp_path / "hf", dtype="float32")
    assert (back.config.shared_kv_heads is None) == (format == "expanded")
    for swiftkv in (False, True):
        expected = np.asarray(skv.logits(mixed, TOKENS[:2], swiftkv=swiftkv))
        np.testing.assert_allclose(
            skv.logits(back, TOKENS[:2], swiftkv=swiftkv),
            expected,
            atol=3e-6 * np.abs(expected).max() if format == "expanded" else 0,
        )


def test_it_comes_back_from_orbax(mixed, tmp_path):
    skv.save(mixed, tmp_path / "orbax")
    back = skv.load(tmp_path / "orbax", dtype="float32")
    assert back.config == mixed.config
    jax.tree.map(np.testing.assert_array_equal, back.swiftkv, mixed.swiftkv)


def test_the_authors_classes_do_not_know_its_type(mixed, tmp_path):
    """They would load it and leave out what they do not know."""
    skv.save_hf(mixed, tmp_path / "full")
    written = json.loads((tmp_path / "full/config.json").read_text())
    assert written["model_type"] == "llama_swiftkv_shared_basis"
    skv.save_hf(mixed, tmp_path / "expanded", format="expanded")
    written = json.loads((tmp_path / "expanded/config.json").read_text())
    assert written["model_type"] == "llama_swiftkv" and "shared_kv_heads" not in written


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["int8", pytest.param("fp8", marks=pytest.mark.long)])
def test_it_is_served_with_8_bit_weights(mixed, quantization, tmp_path):
    skv.save_hf(mixed, tmp_path / "hf")
    small = skv.load(tmp_path / "hf", dtype="float32", quantization=quantization)
    exact = skv.logits(mixed, TOKENS[:1])
    rounded = skv.logits(small, TOKENS[:1])
    answer = skv.generate(small, [TOKENS[0].tolist()], max_tokens=1)[0]
    close = 0.2 * np.abs(exact).max()
    assert np.abs(rounded - exact).max() < close
    assert rounded[0, -1].max() - rounded[0, -1, answer[0]] < close


# Bad input --------------------------------------------------------------------

BAD_DATA = {
    "one text": ("text", "several texts"),
    "nothing": ([], "no token"),
    "empty rows": ([[], []], "no token"),
    "outside": ([[1, 61]], "token id 61 in row 0 is outside the vocabulary of 61"),
    "floats": ([[1.5]], "row 0 is neither"),
    "no tokenizer": (["text"], "need a model with a tokenizer"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_line(case):
    data, message = BAD_DATA[case]
    with pytest.raises(skv.UsageError, match=message) as error:
        skv.calibrate(random_teacher(), data, 2)
    assert "\n" not in str(error.value)


def test_empty_texts_hold_no_token(tokenizer):
    """Though the tokenizer puts one before every text."""
    with pytest.raises(skv.UsageError, match="no token"):
        skv.calibrate(dataclasses.replace(random_teacher(), tokenizer=tokenizer), ["", ""], 2)


def test_cuts_that_do_not_fit():
    with pytest.raises(skv.ConfigError, match="must divide"):
        skv.calibrate(random_teacher(), TOKENS, 2, 3)
    with pytest.raises(skv.UsageError, match="no layer is left"):
        skv.calibrate(random_teacher(), TOKENS, 6)


def test_heads_in_the_config():
    config = random_teacher().config.cut(2, 2)
    heads = ((0, 1), (1, 0), (0, 1), (0, 1))
    mixed = dataclasses.replace(config, shared_kv_heads=heads)
    assert mixed.cut(2, 2) == mixed and mixed.cut(2).shared_kv_heads is None
    assert mixed.cut(6).shared_kv_heads is None
    for wrong in (heads[:3], ((0, 0), *heads[1:]), ((0, 1, 2), *heads[1:])):
        with pytest.raises(skv.ConfigError, match="one permutation of the 2 key/value heads"):
            dataclasses.replace(config, shared_kv_heads=wrong)
    with pytest.raises(skv.ConfigError, match="which share caches"):
        dataclasses.replace(config.cut(2), shared_kv_heads=heads)


def test_a_copied_start_with_mixes_takes_values_as_they_are(mixed):
    start = init_swiftkv(mixed.config, mixed.llama)
    np.testing.assert_array_equal(start.mix[2, 1], np.eye(8))
    leader = init_swiftkv(mixed.config, mixed.llama, start="leader")
    np.testing.assert_array_equal(leader.k[1], mixed.llama.upper_qkv.k[2])
