"""The engine: prompts in, tokens out. It knows nothing of text.

Prompts run in groups of `max_num_seqs` rows: prefill the group, then decode until every row has finished. Rows that
finish early wait for their group; nothing but the group loop knows that, so that slots can be refilled later.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Container, Iterator, Sequence, Sized
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from ..attention import Attention
from ..bundle import Model
from ..cache import bytes_per_token, cache_sharding, init_cache, row_sharding
from ..config import Config
from ..errors import UsageError
from ..pallas_kernels import Implementation
from ..sharding import DATA, llama_shardings, mesh_of, swiftkv_shardings
from .programs import DecodeState, decode, prefill_chunk
from .sampling import Sampling, SamplingParams, make_sampling
from .weights import served_config, serving_weights

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens of one row."""

    row: int
    """Index of the prompt."""
    tokens: list[int]
    """Without the end token; empty if that was all there was."""
    finish_reason: FinishReason | None
    """Set on the row's last event: an end token, or `max_tokens` reached."""


@dataclasses.dataclass
class Stats:
    """What the engine has done so far. Seconds are waited-for results, without what callers do in between."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None
    """From the start of the first group to the first tokens of its rows."""


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    swiftkv: bool | None = None,
    ignore_eos: bool = False,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    decode_steps: int = 8,
    mesh: Mesh | None = None,
    attention: Implementation | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, without the end token.

    `swiftkv` False runs the unmodified teacher, True the student, None the student if there is a delta. Sampling
    parameters are those of `SamplingParams`, the rest those of `Engine`. Raises `ValueError` that names the prompt or
    parameter. Each call copies the layers into serving form: for many calls, keep an `Engine`.
    """
    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed, ignore_eos)
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, Sized)), default=1)
    engine = Engine(
        model,
        swiftkv=swiftkv,
        max_model_len=max_model_len or min(longest + max_tokens, model.config.max_position_embeddings),
        max_num_seqs=min(max_num_seqs, max(len(prompts), 1)),
        decode_steps=decode_steps,
        mesh=mesh,
        attention=attention,
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    for event in engine.stream(prompts, params):
        outputs[event.row] += event.tokens
    return outputs


class Engine:
    """A model in serving form, with the shapes its programs are compiled for."""

    def __init__(
        self,
        model: Model,
        *,
        swiftkv: bool | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        chunks: Sequence[int] = (512, 64),
        decode_steps: int = 8,
        mesh: Mesh | None = None,
        attention: Implementation | None = None,
    ):
        """`max_model_len` bounds prompt plus new tokens of a row; None is all the positions the model was made for.

        Every group has `max_num_seqs` rows, filled or not. Prefill uses the largest of `chunks` that is not longer than
        what is left, and pads the last; each must be a multiple of the smallest. Tokens come out `decode_steps` at a time.
        With a `mesh` (None: the one the model was loaded on), rows are split over `data`, heads and widths over `model`.
        `attention` names an implementation of attention; None chooses for the device.
        """
        self.swiftkv = model.uses_swiftkv(swiftkv)
        self.config = served_config(model.config, self.swiftkv)
        self.end_ids = model.eos_token_ids
        self.dtype = model.dtype
        self.chunks = tuple(sorted(chunks, reverse=True))
        if not self.chunks or self.chunks[-1] < 1 or any(size % self.chunks[-1] for size in self.chunks):
            raise UsageError(f"chunks={tuple(chunks)} must be positive multiples of the smallest")
        if max_num_seqs < 1 or decode_steps < 1:
            raise UsageError(f"{max_num_seqs=} and {decode_steps=} must be at least 1")
        positions = self.config.max_position_embeddings
        self.max_model_len = positions if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= positions:
            raise UsageError(f"--max-model-len {max_model_len} must be from 2 to the model's {positions} positions")
        # Whole chunks: XLA moves a write that would run over the end, silently.
        self.cache_len = -(-self.max_model_len // self.chunks[-1]) * self.chunks[-1]
        self.decode_steps = decode_steps
        self.stats = Stats()

        self.max_num_seqs = max_num_seqs
        # Everything is committed to its place from the start: a program compiled for uncommitted buffers would be compiled
        # again for the committed ones that it returns.
        mesh = mesh or mesh_of(model.llama.embed)
        self._attention = Attention(mesh, attention)
        self._cache_sharding = None
        self._row_sharding: Sharding = SingleDeviceSharding(min(model.llama.embed.devices(), key=lambda device: device.id))
        if mesh is not None:
            self.max_num_seqs = -(-max_num_seqs // mesh.shape[DATA]) * mesh.shape[DATA]
            self._cache_sharding, self._row_sharding = cache_sharding(self.config, mesh), row_sharding(mesh)
            model = place(model, mesh)
        self.weights = serving_weights(model.llama, model.swiftkv if self.swiftkv else None)

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.config, self.dtype)

    # The two programs ---------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> DecodeState:
        """Cache all but the last token of up to `max_num_seqs` prompts, ready to decode `max_tokens` each.

        Does not wait for the device, nor check the prompts.
        """
        count = len(prompts)
        tokens = np.zeros((self.max_num_seqs, self.cache_len), np.int32)
        last, length, budget = np.zeros((3, self.max_num_seqs), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - 1] = prompt[:-1]
            last[row], length[row] = prompt[-1], len(prompt) - 1
        budget[:count] = max_tokens

        cache = init_cache(self.config, self.max_num_seqs, self.cache_len, self.dtype, self._cache_sharding or self._row_sharding)
        for offset, size in chunk_plan(int(length.max()), self.chunks):
            cache = self._prefill_chunk(tokens[:, offset : offset + size], offset, cache)
        return DecodeState(cache, *self._put((last, length, budget)))

    def decode(self, sampling: Sampling, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """Up to `decode_steps` tokens per row, -1 after its end (see `programs.decode`). Does not wait for the device."""
        return decode(self.config, self.weights, sampling, state, steps=self.decode_steps, attention=self._attention)

    def sampling(self, params: SamplingParams, rows: Sequence[int]) -> Sampling:
        """`params` for the prompts numbered `rows`, and for the unfilled rows of their group."""
        padded = [*rows, *[0] * (self.max_num_seqs - len(rows))]
        return self._put(make_sampling(params, padded, self.end_ids))

    def warm_up(self) -> None:
        """Compile every program, by running it once. After this nothing compiles again."""
        state, sampling = self.prefill([[0]], 1), self.sampling(SamplingParams(), [0])
        cache = state.cache
        for size in self.chunks:
            if size <= self.cache_len:
                cache = self._prefill_chunk(np.zeros((self.max_num_seqs, size), np.int32), 0, cache)
        jax.block_until_ready(self.decode(sampling, dataclasses.replace(state, cache=cache)))

    def _prefill_chunk(self, tokens: np.ndarray, offset: int, cache):
        tokens = self._put(tokens)
        return prefill_chunk(self.config, self.weights, tokens, np.int32(offset), cache, attention=self._attention)

    def _put(self, rows):
        return jax.device_put(rows, self._row_sharding)

    # The loop -----------------------------------------------------------------------------------------------------

    def stream(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, cancelled: Container[int] = ()) -> Iterator[Event]:
        """Events of all prompts as they come; those of a row in order, ended by its finish reason.

        Every prompt is checked before the first runs. Rows that the caller puts into `cancelled` emit nothing more.
        """
        for row, prompt in enumerate(prompts):
            check_prompt(self.config, row, prompt, params.max_tokens, self.max_model_len)

        def groups():
            for start in range(0, len(prompts), self.max_num_seqs):
                rows = range(start, min(start + self.max_num_seqs, len(prompts)))
                yield from self._run_group(rows, [prompts[row] for row in rows], params, cancelled)

        return groups()

    def _run_group(self, rows: range, prompts, params: SamplingParams, cancelled: Container[int]) -> Iterator[Event]:
        start = time.perf_counter()
        sampling = self.sampling(params, rows)
        state = jax.block_until_ready(self.prefill(prompts, params.max_tokens))
        self.stats.prompt_tokens += sum(len(prompt) for prompt in prompts)
        self.stats.prefill_seconds += time.perf_counter() - start
        end_ids = () if params.ignore_eos else self.end_ids
        left = dict.fromkeys(rows, params.max_tokens)
        while left:
            step_start = time.perf_counter()
            state, emitted = self.decode(sampling, state)
            emitted = np.asarray(emitted).tolist()
            self.stats.decode_seconds += time.perf_counter() - step_start
            if self.stats.first_token_seconds is None:
                self.stats.first_token_seconds = time.perf_counter() - start
            for row in list(left):
                if row in cancelled:
                    del left[row]
                    continue
                tokens = [token for token in emitted[row - rows.start] if token >= 0]
                self.stats.new_tokens += len(tokens)
                left[row] -= len(tokens)
                ended = tokens[-1] in end_ids
                reason = "stop" if ended else "length" if left[row] == 0 else None
                yield Event(row, tokens[:-1] if ended else tokens, reason)
                if reason:
                    del left[row]


def check_prompt(config: Config, row: int, prompt: Sequence[int], max_tokens: int, max_model_len: int) -> None:
    """Raise `UsageError` (a `ValueError`) if the prompt numbered `row` cannot run."""
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, str):
        raise UsageError(f"prompt {row} must be a list of token ids, got {type(prompt).__name__}")
    if len(prompt) == 0:
        raise UsageError(f"prompt {row} is empty")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(f"prompt {row} must be a list of token ids, that is of whole numbers")
    if (outside := ids[(ids < 0) | (ids >= config.vocab_size)]).size:
        raise UsageError(f"prompt {row}: token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
    if len(ids) + max_tokens > max_model_len:
        raise UsageError(
            f"prompt {row} has {len(ids)} tokens, with {max_tokens} new ones that is {len(ids) + max_tokens}, above the limit of "
            f"{max_model_len}: shorten it, lower --max-tokens or raise --max-model-len"
        )


def place(model: Model, mesh: Mesh) -> Model:
    """The weights on `mesh`; those that are already stay where they are."""
    shardings = llama_shardings(model.config, mesh)
    if model.llama.upper_qkv is None:
        shardings = dataclasses.replace(shardings, upper_qkv=None)
    llama = jax.device_put(model.llama, shardings)
    delta = None if model.swiftkv is None else jax.device_put(model.swiftkv, swiftkv_shardings(model.config, mesh))
    return dataclasses.replace(model, llama=llama, swiftkv=delta)


def chunk_plan(length: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(offset, size) of each prefill chunk: the largest that does not overshoot, and at the end the smallest, padded."""
    offset = 0
    while offset < length:
        size = next((size for size in chunks if size <= length - offset), chunks[-1])
        yield offset, size
        offset += size
