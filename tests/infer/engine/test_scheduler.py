"""Scheduling, on a model runner without a model that checks every page that is read."""

import random
import statistics

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.engine.scheduler import MAX_SKIPS
from tests.infer.engine.mock_requests import ask, check_empty, drain, prompt_of
from tests.infer.mock_model_runner import VOCAB, continuation, mock_engine, next_token


def answers(engine: Engine, requests) -> dict[tuple[int, int], list[int]]:
    """(request, sample) -> tokens; checks that every sample ends once, and last."""
    outputs: dict[tuple[int, int], list[int]] = {}
    ended = set()
    for number, event in engine.run(requests):
        key = number, event.sample
        assert key not in ended
        outputs.setdefault(key, []).extend(event.token_ids)
        if event.finish_reason:
            ended.add(key)
    assert ended == set(outputs)
    return outputs


def test_short_prompts_share_a_chunk():
    engine, runner = mock_engine(slots=4, chunk=16, page_size=4)
    list(engine.run([ask(prompt_of(seed, 5)) for seed in range(4)]))
    assert runner.calls[:2] == ["prepare", "prefill 16"]
    assert engine.stats.chunks == 1


def test_a_long_prompt_runs_in_chunks_while_others_decode():
    engine, runner = mock_engine(chunk=8, steps=1)
    engine.add_request(ask(prompt_of(1, 4), 20, ignore_eos=True))
    engine.step()
    engine.add_request(ask(prompt_of(2, 33)))
    drain(engine)
    assert runner.calls[2:10] == ["decode 1", *["prefill 8", "decode 1"] * 3, "prefill 8"]


def test_a_request_without_room_is_skipped_a_bounded_number_of_times():
    engine, _ = mock_engine(slots=4, num_pages=24, max_model_len=96)
    first = engine.add_request(ask(prompt_of(0, 8), 40, ignore_eos=True))
    big = engine.add_request(ask(prompt_of(1, 72), 24, ignore_eos=True))  # the whole pool
    small = [
        engine.add_request(ask(prompt_of(2 + i, 3), 2, ignore_eos=True))
        for i in range(MAX_SKIPS + 20)
    ]
    ends = [event.request_id for event in drain(engine) if event.finish_reason]
    before = ends[: ends.index(big)]
    assert set(before) == {first, *small[:MAX_SKIPS]} and before.index(first) > 3
    assert set(ends[len(before) + 1 :]) == set(small[MAX_SKIPS:])


def test_preempted_requests_in_front_leave_the_bound_on_skips():
    engine, _ = mock_engine(slots=8, num_pages=24, max_model_len=96, max_skips=3, reserve_tokens=4)
    rng = random.Random(0)
    for seed in range(60):
        kinds = ((60, 20), (8, 60), (3, 2))
        length, max_tokens = rng.choices(kinds, (3, 7, 10))[0]
        engine.add_request(ask(prompt_of(seed, length), max_tokens, ignore_eos=True))
    states = list(engine._requests.values())
    drain(engine)
    assert engine.stats.preemptions > 20
    assert max(state.num_times_skipped for state in states) == 3


def test_requests_begin_in_their_order_while_there_is_room():
    engine, _ = mock_engine(slots=2)
    numbers = [
        engine.add_request(ask(prompt_of(seed, length), 2, ignore_eos=True))
        for seed, length in enumerate((30, 3, 20, 5, 40, 3))
    ]
    starts = {event.request_id: event.timing.started or 0.0 for event in drain(engine)}
    assert sorted(numbers, key=starts.__getitem__) == numbers


def waits(max_skips: int, seed: int) -> dict[int, list[float]]:
    """Length -> how long the device worked until each request's first output, where a decode call
    takes as long as a full chunk; each request is skipped `max_skips` times at most."""
    engine, _ = mock_engine(
        slots=16,
        num_pages=520,
        chunk=256,
        max_model_len=2048,
        page_size=4,
        steps=8,
        max_skips=max_skips,
    )
    rng = random.Random(seed)
    lengths = rng.choices((64, 512, 2048), (12, 3, 1), k=120)
    ids = [
        engine.add_request(ask(prompt_of(n, length - 60), rng.randint(20, 60), ignore_eos=True))
        for n, length in enumerate(lengths)
    ]
    found: dict[int, float] = {}
    while engine.has_work:
        worked = engine.stats.prefilled_tokens / 256 + engine.stats.decode_calls
        found |= {
            event.request_id: worked for event in engine.step() if event.request_id not in found
        }
    check_empty(engine)
    return {
        length: [found[id] for id, own in zip(ids, lengths, strict=True) if own == length]
        for length in set(lengths)
    }


