"""Requests to an engine with a mock model runner, and its state after them."""

import random

from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request, RequestOutput
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from tests.infer.mock_model_runner import VOCAB


def ask(prompt, max_tokens: int = 8, **fields) -> Request:
    return Request(prompt, SamplingParams(max_tokens=max_tokens, **fields))


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def check_empty(engine: Engine) -> None:
    assert engine.pages_in_use == 0
    assert not engine._scheduler.has_work and not engine._requests and not engine._scores
    assert sorted(slot for slots in engine._scheduler._free_slots for slot in slots) == list(
        range(engine.options.max_num_seqs)
    )


def drain(engine: Engine) -> list[RequestOutput]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events
