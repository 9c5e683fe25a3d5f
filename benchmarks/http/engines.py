"""Engines that the cost of HTTP is measured with: one on a device that only keeps time, and one of
a model that two CPU cores can bear."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Seq
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.infer import Engine, EngineOptions
from swiftkv_jax.infer.bench.dummy import dummy_model
from swiftkv_jax.infer.engine.chunk_builder import Limits
from swiftkv_jax.infer.engine.request_state import Chunk, Sequence
from swiftkv_jax.infer.engine.sampler_output import AsyncOutput, SamplerOutput
from swiftkv_jax.infer.runner.shapes import SINGLE_STEP_ROWS, Shapes

from ..hf_baseline import CONFIG as MEDIUM
from ..hf_baseline import TINY

STEP_SECONDS, CHUNK_SECONDS, CHUNK = 0.004, 0.025, 2048
VOCAB, MAX_MODEL_LEN, PAGE = 1024, 4096, 128


class TimedModelRunner:
    """A model runner that takes a device's time, and nothing else. Tokens are 100, 101, ..."""

    def __init__(self, slots: int, steps: int):
        pages = slots * (MAX_MODEL_LEN // PAGE) // 4
        self.shapes = Shapes(
            dp_size=1,
            page_size=PAGE,
            num_pages=pages,
            table_pages=MAX_MODEL_LEN // PAGE,
            slots=slots,
            decode_rows=(slots,),
            decode_steps=steps,
            greedy_programs=False,
            chunks=(CHUNK,),
            spare_tiles=(64,),
            contexts=(None,),
            scoring=False,
            # As the server chooses on a GPU: few sequences decode one token a call.
            single_step_rows=0 if steps == 1 else min(SINGLE_STEP_ROWS, slots),
        )
        self.limits = Limits(slots, CHUNK, CHUNK // PAGE + 64)
        self._remaining: dict[int, int] = {}
        self._busy_until = 0.0
        self.idle_seconds = 0.0
        """Time that the device had nothing to do between two calls."""

    def prepare(self) -> None: ...

    def num_compilations(self) -> int:
        return 0

    def remove_sequences(self, slots: Seq[int]) -> None:
        for slot in slots:
            self._remaining.pop(slot, None)

    def add_sequences(self, sequences: Seq[Sequence]) -> None:
        self._remaining |= {one.slot: one.num_remaining_tokens for one in sequences}

    def update_pages(self, sequences: Seq[Sequence]) -> None:
        pass

    def run_decode_constrained(self, sequences: Seq[Sequence], masks: np.ndarray) -> AsyncOutput:
        raise NotImplementedError("grammars are not timed")

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        self._call(CHUNK_SECONDS * chunk.num_tokens / CHUNK)
        return None

    def run_decode(self, sequences: Seq[Sequence], steps: int) -> AsyncOutput:
        left = np.array([self._remaining[one.slot] for one in sequences])
        for one in sequences:
            self._remaining[one.slot] -= min(steps, self._remaining[one.slot])
        ids = 100 + (left[:, None] + np.arange(steps)) % 26
        ready = self._call(STEP_SECONDS * steps)
        return AsyncOutput((ready, np.where(np.arange(steps) < left[:, None], ids, -1)), "tokens")

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        ready, token = output.result
        if (wait := ready - time.perf_counter()) > 0:
            time.sleep(wait)
        nothing = np.zeros(())
        return SamplerOutput(token, nothing, nothing, nothing)

    def _call(self, seconds: float) -> float:
        """When a call will be over that begins now, or after the one before."""
        now = time.perf_counter()
        if self._busy_until:
            self.idle_seconds += max(now - self._busy_until, 0.0)
        self._busy_until = max(now, self._busy_until) + seconds
        return self._busy_until

    def begin(self) -> None:
        """Count from now on."""
        self._busy_until = self.idle_seconds = 0.0


TIMED = dataclasses.replace(TINY, vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN)
"""Of the timed engine, which runs no layer."""


def make_tokenizer(vocab_size: int) -> Any:
    """Tokens of one and two letters, after them of a number; the last is the end token."""
    letters = [chr(code) for code in range(97, 123)]
    words = [*letters, *(a + b for a in letters for b in letters)]
    names = [*words, *(f"x{i}" for i in range(len(words), vocab_size - 1)), "<|end|>"]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def timed_engine(rows: int, steps: int) -> Engine[TimedModelRunner]:
    """The real engine over a `TimedModelRunner` with `rows` slots and decode calls of `steps`."""
    options = EngineOptions(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=rows, enable_prefix_caching=False
    )
    return Engine(
        TimedModelRunner(rows, steps), config=TIMED, eos_token_ids=(VOCAB - 1,), options=options
    )


def medium_engine(rows: int, steps: int, length: int) -> Engine[Any]:
    """Random weights of `benchmarks/medium` with SwiftKV at half of its layers, in float32, for
    sequences of `length` tokens."""
    options = EngineOptions(
        max_model_len=length,
        max_num_seqs=rows,
        decode_steps=steps,
        single_step_rows=None,  # the server's default
        enable_prefix_caching=False,
    )
    return Engine.from_model(dummy_model(MEDIUM, jnp.float32), options)
