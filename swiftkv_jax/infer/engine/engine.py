"""The engine: requests in, events out. Continuous batching over static buffers; it knows nothing of
text.

Each `step` sends the device at most one chunk of prefill and one call of decoding, then reads what
the step before has produced: the host is one step behind, so the device never waits for it.
Requests enter and leave between steps. All programs are compiled before the first step; none is
compiled after.

An engine belongs to one thread: whoever serves requests from several passes them on to it. Several
processes over one mesh each run an engine and must submit and cancel the same things in the same
order; all of them see all events.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator

from jax.sharding import Mesh

from ...config import Config
from ...errors import UsageError
from ...model import Model
from ...pallas_kernels import Implementation
from ..runner.compilation import CompileCounter
from ..runner.model_runner import AsyncOutput, ModelRunner, ModelRunnerBase
from ..sampling.sampler import NON_FINITE, SamplerOutput
from .checks import check_request
from .options import EngineOptions
from .page_pool import PagePool, PrefixStats
from .request_state import Chunk, RequestState, Sequence, spans_of
from .requests import Logprob, Request, RequestOutput, ScoreRequest
from .scheduler import Scheduler


@dataclasses.dataclass
class Stats:
    """What the engine has done so far."""

    prompt_tokens: int = 0
    """Of prompts that are cached now, found in the cache or not."""
    prefilled_tokens: int = 0
    """That ran through prefill."""
    new_tokens: int = 0
    chunks: int = 0
    decode_calls: int = 0
    host_seconds: float = 0.0
    """Of `step`, planning and sending, reading and sorting; the device may be at work meanwhile."""
    wait_seconds: float = 0.0
    """Of `step`, waiting for the device."""
    compilations: int = 0
    """Programs compiled during steps. Should be 0: everything was compiled before."""


@dataclasses.dataclass
class _Sent:
    """What one step has sent to the device."""

    chunk: Chunk | None = None
    scores: AsyncOutput | None = None
    samples: list[Sequence] = dataclasses.field(default_factory=list)
    tokens: AsyncOutput | None = None


class Engine[R: ModelRunnerBase]:
    """A model on its device, and the requests on their way."""

    def __init__(
        self, model_runner: R, *, config: Config, end_ids: abc.Sequence[int], options: EngineOptions
    ):
        """Compiles everything and takes the memory: see `engine_for`. `end_ids` are the model's end
        tokens."""
        self.model_runner, self.config, self.end_ids, self.options = (
            model_runner,
            config,
            tuple(end_ids),
            options,
        )
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        model_runner.prepare()
        shapes = model_runner.shapes
        self._pools = [
            PagePool(shapes.num_pages, shapes.page_size, share=options.enable_prefix_caching)
            for _ in range(shapes.lanes)
        ]
        self._scheduler = Scheduler(self._pools, model_runner.limits)
        self._tasks: dict[int, RequestState] = {}
        self._ids = itertools.count()
        self._sent: deque[_Sent] = deque()
        self._scores: dict[int, tuple[list[int], list[Logprob]]] = {}
        self.stats = Stats()
        CompileCounter.read()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._sent) or self._scheduler.has_work

    @property
    def prefix_stats(self) -> PrefixStats:
        """How the prefix cache does, all lanes together."""
        each = [dataclasses.astuple(pool.stats) for pool in self._pools]
        return PrefixStats(*(sum(column) for column in zip(*each, strict=True)))

    @property
    def pages_in_use(self) -> int:
        """Pages that requests hold; 0 when there are none."""
        return sum(pool.used for pool in self._pools)

    # Requests -----------------------------------------------------------------

    def add_request(self, request: Request | ScoreRequest) -> int:
        """Put a request into the queue: its number, which its events carry. Raises `UsageError` for
        one that can never run."""
        check_request(request, self.config, self.options)
        task, shapes = RequestState(next(self._ids), request), self.model_runner.shapes
        needed = task.row_pages(shapes.page_size) + task.other_pages(shapes.page_size)
        if needed > shapes.num_pages or task.num_samples > shapes.slots:
            raise UsageError(
                f"the request needs {needed} pages of KV cache and {task.num_samples} rows, there "
                f"are {shapes.num_pages} and {shapes.slots}"
                f"{' on each device' if shapes.lanes > 1 else ''}: lower max_tokens or n, or "
                f"raise --kv-cache-memory or --max-num-seqs"
            )
        self._tasks[task.id] = task
        self._scheduler.add(task)
        return task.id

    def abort_request(self, id: int, sample: int | None = None) -> None:
        """End a request, or one of its samples: it emits nothing more, and makes room. One that has
        ended is left alone."""
        task = self._tasks.get(id)
        if task is None:
            return
        if sample is not None:
            task.cancelled.add(sample)
            if task.wanted:
                for one in [
                    one
                    for one in task.samples
                    if one.index == sample and self._scheduler.running.get(one.slot) is one
                ]:
                    self._scheduler.finish(one, cancelled=True)
                return
        self._scheduler.abort_request(task)
        self._forget(task)

    def run(self, requests: Iterable[Request | ScoreRequest]) -> Iterator[RequestOutput]:
        """Submit all, step until they have ended, and yield their events; `RequestOutput.request` counts
        `requests` from 0.

        Every request is checked before the first runs.
        """
        ids = {self.add_request(request): number for number, request in enumerate(requests)}
        try:
            while any(id in self._tasks for id in ids):
                for event in self.step():
                    if event.request in ids:
                        yield dataclasses.replace(event, request=ids[event.request])
        finally:
            for id in ids:  # whoever stops listening stops them
                self.abort_request(id)

    # Steps --------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Send the device its next work, and return the events of what it was sent before."""
        start, compiled = time.perf_counter(), CompileCounter.read()
        waited = self.stats.wait_seconds
        sent = self._send()
        if sent is not None:
            self._sent.append(sent)
        events = []
        while len(self._sent) > (sent is not None):
            events += self._receive(self._sent.popleft())
        self.stats.compilations += CompileCounter.read() - compiled
        self.stats.host_seconds += time.perf_counter() - start - (self.stats.wait_seconds - waited)
        return events

    def _send(self) -> _Sent | None:
        scheduler, device = self._scheduler, self.model_runner
        if scheduler.leaving:  # before anybody else gets their pages
            device.leave(scheduler.leaving)
            scheduler.leaving.clear()
        sent = _Sent()
        if (chunk := scheduler.next_chunk()) is not None:
            sent.chunk, sent.scores = chunk, device.run_chunk(chunk)
            device.enter(chunk.ready)
            self._count(chunk)
        if samples := scheduler.next_decode(device.shapes.decode_steps):
            sent.samples, sent.tokens = samples, device.run_decode(samples)
            self.stats.decode_calls += 1
        return sent if sent.chunk or sent.samples else None

    def _count(self, chunk: Chunk) -> None:
        tokens = sum(span.stop - span.start for _, span in spans_of(chunk))
        self.stats.chunks += tokens > 0
        self.stats.prefilled_tokens += tokens
        ended = {span.task for _, span in spans_of(chunk) if span.stop == span.task.target} | {
            sample.task for sample in chunk.ready
        }
        self.stats.prompt_tokens += sum(len(task.tokens) for task in ended)

    def _receive(self, sent: _Sent) -> list[RequestOutput]:
        events = []
        if sent.chunk is not None and sent.scores is not None:
            scores = self._read(sent.scores)
            if scores is not None:
                events += self._score_events(sent.chunk, scores)
        if sent.tokens is not None:
            sampled = self._read(sent.tokens)
            assert sampled is not None
            for row, sample in enumerate(sent.samples):
                sample.unseen -= min(self.model_runner.shapes.decode_steps, sample.unseen)
                if self._scheduler.running.get(sample.slot) is sample:
                    events.append(self._sample_event(sample, sampled, row))
        return events

    def _read(self, handle: AsyncOutput) -> SamplerOutput | None:
        start = time.perf_counter()
        try:
            return self.model_runner.read(handle)
        finally:
            self.stats.wait_seconds += time.perf_counter() - start

    def _sample_event(self, sample: Sequence, sampled: SamplerOutput, row: int) -> RequestOutput:
        task, params = sample.task, sample.params
        emitted = [int(token) for token in sampled.token[row] if token >= 0]
        sample.tokens += emitted
        sample.left -= len(emitted)
        self.stats.new_tokens += len(emitted)
        broken = NON_FINITE in sampled.token[row]
        ended = not broken and (
            emitted[-1] in params.stop_token_ids
            or (emitted[-1] in self.end_ids and not params.ignore_eos)
        )
        now = time.perf_counter()
        task.timing.first_token = task.timing.first_token or now
        task.timing.last_token = now
        tokens = emitted[:-1] if ended else emitted
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                _logprob(sampled, (row, step), params.logprobs) for step in range(len(tokens))
            ]
        reason = "error" if broken else "stop" if ended else None if sample.left else "length"
        if reason is not None:
            self._scheduler.finish(sample)
            self._forget(task)
        timing, end = dataclasses.replace(task.timing), emitted[-1] if ended else None
        return RequestOutput(
            task.id, sample.index, tokens, logprobs, reason, timing, task.cached, end
        )

    def _score_events(self, chunk: Chunk, scores: SamplerOutput) -> Iterator[RequestOutput]:
        at = 0
        for _, span in spans_of(chunk):
            task, request, stop = span.task, span.task.request, at + len(span.scored)
            if not isinstance(request, ScoreRequest):
                continue
            if task.id not in self._tasks:  # cancelled
                at = stop
                continue
            parts = self._scores.setdefault(task.id, ([], []))
            parts[0].extend(scores.token[at:stop].tolist())
            parts[1].extend(
                _logprob(scores, (place,), request.top_logprobs) for place in range(at, stop)
            )
            at = stop
            if span.stop == task.target:
                task.timing.first_token = task.timing.last_token = time.perf_counter()
                likeliest, logprobs = self._scores.pop(task.id)
                self._forget(task)
                yield RequestOutput(
                    task.id,
                    0,
                    likeliest,
                    logprobs,
                    "stop",
                    dataclasses.replace(task.timing),
                    task.cached,
                )

    def _forget(self, task: RequestState) -> None:
        """A task without anything left to run."""
        if not task.samples:
            self._tasks.pop(task.id, None)
            self._scores.pop(task.id, None)


