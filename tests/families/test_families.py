"""Models of every family against what transformers computed for them (`record.py`): logits,
greedy text through the engine, the way there and back, and that every feature counts."""

import dataclasses
import json

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import LayerKind, Model, Rope
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf

from . import models
from .cases import CASES, tokens
from .running import greedy_text, logits


@pytest.mark.parametrize("case", CASES)
def test_logits(case, load):
    """By the order of the sums one token of phi4-mini is off by 1.5e-4 to 3.7e-4, the median token
    by 3e-5."""
    atol = 5e-4 if case == "phi4-mini" else 2e-4
    np.testing.assert_allclose(logits(load(case)), models.recorded(case).logits, atol=atol, rtol=0)


SERVED = (
    "qwen2-window qwen3-moe smollm3 phi4-mini olmo3 gemma2 gemma3 glm4 granite4-unrotated".split()
)
"""Cases whose options the engine has code for; the others are served by `make test-all`."""


@pytest.mark.short("qwen2-window", "gemma3")
@pytest.mark.parametrize(
    "case",
    [case if case in SERVED else pytest.param(case, marks=pytest.mark.long) for case in CASES],
)
def test_greedy_text(case, load):
    expected = models.recorded(case).greedy
    assert greedy_text(load(case), expected.shape[1], swiftkv=False) == expected.tolist()


@pytest.mark.short("qwen2", "gemma3", "phi4-mini", "qwen3-moe")
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, load, tmp_path):
    """Every tensor bit for bit, fused ones too, under the names that they had; the config's every
    option."""
    skv.save_hf(load(case), tmp_path / "hf")
    models.assert_same_tensors(tmp_path / "hf", case)
    again = config_from_hf(json.loads((tmp_path / "hf" / "config.json").read_text()))
    assert again == load(case).config == config_from_hf(config_to_hf(again))
    skv.save(load(case), tmp_path / "orbax")
    assert open_any(tmp_path / "orbax").config == again


@pytest.mark.long
def test_long_factors_do_not_depend_on_the_prompts(load):
    """LongRoPE has the long factors for any text, unless `max_model_len` is short."""
    model, short, long = load("phi4-mini"), tokens()[0, :4].tolist(), tokens()[1].tolist()
    alone = skv.generate(model, short, max_tokens=6, ignore_eos=True)
    assert skv.generate(model, [short, long], max_tokens=16, ignore_eos=True)[0][:6] == alone
    asked = skv.generate(model, short, max_tokens=6, ignore_eos=True, max_model_len=16)
    assert asked != alone


# Features ---------------------------------------------------------------------


def without_leaf(*path: str):
    """The model with a norm gone, on all layers."""

    def change(model: Model) -> Model:
        *stacks, leaf = path
        llama = model.llama
        for stack in stacks:
            part = dataclasses.replace(getattr(llama, stack), **{leaf: None})
            llama = dataclasses.replace(llama, **{stack: part})
        return dataclasses.replace(model, llama=llama)

    return change


def with_config(**options):
    return lambda model: dataclasses.replace(
        model, config=dataclasses.replace(model.config, **options)
    )


def with_kinds(change):
    """The model with `change` of each layer's kind."""

    def apply(model: Model) -> Model:
        layers = range(model.config.num_layers)
        kinds = tuple(change(model.config.kind(layer), layer) for layer in layers)
        return with_config(layer_kinds=kinds)(model)

    return apply


def no_scaling(kind: LayerKind, _) -> LayerKind:
    assert kind.rope is not None
    return LayerKind(dataclasses.replace(kind.rope, scaling=None), kind.window)


def unit_factor(kind: LayerKind, _) -> LayerKind:
    assert kind.rope is not None and kind.rope.scaling is not None
    scaling = dataclasses.replace(kind.rope.scaling, attention_factor=1.0)
    return LayerKind(dataclasses.replace(kind.rope, scaling=scaling), kind.window)


def window_of(size: int | None):
    return with_kinds(lambda kind, _: LayerKind(kind.rope, kind.window and size))


