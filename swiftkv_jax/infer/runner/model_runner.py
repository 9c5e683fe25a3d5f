"""The engine's half on the device: weights, state and compiled programs. It does what it is told,
and waits only in `read`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from tqdm import tqdm

from ...attention import Attention
from ...cache import KVCache, bytes_per_token, cache_dtype, cache_shapes, cache_sharding
from ...errors import OutOfMemoryError
from ...mesh import dp_size, mesh_of
from ...model import Model
from ...pallas_kernels import Implementation
from ...sharding import replicated
from ..engine.options import EngineOptions, check_pages, choose_shapes
from ..engine.request_state import Chunk, ScheduledTokens, Sequence
from ..engine.requests import Request
from ..engine.scheduler import Limits
from ..sampling.sampler import SamplerOutput, SamplingMetadata, sampling_row, seen_in_prompt
from .compilation import compile_all
from .decode_state import DecodeBatch, idle, make_rows
from .memory import MemoryPlan, bytes_per_device, host_memory, memory_limit, memory_plan
from .prefill_chunk import INVALID_PAGE, chunk_needs, pack_scored, pack_spans, scored_places
from .programs import DecodeState
from .shapes import COPY_PAGES, ENTER_ROWS, Key, Shapes, lower_all
from .weights import place, served_config, serving_weights


class AsyncOutput(NamedTuple):
    """A result on its way."""

    result: Any
    index: Any = None
    """Which of its entries are wanted; None if only its end is waited for."""


class ModelRunnerBase(Protocol):
    """What the engine asks of a device; a stand-in for tests needs no model."""

    shapes: Shapes
    limits: Limits

    def prepare(self) -> None:
        """Compile everything and take the memory. After this nothing is compiled."""
        ...

    def leave(self, slots: abc.Sequence[int]) -> None:
        """These rows emit nothing more."""
        ...

    def enter(self, samples: abc.Sequence[Sequence]) -> None:
        """These rows decode from the next call on; their prompts are cached."""
        ...

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        """Prefill, then the copies. `read` yields an entry for each scored token, span by span."""
        ...

    def run_decode(self, samples: abc.Sequence[Sequence]) -> AsyncOutput:
        """`read` yields up to `decode_steps` (M) tokens for each of these: B M, -1 where a row has
        ended."""
        ...

    def read(self, handle: AsyncOutput) -> SamplerOutput | None:
        """Wait for a result: NumPy arrays."""
        ...


class ModelRunner:
    """A model in serving form on its devices."""

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        *,
        swiftkv: bool | None,
        mesh: Mesh | None,
        attention: Implementation | None,
        donate: bool = False,
        log: Callable[[str], None],
    ):
        self.swiftkv = model.uses_swiftkv(swiftkv)
        self.config = served_config(model.config, self.swiftkv)
        self.end_ids = model.eos_token_ids
        self.cache_dtype = cache_dtype(options.kv_cache_dtype, model.dtype)
        self.plan: MemoryPlan | None = None
        self._options, self._log = options, log
        # Everything is committed to its place from the start: a program compiled for uncommitted
        # buffers would be another one.
        mesh = mesh or mesh_of(model.llama.embed)
        self._attention = Attention(mesh, attention)
        self._first = (
            min(model.llama.embed.devices(), key=lambda device: device.id)
            if mesh is None
            else mesh.local_devices[0]
        )
        self._place: Sharding = (
            SingleDeviceSharding(self._first) if mesh is None else replicated(mesh)
        )
        self._cache_place = self._place if mesh is None else cache_sharding(self.config, mesh)
        model = model if mesh is None else place(model, mesh)
        self.weights = serving_weights(
            model.llama, model.swiftkv if self.swiftkv else None, donate=donate
        )
        self._memory_limit = memory_limit(self._first, options.memory_utilization)
        self.shapes = choose_shapes(
            self.config,
            options,
            lanes=dp_size(mesh),
            platform=self._first.platform,
            page_bytes=self._page_bytes(options.page_size),
            weight_bytes=bytes_per_device(self.weights),
            memory_limit=self._memory_limit,
            quantized=self.cache_dtype != model.dtype,
        )
        self.limits = Limits(
            max_num_seqs=self.shapes.slots,
            chunk_tokens=self.shapes.chunks[-1],
            max_pieces=self.shapes.pieces(self.shapes.chunks[-1]),
            context_pages=self.shapes.contexts[-1],
            scored_tokens=self.shapes.chunks[-1] if self.shapes.scoring else 0,
        )
        self._compiled: dict[Key, Any] = {}
        self._state: Any = None

    @property
    def kv_bytes_per_token(self) -> int:
        """On all devices together."""
        return bytes_per_token(self.config, self.cache_dtype)

    def _page_bytes(self, page_size: int) -> int:
        """A page of all layers, on one device."""
        page = cache_shapes(self.config, dp_size(self._attention.mesh), page_size, self.cache_dtype)
        return bytes_per_device(self._placed(page))

    def _cache(self) -> KVCache:
        """The shapes of the cache, and where it lives."""
        return self._placed(
            cache_shapes(
                self.config,
                self.shapes.lanes * self.shapes.num_pages,
                self.shapes.page_size,
                self.cache_dtype,
            )
        )

    def _placed(self, cache: KVCache) -> KVCache:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._cache_place),
            cache,
        )

    # Before the first request -------------------------------------------------

    def prepare(self) -> None:
        """Compile every program, check that all fits the device, take the memory, and run each
        program on nothing.

        Raises `OutOfMemoryError` with the figures and the flags to change.
        """
        if self._compiled:
            return
        plan = self._compile()
        if plan.over and self._options.kv_cache_memory is None:
            page_bytes = self._page_bytes(self.shapes.page_size)
            fewer = dataclasses.replace(
                self.shapes, num_pages=self.shapes.num_pages - -(-plan.over // page_bytes)
            )
            self.shapes = check_pages(
                fewer, self.shapes.table_pages * self.shapes.page_size, page_bytes
            )
            plan = self._compile()
        if plan.over:
            raise OutOfMemoryError(
                f"{plan}: lower --kv-cache-memory, --max-num-batched-tokens or --max-num-seqs"
            )
        self.plan = plan
        self._log(
            f"{plan}, for {self.shapes.lanes * self.shapes.num_pages * self.shapes.page_size:,} "
            f"tokens of KV"
        )
        self._state = self._make_state()
        self._run_on_nothing()

    def _compile(self) -> MemoryPlan:
        lowered = lower_all(
            self.config, self.shapes, self.weights, self.cache_dtype, self._attention, self._place
        )
        with tqdm(
            total=len(lowered), desc="compiling", unit="program", disable=None, leave=False
        ) as progress:
            self._compiled = compile_all(lowered, progress.update)
        slots = self.shapes.lanes * self.shapes.slots
        rows = (
            idle(slots, self.shapes.table_pages),
            jax.ShapeDtypeStruct((slots, self.config.vocab_size), jnp.uint16),
        )
        limit = self._memory_limit
        if limit is None and self._first.platform == "cpu":
            limit = host_memory() // (
                1 if self._attention.mesh is None else self._attention.mesh.size
            )
        return memory_plan(self.weights, self._cache(), rows, self._compiled, limit)

    def _make_state(self) -> DecodeState:
        slots = self.shapes.lanes * self.shapes.slots
        cache = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), self._cache()
        )
        rows = jax.device_put(idle(slots, self.shapes.table_pages), self._place)
        return DecodeState(
            cache, rows, jnp.zeros((slots, self.config.vocab_size), jnp.uint16, device=self._place)
        )

    def _run_on_nothing(self) -> None:
        """A first run costs more: on a GPU, XLA records the launches of the first few."""
        nothing: list[list[ScheduledTokens]] = [[] for _ in range(self.shapes.lanes)]
        for _ in range(3 if self._first.platform == "gpu" else 1):
            for key in self._compiled:
                if key[0] in ("prefill", "score"):
                    self._prefill(key, nothing)
                elif key[0] == "decode":
                    self._decode(key, nothing)
            self.leave([0])
            self._copy([[] for _ in nothing], least=1)
            self._enter_seen(0, [])
        jax.block_until_ready(self._state)

    # Steps --------------------------------------------------------------------

    def leave(self, slots: abc.Sequence[int]) -> None:
        for some in itertools.batched(slots, ENTER_ROWS):
            self._put_rows(some, idle(len(some), self.shapes.table_pages))

    def enter(self, samples: abc.Sequence[Sequence]) -> None:
        for some in itertools.batched(samples, ENTER_ROWS):
            tables = np.zeros((len(some), self.shapes.table_pages), np.int32)
            for table, sample in zip(tables, some, strict=True):
                table[: len(sample.pages)] = sample.pages
            tokens, lengths = (
                [sample.task.tokens[-1] for sample in some],
                [sample.task.target for sample in some],
            )
            rows = make_rows(
                tokens,
                lengths,
                [sample.left for sample in some],
                tables,
                [self._sampling(sample) for sample in some],
            )
            self._put_rows([sample.slot for sample in some], rows)
        for sample in samples:
            if sample.params.has_penalty:
                self._enter_seen(sample.slot, sample.task.tokens)

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        handle = None
        if any(chunk.spans):
            tokens, pieces, scored, scored_pieces, context = chunk_needs(
                chunk.spans, self.shapes.page_size
            )
            size = next(
                size
                for size in self.shapes.chunks
                if size >= tokens and self.shapes.pieces(size) >= pieces
            )
            room = next(room for room in self.shapes.contexts if room is None or room >= context)
            key: Key = ("prefill", size, room)
            if scored:
                room_for = (
                    n
                    for n in self.shapes.scored(size)
                    if n >= scored and self.shapes.pieces(n) >= scored_pieces
                )
                key = ("score", size, next(room_for), room)
            handle = self._prefill(key, chunk.spans)
        self._copy(chunk.copies)
        return handle

    def run_decode(self, samples: abc.Sequence[Sequence]) -> AsyncOutput:
        lanes: list[list[int]] = [[] for _ in range(self.shapes.lanes)]
        places = []
        for sample in samples:
            lane = lanes[sample.task.lane]
            places.append((sample.task.lane, len(lane)))
            lane.append(sample.slot)
        size = next(size for size in self.shapes.decode_rows if size >= max(map(len, lanes)))
        result = self._decode(("decode", size), lanes)
        return AsyncOutput(result, np.array([lane * size + place for lane, place in places]))

    def read(self, handle: AsyncOutput) -> SamplerOutput | None:
        if handle.index is None:
            jax.block_until_ready(handle.result)
            return None
        return jax.tree.map(lambda leaf: np.asarray(leaf)[handle.index], handle.result)

    # Calls --------------------------------------------------------------------

    def _prefill(self, key: Key, lanes: list[list[ScheduledTokens]]) -> AsyncOutput:
        shapes, (tokens, context) = self.shapes, (key[1], key[-1])
        common = {
            "page_size": shapes.page_size,
            "table_pages": shapes.table_pages,
            "context_pages": context,
        }
        chunk = pack_spans(lanes, tokens=tokens, pieces=shapes.pieces(tokens), **common)
        if key[0] == "prefill":
            cache, done = self._compiled[key](self.weights, chunk, self._state.cache)
            handle = AsyncOutput(done)
        else:
            scored = pack_scored(lanes, scored=key[2], pieces=shapes.pieces(key[2]), **common)
            cache, result = self._compiled[key](self.weights, chunk, scored, self._state.cache)
            handle = AsyncOutput(_to_host(result), scored_places(lanes))
        self._state = dataclasses.replace(self._state, cache=cache)
        return handle

    def _decode(self, key: Key, lanes: list[list[Any]]) -> SamplerOutput:
        slots = np.full(
            (self.shapes.lanes, key[1]), self.shapes.lanes * self.shapes.slots, np.int32
        )
        for row, lane in zip(slots, lanes, strict=True):
            row[: len(lane)] = lane
        self._state, sampled = self._compiled[key](self.weights, slots.reshape(-1), self._state)
        return _to_host(sampled)

    def _copy(self, lanes: list[list[tuple[int, int]]], least: int = 0) -> None:
        for start in range(0, max(least, *map(len, lanes)), COPY_PAGES):
            pairs = np.full((self.shapes.lanes, COPY_PAGES, 2), INVALID_PAGE, np.int32)
            for lane, copies in zip(pairs, lanes, strict=True):
                some = copies[start : start + COPY_PAGES]
                lane[: len(some)] = np.array(some, np.int32).reshape(-1, 2)
            source, target = pairs[..., 0].reshape(-1), pairs[..., 1].reshape(-1)
            self._state = dataclasses.replace(
                self._state, cache=self._compiled[("copy",)](source, target, self._state.cache)
            )

    def _put_rows(self, slots: abc.Sequence[int], rows: DecodeBatch) -> None:
        nobody = self.shapes.lanes * self.shapes.slots
        padded = np.array([*slots, *[nobody] * (ENTER_ROWS - len(slots))], np.int32)
        rows = jax.tree.map(
            lambda leaf: np.concatenate(
                [leaf, np.repeat(leaf[:1], ENTER_ROWS - len(leaf), axis=0)]
            ),
            rows,
        )
        self._state = dataclasses.replace(
            self._state, rows=self._compiled[("enter",)](self._state.rows, padded, rows)
        )

    def _enter_seen(self, slot: int, prompt: abc.Sequence[int]) -> None:
        seen = self._compiled[("enter_seen",)](
            self._state.seen, np.int32(slot), seen_in_prompt(prompt, self.config.vocab_size)
        )
        self._state = dataclasses.replace(self._state, seen=seen)

    def _sampling(self, sample: Sequence) -> SamplingMetadata:
        request = sample.task.request
        assert isinstance(request, Request)
        stream = request.rng_stream, sample.index
        return sampling_row(
            request.params,
            rng_stream=stream,
            end_ids=self.end_ids,
            prompt_length=len(request.prompt),
        )


def _to_host(result: SamplerOutput) -> SamplerOutput:
    """Start copying, so that `read` finds it there."""
    for leaf in jax.tree.leaves(result):
        leaf.copy_to_host_async()
    return result
