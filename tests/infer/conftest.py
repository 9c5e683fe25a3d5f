"""A byte-level BPE tokenizer and a tiny checkpoint made on the spot, commands that compile once,
and a list of what XLA compiles."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer.__main__ import main
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.runner.build import build_model_runner
from tests.tiny import hf_config, model_of, tensors_for

CHAT_TEMPLATE = (
    "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one entry with every program that XLA compiles during the test."""
    events: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


LIMIT = 256
"""Positions of `checkpoint`."""
_HF = hf_config(
    vocab_size=320, num_hidden_layers=2, num_key_value_layers=1, max_position_embeddings=LIMIT
)


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory) -> Path:
    """Two layers, one of them lower, and `tokenizer`. No token ends a text."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    skv.save_hf(model_of(_HF, tensors_for(_HF)), path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def greedy(checkpoint) -> Callable[..., list[int]]:
    """`(ids, count)` -> the likeliest tokens that follow, by whole forward passes."""
    model = skv.load(checkpoint)
    forward = jax.jit(
        lambda tokens, swiftkv: skv.logits(model, tokens, swiftkv=swiftkv), static_argnums=1
    )

    @functools.cache
    def tokens(ids: tuple[int, ...], count: int, swiftkv: bool | None) -> list[int]:
        row = np.zeros((1, LIMIT), np.int32)
        row[0, : len(ids)] = ids
        for at in range(len(ids), len(ids) + count):
            row[0, at] = int(np.argmax(forward(row, swiftkv)[0, at - 1]))
        return row[0, len(ids) : len(ids) + count].tolist()

    return lambda ids, count, swiftkv=None: tokens(tuple(ids), count, swiftkv)


@pytest.fixture(scope="session")
def logprobs(checkpoint) -> Callable[[list[int], int], tuple[list[float], bool]]:
    """`(tokens, start)` -> (log-probabilities of tokens[start:], whether each is the likeliest), by
    one pass through all layers."""
    model = skv.load(checkpoint)
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(skv.logits(model, tokens)))

    def score(tokens: list[int], start: int) -> tuple[list[float], bool]:
        row = np.zeros((1, LIMIT), np.int32)
        row[0, : len(tokens)] = tokens
        table = np.asarray(forward(row)[0])[start - 1 : len(tokens) - 1]
        scored = np.asarray(tokens[start:])
        found = table[np.arange(len(scored)), scored].tolist()
        return found, bool((table.argmax(axis=-1) == scored).all())

    return score


@pytest.fixture(scope="session")
def model_runners() -> dict:
    """The model runners that `run` has made."""
    return {}


@pytest.fixture
def run(model_runners, monkeypatch) -> Callable[..., int]:
    """The command in this process. Runs with the same options share what is compiled; each has an
    engine of its own."""

    def from_model(
        model,
        options=None,
        *,
        swiftkv=None,
        mesh=None,
        attention=None,
        donate=False,
        on_compile=None,
    ) -> Engine:
        options = options or EngineOptions()
        embed = float(model.llama.embed.sum())
        key = options, swiftkv, mesh, attention, model.config, model.eos_token_ids, embed
        if key not in model_runners:
            model_runners[key] = build_model_runner(
                model, options, swiftkv=swiftkv, mesh=mesh, attention=attention, donate=donate
            )
        runner = model_runners[key]
        return Engine(
            runner, config=runner.config, eos_token_ids=model.eos_token_ids, options=options
        )

    monkeypatch.setattr(Engine, "from_model", from_model)
    # One program of each kind, and the same ones for most tests.
    small = (
        "--compile-cache none --max-num-batched-tokens 16 --max-model-len 128 --decode-steps "
        "3 --page-size 8".split()
    )

    def command(*argv: object) -> int:
        words = [str(word) for word in argv]
        first = words[:1] if words and words[0] in ("generate", "chat", "score") else []
        return main([*first, *small, *words[len(first) :]])

    return command
