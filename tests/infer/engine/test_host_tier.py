"""Pages that leave the device stay in host memory: what is loaded is what was saved."""

import dataclasses
import functools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.cache_events import PageRemoved
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.host_tier import HostTier, PageMove
from swiftkv_jax.infer.engine.page_pool import ON_HOST, RELEASED, PagePool
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.host_pages import (
    PINNED_LIMIT,
    MoveProgram,
    keeps_boundary,
    num_host_pages,
)
from swiftkv_jax.model.config import KVCacheDtype
from swiftkv_jax.model.mesh import make_mesh
from tests.infer.engine.mock_requests import ask, check_empty, drain, prompt_of
from tests.infer.engine.test_engine import model, small
from tests.infer.engine.test_page_pool import taken
from tests.infer.engine.test_scheduler import answers
from tests.infer.engine.test_speculation import answers as answers_of
from tests.infer.engine.test_speculation import check_equal
from tests.infer.mock_model_runner import MockHostPages, continuation, mock_engine

# The index --------------------------------------------------------------------


class Memory(list):
    """The moves that were started."""

    def __init__(self):
        self.host_pages = MockHostPages(4)

    def move_pages(self, moves) -> None:
        self.extend(moves)
        for move in moves:
            if move.saves:
                self.host_pages.put(move.slot, np.zeros(4, np.int64))

    def fingerprint(self) -> bytes:
        return self.host_pages.fingerprint()


def pool_of(
    num_pages: int, num_slots: int, window: int | None = None, **options: int
) -> tuple[PagePool, HostTier, Memory]:
    memory = Memory()
    pool = PagePool(num_pages, 2, window=window)
    host = HostTier(num_slots, memory, **options)
    pool.keep_on_host(host)
    return pool, host, memory


def fill(pool: PagePool, first: int, count: int) -> list[bytes]:
    """Cache `count` pages of tokens from `first` on, which nothing uses afterwards; returns their
    keys."""
    keys, pages = pool.keys([*range(first, first + 2 * count)]), taken(pool, count)
    pool.cache(keys, pages)
    pool.release(pages)
    return keys


def loading(pool: PagePool, keys: list[bytes]) -> list[int]:
    """The page table of a sequence that shares all pages of `keys`."""
    table = pool.reserve(pool.match(keys), 0, keys)
    assert table is not None
    return table


def test_evicted_pages_are_saved_and_then_loaded_into_others():
    pool, host, memory = pool_of(4, 8)
    first, second = fill(pool, 0, 4), fill(pool, 20, 4)
    assert pool.match(first) == [ON_HOST] * 4 and len(host) == 4
    pool.move_pages()
    slots = {move.page: move.slot for move in memory}
    assert len(slots) == 4 and all(move.saves for move in memory)
    assert pool.reserve(pool.match(first), 1, first) is None
    table = loading(pool, first)
    assert pool.match(first) == table and pool.match(second) == [ON_HOST] * 4
    memory.clear()
    assert pool.load(table)
    pool.move_pages()
    saves, loads = memory[:4], memory[4:]
    assert all(move.saves for move in saves) and {move.page for move in saves} == {*table}
    # The first pool page had the first key, as `taken` gives pages in their order.
    expected = [PageMove(False, page, slots[n], n) for n, page in enumerate(table)]
    assert loads == expected and (host.saved, host.loaded) == (8, 4)
    pool.release(table)
    assert fill(pool, 40, 4) and host.saved == 8, "what the host has is not saved again"


def test_loads_of_a_chunk_are_bounded():
    pool, host, memory = pool_of(8, 8, loads_per_chunk=3)
    keys = fill(pool, 0, 8)
    fill(pool, 20, 8)
    table, rounds = loading(pool, keys), []
    while not (done := pool.load(table)) or not rounds:
        pool.move_pages()
        rounds.append(sum(not move.saves for move in memory))
        if done:
            break
    pool.move_pages()
    assert rounds == [3, 6] and sum(not move.saves for move in memory) == 8


