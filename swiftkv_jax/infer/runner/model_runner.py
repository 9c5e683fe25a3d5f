"""The model runner: weights, decode state and compiled programs of a model on its devices. Calls
return at once; only `read` waits for a result."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from ...errors import OutOfMemoryError, UsageError
from ...model.attention import Attention
from ...model.cache import bytes_per_token
from ...model.mesh import num_devices
from ...model.model import Model
from ...pallas_kernels import ImplementationError
from ..engine.constrained import ConstrainedCall, constrained_call
from ..engine.host_tier import PageMove
from ..engine.model_runner_base import Adapter
from ..engine.request_state import Chunk, SequenceState
from ..engine.sampler_output import AsyncOutput, SamplerOutput
from ..engine.shapes import DecodeCall, Shapes
from ..sampling.penalties import token_counts_of
from .adapters import no_adapter, read_adapter
from .choose_shapes import log_shapes, with_smaller_cache
from .compilation import CompileCounter, compile_all
from .conversion import Conversion
from .decode_state import DecodeBatch, batch_of, decode_rows, empty_batch, page_tables
from .drafts import history_of
from .exit import wait_at_exit, wait_for
from .host_pages import WARM_UP, HostPages
from .kept_programs import KeptPrograms
from .layout import Layout
from .lowering import (
    COPY_PAGES,
    INSERT_SEQUENCES,
    DecodeProgram,
    PrefillProgram,
    Program,
    StateUpdate,
    UpperProgram,
    compiler_defaults,
    lower_all,
    prefill_program,
)
from .memory import MemoryPlan, allocating, host_memory, memory_plan
from .prefill_chunk import (
    Joined,
    ScheduledShards,
    pack_chunk,
    pack_copies,
    pack_upper,
    scored_index,
)
from .serving_form import Weights
from .wide_costs import measure_wide_costs

logger = logging.getLogger(__name__)


class ModelRunner:
    """A model in serving form on its devices. Made by `build_model_runner`."""

    _state: Any = None
    """Decode state; None before `prepare`."""
    _last_result: Any = None
    """Result of the last chunk or decode call."""
    wide_costs: tuple[float, ...] = ()
    """See `ModelRunnerBase`."""

    def __init__(
        self,
        weights: Weights,
        shapes: Shapes,
        layout: Layout,
        host_pages: HostPages,
        *,
        convert: Conversion,
        eos_token_ids: Sequence[int],
        attention: Attention,
        device: Any,
        memory_limit: int | None,
        kept_bytes: int,
        shrink_cache: bool,
        compiler_options: Mapping[str, Any],
        on_compile: Callable[[int, int], object] | None = None,
    ):
        """`convert` made the weights, `device` is the first `jax.Device`, `memory_limit` the bytes
        that may be used of each (None: not known), `kept_bytes` those that the caller's model takes
        beside the weights. With `shrink_cache` a cache that does not fit is made smaller.
        `compiler_options` are XLA's, `on_compile` is `compile_all`'s `on_progress`."""
        self.weights, self.shapes, self.layout = weights, shapes, layout
        self.config, self.cache_dtype = layout.config, layout.cache_dtype
        self.host_pages, self.eos_token_ids = host_pages, eos_token_ids
        self.plan: MemoryPlan | None = None
        """Memory plan; None before `prepare`."""
        self._attention, self._device, self._convert = attention, device, convert
        self._memory_limit, self._kept_bytes = memory_limit, kept_bytes
        self._shrink_cache, self._on_compile = shrink_cache, on_compile
        self._compiler_options = compiler_options
        self._compiled: dict[Program, Any] = {}

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token of a prompt, on all devices together. One of an
        answer takes `shapes.pages_per_own_page` times as many in addition."""
        return bytes_per_token(self.config, self.cache_dtype)

    # Before the first request -------------------------------------------------

    def prepare(self) -> None:
        """Compile every program, check that everything fits the device, allocate the memory, and
        run each program once without requests.

        Raises `OutOfMemoryError` with the memory plan and the options to change.
        """
        if self._compiled:
            return
        plan = self._compile()
        if plan.over and self._shrink_cache:
            page_bytes = self.layout.page_bytes(self.shapes.page_size)
            self.shapes = with_smaller_cache(self.shapes, plan.over, page_bytes)
            plan = self._compile()
        if plan.over:
            raise OutOfMemoryError(
                f"{plan}: lower `kv_cache_memory`, `max_num_batched_tokens` or `max_num_seqs`"
            )
        self.plan = plan
        log_shapes(self.shapes, plan)
        with allocating(f"the KV cache ({plan})"):
            self._state = self.layout.init_state(self.shapes)
        self.host_pages.start(self._compiled)
        wait_at_exit(self)
        self._warm_up()
        CompileCounter.start()

    def update_weights(self, model: Model, *, donate: bool) -> None:
        """See `ModelRunnerBase`."""
        model = self._convert.placed(model)
        kept = {name: getattr(self.weights, name) for name in ("adapters", "speculator")}
        del self.weights  # their memory is that of the next ones
        weights = self._convert(model, donate=donate)
        self.weights = dataclasses.replace(weights, **kept)

    def read_adapter(self, path: Path) -> Adapter:
        """See `ModelRunnerBase`."""
        return read_adapter(self._convert, path, self.weights.adapters)

    def insert_adapter(self, number: int, adapter: Adapter) -> None:
        """See `ModelRunnerBase`."""
        places = self.weights.adapters
        adapters = self._compiled["adapter"](places, np.int32(number - 1), adapter.layers)
        self.weights = dataclasses.replace(self.weights, adapters=adapters)

    def wait(self) -> None:
        """Wait for all calls in flight and for copies to the host; their errors are dropped."""
        wait_for(self._state, self._last_result)

    def __del__(self) -> None:
        # XLA aborts the process if its client is destroyed while a call is in flight. At exit,
        # `wait_at_exit` has already waited.
        if self._state is not None and not sys.is_finalizing():
            self.wait()

    def num_compilations(self) -> int:
        """See `ModelRunnerBase`."""
        return CompileCounter.read()

    def _compile(self) -> MemoryPlan:
        try:
            lowered = lower_all(self.layout, self.shapes, self.weights, self._attention)
            options = self._compiler_options
            defaults = functools.partial(compiler_defaults, platform=self._device.platform)
            programs = None if self.layout.mesh is not None else KeptPrograms.of(self._device)
            self._compiled = compile_all(lowered, self._on_compile, options, defaults, programs)
        except ImplementationError as error:
            raise UsageError(error.of_option("attention"), option="attention") from error
        state, limit = self.layout.state(self.shapes), self._memory_limit
        if limit is None and self._device.platform == "cpu":
            limit = host_memory() // num_devices(self.layout.mesh)
        rows, kept = (state.batch, state.token_counts, state.history), self._kept_bytes
        return memory_plan(self.weights, state.cache, rows, self._compiled, limit, kept)

    def _warm_up(self) -> None:
        """Run every program, because first runs are slower. On a GPU, XLA records the launches of
        the first few runs."""
        empty: ScheduledShards = [[] for _ in range(self.shapes.dp_size)]
        for _ in range(3 if self._device.platform == "gpu" else 1):
            for program in self._compiled:
                if isinstance(program, PrefillProgram | UpperProgram):
                    self._prefill(program, empty)
                elif isinstance(program, DecodeProgram) and program.kind != "constrained":
                    self._decode(program, [[] for _ in empty])
                elif program == "first_token":
                    embed = self.weights.embed
                    self._first_token(np.zeros((1, embed.shape[1]), embed.dtype), self.shapes.slots)
                elif isinstance(program, DecodeProgram):
                    call = constrained_call([], [], program.width, self.config.vocab_size)
                    operands = call.operands(self.shapes.dp_size * program.rows, [])
                    self._decode(program, [[] for _ in empty], **operands)
            self.remove_sequences([0])
            self._copy([[] for _ in empty], least=1)
            if self.shapes.host_pages:
                self.move_pages(WARM_UP)
            self._insert_row("token_counts", 0, token_counts_of([], 0, self.config.vocab_size))
            if self.shapes.widths:
                row, _ = history_of([], [], [], self.shapes.history_size)
                self._insert_row("history", 0, row)
            if self.weights.adapters:
                self.insert_adapter(1, Adapter(no_adapter(self.weights.adapters), b""))
            self._write("page_tables", [], page_tables([], self.shapes))
        jax.block_until_ready(self._state)
        self.wide_costs = measure_wide_costs(self.shapes, self._fill, self._decode)

    def _fill(self, batch_of: Callable[[int], DecodeBatch]) -> None:
        """Put `batch_of(count)` into all slots, `count` at a time, and wait for it."""
        slots = range(self.shapes.dp_size * self.shapes.slots)
        for some in itertools.batched(slots, INSERT_SEQUENCES):
            self._write("insert", some, batch_of(len(some)))
        jax.block_until_ready(self._state)

    # Steps --------------------------------------------------------------------

    def remove_sequences(self, slots: Sequence[int]) -> None:
        """See `ModelRunnerBase`."""
        for some in itertools.batched(slots, INSERT_SEQUENCES):
            self._write("insert", some, empty_batch(len(some), self.shapes))

    def add_sequences(self, sequences: Sequence[SequenceState]) -> None:
        """See `ModelRunnerBase`."""
        for some in itertools.batched(sequences, INSERT_SEQUENCES):
            offsets = [self._insert_history(sequence) for sequence in some if self.shapes.widths]
            batch = batch_of(some, self.shapes, self.eos_token_ids, offsets)
            self._write("insert", [sequence.slot for sequence in some], batch)
        for sequence in sequences:
            if sequence.params.has_penalty:
                state = sequence.request_state
                tokens, generated = state.prefill_token_ids, state.num_generated_tokens
                counts = token_counts_of(tokens, generated, self.config.vocab_size)
                self._insert_row("token_counts", sequence.slot, counts)

    def update_pages(self, sequences: Sequence[SequenceState]) -> None:
        """See `ModelRunnerBase`."""
        for some in itertools.batched(sequences, INSERT_SEQUENCES):
            slots = [sequence.slot for sequence in some]
            self._write("page_tables", slots, page_tables(some, self.shapes))

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        """See `ModelRunnerBase`."""
        output = None
        if any(chunk.shards):
            program = prefill_program(self.shapes, chunk.shards)
            padding = self.shapes.dp_size * program.tokens - chunk.num_tokens
            output = self._prefill(program, chunk.shards)._replace(num_padding=padding)
        self._copy(chunk.page_copies)
        return output

    def run_last_chunk(self, chunk: Chunk) -> AsyncOutput:
        """See `ModelRunnerBase`."""
        ((scheduled,),), (sequence,) = chunk.shards, chunk.finished_prefill
        shards = [[dataclasses.replace(scheduled, stop=scheduled.stop + 1)]]
        program = prefill_program(self.shapes, shards)
        padding = program.tokens - chunk.num_tokens - 1
        sampled = self._first_token(self._prefill(program, shards).result, sequence.slot)
        return AsyncOutput(sampled, np.zeros(1, int), padding)

    def run_decode(self, sequences: Sequence[SequenceState], call: DecodeCall) -> AsyncOutput:
        """See `ModelRunnerBase`."""
        slots, size, index = decode_rows(sequences, self.shapes)
        plain = all(sequence.params.is_plain_greedy for sequence in sequences)
        # A wide program has the steps of `Shapes.wide_call`, and is none of a single step.
        single = call.width == 1 and call.steps != self.shapes.decode_steps
        kind = self.shapes.decode_kind(call, plain_greedy=plain)
        program = DecodeProgram(size, kind, single_step=single, width=call.width)
        return AsyncOutput(self._decode(program, slots), index)

    def run_decode_constrained(self, call: ConstrainedCall) -> AsyncOutput:
        """See `ModelRunnerBase`."""
        slots, size, index = decode_rows(call.sequences, self.shapes)
        program = DecodeProgram(size, "constrained", single_step=True, width=call.width)
        operands = call.operands(self.shapes.dp_size * size, index)
        return AsyncOutput(self._decode(program, slots, **operands), index)

    def is_idle(self) -> bool:
        """See `ModelRunnerBase`."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self._last_result))

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        """See `ModelRunnerBase`."""
        if output.index is None:
            jax.block_until_ready(output.result)
            return None
        return jax.tree.map(lambda leaf: np.asarray(leaf)[output.index], output.result)

    # Calls --------------------------------------------------------------------

    def _prefill(
        self, program: PrefillProgram | UpperProgram, shards: ScheduledShards
    ) -> AsyncOutput:
        shapes, tokens = self.shapes, program.tokens
        common: dict[str, Any] = {"page_size": shapes.page_size, "table_pages": shapes.table_pages}
        common["context_pages"] = program.context
        adapted = {"tokens": tokens, "adapters": shapes.adapts_prefill}
        chunk = functools.partial(pack_chunk, shards, **adapted, **common)
        if isinstance(program, PrefillProgram):
            joined = Joined.of(chunk(tiles=program.tiles), shapes.dp_size)
            cache, done = self._compiled[program](self.weights, joined, self._state.cache)
            output = AsyncOutput(done)
        else:
            upper = pack_upper(
                shards,
                tokens=program.upper_tokens,
                tiles=shapes.tiles(program.upper_tokens)[-1],
                own_start=shapes.has_own_start,
                adapters=shapes.num_adapters > 0,
                pages_per_own_page=shapes.pages_per_own_page,
                **common,
            )
            joined = Joined.of((chunk(tiles=shapes.tiles(tokens)[-1]), upper), shapes.dp_size)
            cache, result = self._compiled[program](self.weights, joined, self._state.cache)
            index = scored_index(shards) if program.scores else None
            output = AsyncOutput(self._to_host(result) if program.scores else result, index)
        self._update(cache=cache)
        self._last_result = output.result
        return output

    def _decode(
        self, program: DecodeProgram, slots: list[list[int]], **operands: Any
    ) -> SamplerOutput:
        """Run a program, a constrained one with `ConstrainedCall.operands`."""
        past_the_last = self.shapes.dp_size * self.shapes.slots
        padded = np.full((self.shapes.dp_size, program.rows), past_the_last, np.int32)
        for row, shard in zip(padded, slots, strict=True):
            row[: len(shard)] = shard
        self._state, sampled = self._compiled[program](
            self.weights, padded.reshape(-1), self._state, **operands
        )
        return self._to_host(sampled)

    def _first_token(self, hidden: jax.Array | np.ndarray, slot: int) -> SamplerOutput:
        slots = np.array([slot], np.int32)
        program = self._compiled["first_token"]
        self._state, sampled = program(self.weights, hidden, slots, self._state)
        return self._to_host(sampled)

    def _to_host(self, result: SamplerOutput) -> SamplerOutput:
        """Start copying a result to the host, before `read` asks for it."""
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        self._last_result = result
        return result

    def _copy(self, copies: list[list[tuple[int, int]]], least: int = 0) -> None:
        """Copy pages (source, target) of each shard, in at least `least` calls."""
        for start in range(0, max(least, *map(len, copies)), COPY_PAGES):
            source, target = pack_copies(copies, start, COPY_PAGES)
            self._update(cache=self._compiled["copy"](source, target, self._state.cache))

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """See `HostMemory`."""
        self._update(cache=self.host_pages.move(self.weights, self._state.cache, moves))

    def fingerprint(self) -> bytes:
        """See `HostMemory`."""
        return self.host_pages.fingerprint(self.weights)

    def _write(self, name: StateUpdate, slots: Sequence[int], rows: Any) -> None:
        """Write the rows of these slots into the batch, and empty ones past the last slot."""
        missing = INSERT_SEQUENCES - len(slots)
        past_the_last = self.shapes.dp_size * self.shapes.slots
        padded = np.array([*slots, *[past_the_last] * missing], np.int32)
        rows = jax.tree.map(
            lambda leaf: np.pad(leaf, ((0, missing), *((0, 0),) * (leaf.ndim - 1))), rows
        )
        self._update(batch=self._compiled[name](self._state.batch, padded, rows))

    def _insert_history(self, sequence: SequenceState) -> int:
        """Write the text of a sequence; returns its offset, -1 without drafts."""
        request, tokens = sequence.request, sequence.request_state.prefill_token_ids
        if not sequence.has_drafts:
            return -1
        generated = tokens[len(request.prompt) :]
        size = self.shapes.history_size
        row, offset = history_of(request.prompt, request.prediction, generated, size)
        self._insert_row("history", sequence.slot, row)
        return offset

    def _insert_row(self, name: Literal["token_counts", "history"], slot: int, row) -> None:
        rows = self._compiled[name](getattr(self._state, name), np.int32(slot), row)
        self._update(**{name: rows})

    def _update(self, **fields: Any) -> None:
        self._state = dataclasses.replace(self._state, **fields)
