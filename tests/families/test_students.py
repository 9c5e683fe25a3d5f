"""SwiftKV on every family: what a fresh delta starts from, prompt tokens that skip the upper
layers, groups, own keys and values, the loss, names in checkpoints."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax import ConfigError, Model
from swiftkv_jax.infer import Engine, ScoreRequest
from swiftkv_jax.model import layers, transformer
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.train.analysis.sweep import Sweep, measure_all
from swiftkv_jax.train.recipe import Init
from tests.checkpoints.hf_models import assert_same

from . import models
from .cases import CASES, PROMPT, VOCABULARY, tokens
from .running import SERVED, greedy_text, logits

MIXED_ROTATIONS = ("smollm3", "olmo3", "gemma3")
NEW = 5


def cases_of_long(*names: str) -> list:
    """Cases that only `make test-all` runs."""
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


def most_long(*always: str) -> list:
    """All cases, of which `make test` runs only some."""
    return [*always, *cases_of_long(*(name for name in CASES if name not in always))]


def other(model: Model, seed: int = 0) -> Model:
    """The model with a delta that is not the teacher's."""
    leaves, tree = jax.tree.flatten(model.swiftkv)
    rng = np.random.default_rng(seed)
    moved = [
        leaf * jnp.asarray(1 + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves
    ]
    return dataclasses.replace(model, swiftkv=jax.tree.unflatten(tree, moved))


def student(model: Model, group: int = 1) -> Model:
    """Half of the layers with keys and values from the boundary; the delta is moved a little."""
    lower = model.config.num_layers // 2
    lower -= (model.config.num_layers - lower) % group
    return other(skv.add_swiftkv(model, lower, group))


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_delta_leaves_the_first_upper_layer_as_it_was(case, load):
    model = skv.add_swiftkv(load(case), 3)
    config, batch = model.config, unpacked_batch(jnp.asarray(tokens()))

    def entering(index, x):
        """The states that enter the layers up to that after the first upper one."""
        return jnp.where(index <= config.num_lower_layers + 1, x, 0)

    @jax.jit
    def run(llama, delta):
        x, tables = transformer.run_lower_layers(config, llama, batch)
        shared = (x, tables, batch.segment_ids)
        _, teacher = transformer.run_upper_layers_teacher(
            config, llama, *shared, layer_hook=entering
        )
        return teacher, *transformer.run_upper_layers_student(
            config, llama, delta, *shared, layer_hook=entering
        )

    teacher, last, found = run(model.llama, model.swiftkv)
    np.testing.assert_allclose(found, teacher, atol=1e-4, rtol=1e-4)
    assert np.abs(np.asarray(last)).max() > 0.1


@pytest.mark.parametrize("case", most_long("gemma3"))
def test_prompt_tokens_skip_the_upper_layers(case, load):
    """Text of the engine, whose prompt tokens stop at the boundary, is the likeliest by the full
    pass."""
    model = student(load(case), 1 if case in MIXED_ROTATIONS else 2)
    text = greedy_text(model, NEW)
    rows = np.concatenate([tokens()[:, :PROMPT], text], 1)
    best = logits(model, rows)[:, PROMPT - 1 : -1]
    chosen = np.take_along_axis(best, np.asarray(text)[..., None], 2)[..., 0]
    np.testing.assert_allclose(chosen, best.max(-1), atol=1e-3)


@pytest.mark.parametrize("case", ["gemma2", *cases_of_long("granite", "gemma3")])
def test_scores_are_divided_and_capped(case, load):
    model = load(case)
    options = dataclasses.replace(SERVED, scoring=True)
    engine = Engine.from_model(model, options, swiftkv=False)
    rows = tokens()
    scores = dict(engine.run([ScoreRequest(row.tolist(), 1) for row in rows]))
    expected = jax.nn.log_softmax(models.recorded(case).logits)[:, :-1]
    for number, row in enumerate(rows):
        found = [entry.logprob for entry in scores[number].logprobs or ()]
        np.testing.assert_allclose(found, expected[number, np.arange(39), row[1:]], atol=2e-4)


@pytest.mark.parametrize("case", cases_of_long("qwen3", "gemma3", "phi4-mini", "glm4"))
def test_generated_tokens_keep_their_own(case, load):
    model = student(load(case))
    config = dataclasses.replace(model.config, generated_kv="own", exact_tail=3)
    model = dataclasses.replace(model, config=config)
    text = greedy_text(model, NEW)
    rows = np.concatenate([tokens()[:, :PROMPT], text], 1)
    best = logits(model, rows, prompt_lengths=[PROMPT, PROMPT])[:, PROMPT - 1 : -1]
    chosen = np.take_along_axis(best, np.asarray(text)[..., None], 2)[..., 0]
    np.testing.assert_allclose(chosen, best.max(-1), atol=1e-3)
    boundary = logits(model, rows)[:, PROMPT - 1 : -1]
    assert np.abs(boundary - best).max() > 1e-2


@pytest.mark.parametrize("case", ["qwen3-moe", "olmo2", "phi3", "gemma3", "qwen2-window"])
@pytest.mark.long
@pytest.mark.parametrize("mesh", ["1x4", "2x2"])
def test_a_mesh_changes_nothing(case, mesh, load, tmp_path):
    path = models.write(case, tmp_path / "model")
    model = student(skv.load(path, dtype="float32", mesh=skv.make_mesh(mesh)))
    single = student(load(case))
    np.testing.assert_allclose(logits(model), logits(single), atol=2e-4)
    if mesh == "2x2":
        assert greedy_text(model, NEW) == greedy_text(single, NEW)


@pytest.mark.parametrize("case", MIXED_ROTATIONS)
def test_layers_that_rotate_differently_share_no_keys(case, load):
    with pytest.raises(ConfigError, match="key_value_group_size=2: layers .* rotate them differ"):
        skv.add_swiftkv(load(case), 2, 2)


def test_a_group_starts_from_the_mean_of_its_norms(load):
    model = load("qwen3")
    cut = skv.add_swiftkv(model, 2, 2)
    assert cut.swiftkv is not None and cut.llama.upper_qkv is not None
    expected = np.asarray(cut.llama.upper_qkv.k_norm).reshape(2, 2, -1).mean(1)
    np.testing.assert_allclose(cut.swiftkv.k_norm, expected, rtol=1e-6)
    np.testing.assert_array_equal(cut.swiftkv.q_norm, cut.llama.upper_qkv.q_norm)


# Case -> what its class begins with, layers of a group, norms of heads.
NAMES = {
    "qwen3": ("Qwen3", 1, {"q_norm", "k_norm"}),
    "qwen2": ("Qwen2", 1, set()),
    "olmo2": ("Olmo2", 1, {"q_norm", "k_norm"}),
    "phi3": ("Phi3", 1, set()),
    "glm4": ("Glm4", 1, set()),
    "granite4-unrotated": ("GraniteMoeHybrid", 2, set()),
}


@pytest.mark.short("qwen2", "olmo2", "granite4-unrotated")
@pytest.mark.parametrize("case", NAMES)
def test_names_of_the_delta(case, load, tmp_path):
    architecture, group, norms = NAMES[case]
    model = student(load(case), group)
    skv.save_hf(model, tmp_path / "hf")
    hf = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert hf["architectures"] == [f"{architecture}SwiftKVForCausalLM"]
    assert hf["model_type"] == f"{CASES[case]['model_type']}_swiftkv"
    written = load_file(tmp_path / "hf" / "model.safetensors")
    kinds = ["weight", "bias"] if model.config.qkv_bias else ["weight"]
    names = {f"{name}_proj_swiftkv.{kind}" for name in "qkv" for kind in kinds}
    names |= {f"{name}_swiftkv.weight" for name in norms}
    expected = set() if case == "olmo2" else {"model.norm_swiftkv.weight"}
    for layer in range(model.config.num_lower_layers, 6):
        leads = (layer - model.config.num_lower_layers) % group == 0
        mine = {name for name in names if leads or name.startswith("q")}
        expected |= {f"model.layers.{layer}.self_attn.{name}" for name in mine}
    assert written.keys() - models.tensors(case).keys() == expected
    assert_same(skv.load(tmp_path / "hf", dtype="float32"), model)


# Distillation -----------------------------------------------------------------


@pytest.mark.parametrize("case", ["gemma2", *cases_of_long("granite")])
def test_caps_and_divisors_reach_the_loss_and_its_gradient(case, load):
    """Against the divergence of the logits that the model returns, differentiated by JAX."""
    model, rows = student(load(case)), jnp.asarray(tokens())
    mask = jnp.ones(rows.shape)

    def divergence(delta):
        temperature = 2.0
        taught = dataclasses.replace(model, swiftkv=delta)
        p, q = (
            jax.nn.log_softmax(skv.logits(taught, rows, swiftkv=swiftkv) / temperature)
            for swiftkv in (False, True)
        )
        return temperature**2 * (jnp.exp(p) * (p - q)).sum(-1).mean()

    def loss(delta):
        taught = dataclasses.replace(model, swiftkv=delta)
        return skv.distill_loss(taught, rows, mask, hidden_weight=0.0)[0]

    with jax.default_matmul_precision("highest"):
        expected = jax.value_and_grad(divergence)(model.swiftkv)
        found = jax.value_and_grad(loss)(model.swiftkv)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4 * np.abs(theirs).max())


