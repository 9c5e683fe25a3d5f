"""Prefill-skip, scoring and decoding are the full forward pass, cost what they should, and keep no
second cache."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.infer.engine.request_state import RequestState, ScheduledTokens
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.engine.shapes import Shapes
from swiftkv_jax.infer.runner.decode_programs import copy_pages, decode
from swiftkv_jax.infer.runner.decode_state import DecodeBatch, DecodeState
from swiftkv_jax.infer.runner.lowering import (
    DecodeProgram,
    PrefillProgram,
    Program,
    UpperProgram,
)
from swiftkv_jax.infer.runner.prefill_chunk import Joined, chunk_needs, pack_chunk, pack_upper
from swiftkv_jax.infer.runner.prefill_programs import prefill_chunk, score_chunk
from swiftkv_jax.infer.runner.serving_form import served_config, serving_weights
from swiftkv_jax.infer.sampling.metadata import sampling_row
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.cache import KVCache, bytes_per_token, cache_shapes
from swiftkv_jax.model.config import LayerKind, Rope
from swiftkv_jax.plan.presets import LLAMA_8B
from tests import tiny
from tests.lowered import lower_program

CUTS = {"g=2": (2, 2), "K=1 g=3": (1, 3), "K=L": (4, 1)}
PAGE, PAGES, TABLE = 4, 16, 5


@functools.cache
def model_of(cut: str, bias: bool = False) -> skv.Model:
    lower, group = CUTS[cut]
    hf = tiny.hf_config(
        num_hidden_layers=4,
        num_key_value_layers=lower,
        key_value_group_size=group,
        attention_bias=bias,
    )
    return tiny.model_of(hf, tiny.tensors_for(hf))


def garbage(shapes: KVCache) -> KVCache:
    """A cache full of numbers that would show in any result."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 1e3, leaf.shape), leaf.dtype), shapes
    )


def request_state(tokens, start: int, pages: list[int]) -> RequestState:
    state = RequestState(0, ScoreRequest(tokens, start))
    state.pages = pages
    return state


def arrays(scheduled: list[ScheduledTokens], tokens: int, context_pages: int | None = None):
    common = {"page_size": PAGE, "table_pages": TABLE, "context_pages": context_pages}
    return pack_chunk([scheduled], tokens=tokens, tiles=7, **common), pack_upper(
        [scheduled], tokens=tokens, tiles=7, **common
    )


# The packing ------------------------------------------------------------------


def test_a_tree_as_one_array():
    """Arrays whose first axis the shards divide, and what is None."""
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(2, 5), (6,), (4, 3, 2)]
    a, b, c = (rng.integers(0, 100, shape, dtype=np.int32) for shape in shapes)
    joined = Joined.of(((a, None), b, c), 2)
    assert joined.data.shape == (2, 5 + 3 + 12)
    jax.tree.map(np.testing.assert_array_equal, joined.split(), ((a, None), b, c))


def test_the_picture():
    """The drawing in `prefill_chunk`: request a from 6 to 9, request b from 0 to 3, pages of 4."""
    a, b = request_state(range(100, 111), 10, [3, 5, 7]), request_state(range(200, 205), 4, [2, 4])
    scheduled = [ScheduledTokens(a, 6, 10), ScheduledTokens(b, 0, 4)]
    chunk, scored = arrays(scheduled, 8)
    assert chunk.tokens.tolist() == [[106, 107, 108, 109, 200, 201, 202, 203]]
    assert chunk.positions.tolist() == [[6, 7, 8, 9, 0, 1, 2, 3]]
    tiles = chunk.tiles
    assert [
        row[:3].tolist()
        for row in (
            tiles.page,
            tiles.page_start,
            tiles.source,
            tiles.query_start,
            tiles.query_end,
        )
    ] == [
        [5, 7, 2],
        [4, 8, 0],
        [0, 2, 4],
        [2, 0, 0],
        [4, 2, 4],
    ]
    assert tiles.tile_index.tolist() == [[2, 3, 4, 5, 8, 9, 10, 11]]
    assert tiles.page_table[:3, :3].tolist() == [[3, 5, 7], [3, 5, 7], [2, 0, 0]]
    assert tiles.query_end[3:].tolist() == [0] * 4 and (tiles.page[3:] > 10**9).all()
    assert chunk_needs([scheduled], PAGE) == (8, 3, 2, 2, 4)
    assert scored.index[0, :2].tolist() == [3, 7] and scored.target[0, :3].tolist() == [
        110,
        204,
        -1,
    ]