def short_factors(kind: LayerKind, _) -> LayerKind:
    assert kind.rope is not None and kind.rope.scaling is not None
    short = kind.rope.scaling.short_factor
    scaling = dataclasses.replace(kind.rope.scaling, long_factor=short)
    return LayerKind(dataclasses.replace(kind.rope, scaling=scaling), kind.window)


def one_rope(model: Model) -> Model:
    rope = model.config.ropes[0]
    return with_kinds(lambda kind, _: LayerKind(rope, kind.window))(model)


def all_rotate(model: Model) -> Model:
    (rope,) = model.config.ropes
    return with_kinds(lambda kind, _: LayerKind(rope, kind.window))(model)


def by_interval(model: Model) -> Model:
    (rope,) = model.config.ropes
    return with_kinds(lambda _, layer: LayerKind(rope if (layer + 1) % 4 else None))(model)


def no_biases(model: Model) -> Model:
    def drop(qkv):
        return dataclasses.replace(qkv, q_bias=None, k_bias=None, v_bias=None)

    llama = model.llama
    llama = dataclasses.replace(
        llama, lower_qkv=drop(llama.lower_qkv), upper_qkv=drop(llama.upper_qkv)
    )
    return dataclasses.replace(model, llama=llama)


def neighbours_for_halves(model: Model) -> Model:
    """The model with rows of queries and keys in the order of the checkpoint, as if its rotary
    embedding were not interleaved."""
    config, llama = model.config, model.llama
    (rope,) = config.ropes
    size = rope.rotated(config.head_dim)
    order = np.arange(config.head_dim)
    order[:size] = np.arange(size).reshape(2, -1).T.ravel()

    def undo(qkv):
        fields = {name: getattr(qkv, name) for name in ("q", "k", "q_bias", "k_bias")}
        moved = {name: leaf[:, :, order] for name, leaf in fields.items() if leaf is not None}
        return dataclasses.replace(qkv, **moved)

    llama = dataclasses.replace(
        llama, lower_qkv=undo(llama.lower_qkv), upper_qkv=undo(llama.upper_qkv)
    )
    return dataclasses.replace(model, llama=llama)


def all_dimensions_rotate(kind: LayerKind, _) -> LayerKind:
    assert kind.rope is not None
    return LayerKind(dataclasses.replace(kind.rope, fraction=1.0), kind.window)


