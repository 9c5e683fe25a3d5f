"""Prefill-skip and decode are the full forward pass, cost what they should, and keep no second cache."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax import Config
from swiftkv_jax.cache import KVCache, bytes_per_token, init_cache
from swiftkv_jax.infer.generate import chunk_plan
from swiftkv_jax.infer.programs import DecodeState, decode, decode_logits, prefill_chunk
from swiftkv_jax.infer.sampling import SamplingParams, make_sampling
from swiftkv_jax.infer.shapes import lower_decode, lower_prefill
from swiftkv_jax.infer.weights import served_config, serving_weights
from swiftkv_jax.presets import LLAMA_8B
from tests import tiny

CUTS = {"K=2": (2, 1), "g=2": (2, 2), "g=4": (2, 4), "K=1": (1, 1), "K=1 g=5": (1, 5), "K=L": (6, 1)}
ROWS, LENGTH = 4, 14
PREFILLED = np.array([5, 2, 0, 7])  # the picture in `prefill_chunk`

forced_decode = jax.jit(decode_logits, static_argnums=0)


@functools.cache
def model_of(cut: str, bias: bool = False) -> skv.Model:
    lower, group = CUTS[cut]
    hf = tiny.hf_config(num_key_value_layers=lower, key_value_group_size=group, attention_bias=bias)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def garbage(cache: KVCache) -> KVCache:
    """A cache full of numbers that would show in any result."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda buffer: jnp.asarray(rng.normal(0, 1e3, buffer.shape), buffer.dtype), cache)


def cached_logits(model: skv.Model, swiftkv: bool, tokens: np.ndarray, chunks: tuple[int, ...], cache_len: int) -> list[np.ndarray]:
    """Logits at positions `PREFILLED[b] ..` of each row: those before come from the cache."""
    config = served_config(model.config, swiftkv)
    weights = serving_weights(model.llama, model.swiftkv if swiftkv else None)
    cache = garbage(init_cache(config, ROWS, cache_len, jnp.float32))
    prompts = np.where(np.arange(cache_len) < PREFILLED[:, None], np.pad(tokens, ((0, 0), (0, cache_len - LENGTH))), 1)
    for offset, size in chunk_plan(PREFILLED.max(), chunks):
        cache = prefill_chunk(config, weights, prompts[:, offset : offset + size].astype(np.int32), np.int32(offset), cache)

    logits = [[] for _ in range(ROWS)]
    for step in range(LENGTH - PREFILLED.min()):
        position = np.minimum(PREFILLED + step, LENGTH - 1)
        out, cache = forced_decode(config, weights, tokens[np.arange(ROWS), position], jnp.asarray(position, jnp.int32), cache)
        for row in np.flatnonzero(PREFILLED + step < LENGTH):
            logits[row].append(np.asarray(out[row]))
    return [np.stack(row) for row in logits]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("chunks", [(8,), (4, 1)], ids=str)
def test_cached_logits_are_those_of_the_full_forward(cut, chunks):
    model = model_of(cut)
    tokens = tiny.tokens_for(tiny.hf_config(), ROWS, LENGTH)
    for swiftkv in (True, False) if model.swiftkv is not None else (False,):
        full = np.asarray(skv.logits(model, jnp.asarray(tokens), swiftkv=swiftkv))
        for row, found in enumerate(cached_logits(model, swiftkv, tokens, chunks, cache_len=16)):
            np.testing.assert_allclose(found, full[row, PREFILLED[row] :], atol=2e-5, rtol=1e-4)


def test_biases():
    model = model_of("g=2", bias=True)
    tokens = tiny.tokens_for(tiny.hf_config(), ROWS, LENGTH)
    for swiftkv in (True, False):
        full = np.asarray(skv.logits(model, jnp.asarray(tokens), swiftkv=swiftkv))
        for row, found in enumerate(cached_logits(model, swiftkv, tokens, (4,), cache_len=16)):
            np.testing.assert_allclose(found, full[row, PREFILLED[row] :], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("length", "plan"),
    [
        (0, []),
        (1, [(0, 2)]),
        (2, [(0, 2)]),
        (8, [(0, 8)]),
        (11, [(0, 8), (8, 2), (10, 2)]),
        (17, [(0, 8), (8, 8), (16, 2)]),
    ],
)
def test_chunk_plan(length, plan):
    assert list(chunk_plan(length, (8, 2))) == plan


