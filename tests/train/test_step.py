"""The compiled train step: the same update however the batch is divided, and no large array where
none should be."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.initialization import init_llama, init_swiftkv
from swiftkv_jax.model.mesh import make_mesh, parse_mesh
from swiftkv_jax.model.params import llama_shapes
from swiftkv_jax.model.sharding import llama_shardings
from swiftkv_jax.train.recipe import Recipe
from swiftkv_jax.train.run.step import (
    init_state,
    learning_rate,
    make_eval_step,
    make_optimizer,
    make_train_step,
    micro_batch_sharding,
    state_shapes,
)

CONFIG = Config(
    vocab_size=328,
    embed_dim=64,
    mlp_dim=192,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    num_key_value_layers=3,
)
ROWS, LENGTH = 8, 32


def recipe(**settings) -> Recipe:
    return Recipe(
        **{"model": "", "data": (), "output_dir": Path(), "batch_size": ROWS, "max_length": LENGTH}
        | settings
    )


def batch(accumulation: int = 1) -> Batch:
    """Packed rows of uneven fill: micro-batches have very different numbers of targets."""
    random = np.random.default_rng(0)
    used = np.arange(LENGTH) < np.array([32, 3, 30, 20, 7, 2, 31, 12])[:, None]
    targets = used & (random.uniform(size=(ROWS, LENGTH)) < np.linspace(0.1, 1, ROWS)[:, None])
    tokens = random.integers(0, CONFIG.vocab_size, (ROWS, LENGTH))
    fields = tokens, np.where(used, np.arange(LENGTH), 0), used, targets
    dtypes = np.int32, np.int32, np.int32, np.float32
    return Batch(
        *(
            field.astype(d).reshape(accumulation, -1, LENGTH)
            for field, d in zip(fields, dtypes, strict=True)
        )
    )


def step_once(
    mesh: str = "1x1",
    accumulation: int = 1,
    shard_sequence: bool = False,
    logged: bool = True,
    **others,
):
    """(metrics, Adam's first moment) after one step, as NumPy. The delta itself would show
    rounding: Adam divides by it."""
    settings = recipe(
        mesh=parse_mesh(mesh),
        gradient_accumulation_steps=accumulation,
        shard_sequence=shard_sequence,
        learning_rate=1e-2,
        warmup_ratio=0.0,
        **others,
    )
    on, optimizer = make_mesh(settings.mesh), make_optimizer(settings, 100)
    llama = jax.device_put(
        init_llama(CONFIG, jax.random.key(0), scale=0.1), llama_shardings(CONFIG, on)
    )
    delta = jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.sin(jnp.arange(leaf.size).reshape(leaf.shape)),
        init_swiftkv(CONFIG, llama),
    )
    state = init_state(CONFIG, optimizer, on, delta)
    micro_batches = jax.device_put(batch(accumulation), micro_batch_sharding(on))
    step = make_train_step(CONFIG, settings, optimizer, on)
    state, metrics = step(state, llama, micro_batches, logged)
    return jax.tree.map(np.asarray, (metrics, optax.tree_utils.tree_get(state.opt_state, "mu")))


@pytest.fixture(scope="module")
def alone():
    return step_once()


@pytest.mark.short("data=2,fsdp=2,model=2-2-True")
@pytest.mark.parametrize(
    ("mesh", "accumulation", "shard_sequence"),
    [
        pytest.param("1x1", 2, False, marks=pytest.mark.long),
        ("1x1", 4, False),
        pytest.param("4x1", 1, False, marks=pytest.mark.long),
        pytest.param("2x2", 1, False, marks=pytest.mark.long),
        pytest.param("1x4", 1, False, marks=pytest.mark.long),
        pytest.param("fsdp=4", 1, False, marks=pytest.mark.long),
        ("data=2,fsdp=2,model=2", 2, True),
    ],
)
def test_the_update_does_not_depend_on_how_the_batch_is_divided(
    alone, mesh, accumulation, shard_sequence
):
    """A mean of micro-batches' means would be off by tens of percent: they have from 2 to 60
    targets."""
    metrics, moment = step_once(mesh, accumulation, shard_sequence)
    for name, value in alone[0].items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), moment, alone[1]
    )


def test_a_step_that_is_not_logged_is_the_same_without_what_is_only_read(alone):
    """Bit by bit: both are one program."""
    metrics, moment = step_once(logged=False)
    for name in ("loss", "logits_loss", "hidden_loss", "grad_norm", "tokens"):
        assert metrics.pop(name) == alone[0][name], name
    assert metrics and not any(metrics.values()) and all(alone[0][name] for name in metrics)
    jax.tree.map(np.testing.assert_array_equal, moment, alone[1])


def test_an_average_over_positions_weighs_the_divergence_by_the_share_of_targets(alone):
    """With one micro-batch and with two: the numbers are those of the whole batch."""
    used = np.asarray(batch().segment_ids)
    share = np.asarray(batch().loss_mask).sum() / used.sum()
    for accumulation in (1, 2):
        metrics, _ = step_once(accumulation=accumulation, loss_average="positions")
        expected = alone[0]["logits_loss"] * share
        np.testing.assert_allclose(metrics["logits_loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["hidden_loss"], alone[0]["hidden_loss"], rtol=1e-5)
        weighted = Recipe.hidden_loss_weight * metrics["hidden_loss"]
        np.testing.assert_allclose(metrics["loss"], metrics["logits_loss"] + weighted, rtol=1e-5)
        assert metrics["grad_norm"] < alone[0]["grad_norm"]


def lowered(
    mesh: str, length: int = 128, accumulation: int = 1, chunk: int | None = None, **others
):
    settings = recipe(
        mesh=parse_mesh(mesh),
        gradient_accumulation_steps=accumulation,
        batch_size=ROWS * accumulation,
        **others,
    )
    optimizer = make_optimizer(settings, 100)
    integers, floats = (
        jax.ShapeDtypeStruct((accumulation, ROWS, length), dtype)
        for dtype in (jnp.int32, jnp.float32)
    )
    step = make_train_step(CONFIG, settings, optimizer, make_mesh(settings.mesh), chunk=chunk)
    return step.lower(
        state_shapes(CONFIG, optimizer),
        llama_shapes(CONFIG),
        Batch(integers, integers, integers, floats),
        True,
    )


def gathered(text: str) -> list[tuple[int, ...]]:
    """Shapes that all-gathers of a compiled program return."""
    results = [line.split("all-gather(")[0] for line in text.splitlines() if "all-gather(" in line]
    return [
        tuple(map(int, shape.split(",")))
        for result in results
        for shape in re.findall(r"\[([\d,]+)\]", result)
    ]


@pytest.mark.parametrize("mesh", [pytest.param("4x2", marks=pytest.mark.long), "fsdp=4,model=2"])
def test_no_whole_logits_and_no_gathered_hidden_states(mesh):
    """Every device sees its own rows and its part of the vocabulary, one chunk of positions at a
    time."""
    rows, vocabulary, chunk, length = ROWS // 4, CONFIG.vocab_size // 2, 16, 128
    text = lowered(mesh, length, chunk=chunk).compile().as_text() or ""
    assert f"f32[{rows},{chunk},{vocabulary}]" in text, (
        "the chunk's logits should be there: the patterns below would match nothing"
    )
    wide = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", text)}
    with_vocabulary = {shape for shape in wide if shape[-1] in (vocabulary, 2 * vocabulary)}
    assert max(np.prod(shape[:-1]) for shape in with_vocabulary) <= rows * chunk
    assert bool(gathered(text)) == mesh.startswith("fsdp"), "weights are gathered, and by fsdp only"
    assert not [shape for shape in gathered(text) if length in shape], (
        "of hidden states nothing is gathered"
    )


def test_fsdp_gathers_a_layer_at_a_time():
    shapes = gathered(lowered("fsdp=8").compile().as_text() or "")
    stacked = [
        shape
        for shape in shapes
        if len(shape) > 2 and shape[0] == CONFIG.num_upper_layers and CONFIG.mlp_dim in shape
    ]
    one = [shape for shape in shapes if shape[0] == 1 and CONFIG.mlp_dim in shape]
    assert one and not stacked


def test_accumulation_needs_no_more_memory_for_more_micro_batches():
    two, eight = (
        lowered("1x1", accumulation=count).compile().memory_analysis() for count in (2, 8)
    )
    assert two is not None and eight is not None
    assert eight.temp_size_in_bytes <= 1.02 * two.temp_size_in_bytes


@pytest.mark.parametrize("mesh", ["1x1", pytest.param("2x2", marks=pytest.mark.long)])
def test_attention_is_kept_while_the_rest_of_a_layer_is_computed_again(mesh):
    """Rows of several attention blocks: what fits in one block is differentiated by JAX, which
    names nothing."""
    again = r"rematted_computation/.*attention/.*dot_general"
    mlp, layer = (
        re.findall(again, lowered(mesh, 512, remat=remat).compile().as_text() or "")
        for remat in ("mlp", "layer")
    )
    assert layer and not mlp


@pytest.mark.long
def test_a_sharded_sequence_keeps_a_part_of_each_layer_input():
    text = lowered("1x4", 512, shard_sequence=True, remat="layer").compile().as_text() or ""
    kept, whole = (
        f"f32[{CONFIG.num_upper_layers},{ROWS},{positions},{CONFIG.embed_dim}]"
        for positions in (128, 512)
    )
    assert kept in text and whole not in text
    assert whole in (lowered("1x4", 512, remat="layer").compile().as_text() or "")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.0, 0.5, 1.0, 0.5, 0.0]),
        ("cosine", [0.0, 0.5, 1.0, 0.5, 0.0]),
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rate(schedule, expected):
    """Steps 0, 5, 10, 55 and 100 of 100 with ten of warm-up; a cosine passes its middle where the
    line does."""
    rate = learning_rate(recipe(lr_schedule=schedule, learning_rate=1.0, warmup_ratio=0.1), 100)
    np.testing.assert_allclose(
        [float(jnp.asarray(rate(step))) for step in (0, 5, 10, 55, 100)], expected, atol=1e-6
    )
    if schedule == "cosine":
        assert float(jnp.asarray(rate(30))) > 1 - 20 / 90, "it falls slower than the line at first"


def test_the_norm_of_a_gradient_is_clipped():
    """A gradient of norm 5: AdamW's first moments are a tenth of what it is given."""
    optimizer, weights = make_optimizer(recipe(max_grad_norm=2.0), 100), {"w": jnp.zeros(2)}
    gradient = {"w": jnp.array([3.0, 4.0])}
    _, state = optimizer.update(gradient, optimizer.init(weights), weights)
    moments = optax.tree.get(state, "mu")["w"]
    np.testing.assert_allclose(moments, [0.1 * 3 * 2 / 5, 0.1 * 4 * 2 / 5], rtol=1e-6)


def test_an_evaluation_with_two_masks_is_two_with_one():
    """Each mask has the sums that it has alone."""
    one_row = jax.tree.map(lambda leaf: leaf[0], batch())
    mesh = make_mesh((1, 1))
    llama = init_llama(CONFIG, jax.random.key(0), scale=0.1)
    models = init_swiftkv(CONFIG, llama), llama
    evaluate = make_eval_step(CONFIG, recipe().objective, Attention(mesh))
    even = one_row.loss_mask * (np.arange(LENGTH) % 2 == 0)
    masks = one_row.loss_mask, even.astype(np.float32)
    both = evaluate(*models, one_row, masks)
    assert both.targets[0] > both.targets[1] > 0
    for number, mask in enumerate(masks):
        alone = evaluate(*models, one_row, (mask,))
        jax.tree.map(
            lambda sums, sum, number=number: np.testing.assert_allclose(
                sums[number], sum[0], rtol=1e-6
            ),
            both,
            alone,
        )
