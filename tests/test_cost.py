"""Counted operations against those XLA counts, where XLA's count is complete (it counts a loop's
body once)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.calibration.attenuation import score_products
from swiftkv_jax.calibration.moments import add_batch, moment_shapes
from swiftkv_jax.infer.bench.cells import STUDENT, TEACHER
from swiftkv_jax.infer.bench.summary import variant_of
from swiftkv_jax.infer.engine.shapes import Shapes, has_own_start
from swiftkv_jax.infer.runner.lowering import (
    DecodeProgram,
    PrefillProgram,
    Program,
    UpperProgram,
)
from swiftkv_jax.infer.runner.serving_form import num_bytes, weight_shapes
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.config import Config, LayerKind
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.params import llama_shapes, swiftkv_shapes
from swiftkv_jax.plan.cost import (
    calibration_flops_by_part,
    decode_flops,
    prefill_flops,
    query_scale_flops_by_part,
    speculator_flops_by_part,
    train_flops_per_token,
)
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.train.dry_run import lower_speculator_step
from swiftkv_jax.train.loss.distill import distill_sums
from swiftkv_jax.train.recipe import DEMO
from tests.lowered import lower_program

# Two layers are two loops of one step each; short rows keep attention, of which XLA computes both
# triangles, small.
CONFIG = Config(
    vocab_size=512,
    embed_dim=256,
    mlp_dim=768,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    num_key_value_layers=1,
)
LENGTH = 16


def counted_flops(compiled) -> float:
    return compiled.cost_analysis()["flops"]


@functools.cache
def compiled_flops(config: Config, program: Program, swiftkv: bool = True) -> float:
    """XLA's figure of an optimised program for one row of `LENGTH`."""
    fields = {"batch": 1, "max_model_len": LENGTH, "page_size": LENGTH, "dtype": jnp.float32}
    return counted_flops(lower_program(config, program, swiftkv=swiftkv, **fields).compile())


@pytest.mark.parametrize("swiftkv", [False, True])
def test_prefill(swiftkv):
    found = compiled_flops(CONFIG, PrefillProgram(LENGTH, 1, None), swiftkv)
    assert prefill_flops(CONFIG, LENGTH, swiftkv=swiftkv) == pytest.approx(found, rel=0.05)


@pytest.mark.short("2-1-1-256")
@pytest.mark.parametrize(
    ("layers", "taps", "group", "neurons"), [(1, 0, 1, 0), (2, 1, 1, 256), (3, 1, 2, 0)]
)
def test_prompt_attention_and_taps(layers, taps, group, neurons):
    """What they add to a prompt's operations and to a decode step's, as XLA counts them once it
    has merged what it finds twice."""
    plain = dataclasses.replace(CONFIG, num_layers=7, num_key_value_layers=2)
    config = dataclasses.replace(
        plain,
        prompt_attention_layers=layers,
        prompt_mlp_neurons=neurons,
        boundary_taps=taps,
        key_value_group_size=group,
    )
    for program, formula in (
        (PrefillProgram(LENGTH, 1, None), lambda c: prefill_flops(c, LENGTH, swiftkv=True)),
        (DecodeProgram(1), lambda c: decode_flops(c, LENGTH, swiftkv=True)),
    ):
        found, without = (compiled_flops(c, program) for c in (config, plain))
        assert formula(config) - formula(plain) == pytest.approx(found - without, rel=0.1)


