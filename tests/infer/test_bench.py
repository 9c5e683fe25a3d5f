"""`infer bench`: what is timed is what is said, rates follow from it, and mistakes end before
anything is measured."""

import dataclasses
import json
import math
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.checkpoints.hf_config import config_to_hf
from swiftkv_jax.config import Config
from swiftkv_jax.cost import decode_flops, prefill_flops
from swiftkv_jax.infer import bench
from swiftkv_jax.infer.__main__ import main
from swiftkv_jax.infer.bench import summary, timing
from swiftkv_jax.infer.bench.cells import MODES, Cell, check_lengths, make_cells, num_pages
from swiftkv_jax.infer.bench.dummy import STANDARD_DEVIATION, dummy_model
from swiftkv_jax.infer.bench.plot import draw
from swiftkv_jax.infer.bench.summary import SWIFTKV, TEACHER, Variant
from swiftkv_jax.infer.engine.engine import engine_for
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.request_state import spans_of
from swiftkv_jax.infer.runner.shapes import lower_program
from swiftkv_jax.mesh import make_mesh
from swiftkv_jax.quantization import Scheme, dequantize
from swiftkv_jax.roofline import Roofline, measure_roofline

CONFIG = Config(
    vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, num_key_value_layers=1,
    max_position_embeddings=256,
)  # fmt: skip
ROOFLINE = Roofline(flops=1e12, bandwidth=1e9, devices=1, dtype="float32", tried={}, published=None)
CELL = Cell(input_len=21, output_len=8, prompts=2)
BYTES = {"prefill_bytes": 70, "weight_bytes": 100, "kv_bytes": 10, "written_bytes": 6}


@pytest.fixture(scope="module")
def engine():
    model = dummy_model(CONFIG, jnp.float32, teacher=False)
    options = EngineOptions(
        max_model_len=32,
        max_num_seqs=2,
        decode_steps=2,
        page_size=8,
        chunks=(16,),
        decode_rows=(2,),
    )
    return engine_for(model, options)


@pytest.fixture
def quick_roofline(monkeypatch):
    monkeypatch.setattr(
        bench,
        "measure_roofline",
        lambda dtype, devices: dataclasses.replace(ROOFLINE, devices=devices),
    )


# What is timed ----------------------------------------------------------------


def test_prefill_runs_all_tokens_but_the_last_and_decodes_nothing(engine, monkeypatch):
    chunks, decoded, alone = [], [], []
    run_chunk = engine.model_runner.run_chunk

    def run(chunk):
        chunks.append(sum(span.stop - span.start for _, span in spans_of(chunk)))
        return run_chunk(chunk)

    monkeypatch.setattr(engine.model_runner, "run_chunk", run)
    monkeypatch.setattr(engine.model_runner, "run_decode", decoded.append)
    monkeypatch.setattr(engine, "run", lambda requests: alone.extend(requests) or iter([None]))
    raw = timing.prefill(engine, CELL, seed=3)
    assert sum(chunks) == 2 * 20 and len(chunks) == 3  # of at most 16 tokens
    assert not decoded
    assert [len(request.prompt) for request in alone] == [21]
    assert 0 < raw["ttft"] and 0 < raw["seconds"]


def test_decoding_times_full_rows_after_a_first_call(engine, monkeypatch):
    tokens, read = [], engine.model_runner.read

    def spy(handle):
        result = read(handle)
        if result is not None:
            tokens.append(result.token)
        return result

    monkeypatch.setattr(engine.model_runner, "read", spy)
    raw = timing.decode(engine, CELL, seed=3)
    monkeypatch.undo()
    assert np.shape(tokens) == (4, 2, 2)  # 8 tokens in calls of 2, for two rows
    assert np.min(tokens) >= 0, "a row had ended while it was timed"
    assert raw["steps"] == 6
    assert 0 <= raw["wait"] <= raw["seconds"]
    alike = timing._requests(engine, CELL, 3, 2)
    generated = [[] for _ in alike]
    for event in engine.run(alike):
        generated[event.request] += event.tokens
    assert np.concatenate(tokens, axis=1).tolist() == generated, (
        "the rows decoded something else than their prompts"
    )


def test_offline_counts_every_token(engine):
    raw = timing.measure("offline", engine, Cell(input_len=9, output_len=5, prompts=5), 7)
    assert raw["new_tokens"] == 25
    assert (raw["compilations"], raw["prefix_hits"]) == (0, 0)
    assert 0 < raw["host"] + raw["wait"] <= raw["seconds"]


def test_every_repetition_has_its_own_prompts(engine):
    first, again, other = (timing._requests(engine, CELL, seed, 2) for seed in (1, 1, 2))
    assert [r.prompt for r in first] == [r.prompt for r in again] != [r.prompt for r in other]
    assert first[0].prompt != first[1].prompt


