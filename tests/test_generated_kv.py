"""Tokens that keep their own keys and values in the upper layers: the configuration, and whole
sequences against `own_kv_oracle`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints import load
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf
from swiftkv_jax.checkpoints.hf_read import load_delta
from swiftkv_jax.model import transformer
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.config import NO_OWN, LayerKind
from swiftkv_jax.model.cut import choose_generated_kv
from swiftkv_jax.model.layers import unembed
from swiftkv_jax.model.params import QKV
from tests import oracle, own_kv_oracle, tiny

SHAPES = {
    "plain": {},
    "K=1": {"num_key_value_layers": 1},
    "K=L-1": {"num_key_value_layers": 5},
    "biases": {"attention_bias": True},
    "one kv head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "2-way": {"key_value_group_size": 2},
    "4-way, values mixed, heads paired, biases": {
        "key_value_group_size": 4,
        "shared_kv_heads": [[0, 1], [1, 0], [0, 1], [1, 0]],
        "attention_bias": True,
    },
}
assert_close = functools.partial(
    np.testing.assert_allclose, atol=3e-5, rtol=1e-5
)  # float32 against float64


def setup(exact_tail: int = 0, **fields):
    """(config dict, tensors, model whose generated tokens are own)."""
    hf = tiny.hf_config(generated_kv="own", exact_tail=exact_tail, **fields)
    tensors = tiny.tensors_for(hf)
    return hf, tensors, tiny.model_of(hf, tensors)


# Configuration ----------------------------------------------------------------


def test_absent_is_boundary():
    config = config_from_hf(tiny.hf_config())
    assert (config.generated_kv, config.exact_tail) == ("boundary", 0)
    assert not {"generated_kv", "exact_tail"} & config_to_hf(config).keys()
    assert config_from_hf(tiny.hf_config(generated_kv=None, exact_tail=None)) == config


@pytest.mark.parametrize("tail", [0, 64])
def test_config_round_trip(tail):
    config = config_from_hf(tiny.hf_config(generated_kv="own", exact_tail=tail))
    assert (config.generated_kv, config.exact_tail) == ("own", tail)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generated_kv": "mine"}, "generated_kv='mine' is not one of boundary, own"),
        ({"generated_kv": 1}, "generated_kv=1 must be a string"),
        ({"exact_tail": 4}, "exact_tail=4 needs generated_kv=own"),
        ({"generated_kv": "own", "exact_tail": -1}, "exact_tail=-1 must be"),
        ({"generated_kv": "own", "exact_tail": 1.5}, "exact_tail=1.5 must be an integer"),
        ({"generated_kv": "own", "exact_tail": True}, "exact_tail=True must be an integer"),
        (
            {"generated_kv": "own", "key_value_group_size": 2, "sliding_window": 8}
            | {"model_type": "mistral"},
            "key_value_group_size=2 needs upper layers without windows",
        ),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(tiny.hf_config(**fields))


def test_choice_replaces_the_models():
    """Its tail goes with its `own`."""
    config = config_from_hf(tiny.hf_config(generated_kv="own", exact_tail=4))
    chosen = [
        choose_generated_kv(config, *given)
        for given in [(None, None), ("own", None), (None, 0), ("boundary", None), ("own", 7)]
    ]
    assert [(each.generated_kv, each.exact_tail) for each in chosen] == [
        ("own", 4),
        ("own", 4),
        ("own", 0),
        ("boundary", 0),
        ("own", 7),
    ]
    with pytest.raises(skv.UsageError, match="`exact_tail`=4 needs `generated_kv`=own"):
        choose_generated_kv(config, "boundary", 4)
    with pytest.raises(skv.UsageError, match="^`exact_tail`='4': must be a whole number"):
        choose_generated_kv(config, "own", "4")  # type: ignore
    with pytest.raises(
        skv.UsageError, match="^`exact_tail`=-3: must be a whole number, at least 0"
    ):
        choose_generated_kv(config, "boundary", -3)
    windows = dataclasses.replace(
        config_from_hf(tiny.hf_config(key_value_group_size=2)), layer_kinds=(LayerKind(window=8),)
    )
    with pytest.raises(skv.UsageError, match="`generated_kv`=own: .* without windows"):
        choose_generated_kv(windows, "own")


def test_own_start():
    config = config_from_hf(tiny.hf_config(generated_kv="own", exact_tail=4))
    assert [config.own_start(length) for length in (2, 4, 9)] == [0, 0, 5]
    assert config_from_hf(tiny.hf_config()).own_start(9) == NO_OWN


def test_teacher_has_nothing_to_choose():
    """So the teacher's programs are the same whatever the student's config says."""
    own = config_from_hf(tiny.hf_config(generated_kv="own", exact_tail=4))
    assert own.cut(6) == config_from_hf(tiny.hf_config()).cut(6)


@pytest.mark.short("hf")
@pytest.mark.parametrize("save", [skv.save, skv.save_hf], ids=["orbax", "hf"])
def test_checkpoints_keep_the_mode(save, tmp_path):
    model = setup(exact_tail=3)[2]
    save(model, tmp_path / "own")
    loaded = skv.load(tmp_path / "own")
    assert loaded.config == model.config
    kept = load(tmp_path / "own", config=choose_generated_kv(model.config, "boundary"))
    assert kept.config.generated_kv == "boundary" and kept.swiftkv is not None
    back = dataclasses.replace(
        loaded, config=dataclasses.replace(loaded.config, generated_kv="boundary", exact_tail=0)
    )
    save(back, tmp_path / "boundary")
    assert skv.load(tmp_path / "boundary").config.generated_kv == "boundary"


def test_delta_carries_the_mode(tmp_path):
    model = setup(exact_tail=3)[2]
    skv.save_hf(model, tmp_path / "delta", format="delta")
    base = dataclasses.replace(
        model,
        swiftkv=None,
        config=dataclasses.replace(model.config.cut(2), generated_kv="boundary", exact_tail=0),
    )
    assert load_delta(tmp_path / "delta", base).config == model.config


# Whole sequences --------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tail", [0, 3, 20])
def test_logits_equal_the_oracle(name, tail):
    hf, tensors, model = setup(tail, **SHAPES[name])
    tokens, lengths = tiny.tokens_for(hf, 4, 9), [5, 9, 0, 2]
    found = skv.logits(model, tokens, prompt_lengths=lengths)
    for row, (ids, length) in enumerate(zip(tokens, lengths, strict=True)):
        expected = own_kv_oracle.logits(hf, tensors, ids, np.arange(9) >= length - tail)
        assert_close(found[row], expected, err_msg=f"row {row}")


def test_without_lengths_a_row_is_a_prompt():
    hf, _, model = setup(3)
    tokens = tiny.tokens_for(hf, 2, 9)
    found = skv.logits(model, tokens)
    np.testing.assert_array_equal(found, skv.logits(model, tokens, prompt_lengths=[9, 9]))
    assert np.abs(found - skv.logits(model, tokens, prompt_lengths=[5, 5])).max() > 1e-3


@pytest.mark.parametrize("group", [1, 2])
def test_own_tokens_anywhere(group):
    """Any mask, not only suffixes: training has such rows."""
    hf, tensors, model = setup(key_value_group_size=group)
    tokens = tiny.tokens_for(hf, 2, 9)
    own = np.random.default_rng(0).random((2, 9)) < 0.5
    assert model.swiftkv is not None
    hidden = transformer.student(
        model.config,
        model.llama,
        model.swiftkv,
        unpacked_batch(jnp.asarray(tokens)),
        own=jnp.asarray(own),
    )
    found = unembed(model.config, model.llama, hidden)
    for row in range(2):
        assert_close(found[row], own_kv_oracle.logits(hf, tensors, tokens[row], own[row]))


@pytest.mark.parametrize("group", [1, 2])
def test_oracles_agree(group):
    """No own token is the student of `oracle`; all own with the teacher's queries, the teacher."""
    hf, tensors, _ = setup(key_value_group_size=group)
    tokens = tiny.tokens_for(hf, 1, 9)[0]
    boundary = own_kv_oracle.logits(hf, tensors, tokens, [False] * 9)
    np.testing.assert_allclose(
        boundary, oracle.forward(hf, tensors, tokens, swiftkv=True).logits, atol=1e-12
    )
    copied = tensors | {
        name.replace("q_proj.", "q_proj_swiftkv."): value
        for name, value in tensors.items()
        if ".q_proj." in name and name.replace("q_proj.", "q_proj_swiftkv.") in tensors
    }
    own = own_kv_oracle.logits(hf, copied, tokens, [True] * 9)
    np.testing.assert_allclose(
        own, oracle.forward(hf, tensors, tokens, swiftkv=False).logits, atol=1e-12
    )
    assert np.abs(own - boundary).max() > 0.1