def engine_for(
    model: Model,
    options: EngineOptions | None = None,
    *,
    swiftkv: bool | None = None,
    mesh: Mesh | None = None,
    attention: Implementation | None = None,
    donate: bool = False,
    log: Callable[[str], None] = lambda message: None,
) -> Engine[ModelRunner]:
    """An engine for a model, ready to run; `log` is told the memory plan.

    `swiftkv` False serves the unmodified teacher, True the student, None the student if there is a
    delta. With a `mesh` (None: the one the model was loaded on), rows are split over `data`, heads
    and widths over `model`. `attention` names an implementation; None chooses for the device. The
    layers are copied into serving form; with `donate` the model's own are deleted meanwhile, so that
    memory holds them once, and the model is good for nothing after. Raises `UsageError` (a
    `ValueError`) for what cannot be, `OutOfMemoryError` for what does not fit.
    """
    options = options or EngineOptions()
    device = ModelRunner(
        model, options, swiftkv=swiftkv, mesh=mesh, attention=attention, donate=donate, log=log
    )
    return Engine(device, config=device.config, end_ids=model.eos_token_ids, options=options)


def _logprob(sampled: SamplerOutput, index: tuple[int, ...], top: int) -> Logprob:
    ids, values = sampled.top_ids[index][:top].tolist(), sampled.top_logprobs[index][:top].tolist()
    return Logprob(float(sampled.logprob[index]), tuple(zip(ids, values, strict=True)))