@pytest.mark.parametrize("limit", [None, 1])
def test_latency_counts_from_arrival(engine, limit, monkeypatch):
    inside, most = set(), []
    add_request, step = engine.add_request, engine.step

    def submitted(request):
        inside.add(id := add_request(request))
        most.append(len(inside))
        return id

    def stepped():
        events = step()
        inside.difference_update(event.request for event in events if event.finish_reason)
        return events

    monkeypatch.setattr(engine, "add_request", submitted)
    monkeypatch.setattr(engine, "step", stepped)
    raw = timing.latency(
        engine, Cell(9, 6, prompts=4, request_rate=math.inf, max_concurrency=limit), seed=5
    )
    assert max(most) == (limit or 4)
    assert raw["new_tokens"] == 24 and len(raw["ttft"]) == len(raw["e2e"]) == 4
    assert len(raw["itl"]) == 4 * 2  # 6 tokens in calls of 2
    for ttft, tpot, e2e in zip(raw["ttft"], raw["tpot"], raw["e2e"], strict=True):
        assert tpot == pytest.approx((e2e - ttft) / 5)
    # All arrive at the start: who waits outside waits too.
    assert max(raw["e2e"]) == pytest.approx(raw["seconds"], rel=0.5)
    if limit == 1:
        assert sorted(raw["ttft"]) == raw["ttft"] and raw["ttft"][3] > raw["e2e"][2]


def test_arrivals_are_a_poisson_process():
    gaps = np.diff(timing._arrivals(Cell(9, 6, prompts=4000, request_rate=5.0), seed=1))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.1) and gaps.std() == pytest.approx(
        1 / 5, rel=0.1
    )
    assert timing._arrivals(Cell(9, 6, prompts=3, request_rate=math.inf), seed=1) == [0, 0, 0]


# What follows -----------------------------------------------------------------


@pytest.mark.parametrize("swiftkv", [False, True])
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
    counted = lower_program(config, ("decode", 1), **common).compile().cost_analysis()
    assert counted is not None
    assert decode_flops(config, 16, swiftkv=swiftkv) == pytest.approx(counted["flops"], rel=0.05)


def test_prefill_figures():
    variant = Variant(SWIFTKV, CONFIG, **BYTES, decode_steps=2)
    raws = [
        {"seconds": s, "cpu_seconds": s, "ttft": 3.0, "chunks": 3, "compilations": 0}
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
        [{"seconds": 3.0, "wait": 2.7, "steps": 6, "compilations": 0}],
        variant,
        ROOFLINE,
    )
    assert row["context"] == statistics.mean(range(23, 29))
    assert row["seconds_per_output_token"] == 0.5
    assert row["bytes_per_s"] == (100 + 2 * 25.5 * 10) / 0.5
    assert row["bandwidth_share"] == row["bytes_per_s"] / 1e9
    assert row["host_share"] == pytest.approx(0.1)


def test_latency_figures():
    variant = Variant(SWIFTKV, CONFIG, **BYTES, decode_steps=2)
    lists = {"ttft": [1.0, 3.0], "tpot": [0.5, None], "e2e": [2.0, 4.0], "itl": []}
    raws = [
        lists | {"seconds": 10.0, "host": 1.0, "chunks": 2, "decode_calls": 4, "compilations": 0}
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


def test_weights_read_by_a_step(engine):
    """Not the embedding, whose rows are looked up; and keys and values once for every layer."""
    variant = summary.variant_of(SWIFTKV, CONFIG, engine)
    student = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.model_runner.weights))
    assert variant.weight_bytes == student - 64 * 32 * 4
    assert variant.kv_bytes == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("swiftkv", [True, False])
def test_bytes_of_prefill_are_what_its_program_takes(swiftkv):
    """XLA drops the arguments that a program does not read."""
    engine = engine_for(
        dummy_model(CONFIG, jnp.float32),
        EngineOptions(max_model_len=32, max_num_seqs=1, chunks=(16,)),
        swiftkv=swiftkv,
    )
    variant = summary.variant_of(SWIFTKV if swiftkv else TEACHER, CONFIG, engine)
    program = engine.model_runner._compiled["prefill", 16, None].memory_analysis()
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


# Weights ----------------------------------------------------------------------


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


# The command ------------------------------------------------------------------


