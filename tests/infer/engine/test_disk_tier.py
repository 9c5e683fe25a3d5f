"""An engine whose prefix cache goes on from files of an earlier one."""

import collections
import errno
import functools
import gc
import random
import shutil
import time
import weakref

import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine import host_tier, page_store
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.host_tier import HostTier
from swiftkv_jax.infer.engine.page_store import PageStore
from swiftkv_jax.infer.engine.request_state import RequestState, SequenceState
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.serve.command import warm
from tests import tiny
from tests.infer.engine.mock_requests import ask, check_empty, drain, prompt_of
from tests.infer.engine.test_engine import prompts_of, small
from tests.infer.engine.test_host_tier import Memory, pool_of
from tests.infer.engine.test_page_store import FILE, KEYS, files, read, store_of, write
from tests.infer.engine.test_scheduler import answers
from tests.infer.engine.test_speculation import answers as answers_of
from tests.infer.engine.test_speculation import check_equal
from tests.infer.mock_model_runner import continuation, mock_engine


def test_a_file_system_without_locks_is_not_another_process(tmp_path, monkeypatch):
    def flock(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(page_store.fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks available") as error:
        store_of(tmp_path)
    assert error.value.filename == str(tmp_path)


def test_a_restart_answers_from_disk(tmp_path):
    prompts = [prompt_of(number, 33) for number in range(4)]
    requests = [ask(prompt) for prompt in prompts]
    expected = {(row, 0): continuation(prompt, 8) for row, prompt in enumerate(prompts)}
    engine, runner = mock_engine(num_pages=64, host_pages=64, folder=tmp_path)
    assert answers(engine, requests) == expected
    store = runner.host_pages.store
    assert store is not None and store.saved == 0, "nothing has left the device"
    engine.persist_prefix_cache(10)
    assert store.saved >= 4 * 8
    store.close()
    again, runner = mock_engine(num_pages=64, host_pages=64, folder=tmp_path)
    assert answers(again, requests) == expected
    store = runner.host_pages.store
    assert store is not None and store.loaded == 4 * 8 and not store.misses
    assert again.prefix_stats.hits == again.prefix_stats.host_hits == 4 * 32
    assert [counts.tier for counts in again.load.tiers] == ["host", "disk"]
    assert again.load.tiers[1].loaded == 32
    check_empty(again)
    again.update_weights(model(0))
    again.reset_stats()
    assert answers(again, requests) == expected and again.prefix_stats.hits > 0
    store.close()


def test_a_folder_that_is_removed_is_not_made_again(tmp_path, caplog):
    """Nothing would lock it, nor close it to others; one line says so."""
    folder = tmp_path / "cache"
    folder.mkdir()
    store = store_of(folder)
    write(store, 1)
    shutil.rmtree(folder)
    write(store, 2, 3)
    assert not folder.exists() and len(caplog.records) == 1 and str(folder) in caplog.text
    assert store.misses == {"write": 2} and read(store, 1) == {1: None} and len(store) == 0
    store.close()


def test_what_is_found_on_the_device_stays_on_disk(tmp_path):
    """Others make room for more: a kill loses nothing of what is asked for again and again."""
    engine, runner = mock_engine(num_pages=24, host_pages=64, folder=tmp_path, disk_pages=32)
    store = runner.host_pages.store
    assert store is not None
    prompt = prompt_of(0, 33)
    answers(engine, [ask(prompt)])
    for number in range(1, 12):
        answers(engine, [ask(prompt_of(number, 33))])
        if number > 3:
            answers(engine, [ask(prompt)])
        assert store.wait_written(0, time.monotonic() + 10)
    assert len(store) == 32 and store.loaded == 0
    assert all(key in store for key in engine.pools[0].keys(prompt))
    store.close()


def test_times_of_files_follow_their_use(tmp_path):
    """Once in a while, in a thread: the next process has the order."""
    store = store_of(tmp_path)
    write(store, 1, 2, 3)
    for once in (True, False):
        store.use([KEYS[2], KEYS[1], KEYS[9]])
        assert len(store._used) == (0 if once else 2)
    assert [int(name.split("/")[1], 16) for name in store._sizes] == [3, 1, 2]
    write(store, 4)  # behind it in the queue
    store.close()
    less = store_of(tmp_path, 3 * FILE)
    assert KEYS[3] not in less and len(less) == 3
    less.close()


def test_other_weights_read_nothing(tmp_path):
    engine, runner = mock_engine(num_pages=16, host_pages=64, folder=tmp_path)
    requests = [ask(prompt_of(number, 33)) for number in range(4)]
    answers(engine, requests)
    store = runner.host_pages.store
    assert store is not None and store.wait_written(0, time.monotonic() + 10) and store.saved
    runner.host_pages.weights = b"the other weights"
    engine.update_weights(model(0))
    runner.host_pages.slots.clear()
    runner.pages[:] = -1
    answers(engine, requests)
    assert store.loaded == 0 and engine.prefix_stats.host_hits == 0
    store.close()


def test_damaged_files_are_computed_again(tmp_path):
    prompts = [prompt_of(number, 33) for number in range(4)]
    requests = [ask(prompt) for prompt in prompts]
    engine, runner = mock_engine(num_pages=64, host_pages=64, folder=tmp_path)
    expected = answers(engine, requests)
    engine.persist_prefix_cache(10)
    assert runner.host_pages.store is not None
    runner.host_pages.store.close()
    damaged = random.Random(0).sample(files(tmp_path), 9)
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    again, runner = mock_engine(num_pages=64, host_pages=64, folder=tmp_path)
    assert answers(again, requests) == expected
    store = runner.host_pages.store
    assert store is not None and 0 < store.misses["damaged"] <= 9
    assert 0 < again.prefix_stats.host_hits < 4 * 32
    store.close()


def test_the_rate_of_prefill_is_not_that_of_the_disk(tmp_path):
    """What a server measures before its first request is computed, whatever is cached."""
    engine, runner = mock_engine(num_pages=64, host_pages=64, folder=tmp_path)
    for times in (1, 2):
        warm(engine)
        assert runner.calls.count("prefill 15") == 2 * times
    assert runner.host_pages.store is not None
    runner.host_pages.store.close()


def test_what_nobody_waits_for_gives_its_slots_back(tmp_path):
    """The request has gone: later ones find nothing on disk, or are decoding."""
    pool, host, memory = pool_of(4, 4)
    store = memory.host_pages.open(tmp_path)
    write(store, 1, 2, 3, 4)
    assert host.fetch(KEYS[1:5]) == {*KEYS[1:5]} and not host.save(KEYS[0], 0)
    while store._read.qsize() < 4:
        time.sleep(0.001)
    pool.move_pages()
    assert len(host) == 4 and host.save(KEYS[0], 0)
    store.close()


@pytest.mark.parametrize(("slots", "num_pages"), [(1, 256), (8, 80)])
def test_what_is_read_for_one_is_not_pushed_out_for_the_next(tmp_path, slots, num_pages):
    """Requests that wait for a slot, or for pages, find all that they had on disk."""
    prompts = [prompt_of(number, 129) for number in range(6)]
    mock = functools.partial(mock_engine, page_size=4, max_model_len=256, chunk=64, folder=tmp_path)
    engine, runner = mock(num_pages=256, host_pages=192)
    answers(engine, [ask(prompt, 2) for prompt in prompts])
    engine.persist_prefix_cache(10)
    assert runner.host_pages.store is not None
    runner.host_pages.store.close()
    engine, runner = mock(num_pages=num_pages, host_pages=80, slots=slots)
    engine.add_request(ask([5] * 9, 100, ignore_eos=True))
    engine.step()
    cached = {}
    for prompt in prompts:
        engine.add_request(ask(prompt, 8, ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            cached[output.request_id] = output.num_cached_tokens
        time.sleep(0.002)  # the disk is as quick as a step
    assert cached == {0: 0} | dict.fromkeys(range(1, 7), 128)
    assert runner.host_pages.store is not None
    runner.host_pages.store.close()


def test_a_page_that_is_read_is_no_hit_before_it_is_there(tmp_path, monkeypatch):
    """And `clear` takes its slot back."""
    pool, host, memory = pool_of(4, 3)
    store = memory.host_pages.open(tmp_path)
    write(store, 1, 2)
    monkeypatch.setattr(store, "read", lambda key: None)
    assert host.fetch(KEYS[1:3]) == {*KEYS[1:3]}
    assert pool.match(KEYS[1:3]) == [] and len(host) == 0
    pool.clear()
    assert sorted(host._free) == [0, 1, 2] and not host._reading
    store.close()


def test_a_damaged_file_takes_no_room(tmp_path):
    store = store_of(tmp_path, 3 * FILE)
    write(store, 1, 2, 3)
    (tmp_path / store._name(store.fingerprint, KEYS[1])).write_bytes(b"")
    assert read(store, 1) == {1: None}
    write(store, 4)
    assert all(KEYS[number] in store for number in (2, 3, 4)) and store._total == 3 * FILE
    store.close()


def test_a_disk_that_stalls_takes_no_more_slots(tmp_path, monkeypatch):
    """Pages that are in host memory stay; what comes late is taken, and then more is read."""
    memory = Memory()
    store = memory.host_pages.open(tmp_path)
    write(store, 1, 2)
    host = HostTier(3, memory)
    assert all(host.save(KEYS[number], number) for number in (10, 11, 12))
    read = store.read
    monkeypatch.setattr(store, "read", lambda key: None)
    assert host.fetch([KEYS[1]]) == {KEYS[1]}
    monkeypatch.setattr(host_tier, "STALLED_SECONDS", 0.0)
    assert host.fetch([KEYS[2]]) == set() and len(host) == 2
    monkeypatch.setattr(store, "read", read)
    read(KEYS[1])
    while not store._read.qsize():
        time.sleep(0.001)
    assert host.fetch([KEYS[2]]) == {KEYS[2]} and KEYS[1] in host
    store.close()


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_pages_of_the_device_push_out_none_that_is_not_on_disk(tmp_path, slots):
    memory = Memory()
    store = memory.host_pages.open(tmp_path)
    host = HostTier(slots, memory)
    for number in range(3):
        assert host.save(KEYS[number], number)
    kept = [key for key in KEYS[:3] if key in host]
    host.persist({KEYS[number]: number for number in (3, 4, 5)}, 10)
    assert {*kept, *KEYS[3:6]} == {key for key in KEYS if key in store}
    store.close()


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.long)])
def test_at_random(tmp_path, monkeypatch, count, window):
    """Requests over the device, the host and a disk that is too small and stalls, with preemptions,
    samples, aborts and restarts, 100,000 in all: the mock checks each page that is read, and no
    place for a page is lost."""
    rng = random.Random(count)
    prefixes = [prompt_of(number, rng.randint(8, 28)) for number in range(12)]
    seen, slots = collections.Counter[str](), 24
    while seen["requests"] < count:
        engine, runner = mock_engine(
            num_pages=24,
            chunk=32,
            steps=2,
            window=window,
            host_pages=slots,
            folder=tmp_path,
            disk_pages=100,
            reserve_tokens=rng.choice([1, 5]),
        )
        store, host = runner.host_pages.store, engine.pools[0].host
        assert store is not None and host is not None
        live: list[int] = []
        for _ in range(rng.randint(20, 100)):
            for _ in range(rng.randint(0, 4)):
                prompt = [*rng.choice(prefixes), *prompt_of(rng.randrange(4), rng.randint(1, 12))]
                params = {"n": rng.choice([1, 1, 2]), "ignore_eos": rng.random() < 0.9}
                live.append(engine.add_request(ask(prompt, rng.choice([1, 1, 2, 4, 20]), **params)))
            if rng.random() < 0.1 and live:
                engine.abort_request(rng.choice(live[-8:]))
            engine.step()
            while len(engine._scheduler.waiting) > 8:
                engine.step()
            assert runner.host_pages.slots.keys().isdisjoint(host._reading.values())
            assert len(runner.host_pages.slots) + len(host._reading) <= slots
        with monkeypatch.context() as stalled:  # nobody waits for what is read
            stalled.setattr(host_tier, "STALLED_SECONDS", 0.0)
            drain(engine)
        check_empty(engine)
        while store._read.qsize() < len(host._reading):
            time.sleep(0.001)
        engine.step()
        assert not host._reading and len(host._free) + len(host._slot_of) == slots
        assert not host._held and not host._loading and not host._moves
        if rng.random() < 0.5:
            engine.persist_prefix_cache(10)
        assert not store.misses["damaged"] and not store.misses["write"]
        seen.update(requests=len(live), preempted=engine.stats.preemptions)
        seen.update(from_host=host.loaded, from_disk=store.loaded)
        store.close()
    assert min(seen["from_host"], seen["from_disk"]) > seen["requests"] / 10
    assert seen["preempted"] or window


@functools.cache
def model(seed: int) -> skv.Model:
    hf = tiny.hf_config(num_hidden_layers=5, num_key_value_layers=1, key_value_group_size=2)
    return tiny.model_of(hf, tiny.tensors_for(hf, seed))


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ({"kv_cache_dtype": "int8"}, None),
        ({"prefix_cache_form": "boundary"}, None),
        pytest.param({"kv_cache_dtype": "int8"}, "1x2", marks=pytest.mark.long),
    ],
)
def test_a_model_goes_on_from_disk(tmp_path, form, shape):
    """Bytes of an int8 cache, with scales, or boundary states, over two engines; other weights find
    nothing."""
    fields = {"ignore_eos": True, "logprobs": 0}
    requests = [ask((*prompt, *prompt)[:60], 4, **fields) for prompt in prompts_of(3, 6)]
    memory = {"prefix_cache_host": 2**22, "prefix_cache_disk": 2**26, "prefix_cache_dir": tmp_path}

    def engine_of() -> tuple[Engine, PageStore]:
        chosen = small(**form, **memory)
        engine = Engine.from_model(model(0), chosen, mesh=shape and make_mesh(shape))
        store = engine.model_runner.host_pages.store
        assert store is not None
        return engine, store

    first, store = engine_of()
    expected = answers_of(first, requests)
    first.persist_prefix_cache(10)
    assert store.saved > 20
    kept = {path.name: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(UsageError, match="another process uses it"):
        build_model_runner(model(0), first.options)  # before anything is compiled
    runner, gone = weakref.ref(first.model_runner), weakref.ref(store)
    gc.collect()
    gc.disable()
    del first, store
    gc.enable()
    assert runner() is gone() is None, "nothing refers to them in a circle"
    second, store = engine_of()
    check_equal(answers_of(second, requests), expected, atol=1e-5)
    assert store.loaded > 20 and not store.misses
    assert second.prefix_stats.host_hits == 4 * second.load.tiers[0].loaded
    assert {path.name: path.read_bytes() for path in files(tmp_path)} == kept
    before, loaded = store.fingerprint, store.loaded
    second.update_weights(model(1))
    assert store.fingerprint != before and answers_of(second, requests) != expected
    second.update_weights(model(0))
    check_equal(answers_of(second, requests), expected, atol=1e-5)
    assert store.fingerprint == before
    assert store.loaded == 2 * loaded
    store.close()


def test_what_cannot_be_kept_on_disk_is_refused(tmp_path):
    def refused(text: str, **fields) -> None:
        with pytest.raises(UsageError, match=text):
            Engine.from_model(model(0), small(prefix_cache_host=2**22, **fields))

    folder = {"prefix_cache_dir": tmp_path}
    refused("`prefix_cache_dir` needs `prefix_cache_disk`", **folder)
    refused("`prefix_cache_disk` needs `prefix_cache_dir`", prefix_cache_disk=2**20)
    refused("`prefix_cache_disk`=0.0 MiB is too small: 16 pages", prefix_cache_disk=100, **folder)
    tmp_path.chmod(0o750)
    refused("others can read there", prefix_cache_disk=2**20, **folder)
    with pytest.raises(UsageError, match="`prefix_cache_dir` needs `prefix_cache_host`"):
        small(prefix_cache_disk=2**20, **folder)


def test_a_request_that_was_preempted_looks_on_disk_again():
    """What it had on the device may be there by now."""
    state = RequestState(0, ask([1, 2, 3]))
    state.fetching = set()
    state.preempt(SequenceState(state, 0, 0, [], [], 5))
    assert state.fetching is None
