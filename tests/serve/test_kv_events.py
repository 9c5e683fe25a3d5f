"""Events of the prefix cache: vLLM's wire format, and the queue before the publisher."""

import socket
import sys
import time

import msgspec
import numpy as np
import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.cache_events import PageRemoved, PagesStored
from swiftkv_jax.serve.distributed.kv_events import (
    AllBlocksCleared,
    Batches,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    block_hash,
    encode_batch,
)
from swiftkv_jax.serve.options import KVEventsConfig

KEYS = [bytes(range(start, start + 32)) for start in (0, 100, 200)]
HASHES = [0x0001020304050607, 0x6465666768696A6B, 0xC8C9CACBCCCDCECF]


def stored(keys, parent=None, salt="", adapter="") -> PagesStored:
    return PagesStored(keys, parent, np.arange(2 * len(keys), dtype=np.int32), salt, adapter)


def test_batches_are_those_of_vllm():
    assert [block_hash(key) for key in KEYS] == HASHES
    pages = stored(KEYS[:2], salt="s"), stored(KEYS[2:], KEYS[1], "s", adapter="it,3")
    events = [*pages, PageRemoved(KEYS[0])]
    found = msgspec.msgpack.decode(encode_batch(events, 2, 1757500000.25))
    common = {"type": "BlockStored", "block_size": 2, "lora_id": None, "lora_name": None}
    common |= {"medium": "GPU"}
    first = {"block_hashes": HASHES[:2], "parent_block_hash": None, "token_ids": [0, 1, 2, 3]}
    second = {"block_hashes": HASHES[2:], "parent_block_hash": HASHES[1], "token_ids": [0, 1]}
    assert found == [
        1757500000.25,
        [
            common | first | {"extra_keys": [["s"], None]},
            common | second | {"lora_name": "it"},
            {"type": "BlockRemoved", "block_hashes": HASHES[:1], "medium": "GPU"},
        ],
        0,
    ]
    assert msgspec.msgpack.decode(encode_batch(None, 2, 1.0)) == [
        1.0,
        [{"type": "AllBlocksCleared"}],
        0,
    ]


def test_the_queue_drops_what_it_has_no_room_for():
    batches = Batches(KVEventsConfig(endpoint="", max_queue_size=2), 2)
    start = time.monotonic()
    for number in range(5):
        batches.put([PageRemoved(KEYS[number % 3])])
    assert time.monotonic() - start < 1 and (batches.num_batches, batches.num_dropped) == (5, 3)
    assert [found[0] for found in (batches.get(0.01), batches.get(0.01)) if found] == [0, 1]
    assert batches.get(0.01) is None
    batches.put([PageRemoved(KEYS[0])])
    found = batches.get(0.01)
    assert found is not None and found[0] == 5, "a gap says that some are missing"


def test_a_replay_has_the_last_batches():
    batches = Batches(KVEventsConfig(endpoint="", buffer_steps=3), 2)
    sent = []
    for _ in range(5):
        batches.put([PageRemoved(KEYS[0])])
        sent.append(batches.get(0.01))
    assert list(batches.replay(0)) == sent[2:] and list(batches.replay(4)) == sent[4:]
    assert list(batches.replay(5)) == []


def test_the_engine_hands_over_what_it_caches(start):
    """Through a stand-in for the publisher: what arrives are the pages of the prompt."""
    running, found = start(), []
    thread = running.app.service.engine
    thread._on_cache_events, thread._cache_events = (
        found.append,
        thread._engine.record_cache_events(),
    )
    running.post("/v1/completions", {"prompt": "hello there", "max_tokens": 1, "seed": 1})
    running.check_empty()
    pages = [event for events in found for event in events if isinstance(event, PagesStored)]
    assert sum(len(event.keys) for event in pages) == 2
    assert [token for event in pages for token in event.token_ids] == [
        *running.app.tokenizer("hello th")["input_ids"]
    ]


def test_a_publisher_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UsageError, match=r"pip install 'swiftkv-jax\[serve,kv-events\]'"):
        KVEventPublisher(KVEventsConfig(endpoint="tcp://*:1"))


def test_null_publishes_nothing():
    text = '{"endpoint": "tcp://*:1", "enable_kv_cache_events": true, "publisher": "null"}'
    assert not KVEventsConfig.from_json(text).is_enabled
    assert KVEventsConfig.from_json('{"endpoint": "tcp://*:1"}').is_enabled


# Subscribers ----------------------------------------------------------------------------------

TOPIC = "kv@127.0.0.1@tiny"