def test_cells():
    plan = {
        "input_lens": [4, 8],
        "batches": [1, 2],
        "num_prompts": 9,
        "request_rates": [1.0, 2.0],
        "max_concurrency": 3,
    }
    assert make_cells("prefill", output_len=7, decode_steps=8, **plan) == [
        Cell(n, 1, b) for n in (4, 8) for b in (1, 2)
    ]
    assert make_cells("decode", output_len=17, decode_steps=8, **plan)[0] == Cell(4, 24, 1)
    assert make_cells("offline", output_len=7, decode_steps=8, **plan) == [
        Cell(4, 7, 9),
        Cell(8, 7, 9),
    ]
    assert make_cells("latency", output_len=7, decode_steps=8, **plan)[1] == Cell(4, 7, 9, 2.0, 3)
    assert num_pages([Cell(4, 4, 9), Cell(9, 8, 2)], rows=3, page_size=8) == 6
    with pytest.raises(ValueError, match="--output-len 8 must be at least 16"):
        make_cells("decode", output_len=8, decode_steps=8, **plan)
    with pytest.raises(ValueError, match="12 positions, above the limit of 11"):
        check_lengths([Cell(8, 4, 1)], 11)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("prefill --config llama-9b --load-format dummy", "--config llama-9b: neither a preset"),
        ("prefill --config llama-3.1-8b", "add --load-format dummy"),
        ("prefill --load-format dummy", "either --config or --model"),
        ("offline --batch 2", "--batch is for prefill and decode"),
        ("decode --max-num-seqs 2", "--max-num-seqs is for offline and latency"),
        ("decode --request-rate 2", "are for latency, not for decode"),
        ("prefill --output-len 8", "--output-len is not for prefill"),
        ("decode --num-prompts 8", "--num-prompts is for offline and latency"),
        ("prefill -o {tmp}/there.json", "exists already"),
        ("prefill -o {tmp}/no/where.json", "its folder does not exist"),
        (
            "prefill --input-len 256k --config llama-3.1-8b --load-format dummy",
            "above the limit of 131072",
        ),
        (
            "prefill --config llama-3.1-8b --load-format dummy --num-key-value-layers 5 "
            "--key-value-group-size 2",
            "--num-key-value-layers 5",
        ),
    ],
)
def test_mistakes_are_one_line(flags, message, tmp_path, capsys):
    (tmp_path / "there.json").touch()
    assert main(["bench", *flags.format(tmp=tmp_path).split(), "--compile-cache", "none"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


NONSENSE = [
    "prefill --swiftkv on,on",
    "prefill --input-len 1",
    "decode --batch 0",
    "latency --request-rate 0",
    "decode --seed -1",
    "fly",
]


@pytest.mark.parametrize("flags", NONSENSE)
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *flags.split()])


def test_both_variants_in_one_run(tmp_path, capsys, quick_roofline):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(CONFIG.cut(2))))
    flags = (
        "decode --load-format dummy --input-len 16 --output-len 4 --decode-steps 2 --batch 2 "
        "-r 2 --page-size 8 --compile-cache none"
    )
    path = tmp_path / "result.json"
    assert (
        main(
            [
                "bench",
                *flags.split(),
                "--config",
                str(tmp_path),
                "--num-key-value-layers",
                "1",
                "-o",
                str(path),
            ]
        )
        == 0
    )
    text = capsys.readouterr()
    assert (
        len(re.findall(r"^\| 16 in, 4 out, 2 prompts \| (?:swiftkv|teacher) ", text.out, re.M)) == 2
    )
    order = re.findall(r"repetition \d: (\w+)", text.err)
    assert order == [SWIFTKV, TEACHER, TEACHER, SWIFTKV], "they take turns in going first"
    document = json.loads(path.read_text())
    student, teacher = document["rows"]
    assert student["cell"] == teacher["cell"] and [
        raw["seed"] for raw in student["repetitions"]
    ] == [0, 1]
    assert [raw["seed"] for raw in teacher["repetitions"]] == [0, 1]
    assert student["speed_up"] > 0 and student["compilations"] == teacher["compilations"] == 0
    assert (
        document["engines"][SWIFTKV]["plan"]["weights"]
        != document["engines"][TEACHER]["plan"]["weights"]
    )
    assert document["config"]["num_key_value_layers"] == 1 and "jax" in document["versions"]
    assert "commit" in document and not list(tmp_path.glob("*partial*"))


@pytest.mark.parametrize("mode", MODES)
def test_plot(tmp_path, mode):
    figures = (
        "tokens_per_s",
        "ttft",
        "seconds_per_output_token",
        "output_tokens_per_s",
        "ttft_p50",
        "e2e_p50",
    )
    cell = {"prompts": 1, "request_rate": "inf" if mode == "latency" else None}
    shares = {"flops_share": 0.5, "bandwidth_share": 0.5}
    rows = [
        {"variant": name, "cell": cell | {"input_len": length}} | shares | dict.fromkeys(figures, 5.0)
        for name in (SWIFTKV, TEACHER) for length in (16, 32)
    ]  # fmt: skip
    draw(mode, rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