def test_long_and_short_requests_share_memory():
    """Requests of 4k, 32k and 128k tokens (here a 32nd), in memory for one long one: short ones
    wait less, and long ones at most a tenth longer, than in strict order."""
    strict, fair = ([waits(skips, seed) for seed in range(4)] for skips in (0, MAX_SKIPS))

    def ratio(length: int) -> float:
        return statistics.mean(
            statistics.mean(a[length]) / statistics.mean(b[length])
            for a, b in zip(fair, strict, strict=True)
        )

    assert ratio(64) < 0.75 and ratio(512) < 0.95 and ratio(2048) < 1.1


def test_prefill_keeps_up_with_decoding():
    """A chunk for each prompt, and five calls of decoding: the slots are full nearly all the
    time, and no sequence waits for more chunks than it decodes steps."""
    engine, _ = mock_engine(slots=16, num_pages=512, chunk=16, steps=8)
    for seed in range(64):
        engine.add_request(ask(prompt_of(seed, 17), 40, ignore_eos=True))
    while engine.has_work:
        chunks = engine.stats.chunks
        engine.step()
        assert engine.stats.chunks - chunks <= 8
    assert engine.stats.chunks == 64
    assert engine.stats.decode_calls <= 1.2 * 64 * 5 / 16


def test_offline_runs_fill_the_slots_before_they_decode():
    """With more chunks before a call than it has steps, every call decodes full rows."""
    engine, _ = mock_engine(slots=16, num_pages=512, chunk=16, steps=8, max_prefill_chunks=32)
    for seed in range(64):
        engine.add_request(ask(prompt_of(seed, 17), 40, ignore_eos=True))
    engine.step()
    assert engine.stats.chunks == 16
    while engine.has_work:
        engine.step()
    assert engine.stats.chunks == 64
    assert engine.stats.decode_calls == 64 * 5 // 16


def test_the_same_requests_leave_the_same_slots_and_pages():
    """Processes that make the same calls hold the same pages, whatever else is in their memory."""
    left, junk = [], []
    for attempt in range(8):
        junk.append([object() for _ in range(1000 * attempt)])
        engine, _ = mock_engine(slots=12, num_pages=64)
        for seed in range(4):
            engine.abort_request(engine.add_request(ask(prompt_of(seed, 6), 4, n=3)), 1)
            junk.append([object() for _ in range(attempt * seed)])
        drain(engine)
        left.append(
            (engine._scheduler._free_slots, engine.pools[0]._free, list(engine.pools[0]._unused))
        )
    assert all(one == left[0] for one in left)


def test_prefixes_are_shared_with_what_runs_and_what_ran():
    engine, _ = mock_engine(chunk=32)
    prefix = prompt_of(5, 16)
    prompts = [[*prefix, *prompt_of(seed, 3)] for seed in range(3)]
    cached = {
        number: event.num_cached_tokens
        for number, event in engine.run([ask(prompt) for prompt in prompts])
    }
    assert cached == {
        0: 0,
        1: 16,
        2: 16,
    }  # the second finds what the first writes in the same chunk
    again = list(engine.run([ask(prompts[0])]))
    assert again[0][1].num_cached_tokens == 16  # of 19: whole pages, and never the last token
    assert engine.prefix_stats.hits == 48


@pytest.mark.parametrize(("count", "cached"), [(12, 16), (11, 16), (10, 12)])
def test_what_was_generated_is_shared_too(count, cached):
    """Whole pages of it, and not the last token, which is not cached."""
    engine, _ = mock_engine()
    prompt = prompt_of(3, 6)
    reply = continuation(prompt, count, ends=False)
    list(engine.run([ask(prompt, count, ignore_eos=True)]))
    ((_, event), *_) = engine.run([ask([*prompt, *reply, *prompt_of(4, 3)])])
    assert event.num_cached_tokens == cached