def test_the_oracle_rounds_as_ml_dtypes():
    numbers = np.random.default_rng(0)
    x = numbers.uniform(-448, 448, 4000) * 2.0 ** -numbers.integers(0, 20, 4000)
    x = np.concatenate([x, np.arange(-64, 64) / 2**10, [0.0, 448.0, -448.0]])
    for format, dtype in ("fp8", jnp.float8_e4m3fn), ("int8", np.int8):
        of_format = x if format == "fp8" else np.rint(x * 127 / 448)
        steps, step = own_kv_oracle.EightBits(format).steps(of_format)
        np.testing.assert_array_equal(np.rint(steps) * step, of_format.astype(dtype).astype(float))


def test_only_the_teachers_keys_and_values_are_needed():
    hf, _, model = setup(2)
    tokens = tiny.tokens_for(hf, 2, 9)
    whole = model.llama.upper_qkv
    assert isinstance(whole, QKV)
    slim = dataclasses.replace(whole, q=None, q_bias=None)

    def with_upper(qkv):
        return dataclasses.replace(model, llama=dataclasses.replace(model.llama, upper_qkv=qkv))

    np.testing.assert_array_equal(skv.logits(with_upper(slim), tokens), skv.logits(model, tokens))
    with pytest.raises(ValueError, match="upper q, k, v were dropped"):
        skv.logits(with_upper(slim), tokens, swiftkv=False)
    with pytest.raises(ValueError, match="upper k, v were dropped"):
        skv.logits(with_upper(None), tokens)