def test_windows_leave_fewer_pairs():
    """Pairs of a query and a key, counted one by one."""
    kinds = tuple(LayerKind(window=window) for window in (None, 8, 3, LENGTH, 2 * LENGTH, 1))
    plain = dataclasses.replace(CONFIG, num_layers=6, num_key_value_layers=3)
    windowed = dataclasses.replace(plain, layer_kinds=kinds)

    def pairs(layer: int) -> int:
        window = windowed.kind(layer).window or LENGTH
        return sum(min(t + 1, window) for t in range(LENGTH))

    per_pair = 4 * CONFIG.num_heads * CONFIG.head_dim
    for swiftkv, run in (True, range(3)), (False, range(5)):
        counts = (prefill_flops(c, LENGTH, swiftkv=swiftkv) for c in (plain, windowed))
        hidden = sum(LENGTH * (LENGTH + 1) // 2 - pairs(layer) for layer in run)
        assert next(counts) - next(counts) == per_pair * hidden > 0
    counts = (decode_flops(c, LENGTH, swiftkv=True) for c in (plain, windowed))
    hidden = sum(LENGTH - min(LENGTH, kind.window or LENGTH) for kind in kinds)
    assert next(counts) - next(counts) == pytest.approx(per_pair * hidden)


# Tokens that keep their own keys and values -----------------------------------


def own(config: Config, exact_tail: int) -> Config:
    return dataclasses.replace(config, generated_kv="own", exact_tail=exact_tail)


def counted(
    config: Config, program: Program, swiftkv: bool = True, max_model_len: int = LENGTH, **fields
):
    """XLA's figures of one program, before it is optimised."""
    defaults = {"batch": 1, "page_size": LENGTH, "dtype": jnp.float32}
    lowered = lower_program(
        config, program, max_model_len=max_model_len, swiftkv=swiftkv, **defaults | fields
    )
    figures = lowered.cost_analysis()
    assert figures is not None
    return figures["flops"]


def test_prefill_with_a_tail():
    """All of a chunk: XLA's program runs the upper layers for a fixed number of tokens."""
    deep = dataclasses.replace(CONFIG, num_layers=5, num_key_value_layers=2)
    for config in own(deep, LENGTH + 1), own(deep, LENGTH):
        program = UpperProgram(LENGTH, LENGTH, None, scores=False)
        assert prefill_flops(config, LENGTH, swiftkv=True) == pytest.approx(
            counted(config, program), rel=0.05
        )
    assert prefill_flops(own(deep, 1000), LENGTH, swiftkv=True) == prefill_flops(
        own(deep, LENGTH), LENGTH, swiftkv=True
    )
    assert prefill_flops(own(deep, 0), LENGTH, swiftkv=True) == prefill_flops(
        deep, LENGTH, swiftkv=True
    )


def test_decode_of_own_keys_and_values():
    """With a tail as many operations as the teacher. Without one, the keys and values of the three
    upper layers twice."""
    config = dataclasses.replace(CONFIG, num_layers=5, num_key_value_layers=2)
    teacher = decode_flops(config, LENGTH, swiftkv=False)
    again = 3 * 2 * 2 * 4 * 32 * 256
    assert decode_flops(own(config, 8), LENGTH, swiftkv=True) == teacher
    assert decode_flops(own(config, 0), LENGTH, swiftkv=True) == teacher + again
    both, one = (counted(own(config, tail), DecodeProgram(1)) for tail in (0, 8))
    assert both - one == pytest.approx(again, rel=0.05)
    assert one == pytest.approx(counted(config, DecodeProgram(1), swiftkv=False), rel=0.01)


@pytest.mark.short("0")
@pytest.mark.parametrize("tail", [0, 8])
def test_two_caches(tail):
    """A second projection of queries in each upper layer, and a mix of shared values. XLA also
    counts attention to the second cache, which the formula has in that to the first."""
    config = own(dataclasses.replace(CONFIG, num_layers=6, num_key_value_layers=2), tail)
    grouped = dataclasses.replace(config, key_value_group_size=2)
    mixed = dataclasses.replace(
        grouped, shared_kv_heads=(tuple(range(config.num_kv_heads)),) * config.num_upper_layers
    )
    pairs = 2 * config.num_upper_layers * 2 * 2 * config.num_heads * config.head_dim * LENGTH
    for program, tokens, formula in (
        (DecodeProgram(1), 1, lambda config: decode_flops(config, LENGTH, swiftkv=True)),
        (
            UpperProgram(LENGTH, LENGTH, None, scores=False),
            LENGTH,
            lambda config: prefill_flops(
                dataclasses.replace(config, exact_tail=LENGTH), LENGTH, swiftkv=True
            ),
        ),
    ):
        plain, two, mixing = ((formula(c), counted(c, program)) for c in (config, grouped, mixed))
        assert mixing[1] - two[1] == pytest.approx(mixing[0] - two[0], rel=0.01)
        more = two[1] - plain[1] - (two[0] - plain[0])
        assert 0 < more < pairs * tokens


CONFIG_8B = LLAMA_8B.cut(12)
SHAPE_8B = {"page_size": 128, "max_model_len": 8192, "dtype": jnp.bfloat16}


@pytest.mark.long
def test_prefill_of_8b_with_a_tail():
    """K = 12 of 32 layers, a prompt of 8,192 of which the last 64 run through all layers. The
    engine's teacher stops at the keys and values of its last layer; a 33rd layer stops there
    instead."""
    config, filling = own(CONFIG_8B, 64), PrefillProgram(2048, 16, None)
    student = 3 * counted(config, filling, **SHAPE_8B)
    tail = UpperProgram(2048, 64, None, scores=False)
    student += counted(config, tail, **SHAPE_8B)
    for layers, limit in (32, 0.42), (33, 0.41):
        plain = dataclasses.replace(LLAMA_8B, num_layers=layers, num_key_value_layers=0)
        teacher = 4 * counted(plain, filling, swiftkv=False, **SHAPE_8B)
        formula = prefill_flops(config, 8192, swiftkv=True)
        formula /= prefill_flops(plain, 8192, swiftkv=False)
        print(
            f"prefill operations to the teacher's: {student / teacher:.4f}, formula {formula:.4f}"
        )
        assert formula <= student / teacher <= limit


@pytest.mark.long
@pytest.mark.parametrize("tail", [64, 0])
def test_decode_of_8b(tail):
    """XLA counts one step of the loop over pages, that is almost no attention."""
    config = own(CONFIG_8B, tail)
    one, plain = (
        counted(config, DecodeProgram(1), swiftkv=swiftkv, **SHAPE_8B) for swiftkv in (True, False)
    )
    without, whole = (
        decode_flops(config, context, swiftkv=True) / decode_flops(config, context, swiftkv=False)
        for context in (1, 8192)
    )
    student, teacher = (
        variant_of(name, config, weight_shapes(config, swiftkv, BF16), BF16, shapes_of(config))
        for name, swiftkv in ((STUDENT, True), (TEACHER, False))
    )
    read, floor = (each.weight_bytes + 8192 * each.kv_bytes for each in (student, teacher))
    print(f"decode, tail {tail}: operations {whole:.4f}, bytes {read / floor:.4f} of the teacher's")
    assert one / plain == pytest.approx(without, abs=2e-3)
    assert whole <= 1.02 and read / floor <= 1.03


BF16 = jnp.dtype(jnp.bfloat16)


def shapes_of(config: Config) -> Shapes:
    """Shapes of an engine for one sequence."""
    return Shapes(
        dp_size=1,
        page_size=128,
        num_pages=64,
        table_pages=64,
        slots=1,
        decode_rows=(1,),
        decode_steps=1,
        decode_kinds=("sampling",),
        chunks=(2048,),
        spare_tiles=(4,),
        contexts=(None,),
        scoring=False,
        has_own_start=has_own_start(config),
    )


def test_bytes_of_prompt_attention_and_an_exact_head():
    """A decode step reads the caches of all but the first prompt attention layer twice, and not
    the projections for a prompt's first token, for which a chunk reads all upper layers."""
    plain = dataclasses.replace(
        CONFIG, num_layers=6, num_key_value_layers=2, prompt_attention_layers=3
    )
    config = dataclasses.replace(plain, exact_head=1)
    found, without = (
        variant_of(STUDENT, each, weight_shapes(each, True, BF16), BF16, shapes_of(each))
        for each in (config, plain)
    )
    of_a_layer = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert found.kv_bytes == without.kv_bytes == (6 + 2) * of_a_layer
    assert found.weight_bytes == without.weight_bytes
    assert found.prefill_bytes == without.prefill_bytes
    upper = num_bytes(llama_shapes(config, BF16).upper)
    assert without.tail_bytes == 0 and upper / 2 < found.tail_bytes < 2 * upper


# Calibration ------------------------------------------------------------------


def test_calibration():
    """In a loop of two upper layers, of which XLA counts one: alone, the end of the last layer
    would be left out."""
    config = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True)
    deep = dataclasses.replace(config, num_layers=3)
    batch = jax.eval_shape(unpacked_batch, jax.ShapeDtypeStruct((1, LENGTH), jnp.int32))
    lowered = add_batch.lower(deep, Attention(), moment_shapes(deep), llama_shapes(deep), batch)
    formula = sum(calibration_flops_by_part(config, LENGTH).values())
    assert formula == pytest.approx(counted_flops(lowered.compile()) / LENGTH, rel=0.05)