# Values -----------------------------------------------------------------------


def check_scores(
    model: skv.Model, swiftkv: bool, context_pages: int | None = None, **options: int
) -> None:
    """Two packed prompts in two chunks, the second with the beginning of a third, over a cache full
    of garbage: every later position's log-probability."""
    config = served_config(model.config, swiftkv)
    weights = serving_weights(model.llama, model.swiftkv if swiftkv else None, config)
    cache = garbage(cache_shapes(config, PAGES, PAGE, jnp.float32))
    rows = tiny.tokens_for(tiny.hf_config(), 2, 14)
    full = jax.nn.log_softmax(skv.logits(model, jnp.asarray(rows), swiftkv=swiftkv), axis=-1)
    states = [
        request_state(rows[0].tolist(), 7, [3, 9, 1, 12]),
        request_state(rows[1, :9].tolist(), 5, [2, 4, 15]),
        request_state(range(20, 30), 7, [6, 8, 10]),
    ]
    scheduled = [ScheduledTokens(states[0], 0, 6), ScheduledTokens(states[1], 0, 3)]
    first, _ = arrays(scheduled, 12, context_pages)
    cache, _ = prefill_chunk(config, weights, Joined.of(first, 1), cache)
    ends = (states[2], 0, 4), (states[1], 3, 8), (states[0], 6, 13)
    scheduled = [ScheduledTokens(state, start, stop) for state, start, stop in ends]
    second, scored = arrays(scheduled, 16, context_pages)
    assert context_pages is None or second.gathered_pages.tolist() == [6, 2, 4, 3, 9, 1, 12]
    _, found = score_chunk(config, weights, Joined.of((second, scored), 1), cache, **options)
    place = 0
    found = jax.tree.map(np.asarray, found)
    for row in (1, 0):
        for position in states[row].scored:
            expected = np.asarray(full[row, position])
            np.testing.assert_allclose(
                found.logprob[0, place], expected[rows[row, position + 1]], atol=2e-5, rtol=1e-4
            )
            assert found.token[0, place] == expected.argmax()
            place += 1
    assert place == 11


@pytest.mark.parametrize("cut", CUTS)
def test_scores_are_those_of_the_full_forward(cut):
    model = model_of(cut)
    for swiftkv in (True, False) if model.swiftkv is not None else (False,):
        check_scores(model, swiftkv)


def test_biases():
    for swiftkv in (True, False):
        check_scores(model_of("g=2", bias=True), swiftkv)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_logits_of_few_scored_tokens_at_a_time(rows):
    """16 tokens in blocks that divide them or not."""
    check_scores(model_of("g=2"), True, head_rows=rows)


@pytest.mark.parametrize("swiftkv", [True, False])
def test_gathered_pages_are_the_same(swiftkv):
    """Exactly as many as the second chunk reads: seven, of all three prompts."""
    check_scores(model_of("g=2"), swiftkv, context_pages=7)


# Decoding ---------------------------------------------------------------------


def state_of(model: skv.Model, slots: int, remaining: int, eos_token_ids=()) -> DecodeState:
    """Rows of one token each, on pages of their own."""
    row = sampling_row(SamplingParams(), eos_token_ids=eos_token_ids, prompt_length=1)
    tables = np.arange(slots * TABLE).reshape(slots, TABLE)
    zeros = np.zeros(slots, np.int32)
    sampling = jax.tree.map(lambda leaf: np.stack([leaf] * slots), row)
    batch = DecodeBatch(zeros + 1, zeros, zeros + remaining, np.int32(tables), sampling)
    cache = garbage(cache_shapes(model.config, slots * TABLE, PAGE, jnp.float32))
    return DecodeState(
        cache,
        jax.tree.map(jnp.asarray, batch),
        jnp.zeros((slots, model.config.vocab_size), jnp.uint16),
    )