def divergence(model: Model) -> float:
    """KL(teacher || student) in nats, averaged over the positions that something follows."""
    p, q = (jax.nn.log_softmax(logits(model, swiftkv=swiftkv)) for swiftkv in (False, True))
    return float((jnp.exp(p) * (p - q)).sum(-1)[:, :-1].mean())


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "group"),
    [
        *((name, 1) for name in ("gemma3", "qwen3", "olmo3")),
        *((name, 3) for name in ("glm4", "phi4-mini", "glm")),
    ],
)
def test_calibration_and_analysis(case, group, load):
    """The closed form lowers the divergence from the teacher on other text; the analysis of cuts,
    which writes out the keys and values of each layer, finds the divergences that the students
    have."""
    model, rng = load(case), np.random.default_rng(3)
    rows = rng.integers(3, VOCABULARY, (48, 40))
    fitted = skv.calibrate(model, rows, 3, group).model
    copied = skv.add_swiftkv(model, 3, group)
    copy: Init = "leader" if group == 1 else "authors"
    expected: dict[Init, float] = {
        "closed-form": divergence(fitted),
        copy: divergence(copied),
    }
    assert expected["closed-form"] < 0.8 * expected[copy]
    batch = unpacked_batch(jnp.asarray(tokens()))
    mask = batch.loss_mask.at[:, -1].set(0.0)
    for init, kl in expected.items():
        sweep = Sweep(
            model.config,
            model.llama,
            [dataclasses.replace(batch, loss_mask=mask)],
            lowest=3,
            prompt_length=100,
            attention=Attention(),
            init=init,
            calibration=[unpacked_batch(jnp.asarray(rows))],
        )
        found = measure_all(sweep, [(3, group, "boundary")])
        assert sweep.summary(found).cuts[0].kl == pytest.approx(kl, rel=2e-2)


def test_the_closed_form_of_groups_needs_keys_without_norms(load):
    with pytest.raises(ConfigError, match="key_value_group_size=2: there is no closed form"):
        skv.calibrate(load("qwen3"), tokens(), 2, 2)


# Rounding ---------------------------------------------------------------------


def test_constants_are_rounded_as_pytorch_does():
    """torch multiplies bfloat16 by a Python number in float32; Gemma rounds its own first."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.bfloat16)
    expected = (np.asarray(x, np.float32) * np.float32(0.22)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(layers.scaled(x, 0.22), expected)
    assert not np.array_equal(x * jnp.bfloat16(0.22), expected)


def test_gemmas_constant_is_rounded_to_the_weights_dtype(load):
    config = dataclasses.replace(load("gemma3").config, embed_dim=2560, embed_scale=2560**0.5)
    ones = jnp.ones((4, 2560))
    token = jnp.zeros((1, 1), jnp.int32)
    assert float(layers.embed(config, ones.astype(jnp.bfloat16), token)[0, 0, 0]) == 50.5
    assert float(layers.embed(config, ones, token)[0, 0, 0]) == pytest.approx(50.596443)