@pytest.fixture
def connected():
    """Makes sockets of a kind, by its name, connected to an endpoint; None connects to none."""
    import zmq  # pyright: ignore[reportMissingImports]

    context, sockets = zmq.Context(), []

    def connect(kind: str, endpoint: str | None):
        sockets.append(context.socket(getattr(zmq, kind)))
        if endpoint is not None:
            sockets[-1].connect(endpoint)
        return sockets[-1]

    yield connect
    for one in sockets:
        one.close(linger=0)
    context.term()


def receive(subscriber, *, seconds: float = 10.0) -> tuple[int, KVEventBatch]:
    assert subscriber.poll(1000 * seconds), "no message"
    topic, number, payload = subscriber.recv_multipart()
    assert topic == TOPIC.encode() and len(number) == 8
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)


def cached_hashes(running) -> set[int]:
    (pool,) = running.app.service.engine._engine.pools
    return {block_hash(key) for key in pool._page_of}


def test_a_subscriber_knows_what_is_cached(start, connected, tmp_path):
    """With what it has missed from a replay; evicted pages among it."""
    endpoint, replay_endpoint = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay_endpoint, topic=TOPIC)
    running = start(engine={"num_pages": 24, "max_model_len": 64}, kv_events_config=config)
    for number in range(3):  # before anyone listens
        body = {"prompt": f"{number} is early", "max_tokens": 8, "ignore_eos": True}
        running.post("/v1/completions", body)
    subscriber = connected("SUB", endpoint)
    subscriber.subscribe(TOPIC)
    time.sleep(0.5)  # what a subscription takes to arrive
    for number in range(20):
        body = {"prompt": f"{number} is a number", "max_tokens": 8, "ignore_eos": True}
        running.post("/v1/completions", body)
    running.check_empty()
    batches = [receive(subscriber)]
    while subscriber.poll(500):
        batches.append(receive(subscriber))
    first = batches[0][0]
    assert first > 0 and [number for number, _ in batches] == list(
        range(first, first + len(batches))
    )
    replay = connected("DEALER", replay_endpoint)
    replay.send_multipart((b"", (0).to_bytes(8, "big")))
    missed = []
    while True:
        assert replay.poll(10_000)
        empty, number, payload = replay.recv_multipart()
        assert empty == b""
        if not payload:
            assert number == b"\xff" * 8
            break
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        missed.append((int.from_bytes(number, "big"), batch))
    assert [number for number, _ in missed] == list(range(len(missed)))
    assert missed[first:] == batches
    known: set[int] = set()
    kinds = [type(event) for _, batch in missed for event in batch.events]
    assert kinds[0] is AllBlocksCleared and BlockRemoved in kinds
    for _, batch in missed:
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert not known & set(event.block_hashes)
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                known |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                known -= set(event.block_hashes)
    assert known == cached_hashes(running) and known
    text = running.request("GET", "/metrics")[2].decode()
    assert "swiftkv:kv_event_batches_dropped_total" in text
    (count,) = [line for line in text.splitlines() if "kv_event_batches_total{" in line]
    assert float(count.split()[-1]) == len(missed)


def test_a_publisher_may_connect_to_its_subscriber(start, connected):
    subscriber = connected("SUB", None)
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    subscriber.subscribe(TOPIC)
    config = KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", topic=TOPIC)
    running = start(kv_events_config=config)
    subscriber.poll(500)  # what a subscription takes to arrive
    running.post("/v1/completions", {"prompt": "hello there", "max_tokens": 1})
    event = receive(subscriber)[1].events[0]
    if isinstance(event, AllBlocksCleared):
        event = receive(subscriber)[1].events[0]
    assert isinstance(event, BlockStored) and event.block_size == 4


def test_a_replay_that_asks_for_nothing_harms_nobody(start, connected, tmp_path):
    endpoint, replay_endpoint = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    start(kv_events_config=KVEventsConfig(endpoint=endpoint, replay_endpoint=replay_endpoint))
    for content in (b"", b"too long for a number"):
        bad = connected("REQ", replay_endpoint)
        bad.send(content)
        assert not bad.poll(500)
    good = connected("REQ", replay_endpoint)
    good.send((0).to_bytes(8, "big"))
    assert good.poll(10_000) and good.recv_multipart()[0] == bytes(8)


@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://*", "http://*:1", "tcp://*:99999"])
def test_endpoints_that_are_none(endpoint):
    with pytest.raises(UsageError, match="`kv_events_config`: `endpoint`="):
        KVEventPublisher(KVEventsConfig(endpoint=endpoint))


def test_an_endpoint_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = KVEventsConfig(
            endpoint="inproc://a", replay_endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        )
        with pytest.raises(OSError, match="replay_endpoint tcp://"):
            KVEventPublisher(config)