def test_pages_that_wait_to_be_loaded_are_kept():
    """Also while pages that make room for them are saved; without a slot those are lost."""
    pool, host, _ = pool_of(4, 4)
    first, second = fill(pool, 0, 4), fill(pool, 20, 4)
    table = loading(pool, first)
    assert pool.match(second) == [] and [*map(host.__contains__, first)] == [True] * 4
    assert pool.load(table)
    pool.release(table)
    assert fill(pool, 40, 4) and pool.match(first) == [ON_HOST] * 4


def test_a_page_whose_load_was_not_asked_for_is_not_saved():
    """The sequence has gone: the page of the device holds anything."""
    pool, host, memory = pool_of(4, 8)
    first = fill(pool, 0, 4)
    fill(pool, 20, 4)
    pool.release(loading(pool, first))
    before = host.saved
    fill(pool, 40, 4)
    assert host.saved == before and not host._loading and not host._held
    assert pool.match(first) == [ON_HOST] * 4
    table = loading(pool, first)
    assert pool.load(table) and host.loaded == 4


def test_the_longest_unused_page_of_the_host_is_dropped():
    pool, _, _ = pool_of(4, 6)
    first, second = fill(pool, 0, 4), fill(pool, 20, 4)
    fill(pool, 40, 4)
    assert pool.match(first) == [ON_HOST] * 2 and pool.match(second) == [ON_HOST] * 4


def test_a_page_that_leaves_the_device_again_was_used():
    host = HostTier(2, Memory())
    first, second, third = (bytes([number]) for number in range(3))
    for page, key in enumerate((first, second, first, third)):
        assert host.save(key, page)
    assert first in host and third in host and second not in host


def test_clear_forgets_both():
    pool, host, _ = pool_of(4, 8)
    first, second = fill(pool, 0, 4), fill(pool, 20, 4)
    pool.move_pages()
    pool.clear()
    assert pool.match(first) == pool.match(second) == [] and len(host) == 0
    assert pool.available == 4 and sorted(host._free) == [*range(8)]