BLOCKS, QKVS = ("lower", "upper"), ("lower_qkv", "upper_qkv")
ABLATIONS = {
    "qwen2: biases": ("qwen2", no_biases),
    "qwen2: the window that is off": (
        "qwen2",
        with_kinds(lambda kind, layer: LayerKind(kind.rope, 7 if layer >= 2 else None)),
    ),
    "qwen2-window: window": ("qwen2-window", window_of(None)),
    "qwen3: norm of queries": ("qwen3", without_leaf(*QKVS, "q_norm")),
    "qwen3: norm of keys": ("qwen3", without_leaf(*QKVS, "k_norm")),
    "qwen3-yarn: yarn": ("qwen3-yarn", with_kinds(no_scaling)),
    "qwen3-yarn: its factor": ("qwen3-yarn", with_kinds(unit_factor)),
    "qwen3-yarn: output bias": ("qwen3-yarn", without_leaf(*BLOCKS, "o_bias")),
    "qwen3-moe: renormalisation": ("qwen3-moe", with_config(renormalize_experts=False)),
    "qwen3-moe: no renormalisation": ("qwen3-moe-raw", with_config(renormalize_experts=True)),
    "qwen3-moe: second expert": ("qwen3-moe", with_config(num_experts_per_token=1)),
    "mistral: window": ("mistral-window", window_of(None)),
    "mistral: 9 for 8": ("mistral-window", window_of(9)),
    "seed-oss: biases": ("seed-oss", no_biases),
    "granite: embeddings": ("granite", with_config(embed_scale=1.0)),
    "granite: residual": ("granite", with_config(residual_scale=1.0)),
    "granite: attention": ("granite", with_config(query_scale=None)),
    "granite: logits": ("granite", with_config(logit_divisor=1.0)),
    "granite4: embeddings": ("granite4", with_config(embed_scale=1.0)),
    "granite4: residual": ("granite4", with_config(residual_scale=1.0)),
    "granite4: attention": ("granite4", with_config(query_scale=None)),
    "granite4: logits": ("granite4", with_config(logit_divisor=1.0)),
    "granite4: rotation": ("granite4", with_kinds(lambda kind, _: LayerKind(None))),
    "granite4: no rotation": (
        "granite4-unrotated",
        with_kinds(lambda kind, _: LayerKind(Rope(1e4))),
    ),
    "smollm3: no rotation": ("smollm3", all_rotate),
    "smollm3: the interval": ("smollm3", by_interval),
    "phi3: window": ("phi3", window_of(None)),
    "phi4-mini: longrope": ("phi4-mini", with_kinds(no_scaling)),
    "phi4-mini: long factors": ("phi4-mini", with_kinds(short_factors)),
    "glm4: interleaved": ("glm4", neighbours_for_halves),
    "glm4: half of each head": ("glm4", with_kinds(all_dimensions_rotate)),
    "glm4: biases": ("glm4", no_biases),
    "glm4: norm after attention": ("glm4", without_leaf(*BLOCKS, "attn_post")),
    "glm4: norm after the MLP": ("glm4", without_leaf(*BLOCKS, "mlp_post")),
    "glm4-yarn: interleaved": ("glm4-yarn", neighbours_for_halves),
    "glm4-yarn: yarn": ("glm4-yarn", with_kinds(no_scaling)),
    "glm: interleaved": ("glm", neighbours_for_halves),
    "glm: part of each head": ("glm", with_kinds(all_dimensions_rotate)),
    "ernie4.5: interleaved": ("ernie4.5", neighbours_for_halves),
    "olmo2: norm of queries": ("olmo2", without_leaf(*QKVS, "q_norm")),
    "olmo2: norm of keys": ("olmo2", without_leaf(*QKVS, "k_norm")),
    "olmo2: norm after attention": ("olmo2", without_leaf(*BLOCKS, "attn_post")),
    "olmo2: norm after the MLP": ("olmo2", without_leaf(*BLOCKS, "mlp_post")),
    "olmo3: window": ("olmo3", window_of(None)),
    "olmo3: yarn": ("olmo3", with_kinds(no_scaling)),
    "olmo3: yarn everywhere": ("olmo3", one_rope),
    "gemma2: window": ("gemma2", window_of(None)),
    "gemma2: cap of logits": ("gemma2", with_config(logit_cap=None)),
    "gemma2: cap of scores": ("gemma2", with_config(score_cap=None)),
    "gemma2: offset of norms": ("gemma2", with_config(norm_offset=False)),
    "gemma3: window": ("gemma3", window_of(None)),
    "gemma3: embeddings": ("gemma3", with_config(embed_scale=1.0)),
    "gemma3: scores": ("gemma3", with_config(query_scale=None)),
    "gemma3: gelu": ("gemma3", with_config(activation="silu")),
    "gemma3: norm of queries": ("gemma3", without_leaf(*QKVS, "q_norm")),
    "gemma3: norm of keys": ("gemma3", without_leaf(*QKVS, "k_norm")),
    "gemma3: norm after attention": ("gemma3", without_leaf(*BLOCKS, "attn_post")),
    "gemma3: norm after the MLP": ("gemma3", without_leaf(*BLOCKS, "mlp_post")),
    "gemma3: two ropes": ("gemma3", one_rope),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ABLATIONS)
def test_every_feature_counts(name, load):
    """Without it some logit is another by more than 1, so that `test_logits` would notice."""
    case, change = ABLATIONS[name]
    model = load(case)
    changed = change(model)
    difference = np.abs(logits(changed) - models.recorded(case).logits).max()
    assert difference > 1, difference