def test_the_scale_of_queries():
    """In a loop of two upper layers, of which XLA counts one."""
    deep = dataclasses.replace(
        CONFIG, num_layers=3, key_value_group_size=2, generated_kv="own", qkv_bias=True
    )
    batch = jax.eval_shape(unpacked_batch, jax.ShapeDtypeStruct((1, LENGTH), jnp.int32))
    shapes = llama_shapes(deep), swiftkv_shapes(deep), batch
    compiled = score_products.lower(deep, Attention(), *shapes).compile()
    formula = sum(query_scale_flops_by_part(CONFIG, LENGTH).values())
    assert formula == pytest.approx(counted_flops(compiled) / LENGTH, rel=0.05)


# Training ---------------------------------------------------------------------


@functools.cache
def train_count(config, remat) -> float:
    def step(delta, llama, tokens):
        batch = unpacked_batch(tokens)
        if config.generated_kv == "own":
            batch = dataclasses.replace(batch, own=batch.positions >= LENGTH // 2)

        def loss(delta):
            sums = distill_sums(config, delta, llama, batch, remat=remat)
            return sums.divergence + sums.hidden

        return jax.grad(loss)(delta)

    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return (
        counted_flops(
            jax.jit(step).lower(swiftkv_shapes(config), llama_shapes(config), tokens).compile()
        )
        / LENGTH
    )


def test_training():
    assert train_flops_per_token(CONFIG, LENGTH) == pytest.approx(
        train_count(CONFIG, "none"), rel=0.05
    )


def test_recomputation_of_a_layer():
    """In a loop of two steps, because XLA would take a single step out of its loop and find the
    forward pass in it again."""
    deep = dataclasses.replace(CONFIG, num_layers=4, num_key_value_layers=2)
    counted = train_count(deep, "layer") - train_count(deep, "none")
    assert one_layer("layer") - one_layer("none") == pytest.approx(counted, rel=0.05)


def one_layer(remat):
    return train_flops_per_token(CONFIG, LENGTH, remat=remat)


def test_training_for_two_caches():
    """What comes on top of boundary keys and values: twice the attention, projections."""
    deep = dataclasses.replace(CONFIG, num_layers=4, num_key_value_layers=2, key_value_group_size=2)
    counted = train_count(own(deep, 0), "none") - train_count(deep, "none")
    expected = train_flops_per_token(own(deep, 0), LENGTH) - train_flops_per_token(deep, LENGTH)
    assert counted == pytest.approx(expected / 2, rel=0.1)  # XLA counts one of the two layers


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_training_for_own_keys_and_values(remat):
    """What comes on top, for layers in a loop as above."""
    deep = dataclasses.replace(CONFIG, num_layers=4, num_key_value_layers=2)
    counted = train_count(own(deep, 0), remat) - train_count(deep, remat)
    wide = dataclasses.replace(CONFIG, num_layers=3, num_key_value_layers=2)
    expected = train_flops_per_token(own(wide, 0), LENGTH, remat=remat)
    expected -= train_flops_per_token(wide, LENGTH, remat=remat)
    assert expected == {"none": 2, "layer": 3}[remat] * 2 * 2 * 256 * 4 * 32
    assert counted == pytest.approx(expected, rel=0.1)


def test_training_of_a_speculator():
    """On rows that are long enough for the optimiser's operations to be few."""
    length = 8 * LENGTH
    recipe = dataclasses.replace(DEMO, batch_size=1, max_length=length, speculator=2)
    lowered = lower_speculator_step(recipe, CONFIG, make_mesh((1, 1)), jnp.dtype(jnp.float32))
    of_a_draft = (4 * CONFIG.embed_dim + CONFIG.vocab_size) * CONFIG.embed_dim
    parts = speculator_flops_by_part(CONFIG, length, drafts=2, weights=of_a_draft)
    counted = counted_flops(lowered.compile()) / length
    assert sum(parts.values()) == pytest.approx(counted, rel=0.05)