def state_of(config: Config, batch: int, cache_len: int, budget: int) -> DecodeState:
    cache = init_cache(config, batch, cache_len, jnp.float32)
    return DecodeState(cache, jnp.ones(batch, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.full(batch, budget, jnp.int32))


def test_buffers_are_donated():
    model = model_of("g=2")
    weights = serving_weights(model.llama, model.swiftkv)
    cache = init_cache(model.config, 2, 16, jnp.float32)
    filled = prefill_chunk(model.config, weights, jnp.ones((2, 8), jnp.int32), jnp.int32(0), cache)
    assert all(buffer.is_deleted() for buffer in jax.tree.leaves(cache))
    state = DecodeState(filled, *(jnp.full(2, number, jnp.int32) for number in (1, 8, 4)))
    decode(model.config, weights, make_sampling(SamplingParams(), [0, 1], ()), state, steps=2)
    assert all(buffer.is_deleted() for buffer in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(weights))


def test_finished_rows_emit_nothing_and_stay_inside_the_cache():
    model = model_of("g=2")
    weights = serving_weights(model.llama, model.swiftkv)
    state = state_of(model.config, 2, 4, 3)
    state, tokens = decode(model.config, weights, make_sampling(SamplingParams(), [0, 1], ()), state, steps=9)
    np.testing.assert_array_equal(tokens >= 0, [[True] * 3 + [False] * 6] * 2)
    assert state.length.tolist() == [3, 3] and state.budget.tolist() == [0, 0]


def test_an_end_token_is_emitted_and_finishes_its_row():
    model = model_of("g=2")
    weights = serving_weights(model.llama, model.swiftkv)
    _, free = decode(model.config, weights, make_sampling(SamplingParams(), [0], ()), state_of(model.config, 1, 16, 9), steps=9)
    end = int(free[0, 4])
    first = free[0].tolist().index(end)
    sampling = make_sampling(SamplingParams(), [0], (60 if end != 60 else 59, end))
    _, tokens = decode(model.config, weights, sampling, state_of(model.config, 1, 16, 9), steps=9)
    assert tokens[0].tolist() == free[0, : first + 1].tolist() + [-1] * (8 - first)


@pytest.mark.parametrize("swiftkv", [True, False])
@pytest.mark.parametrize("steps", [1, 8])
def test_decode_holds_one_cache(swiftkv, steps):
    config = Config.from_hf(tiny.hf_config(key_value_group_size=2, max_position_embeddings=4096))
    memory = lower_decode(config, batch=4, max_model_len=4096, steps=steps, swiftkv=swiftkv, dtype=jnp.float32).compile().memory_analysis()
    assert memory is not None
    cache = 4 * 4096 * bytes_per_token(config, jnp.float32, swiftkv=swiftkv)
    assert memory.alias_size_in_bytes >= cache  # updated in place
    print(f"temporaries {memory.temp_size_in_bytes / 2**20:.2f} MiB, cache {cache / 2**20:.2f} MiB")
    assert memory.temp_size_in_bytes < cache / 4


@pytest.mark.parametrize("max_model_len", [512, 2048])
def test_prefill_costs_half(max_model_len):
    def flops(swiftkv: bool) -> float:
        cost = lower_prefill(LLAMA_8B, batch=1, chunk=512, max_model_len=max_model_len, swiftkv=swiftkv).cost_analysis()
        assert cost is not None
        return cost["flops"]

    ratio = flops(True) / flops(False)
    print(f"prefill operations, student to teacher, at Llama-3.1-8B's shape and {max_model_len} positions: {ratio:.4f}")
    assert ratio <= 0.55


def test_prefill_reads_no_upper_layer_and_no_head():
    def parameters(swiftkv: bool) -> list[str]:
        config = Config.from_hf(tiny.hf_config(vocab_size=59))
        text = lower_prefill(config, batch=1, chunk=8, max_model_len=16, swiftkv=swiftkv, dtype=jnp.float32).as_text()
        signature = next(line for line in text.splitlines() if "func.func public @main" in line)
        return re.findall(r"%arg\d+: tensor<([^>]*)>", signature)

    gate, head_or_embedding, query = "48x32xf32", "59x32xf32", "4x8x32xf32"
    student, teacher = parameters(True), parameters(False)
    assert student.count(gate) == 2 * 2  # gate and up of the two lower layers
    assert teacher.count(gate) == 2 * 5  # the last layer is needed for its keys and values only
    assert student.count(query) == 2 and teacher.count(query) == 5
    assert student.count(head_or_embedding) == teacher.count(head_or_embedding) == 1