def decoded(
    model: skv.Model, state: DecodeState, slots, steps: int
) -> tuple[DecodeState, np.ndarray]:
    weights = serving_weights(model.llama, model.swiftkv, model.config)
    state, sampled = decode(
        model.config, weights, jnp.asarray(slots, jnp.int32), state, steps=steps
    )
    return state, np.asarray(sampled.token)


def test_buffers_are_donated():
    model = model_of("g=2")
    weights = serving_weights(model.llama, model.swiftkv, model.config)
    cache = garbage(cache_shapes(model.config, PAGES, PAGE, jnp.float32))
    chunk, _ = arrays([ScheduledTokens(request_state([1, 2, 3, 4], 1, [0]), 0, 3)], 4)
    filled, _ = prefill_chunk(model.config, weights, Joined.of(chunk, 1), cache)
    assert all(buffer.is_deleted() for buffer in jax.tree.leaves(cache))
    copied = copy_pages(model.config, jnp.array([0]), jnp.array([1]), filled)
    assert all(buffer.is_deleted() for buffer in jax.tree.leaves(filled))
    np.testing.assert_array_equal(copied.k[0].values[0], copied.k[0].values[1])
    state = state_of(model, 2, 4)
    decode(model.config, weights, jnp.arange(2), state, steps=2)
    assert all(
        buffer.is_deleted()
        for buffer in jax.tree.leaves((state.cache, state.token_counts, state.batch.length))
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(weights))


def test_finished_rows_emit_nothing_and_write_nothing():
    model = model_of("g=2")
    state = state_of(model, 2, 3)
    before = [np.asarray(pool.values) for pool in (*state.cache.k, *state.cache.v)]
    state, tokens = decoded(model, state, [0, 1], 9)
    np.testing.assert_array_equal(tokens >= 0, [[True] * 3 + [False] * 6] * 2)
    assert state.batch.length.tolist() == [3, 3] and state.batch.remaining.tolist() == [0, 0]
    written = np.zeros((2 * TABLE, PAGE), bool)
    written[[0, TABLE], :3] = True
    for old, pool in zip(before, (*state.cache.k, *state.cache.v), strict=True):
        np.testing.assert_array_equal((np.asarray(pool.values) != old).any(axis=(1, 3)), written)


def test_rows_of_any_slots_decode_and_the_others_stay():
    model = model_of("g=2")
    _, every = decoded(model, state_of(model, 4, 5), range(4), 5)
    state, some = decoded(model, state_of(model, 4, 5), [3, 1, 4], 5)  # slot 4 is empty
    np.testing.assert_array_equal(some, [*every[[3, 1]], [-1] * 5])
    assert state.batch.length.tolist() == [0, 5, 0, 5]


def test_an_end_token_is_emitted_and_finishes_its_row():
    model = model_of("g=2")
    _, free = decoded(model, state_of(model, 1, 9), [0], 9)
    end = int(free[0, 4])
    first = free[0].tolist().index(end)
    _, tokens = decoded(
        model, state_of(model, 1, 9, eos_token_ids=(60 if end != 60 else 59, end)), [0], 9
    )
    assert tokens[0].tolist() == free[0, : first + 1].tolist() + [-1] * (8 - first)


# Costs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("swiftkv", "steps", "format"),
    [
        (True, 8, None),
        (True, 8, jnp.int8),
        pytest.param(False, 1, None, marks=pytest.mark.long),
        pytest.param(False, 1, jnp.int8, marks=pytest.mark.long),
    ],
)
def test_decode_holds_one_cache(swiftkv, steps, format):
    config = config_from_hf(tiny.hf_config(key_value_group_size=2, max_position_embeddings=4096))
    shape = {"batch": 4, "max_model_len": 4096, "dtype": jnp.float32, "cache_dtype": format}
    memory = (
        lower_program(config, DecodeProgram(4), steps=steps, swiftkv=swiftkv, **shape)
        .compile()
        .memory_analysis()
    )
    assert memory is not None
    cache = 4 * 4096 * bytes_per_token(config, format or jnp.float32, swiftkv=swiftkv)
    assert memory.alias_size_in_bytes >= cache  # updated in place
    print(f"temporaries {memory.temp_size_in_bytes / 2**20:.2f} MiB, cache {cache / 2**20:.2f} MiB")
    assert memory.temp_size_in_bytes < cache / 2


