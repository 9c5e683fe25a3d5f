"""Predicted rows of `benchmarks.serve`: the same engine, measured by the same loops, with a model
runner whose calls only take time, by a clock of its own.

The scheduler, the shapes and the counting of FLOPs and bytes are those of the package. The host
takes no time: it is a step ahead of the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from swiftkv_jax.infer.bench import options as bench_options
from swiftkv_jax.infer.bench.cells import STUDENT, TEACHER
from swiftkv_jax.infer.bench.summary import compare, derive, variant_of
from swiftkv_jax.infer.bench.timing import Raw, measure
from swiftkv_jax.infer.engine.constrained import ConstrainedCall
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.host_tier import HostPagesBase, PageMove
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.request_state import Chunk, SequenceState
from swiftkv_jax.infer.engine.sampler_output import AsyncOutput, SamplerOutput
from swiftkv_jax.infer.engine.shapes import DecodeCall
from swiftkv_jax.infer.runner.choose_shapes import choose_shapes, with_contexts
from swiftkv_jax.infer.runner.layout import Layout
from swiftkv_jax.infer.runner.prefill_chunk import chunk_needs
from swiftkv_jax.infer.runner.serving_form import num_bytes, served_config, weight_shapes
from swiftkv_jax.model.cache import cache_dtype
from swiftkv_jax.model.config import Config
from swiftkv_jax.model.model import Model
from swiftkv_jax.model.quantization import Scheme, scheme_for
from swiftkv_jax.plan.presets import LLAMA_8B
from swiftkv_jax.plan.roofline import Roofline

from .model import DeviceModel, StepModel

DTYPE = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass
class Clock:
    """Time that passes only where the model runner says so, with the functions of `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PredictedRunner:
    """`ModelRunnerBase` without a device: one call after the other, each as long as predicted. The
    end of a call is the time at which its result can be read."""

    wide_costs: tuple[float, ...] = ()
    """None: calls with drafts are not predicted."""

    def __init__(
        self,
        device: DeviceModel,
        config: Config,
        name: str,
        options: EngineOptions,
        quantization: Scheme | None = None,
    ):
        """The runner of variant `name` of a model with `config`, with bfloat16 weights but for its
        quantised matrices."""
        self.config = served_config(config, name == STUDENT)
        self.weights = weight_shapes(config, name == STUDENT, DTYPE, quantization)
        self.cache_dtype = cache_dtype(options.kv_cache_dtype, DTYPE)
        self.shapes = choose_shapes(
            self.config,
            options,
            dp_size=1,
            platform="gpu",
            page_bytes=Layout(self.config, self.cache_dtype, None).page_bytes(options.page_size),
            weight_bytes=num_bytes(self.weights),
            memory_limit=int(options.memory_utilization * device.published.memory_bytes),
            ridge_tokens=device.published.ridge_tokens,
        )
        if self.cache_dtype != DTYPE:  # Hopper's kernel widens the pool that it is given
            self.shapes = with_contexts(self.shapes)
        self.variant = variant_of(name, config, self.weights, self.cache_dtype, self.shapes)
        fp8 = quantization is not None and quantization.arithmetic != "widen"
        self.model = StepModel(device, self.variant, self.cache_dtype, options.page_size, fp8)
        self.clock = Clock()
        self._idle_from = 0.0
        self._rows: dict[int, tuple[int, int]] = {}  # slot: (cached positions, remaining tokens)

    def prepare(self) -> None:
        pass

    def num_compilations(self) -> int:
        return 0

    def update_weights(self, model: Model, *, donate: bool) -> None:
        raise NotImplementedError("a prediction has no weights")

    def read_adapter(self, path: Path) -> Any:
        raise NotImplementedError("a prediction has no adapters")

    def insert_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError("a prediction has no adapters")

    @property
    def host_pages(self) -> HostPagesBase:
        raise NotImplementedError("a prediction has no host memory")

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        raise NotImplementedError("a prediction has no host memory")

    def fingerprint(self) -> bytes:
        raise NotImplementedError("a prediction has no host memory")

    def remove_sequences(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._rows.pop(slot, None)

    def add_sequences(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            cached = sequence.request_state.prefill_target
            self._rows[sequence.slot] = cached, sequence.num_remaining_tokens

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        return self._run(self._chunk_seconds(chunk)) if any(chunk.shards) else None

    def run_last_chunk(self, chunk: Chunk) -> AsyncOutput:
        (sequence,) = chunk.finished_prefill
        cached, left = self._rows[sequence.slot]
        self._rows[sequence.slot] = cached + 1, left - 1
        keys = self.shapes.table_pages * self.shapes.page_size
        rest = self.model.decode_seconds([cached + 1], keys, lower_layers=False)
        return self._run(self._chunk_seconds(chunk) + rest, np.zeros((1, 1), int))

    def _chunk_seconds(self, chunk: Chunk) -> float:
        page = self.shapes.page_size
        needs = chunk_needs(chunk.shards, page)
        size, num_tiles, context = self.shapes.chunk(needs.tokens, needs.tiles, needs.context_pages)
        tiles = [
            min(start + page, scheduled.stop)
            for _, scheduled in chunk.scheduled_tokens()
            for start in range(scheduled.start // page * page, scheduled.stop, page)
        ]
        tiles += [0] * (num_tiles - len(tiles))
        return self.model.chunk_seconds(size, tiles, context)

    def run_decode(self, sequences: Sequence[SequenceState], call: DecodeCall) -> AsyncOutput:
        steps = call.steps
        slots = [sequence.slot for sequence in sequences]
        size = next(size for size in self.shapes.decode_rows if size >= len(slots))
        rows = [self._rows[slot] for slot in slots]
        # All steps at the mean length.
        lengths = [cached + (min(steps, left) + 1) // 2 if left else 0 for cached, left in rows]
        lengths += [0] * (size - len(lengths))
        keys = self.shapes.table_pages * self.shapes.page_size
        seconds = steps * self.model.decode_seconds(lengths, keys)
        tokens = np.full((len(rows), steps), -1)
        for row, (slot, (cached, left)) in enumerate(zip(slots, rows, strict=True)):
            emitted = min(steps, left)
            tokens[row, :emitted] = 0
            self._rows[slot] = cached + emitted, left - emitted
        return self._run(seconds, tokens)

    def update_pages(self, sequences: Sequence[SequenceState]) -> None:
        pass

    def run_decode_constrained(self, call: ConstrainedCall) -> AsyncOutput:
        raise NotImplementedError("grammars are not predicted")

    def is_idle(self) -> bool:
        return self.clock.now >= self._idle_from

    def _run(self, seconds: float, tokens: np.ndarray | None = None) -> AsyncOutput:
        """Queue a call behind those before it: its end, and its tokens."""
        self._idle_from = max(self._idle_from, self.clock.now) + seconds
        return AsyncOutput((self._idle_from, tokens))

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        end, tokens = output.result
        self.clock.now = max(self.clock.now, end)
        return None if tokens is None else SamplerOutput(tokens, None, None, None)


# Rows -------------------------------------------------------------------------


def predict(device: DeviceModel, flags: str, config: Config = LLAMA_8B) -> dict[str, Any]:
    """What `infer bench` with these flags would write of its mode and rows, by prediction and with
    the device's rates as the roofline."""
    parser = argparse.ArgumentParser()
    bench_options.add_arguments(parser)
    options = bench_options.BenchOptions.from_args(parser.parse_args(shlex.split(flags)))
    engine_options, cells = bench_options.plan(options)
    roofline = Roofline(device.matmul, device.copy, 1, str(DTYPE), {}, device.published)
    format = options.model.quantization
    scheme = None if format in (None, "none") else scheme_for(format, device.kind)
    raws: dict[str, list[Raw]] = {}
    variants = {}
    for name in options.swiftkv:
        runner = PredictedRunner(device, config, name, engine_options, scheme)
        engine = Engine(runner, config=runner.config, eos_token_ids=(), options=engine_options)
        variants[name] = runner.variant
        raws[name] = [
            measure(options.mode, engine, cell, seed=number, clock=runner.clock)
            for number, cell in enumerate(cells)
        ]
    rows = []
    for number, cell in enumerate(cells):
        for name, variant in variants.items():
            row = derive(options.mode, cell, [raws[name][number]], variant, roofline)
            if name == STUDENT and TEACHER in raws:
                pair = ([raws[each][number]] for each in (STUDENT, TEACHER))
                row |= compare(options.mode, *pair)
            about = {"label": str(cell), "variant": name, "cell": dataclasses.asdict(cell)}
            figures = {key: value for key, value in row.items() if key not in _NOT_PREDICTED}
            rows.append(about | figures)
    return {"mode": options.mode, "flags": flags, "rows": rows}


_NOT_PREDICTED = {
    "idle_share",
    "cpu_share",
    "compilations",
    "speed_up_of_best",
    "speed_up_in_cpu_time",
}
