"""The table of parameters: what shapes, shardings, quantisation and names are read from."""

import dataclasses
import math

import jax
import pytest

from swiftkv_jax import Config
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.tensor_map import leaves
from swiftkv_jax.model.params import (
    LLAMA_PARAMS,
    QKV,
    SWIFTKV_PARAMS,
    Block,
    Llama,
    Param,
    SwiftKV,
    llama_params,
    llama_shapes,
    map_params,
    matrix,
    require_teacher,
    swiftkv_shapes,
)
from tests.published import CONFIG_8B, LLAMA31_8B, LLAMA31_405B, LLAMA33_70B
from tests.tiny import hf_config

CONFIG = Config(
    vocab_size=61,
    embed_dim=32,
    mlp_dim=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_key_value_layers=2,
    key_value_group_size=2,
)


@pytest.mark.parametrize("table", [LLAMA_PARAMS, SWIFTKV_PARAMS], ids=["llama", "swiftkv"])
def test_every_field_has_a_row(table):
    def rows(tree):
        for field in dataclasses.fields(tree):
            row = getattr(tree, field.name)
            if isinstance(row, Block | QKV):
                yield from rows(row)
            else:
                yield row

    found = list(rows(table))
    assert all(isinstance(row, Param) and "?" not in row.dims for row in found)
    # A norm before the MLP and one after attention have one name, each in other families.
    tensors = [(row.axes[0], row.tensor) for row in found]
    shared = {tensor for tensor in tensors if tensors.count(tensor) > 1}
    assert {tensor for _, tensor in shared} <= {"post_attention_layernorm.weight"}


def test_what_follows_from_the_letters():
    o, k = LLAMA_PARAMS.upper.o, SWIFTKV_PARAMS.k
    assert (o.dims, o.shape(CONFIG), o.stacked) == ("U D N H", (4, 32, 4, 8), True)
    assert o.model_axes == (None, None, "model", None) and (o.head_axis, o.in_axes) == (1, 2)
    assert (k.shape(CONFIG), list(k.layers(CONFIG)), k.head_axis) == ((2, 2, 8, 32), [2, 4], 0)
    assert LLAMA_PARAMS.embed.shape(CONFIG) == (61, 32) and not LLAMA_PARAMS.embed.stacked
    assert LLAMA_PARAMS.lower.attn_norm.head_axis is LLAMA_PARAMS.lower.attn_norm.in_axes is None
    per_head = Param("L H", "self_attn.q_norm.weight", init="one")
    assert per_head.head_axis is None and per_head.shape(CONFIG) == (2, 8)
    assert matrix("L F D", "x", split="F").model_axes == (None, "model", None)


def test_rows_that_a_model_lacks():
    assert llama_params(CONFIG).lower.o_bias is None and llama_params(CONFIG).lm_head is not None
    with_biases = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, tie_word_embeddings=True)
    rows = llama_params(with_biases)
    assert rows.lm_head is None and rows.lower_qkv.k_bias is LLAMA_PARAMS.lower_qkv.k_bias
    assert len(jax.tree.leaves(swiftkv_shapes(with_biases))) == 7


def test_rows_go_with_their_leaves():
    shapes: list[Llama | SwiftKV | Block | QKV] = [llama_shapes(CONFIG), swiftkv_shapes(CONFIG)]
    for tree in (*shapes, llama_shapes(CONFIG).lower, llama_shapes(CONFIG).upper_qkv):
        assert tree is not None
        pairs = jax.tree.leaves(
            map_params(lambda row, leaf: (row, leaf.shape), tree), is_leaf=tuple_
        )
        assert len(pairs) == len(jax.tree.leaves(tree))
        for row, shape in pairs:
            assert len(row.axes) == len(shape)


def tuple_(node) -> bool:
    return isinstance(node, tuple)


def test_names_in_a_checkpoint_are_unique():
    names = [name for leaf in leaves(CONFIG) for name in leaf.tensors]
    assert len(names) == len(set(names)) == 3 + 6 * 9 + 1 + 4 + 2 * 2


def test_the_teacher_that_was_dropped():
    llama = llama_shapes(CONFIG)
    assert require_teacher(llama, "run it") is llama.upper_qkv
    with pytest.raises(ValueError, match="were dropped: load the model with them to run it$"):
        require_teacher(dataclasses.replace(llama, upper_qkv=None), "run it")


# Sizes (spec 2.1, 2.2) --------------------------------------------------------


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("hf", "kv_layers", "trainable"),
    [
        (LLAMA31_8B, 16, 402_657_280),
        (LLAMA33_70B, 40, 3_355_451_392),
        (LLAMA31_405B, 63, 19_025_379_328),
    ],
    ids=["8B", "70B", "405B"],
)
def test_trainable_parameters(hf, kv_layers, trainable):
    assert count(swiftkv_shapes(config_from_hf(hf).cut(kv_layers))) == trainable


def test_total_parameters():
    config = CONFIG_8B.cut(16)
    assert count((llama_shapes(config), swiftkv_shapes(config))) == 8_432_918_528
    assert count(llama_shapes(config)) == count(llama_shapes(CONFIG_8B)) == 8_030_261_248


def test_shapes():
    config = config_from_hf(
        hf_config(
            attention_bias=True,
            num_key_value_layers=2,
            key_value_group_size=2,
            tie_word_embeddings=True,
        )
    )
    delta, llama = swiftkv_shapes(config), llama_shapes(config, dtype="bfloat16")
    assert {name: leaf.shape for name, leaf in vars(delta).items() if leaf is not None} == {
        "norm": (32,),
        "q": (4, 4, 8, 32),
        "k": (2, 2, 8, 32),
        "v": (2, 2, 8, 32),
        "q_bias": (4, 4, 8),
        "k_bias": (2, 2, 8),
        "v_bias": (2, 2, 8),
    }
    assert llama.lm_head is None
    assert llama.lower.o.shape == (2, 32, 4, 8)
    assert llama.upper.o_bias.shape == (4, 32)
    assert {leaf.dtype for leaf in jax.tree.leaves(llama)} == {jax.numpy.dtype("bfloat16")}
    assert swiftkv_shapes(config_from_hf(hf_config())).k_bias is None
