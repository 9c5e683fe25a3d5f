"""`bench`: rates, bytes and operations that follow from raw times, and the random weights."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.infer import Engine, EngineOptions
from swiftkv_jax.infer.bench import summary, variants
from swiftkv_jax.infer.bench.cells import STUDENT, TEACHER, Cell
from swiftkv_jax.infer.bench.dummy import STANDARD_DEVIATION, dummy_model
from swiftkv_jax.infer.bench.options import BenchOptions
from swiftkv_jax.infer.bench.summary import Variant
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.lowering import DecodeProgram, PrefillProgram
from swiftkv_jax.infer.runner.serving_form import num_bytes, weight_shapes
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.quantization import Scheme, dequantize
from swiftkv_jax.plan.cost import decode_flops, prefill_flops
from swiftkv_jax.plan.presets import PRESETS
from swiftkv_jax.plan.roofline import measure_roofline
from tests.infer.bench.conftest import CELL, CONFIG, ROOFLINE
from tests.infer.engine import own_kv_engines
from tests.lowered import lower_program

BYTES = {"prefill_bytes": 70, "weight_bytes": 100, "kv_bytes": 10, "written_bytes": 6}


@pytest.mark.parametrize("swiftkv", [pytest.param(False, marks=pytest.mark.long), True])
def test_flops_are_those_that_xla_counts(swiftkv):
    """With attention to a whole page, which is what XLA computes for any length."""
    config = dataclasses.replace(
        CONFIG,
        vocab_size=512,
        embed_dim=256,
        mlp_dim=768,
        num_layers=4,
        head_dim=32,
        num_key_value_layers=2,
    )
    common = {
        "batch": 1,
        "max_model_len": 16,
        "page_size": 16,
        "swiftkv": swiftkv,
        "dtype": jnp.float32,
    }
    counted = lower_program(config, DecodeProgram(1), **common).compile().cost_analysis()
    assert counted is not None
    assert decode_flops(config, 16, swiftkv=swiftkv) == pytest.approx(counted["flops"], rel=0.05)


def test_prefill_figures():
    variant = Variant(STUDENT, CONFIG, **BYTES, decode_steps=2)
    raws = [
        {"seconds": s, "cpu_seconds": s, "idle": 0.0, "ttft": 3.0, "chunks": 3, "compilations": 0}
        for s in (4.0, 2.0, 8.0)
    ]
    row = summary.derive("prefill", CELL, raws, variant, ROOFLINE)
    assert row["tokens_per_s"] == 40 / 4
    assert row["flops"] == 2 * prefill_flops(CONFIG, 20, swiftkv=True)
    assert row["flops_share"] == row["flops"] / 4 / 1e12
    teacher = (
        2 * 64 * 32 + 32 + 2 * (2 * 32 + 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    )  # by hand, from the shapes
    assert row["normalised_flops_per_s"] == 2 * teacher * 40 / 4
    assert row["normalised_flops_share"] == row["normalised_flops_per_s"] / 1e12
    assert row["bytes_per_s"] == (3 * 70 + 40 * 6) / 4
    slower = [
        raw | {"seconds": 1.5 * raw["seconds"], "cpu_seconds": 3 * raw["seconds"], "ttft": 6.0}
        for raw in raws
    ]
    found = summary.compare("prefill", raws, slower)
    assert found == {
        "speed_up": 1.5,
        "speed_up_of_best": 1.5,
        "speed_up_in_cpu_time": 3,
        "ttft_speed_up": 2,
    }


def test_decode_figures():
    """Steps 3 to 8 of rows of 21 tokens: the first of them attends to 23 positions, the last to
    28."""
    variant = Variant(TEACHER, CONFIG, **BYTES, decode_steps=2)
    row = summary.derive(
        "decode",
        CELL,
        [{"seconds": 3.0, "cpu_seconds": 6.0, "idle": 0.3, "steps": 6, "compilations": 0}],
        variant,
        ROOFLINE,
    )
    assert row["context"] == statistics.mean(range(23, 29))
    assert row["seconds_per_output_token"] == 0.5
    assert row["bytes_per_s"] == (100 + 2 * 25.5 * 10) / 0.5
    assert row["bandwidth_share"] == row["bytes_per_s"] / 1e9
    assert row["idle_share"] == pytest.approx(0.1) and row["cpu_share"] == 2
    drafts = {"drafts": 4, "draft_tokens": 16, "accepted_tokens": 8}
    raw = {"seconds": 3.0, "cpu_seconds": 6.0, "idle": 0.3, "steps": 6, "compilations": 0}
    fewer = summary.derive("decode", CELL, [raw | drafts], variant, ROOFLINE)
    assert fewer["bytes_per_s"] == pytest.approx(row["bytes_per_s"] / 3), "2 passes of 6"
    rows = [one | {"label": "a", "variant": STUDENT} for one in (row, fewer)]
    heading, _, plain, drafted = summary.table("decode", rows).splitlines()
    assert heading.endswith("| acceptance length | % accepted | times as fast |")
    assert drafted.endswith("| 3.00 | 50.0 |  |") and plain.endswith("|  |  |  |")


def test_latency_figures():
    variant = Variant(STUDENT, CONFIG, **BYTES, decode_steps=2)
    lists = {"ttft": [1.0, 3.0], "tpot": [0.5], "e2e": [2.0, 4.0], "itl": []}
    raws = [
        lists
        | {"seconds": 10.0, "cpu_seconds": 1.0, "idle": 1.0, "chunks": 2, "decode_calls": 4}
        | {"compilations": 0}
    ] * 2
    row = summary.derive("latency", Cell(9, 6, 2, request_rate=1.0), raws, variant, ROOFLINE)
    assert (row["ttft_mean"], row["ttft_p50"], row["tpot_mean"], row["output_tokens_per_s"]) == (
        2,
        2,
        0.5,
        1.2,
    )
    assert "itl_mean" not in row
    decoding = (
        4 * 2 * 100 + 12 * statistics.mean((9, 14)) * 10
    )  # steps, and the positions that 12 tokens attend to
    assert row["bytes_per_s"] == (2 * 70 + 30 * 6 + decoding) / 10
    twice = [raw | {"e2e": [4.0, 8.0]} for raw in raws]
    assert summary.compare("latency", raws, twice)["speed_up"] == 2


def test_experts_count_as_far_as_tokens_choose_them():
    """A token runs through 3.3 of the 30.5 billion parameters (Qwen3-30B-A3B's card); a step reads
    an expert if one of its tokens chooses it."""
    config = PRESETS["qwen3-30b-a3b"]
    assert summary.parameters(config) == pytest.approx(3.35e9, rel=2e-3)
    raws = [{"seconds": 3.0, "cpu_seconds": 3.0, "idle": 0.0, "steps": 6, "compilations": 0}]
    without, some = (
        summary.derive(
            "decode",
            CELL,
            raws,
            Variant(TEACHER, config, **BYTES, decode_steps=2, expert_bytes=num_bytes),
            ROOFLINE,
        )["bytes_per_s"]
        for num_bytes in (0, 80)
    )
    unread = 80 * (15 / 16) ** CELL.prompts
    assert without - some == pytest.approx(6 * unread / 3)


def variant_of(name: str, engine: Engine) -> summary.Variant:
    runner = engine.model_runner
    return summary.variant_of(name, CONFIG, runner.weights, runner.cache_dtype, runner.shapes)


def test_weights_read_by_a_step(bench_engine):
    """Not the embedding, whose rows are looked up; and keys and values once for every layer."""
    variant = variant_of(STUDENT, bench_engine)
    student = sum(leaf.nbytes for leaf in jax.tree.leaves(bench_engine.model_runner.weights))
    assert variant.weight_bytes == student - 64 * 32 * 4
    assert variant.kv_bytes == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("swiftkv", [True, pytest.param(False, marks=pytest.mark.long)])
def test_bytes_of_prefill_are_what_its_program_takes(swiftkv):
    """XLA drops the arguments that a program does not read."""
    engine = Engine.from_model(
        dummy_model(CONFIG, jnp.float32),
        EngineOptions(max_model_len=32, max_num_seqs=1, chunks=(16,)),
        swiftkv=swiftkv,
    )
    variant = variant_of(STUDENT if swiftkv else TEACHER, engine)
    program = engine.model_runner._compiled[PrefillProgram(16, 3, None)].memory_analysis()
    cache = jax.tree.leaves(engine.model_runner._state.cache)
    rest = (
        program.argument_size_in_bytes - sum(leaf.nbytes for leaf in cache) - variant.prefill_bytes
    )
    embedding = 64 * 32 * 4  # of which rows are read
    assert 0 < rest - embedding < 2000, "more than the chunk"
    assert variant.written_bytes == 2 * 2 * 2 * 8 * 4


def test_roofline_stops_at_a_size_that_is_long_enough():
    found = measure_roofline(jnp.float32, 3, long=0)
    assert len(found.tried) == 2
    assert (
        found.flops == 3 * found.tried["product of 512"]
        and found.bandwidth == 3 * found.tried[f"copy of {2**24}"]
    )


def test_the_better_of_two_rooflines():
    low = dataclasses.replace(ROOFLINE, flops=1.0, bandwidth=5.0, tried={"a": 1.0, "b": 5.0})
    high = dataclasses.replace(ROOFLINE, flops=2.0, bandwidth=4.0, tried={"a": 2.0, "c": 4.0})
    assert low.best(high) == dataclasses.replace(
        ROOFLINE, flops=2.0, bandwidth=5.0, tried={"a": 2.0, "b": 5.0, "c": 4.0}
    )


def test_dummy_weights_are_random_and_the_same_on_a_mesh():
    one = dummy_model(CONFIG, jnp.bfloat16)
    split = dummy_model(CONFIG, jnp.bfloat16, mesh=make_mesh((1, 2)))
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: bool((a == b).all()),
            one.llama,
            jax.device_put(split.llama, jax.devices()[0]),
        )
    )
    assert len(split.llama.lower.gate.sharding.device_set) == 2
    gate, up = (np.asarray(leaf, np.float32) for leaf in (one.llama.lower.gate, one.llama.lower.up))
    assert gate.std() == pytest.approx(STANDARD_DEVIATION, rel=0.05) and abs(gate.mean()) < 0.002
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(gate[..., ::2].ravel(), gate[..., 1::2].ravel())[0, 1]) < 0.1
    assert one.llama.lower.attn_norm.min() == 1 and one.dtype == jnp.bfloat16


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_dummy_weights_in_8_bits(format):
    model = dummy_model(CONFIG, jnp.float32, quantization=Scheme(format), teacher=False)
    assert model.llama.upper_qkv is None and model.swiftkv is not None
    gate = model.llama.lower.gate
    assert gate.values.dtype == Scheme(format).dtype
    assert dequantize(gate, jnp.float32).std() == pytest.approx(STANDARD_DEVIATION, rel=0.05)


@pytest.mark.short("own")
@pytest.mark.parametrize("kv", ["boundary", "own"])
def test_heads_that_are_paired_stay_so(kv):
    """The model that is measured answers as the one that was given."""
    model = own_kv_engines.model("g=2")
    options = BenchOptions(
        mode="decode", model=ModelOptions(), engine={"generated_kv": kv}, swiftkv=(STUDENT,)
    )
    measured = variants._with_cut(options, model)
    assert measured.config.shared_kv_heads == model.config.shared_kv_heads is not None
    prompt = list(range(3, 20))
    answers = [
        skv.generate(served, prompt, max_tokens=12, generated_kv=kv) for served in (model, measured)
    ]
    assert answers[0] == answers[1]


def test_a_student_whose_tokens_keep_their_own():
    """Random weights without a teacher have its upper keys and values; a decode step reads as much
    as the teacher's, and only the end of a prompt reads the upper layers."""
    config = dataclasses.replace(CONFIG, generated_kv="own", exact_tail=4)
    model = dummy_model(config, jnp.float32, teacher=False)
    assert model.llama.upper_qkv is not None and model.llama.upper_qkv.q is None
    options = EngineOptions(max_model_len=32, max_num_seqs=1, chunks=(16,))
    runner = build_model_runner(model, options)
    student, plain = (
        summary.variant_of(name, config, weights, runner.cache_dtype, runner.shapes)
        for name, weights in (
            (STUDENT, runner.weights),
            (TEACHER, weight_shapes(config, False, jnp.float32)),
        )
    )
    assert student.weight_bytes == plain.weight_bytes
    boundary = dataclasses.replace(config, generated_kv="boundary", exact_tail=0)
    filling = weight_shapes(boundary, True, jnp.float32)
    assert student.prefill_bytes == num_bytes(
        (filling.lower, filling.lower_qkv, filling.norm_swiftkv, filling.kv)
    )
    weights = runner.weights
    assert student.tail_bytes == num_bytes((weights.upper, weights.upper_qkv))
    raws = [
        {"seconds": 1.0, "cpu_seconds": 1.0, "idle": 0.0, "ttft": 1.0, "chunks": 1}
        | {"compilations": 0}
    ]
    row = summary.derive("prefill", CELL, raws, student, ROOFLINE)
    tail = dataclasses.replace(config, exact_tail=3)  # the fourth token is decoded
    assert row["flops"] == 2 * prefill_flops(tail, 20, swiftkv=True)