def test_the_loss_is_of_the_same_student():
    """`distill_loss` at temperature 1 is the divergence of the logits, for each division of the
    rows into prompt and answer."""
    _, _, model = setup(exact_tail=2)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 9))
    mask = np.ones((2, 9), np.float32)
    losses = []
    for lengths in ([5, 7], [9, 9], None):
        teacher, student = (
            jax.nn.log_softmax(
                skv.logits(model, tokens, swiftkv=swiftkv, prompt_lengths=lengths)
            ).astype(jnp.float32)
            for swiftkv in (False, True)
        )
        expected = (jnp.exp(teacher) * (teacher - student)).sum(-1).mean()
        _, found = skv.distill_loss(model, tokens, mask, temperature=1.0, prompt_lengths=lengths)
        assert float(found["logits_loss"]) == pytest.approx(float(expected), rel=1e-4)
        losses.append(float(found["logits_loss"]))
    assert losses[1] == losses[2] and abs(losses[0] - losses[1]) > 1e-4
    with pytest.raises(skv.UsageError, match="prompt_lengths"):
        skv.distill_loss(model, tokens, mask, prompt_lengths=[1])


@pytest.mark.parametrize("lengths", [[1], [1, 10], [-1, 2], [1.5, 2.0], "no", [[1, 2]]])
def test_bad_prompt_lengths(lengths):
    _, _, model = setup()
    with pytest.raises(skv.UsageError, match="prompt_lengths"):
        skv.logits(model, np.zeros((2, 9), np.int32), prompt_lengths=lengths)


def test_boundary_is_the_same_program():
    """Without `own` a layer projects no keys and values: its products are those of the teacher's
    layer but for those two."""
    hf = tiny.hf_config()
    model = tiny.model_of(hf, tiny.tensors_for(hf))
    batch = unpacked_batch(jnp.zeros((2, 9), jnp.int32))

    def products(run, *weights):
        return str(jax.make_jaxpr(run)(*weights)).count("dot_general")

    def student(**own):
        return products(
            lambda llama, delta: transformer.student(model.config, llama, delta, batch, **own),
            model.llama,
            model.swiftkv,
        )

    teacher = products(lambda llama: transformer.teacher(model.config, llama, batch), model.llama)
    # Once for each scan: k and v of a layer's own. The student has those of the boundary besides.
    assert student() == teacher
    assert student(own=jnp.ones((2, 9), bool)) == teacher + 2