def flops(program: Program, swiftkv: bool, max_model_len: int) -> float:
    cost = lower_program(
        LLAMA_8B, program, batch=1, max_model_len=max_model_len, swiftkv=swiftkv
    ).cost_analysis()
    assert cost is not None
    return cost["flops"]


@pytest.mark.parametrize("max_model_len", [512, pytest.param(2048, marks=pytest.mark.long)])
def test_prefill_costs_half(max_model_len):
    program = PrefillProgram(512, 4, None)
    ratio = flops(program, True, max_model_len) / flops(program, False, max_model_len)
    print(
        f"prefill operations, student to teacher, at Llama-3.1-8B's shape and {max_model_len} "
        f"positions: {ratio:.4f}"
    )
    assert ratio == pytest.approx(0.535, abs=5e-4)


@pytest.mark.long
def test_a_score_of_a_short_continuation_costs_little_more_than_half():
    """Compared with the teacher and a full forward pass: 2,048 tokens, 32 of them scored."""
    some, all = (UpperProgram(2048, scored, None, scores=True) for scored in (32, 2048))
    ratio = flops(some, True, 2048) / flops(all, False, 2048)
    print(f"operations of a score, student to full forward pass: {ratio:.4f}")
    assert ratio == pytest.approx(0.52, abs=5e-3)


def test_a_score_costs_what_is_scored_and_little_more():
    """257 of 2,048 tokens run through the upper layers with at most as many others."""
    shapes = Shapes(
        dp_size=1,
        page_size=128,
        num_pages=16,
        table_pages=16,
        slots=1,
        decode_rows=(1,),
        decode_steps=1,
        decode_kinds=("sampling",),
        chunks=(2048,),
        spare_tiles=(4,),
        contexts=(None,),
        scoring=True,
    )
    for scored in (1, 32, 33, 257, 700, 2048):
        assert next(size for size in shapes.scored(2048) if size >= scored) <= max(
            32, 8 * scored if scored < 256 else 2 * scored
        )
    some, all = (UpperProgram(2048, scored, None, scores=True) for scored in (512, 2048))
    assert flops(some, True, 2048) / flops(all, False, 2048) <= 0.66


def test_prefill_reads_no_upper_layer_and_no_head():
    def parameters(swiftkv: bool) -> list[str]:
        config = config_from_hf(tiny.hf_config(vocab_size=59))
        text = lower_program(
            config,
            PrefillProgram(8, 1, None),
            batch=1,
            max_model_len=16,
            swiftkv=swiftkv,
            dtype=jnp.float32,
        ).as_text()
        signature = next(line for line in text.splitlines() if "func.func public @main" in line)
        return re.findall(r"%arg\d+: tensor<([^>]*)>", signature)

    gate_and_up, head_or_embedding, qkv = "2x48x32xf32", "59x32xf32", "2x4x8x32xf32"
    student, teacher = parameters(True), parameters(False)
    assert student.count(gate_and_up) == 2  # the lower layers
    assert teacher.count(gate_and_up) == 5  # the last is needed for its keys and values only
    assert student.count(qkv) == 2 and teacher.count(qkv) == 5
    assert teacher.count("4x8x32xf32") == 0  # its queries
    assert student.count(head_or_embedding) == teacher.count(head_or_embedding) == 1


def test_a_plan_for_each_window(monkeypatch):
    """And one alone for a model without windows."""
    planned = []

    def plan_decode(self, q, k, length, *, window, **options):
        planned.append(window)

    monkeypatch.setattr(Attention, "plan_decode", plan_decode)
    config = model_of("g=2").config
    for windows in ((None,) * 4, (7, None, 7, None), (5, 7, 5, 7), (7,) * 4):
        kinds = tuple(
            LayerKind(Rope(theta), w)
            for theta, w in zip((1e4, 2e4, 3e4, 3e4), windows, strict=True)
        )
        layers = dataclasses.replace(config, layer_kinds=kinds)
        lower_program(layers, DecodeProgram(2), batch=2, max_model_len=32, page_size=4)
        assert planned == list(dict.fromkeys(windows))
        planned.clear()