@pytest.mark.parametrize("seed", range(3))
def test_a_window_sees_the_device_and_the_host_together(seed):
    rng = random.Random(seed)
    for _ in range(100):
        window = rng.randint(1, 9)
        pool, host, _ = pool_of(9, 9, window)
        keys, pages = [bytes([number]) for number in range(9)], taken(pool, 9)
        on_device = [number for number in range(9) if rng.random() < 0.5]
        on_host = [number for number in range(9) if rng.random() < 0.4]
        for number in on_device:
            pool.cache(keys, pages, start=number, stop=number + 1)
        for number in on_host:
            assert host.save(keys[number], number)
        expected = 0
        for length in range(1, 10):
            seen = range(max(2 * length - window + 1, 0), 2 * length)
            if {position // 2 for position in seen} <= {*on_device, *on_host}:
                expected = length
        found = pool.match(keys)
        assert len(found) == expected
        for number, page in enumerate(found):
            if page != RELEASED:
                assert page == (pages[number] if number in on_device else ON_HOST)


# The engine -------------------------------------------------------------------


def test_a_prefix_that_was_evicted_is_found_and_answers_are_the_same():
    engine, _ = mock_engine(num_pages=16, host_pages=64)
    prompts = [prompt_of(number, 33) for number in range(4)]
    for _ in range(2):
        found = answers(engine, [ask(prompt) for prompt in prompts])
        assert found == {(row, 0): continuation(prompt, 8) for row, prompt in enumerate(prompts)}
    stats, (pool,) = engine.prefix_stats, engine.pools
    assert stats.evictions > 16 and stats.host_hits == stats.hits == 4 * 32
    assert pool.host is not None and pool.host.loaded == 4 * 8
    outputs = [output for _, output in engine.run([ask([*prompts[0], 5])])]
    assert {output.num_cached_tokens for output in outputs} == {32}
    check_empty(engine)


def test_a_long_prefix_is_loaded_over_steps_while_others_decode():
    engine, runner = mock_engine(num_pages=48, host_pages=64, max_model_len=160, steps=1)
    (pool,) = engine.pools
    assert pool.host is not None
    pool.host.loads_per_chunk = 4
    long, other = prompt_of(1, 129), prompt_of(2, 129)
    answers(engine, [ask(long, 2), ask(other, 2)])
    engine.add_request(ask(prompt_of(3, 4), 60, ignore_eos=True))
    engine.step()
    request, loaded, decoded = engine.add_request(ask(long, 4)), [], []
    while engine.has_work:
        before = pool.host.loaded
        decoded += [output.request_id != request for output in engine.step()]
        loaded.append(pool.host.loaded - before)
        runner.calls.clear()
    assert max(loaded) == 4 and sum(loaded) >= 20
    assert decoded[:5] == [True] * 5, "it did not wait for the loads"
    check_empty(engine)


def test_a_request_may_be_aborted_while_its_prefix_is_loaded():
    engine, _ = mock_engine(num_pages=40, host_pages=64, max_model_len=160)
    (pool,) = engine.pools
    assert pool.host is not None
    pool.host.loads_per_chunk = 4
    long, other = prompt_of(1, 129), prompt_of(2, 129)
    answers(engine, [ask(long, 2), ask(other, 2)])
    for _ in range(3):
        request = engine.add_request(ask(long, 4))
        engine.step()
        assert pool.host._loading
        engine.abort_request(request)
        assert not drain(engine)
        check_empty(engine)
        answers(engine, [ask(other, 2)])
    assert answers(engine, [ask(long, 4)]) == {(0, 0): continuation(long, 4)}
    assert not pool.host._held and not pool.host._loading


def test_other_weights_find_nothing_on_the_host():
    engine, runner = mock_engine(num_pages=16, host_pages=64)
    events = engine.record_cache_events()
    prompts = [prompt_of(number, 33) for number in range(3)]
    answers(engine, [ask(prompt) for prompt in prompts])
    engine.update_weights(model())
    runner.host_pages.slots.clear()
    found = events.take()
    stored = [key for event in found for key in getattr(event, "keys", ())]
    removed = [event.key for event in found if isinstance(event, PageRemoved)]
    assert sorted(stored) == sorted(removed) != []
    engine.reset_stats()
    answers(engine, [ask(prompt) for prompt in prompts])
    assert engine.prefix_stats.hits == 0


# The device -------------------------------------------------------------------


@functools.cache
def engine_with(format: KVCacheDtype, mesh: str | None = None, **fields: Any) -> Engine:
    chosen = small(kv_cache_dtype=format, **fields)
    return Engine.from_model(model(1), chosen, mesh=None if mesh is None else make_mesh(mesh))


@pytest.mark.parametrize(
    ("format", "form", "mesh"),
    [
        ("auto", "full", None),
        ("auto", "boundary", None),
        pytest.param("int8", "full", None, marks=pytest.mark.long),
        pytest.param("int8", "full", "1x2", marks=pytest.mark.long),
        pytest.param("auto", "boundary", "1x2", marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_an_engine_that_computes_all(format, form, mesh, compilations):
    """Also where a prompt goes on from an answer, whose tokens were decoded."""
    cold = engine_with(format, mesh, enable_prefix_caching=False)
    layout = dataclasses.replace(cold.model_runner.layout, boundary=form == "boundary")
    size = layout.page_bytes(4)
    memory = {"kv_cache_memory": 24 * size, "prefix_cache_host": 800 * size}
    engine = engine_with(format, mesh, prefix_cache_form=form, **memory)
    assert engine.pools[0].num_pages == 24
    rng = random.Random(3)
    prefixes = [[rng.randrange(61) for _ in range(40)] for _ in range(5)]
    requests = []
    for number in range(100):
        prompt = [*rng.choice(prefixes)[: rng.randint(20, 40)], *prompt_of(number, 6)]
        sampled = {"temperature": rng.choice([0.0, 0.9]), "logprobs": 0}
        params = SamplingParams(max_tokens=rng.randint(1, 8), **sampled)
        requests.append(Request([token % 61 for token in prompt], params, rng_stream=number))
    compilations.clear()
    first = answers_of(engine, requests)
    check_equal(first, answers_of(cold, requests), atol=1e-5)
    params = SamplingParams(max_tokens=2, logprobs=0)
    again = [
        Request([*request.prompt, *first[number, 0][0], 5], params, rng_stream=number)
        for number, request in enumerate(requests)
    ]
    check_equal(answers_of(engine, again), answers_of(cold, again), atol=1e-5)
    stats = engine.prefix_stats
    assert stats.evictions > 200 and stats.host_hits > 200 and not compilations
    assert engine.stats.compilations == 0
    runner = engine.model_runner
    plan = runner.plan
    assert plan is not None
    for program, compiled in runner._compiled.items():
        if isinstance(program, MoveProgram) and not program.saves:
            figures = compiled.memory_analysis()
            assert figures.alias_size_in_bytes == plan.cache, "the cache is not copied"
            assert figures.temp_size_in_bytes < plan.cache


def test_without_the_option_there_are_no_more_programs():
    programs = engine_with("auto").model_runner._compiled
    assert not any(isinstance(program, MoveProgram) for program in programs)


def test_what_cannot_be_kept_is_refused(monkeypatch):
    def refused(text: str, mesh: str | None = None, **fields: Any) -> None:
        with pytest.raises(UsageError, match=text):
            chosen = small(**fields)
            Engine.from_model(model(), chosen, mesh=None if mesh is None else make_mesh(mesh))

    refused("is too small: 16 pages of this model are", prefix_cache_host=1000)
    refused("exceeds the memory of this machine", prefix_cache_host=2**50)
    refused(
        "one data-parallel shard, the mesh has 2", "2x1", prefix_cache_host=2**20, max_num_seqs=8
    )
    refused("needs `enable_prefix_caching`", prefix_cache_host=2**20, enable_prefix_caching=False)
    refused("must be at least 1", prefix_cache_host=0)
    form = {"prefix_cache_form": "boundary", "prefix_cache_host": 2**20}
    refused("numbers, the upper keys and values of a token 32", **form)
    refused("does not go with `kv_cache_dtype`=int8", kv_cache_dtype="int8", **form)
    refused("needs `lora_upper_only`", enable_lora=True, **form)
    refused("=half is not one of full, boundary", **form | {"prefix_cache_form": "half"})
    refused("`prefix_cache_form` needs `prefix_cache_host`", prefix_cache_form="boundary")
    for change, text in (
        ({"num_key_value_layers": 3}, "needs a student"),
        ({"boundary_taps": 1}, "more than the state, by `boundary_taps`"),
        ({"exact_head": 1}, "more than the state, by `exact_head`"),
        ({"prompt_attention_layers": 1}, "more than the state, by `prompt_attention_layers`"),
        ({"embed_dim": 31}, "no multiple of the 2 key/value heads"),
    ):
        config = dataclasses.replace(model(1).config, **change)
        with pytest.raises(UsageError, match=text):
            keeps_boundary(small(**form), config, jnp.dtype("float32"))
    layout = engine_with("auto").model_runner.layout
    for given, text in (("0", f"raise the variable {PINNED_LIMIT}"), ("1 GB", "='1 GB' is not a")):
        monkeypatch.setenv(PINNED_LIMIT, given)
        with pytest.raises(UsageError, match=text):
            num_host_pages(small(prefix_cache_host=2**20), layout, "gpu")