def test_a_fully_cached_prompt_needs_no_prefill():
    engine, runner = mock_engine()
    prompt = prompt_of(3, 9)
    list(engine.run([ask(prompt)]))
    runner.calls.clear()
    assert answers(engine, [ask(prompt)]) == {(0, 0): continuation(prompt, 8)}
    assert not any(call.startswith("prefill") for call in runner.calls)


def test_salts_are_not_shared():
    engine, _ = mock_engine()
    prompt = prompt_of(3, 17)
    for cache_salt, cached in (("a", 0), ("b", 0), ("a", 16)):
        ((_, event), *_) = engine.run(
            [Request(prompt, SamplingParams(max_tokens=2), cache_salt=cache_salt)]
        )
        assert event.num_cached_tokens == cached


@pytest.mark.parametrize("length", [1, 4, 5, 7, 13])
def test_samples_of_one_prompt_share_its_prefill(length):
    engine, _ = mock_engine(chunk=16)
    prompt = prompt_of(9, length)
    found = answers(engine, [ask(prompt, 9, n=4)])
    assert found == {(0, sample): continuation(prompt, 9, sample) for sample in range(4)}
    assert engine.stats.prefilled_tokens == length - 1
    check_empty(engine)


def test_requests_that_can_never_run_are_refused():
    engine, _ = mock_engine()
    for request, message in (
        (ask([]), "the prompt must not be empty"),
        (ask([VOCAB]), f"token id {VOCAB} is outside"),
        (ask([1] * 60), "60 tokens, with 8 new ones that is 68, above the limit of 64"),
        (ask([1], n=5), "`n`=5 samples do not fit into `max_num_seqs`=4"),
        (ask([1], stop_token_ids=(VOCAB,)), str(VOCAB)),
        (ScoreRequest([1, 2], 2), "`start`=2 must be from 1 to 1"),
        (ScoreRequest([1, 2], 0), "`start`=0 must be from 1 to 1"),
        (ScoreRequest([1, 2], 1, top_logprobs=21), "`top_logprobs`=21"),
        (ScoreRequest([1] * 65, 1), "65 tokens are above the limit of 64"),
        ([1, 2], "`request` must be a Request or a ScoreRequest, got list"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.add_request(request)  # pyright: ignore[reportArgumentType]
    assert not engine.has_work
    small, _ = mock_engine(num_pages=16)
    with pytest.raises(
        UsageError, match="the request needs 48 pages of KV cache and 3 slots, there are 16 and 4"
    ):
        small.add_request(ask([1] * 4, 60, n=3))


def test_a_prompt_aborted_before_it_decodes_leaves_no_unwritten_page():
    """Its last token is the input of the first decode step, which never ran."""
    engine, _ = mock_engine(page_size=4)
    prompt = prompt_of(3, 8)
    request_id = engine.add_request(ask(prompt, 4))
    engine.step(decode=False)
    engine.abort_request(request_id)
    longer = [*prompt, 1, 2, 3, 4, 5]
    assert answers(engine, [ask(longer, 4)]) == {(0, 0): continuation(longer, 4)}


def test_a_sample_aborted_before_it_begins_has_no_output():
    engine, _ = mock_engine(slots=2, chunk=4)
    prompt = prompt_of(7, 14)
    busy = engine.add_request(ask(prompt_of(8, 4), 3, n=2, ignore_eos=True))
    waiting, prefilling = engine.add_request(ask(prompt, 6, n=2)), None
    engine.abort_request(waiting, 0)
    outputs = []
    while engine.has_work:
        outputs += [(event.request_id, event.sample) for event in engine.step()]
        if prefilling is None and (busy, 0) in outputs:
            prefilling = engine.add_request(ask(prompt[:9], 6, n=2))
            engine.abort_request(prefilling, 1)
    assert {sample for id, sample in outputs if id == waiting} == {1}
    assert {sample for id, sample in outputs if id == prefilling} == {0}
    one = engine.add_request(ask(prompt, 6))
    engine.abort_request(one, 0)
    assert not engine.has_work
    check_empty(engine)


def test_pages_of_own_keys_and_values_are_not_shared():
    """Only whole pages before the first of those tokens; a later turn computes the answer again."""
    mock, _ = mock_engine(page_size=4, exact_tail=3)
    prompt = list(range(1, 11))
    first = Request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    reply = [token for _, output in mock.run([first]) for token in output.token_ids]
    turn = Request([*prompt, *reply, 5, 6], SamplingParams(max_tokens=4))
    for request, cached in (
        (first, 4),  # positions 0 to 3; own ones begin at 7
        (turn, 4),
        (turn, 16),  # own ones begin at 18
        (ScoreRequest(turn.prompt, 14), 8),
    ):
        outputs = [output for _, output in mock.run([request])]
        assert outputs[0].num_cached_tokens == cached, request
    assert mock.pages_in_use == 0


@pytest.mark.parametrize("seed", range(16))
def test_at_random(seed):
    """Requests of all kinds come, go and are aborted at any moment; every answer is right, and
    nothing leaks."""
    rng, kinds = random.Random(seed), random.Random(f"kinds {seed}")
    dp_size, context = rng.choice([1, 1, 2]), rng.choice([None, 17])
    engine, runner = mock_engine(
        dp_size=dp_size,
        slots=rng.randint(1, 4),
        num_pages=rng.randint(16, 40),
        chunk=rng.choice([5, 8, 16]),
        tiles=rng.randint(1, 9),
        steps=rng.randint(1, 4),
        context=context,
        enable_prefix_caching=rng.random() < 0.8,
        reserve_tokens=kinds.choice([1, 2, 5, 9, 512]),
        structured_outputs=True,
        single_step_rows=kinds.choice([0, 0, 1, 2]),
        window=random.Random(f"window {seed}").choice([None, 1, 3, 8, 21]),
        exact_tail=[None, 0, 1, 3, 9][seed % 5],
        width=random.Random(f"width {seed}").choice([1, 1, 2, 3, 4]),
        first_tokens=dp_size == 1 and seed % 2 == 0,
    )
    prefixes = [prompt_of(number, rng.randint(1, 24)) for number in range(3)]
    live: dict[int, tuple[Request | ScoreRequest, dict[int, list[int]]]] = {}
    gone: set[tuple[int, int]] = set()
    finished = 0

    def new() -> None:
        prompt = [*rng.choice(prefixes), *prompt_of(rng.randrange(6), rng.randint(0, 12))]
        if rng.random() < 0.25 and len(prompt) > 1:
            request: Request | ScoreRequest = ScoreRequest(prompt, rng.randint(1, len(prompt) - 1))
        else:
            n = rng.randint(1, min(3, runner.shapes.slots))
            request = ask(
                prompt, rng.randint(1, 64 - len(prompt)), n=n, ignore_eos=rng.random() < 0.5
            )
        try:
            live[engine.add_request(request)] = request, {}
        except UsageError as error:
            assert "the request needs" in str(error)

    for _ in range(400):
        for _ in range(rng.choice([0, 0, 1, 3])):
            new()
        if live and rng.random() < 0.2:
            id = rng.choice(list(live))
            aborted, _ = live[id]
            n = aborted.params.n if isinstance(aborted, Request) else 1
            sample = rng.choice([None, *range(n)])
            engine.abort_request(id, sample)
            gone |= {(id, number) for number in (range(n) if sample is None else [sample])}
            if sample is None:
                live.pop(id)
        for event in engine.step():
            assert (event.request_id, event.sample) not in gone, "output of an aborted sample"
            request, outputs = live[event.request_id]
            outputs.setdefault(event.sample, []).extend(event.token_ids)
            if event.finish_reason:
                finished += 1
                check(request, event.sample, outputs[event.sample])
        check_in_flight(engine)
    for id in list(live):
        engine.abort_request(id)
    drain(engine)
    check_empty(engine)
    assert finished > 20


def check_in_flight(engine: Engine) -> None:
    """What is planned of a sequence is what the calls emit that are sent and not read."""
    for sequence in engine._scheduler.running.values():
        calls = [sent.call for sent in engine._sent if sequence in sent.sequences]
        planned = sum(call.steps for call in calls), sum(call.most for call in calls)
        assert sequence.in_flight == planned


def check(request: Request | ScoreRequest, sample: int, tokens: list[int]) -> None:
    if isinstance(request, ScoreRequest):
        assert tokens == [
            next_token(request.tokens[:at]) for at in range(request.start, len(request.tokens))
        ]
    else:
        params = request.params
        assert tokens == continuation(
            request.prompt, params.max_tokens, sample, ends=not params.ignore_eos
        )
