"""The engine: requests in, outputs out, by continuous batching over static buffers. It handles
token ids only.

Each `step` sends the device chunks of prefill, at most `max_prefill_chunks`, and one decode call,
then reads the results of the step before: the host is one step behind, so the device always has
work. Sequences are added and removed between steps. All programs are compiled before the first
step, none after.

Sequences that follow a grammar decode one step at a time, in a separate call before that of the
others. Which tokens may come next depends on the token before, so the result of this call is read
before the next step is sent, while the device decodes the others.

An engine is not thread-safe: one thread makes all calls. With several processes over one mesh, each
process has an engine and makes the same calls in the same order; each gets all outputs.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...model.config import Config
from ...process import interrupts
from .adapters import Adapters
from .cache_events import CacheEvents
from .checks import check_ends, check_fits, check_request, own_start
from .constrained import constrained_call
from .model_runner_base import ModelRunnerBase
from .options import EngineOptions
from .outputs import Scores, Sent, failed_output, score_outputs, sequence_output
from .page_pool import PrefixStats, page_pools, record_events
from .request_state import RequestState, SequenceState
from .requests import Request, RequestOutput, ScoreRequest, with_own_tokens
from .run import Run
from .sampler_output import AsyncOutput, SamplerOutput
from .scheduler import MAX_SKIPS, Scheduler
from .speculation import DecodeCalls
from .stats import IdleTimer, Load, Stats
from .undivided import check_whole, undivided

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ...model.model import Model
    from ...pallas_kernels import Implementation
    from ..runner.model_runner import ModelRunner


class Engine[R: ModelRunnerBase]:
    """A model with its KV cache, and the requests that run on it. Made by `from_model`."""

    def __init__(
        self,
        model_runner: R,
        *,
        config: Config,
        eos_token_ids: Sequence[int],
        options: EngineOptions,
        max_skips: int = MAX_SKIPS,
    ):
        """Compile all programs and allocate the memory of `model_runner`; see `from_model`."""
        self.model_runner, self.config, self.options = model_runner, config, options
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        model_runner.prepare()
        shapes = model_runner.shapes
        self.pools = page_pools(config, shapes, options, model_runner)
        """The pages of each data-parallel shard."""
        reserve = max(options.reserve_tokens, shapes.most_new_tokens)
        self._scheduler = Scheduler(self.pools, shapes, reserve_tokens=reserve, max_skips=max_skips)
        self._calls = DecodeCalls(model_runner, self._scheduler, options.speculative)
        self._requests: dict[int, RequestState] = {}
        self.adapters = Adapters(model_runner, self._requests)
        self._ids = itertools.count()
        self._sent: deque[Sent] = deque()
        self._scores: dict[int, Scores] = {}
        self.stats = Stats()
        self._idle = IdleTimer(model_runner.is_idle)
        self.failed = False
        """Sign of an error that left the engine between two states: no call runs any more."""

    @staticmethod
    def from_model(
        model: Model,
        options: EngineOptions | None = None,
        *,
        swiftkv: bool | None = None,
        mesh: Mesh | None = None,
        attention: Implementation | None = None,
        donate: bool = False,
        on_compile: Callable[[int, int], object] | None = None,
    ) -> Engine[ModelRunner]:
        """An engine for a model, compiled and ready to run. Logs the memory plan.

        `swiftkv` False serves the unmodified teacher, True the student, None the student if there
        is a delta. With a `mesh` (None: the one that the model was loaded on) sequences are split
        over `data`, heads and widths over `model`. `attention` names an implementation; None
        chooses one for the device. The layers are copied into serving form, beside which
        `model` leaves less memory for the KV cache; with `donate` its arrays are deleted on the
        way, so that memory holds them once, and it cannot be used afterwards. `on_compile` is
        called with the number of compiled programs and of all, as it grows.

        Raises `UsageError` (a `ValueError`) for options that cannot be honoured and
        `OutOfMemoryError` if weights, cache and temporaries do not fit the device.
        """
        from ..runner.build import build_model_runner

        options = EngineOptions() if options is None else options
        runner = build_model_runner(
            model,
            options,
            swiftkv=swiftkv,
            mesh=mesh,
            attention=attention,
            donate=donate,
            on_compile=on_compile,
        )
        return Engine(
            runner, config=runner.config, eos_token_ids=model.eos_token_ids, options=options
        )

    def __repr__(self) -> str:
        slots, family = self.options.max_num_seqs, self.config.family
        pages = f"{sum(pool.num_pages for pool in self.pools)} pages"
        return f"Engine({family}, {slots} sequences of {self.max_model_len} tokens, {pages})"

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or a result has not been read."""
        return bool(self._sent) or self._scheduler.has_work

    @property
    def prefix_stats(self) -> PrefixStats:
        """Counters of the prefix cache, summed over the data-parallel shards."""
        return PrefixStats.total(pool.stats for pool in self.pools)

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self.stats = Stats()
        self._scheduler.num_preemptions = self._scheduler.num_times_skipped = 0
        for pool in self.pools:
            pool.stats = PrefixStats()

    def record_cache_events(self) -> CacheEvents:
        """Start recording what enters and leaves the prefix cache. Events are kept until the caller
        drains them."""
        return record_events(self.pools)

    @undivided
    def update_weights(self, model: Model, *, donate: bool = False) -> None:
        """Serve other values: `model` has the same config, shapes and dtypes as the one before,
        except that a delta of another dtype is cast. Nothing is compiled, and the prefix cache is
        emptied.

        The old weights are dropped first; memory and `donate` are as in `from_model`. Raises
        `UsageError`, before anything changes, while requests run and if `model` does not fit.
        """
        if self._requests:
            raise UsageError("requests run: end or abort them before the weights are updated")
        while self._sent:  # results of requests that were aborted
            self.step()
        self.model_runner.update_weights(model, donate=donate)
        for pool in self.pools:
            pool.clear()

    def persist_prefix_cache(self, seconds: float) -> None:
        """Write what the prefix cache holds to `EngineOptions.prefix_cache_dir`, in so many seconds
        at most; pages that are in use are left out. Writes nothing once the engine has failed."""
        for pool in () if self.failed else self.pools:
            pool.persist(seconds)

    @property
    def pages_in_use(self) -> int:
        """Pages that requests hold; 0 when all have ended."""
        return sum(pool.used for pool in self.pools)

    @property
    def load(self) -> Load:
        """Requests and sequences that are queued and running now, and the memory that they hold."""
        return Load.of(self._scheduler)

    @property
    def waiting_request_ids(self) -> list[int]:
        """Requests of which nothing has been planned."""
        return [one.request_id for one in self._scheduler.waiting if not one.num_preemptions]

    @property
    def num_running(self) -> int:
        """Sequences whose prompts are cached and that have not ended."""
        return self._scheduler.num_running

    # Requests -----------------------------------------------------------------

    def add_request(self, request: Request | ScoreRequest) -> int:
        """Queue a request and return its id, which its outputs carry. Raises `UsageError` for one
        that can never run."""
        return self._add(request).request_id

    def _add(self, request: Request | ScoreRequest) -> RequestState:
        check_whole(self)
        request = with_own_tokens(request)
        check_request(request, self.config, self.options)
        check_ends(request, self.eos_token_ids)
        own, head = own_start(request, self.config), self.config.exact_head
        state = RequestState(next(self._ids), request, own, head)
        self.adapters.bind(state)
        check_fits(state, self.pools[0], self.model_runner.shapes)
        with interrupts.held_back():
            self._scheduler.add(state)
            self._requests[state.request_id] = state
        return state

    @undivided
    def abort_request(self, request_id: int, sample: int | None = None) -> None:
        """End a request, or one of its samples: it has no further outputs, and its pages and slots
        become free. Does nothing for one that has ended."""
        if (state := self._requests.get(request_id)) is None:
            return
        if sample is not None:
            state.aborted.add(sample)
            if state.active_indices:
                for sequence in list(state.sequences):
                    if sequence.index == sample and self._scheduler.is_unfinished(sequence):
                        self._scheduler.finish(sequence, aborted=True)
                return
        state.aborted.update(range(max(state.num_samples, 1)))
        self._drop(state)

    def run(
        self,
        requests: Iterable[Request | ScoreRequest | None],
        *,
        in_flight: int | None = None,
        on_invalid: Callable[[int, UsageError], None] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Run requests to their ends and yield (number of the request, output).

        Requests are numbered from 0 in the order of `requests`. With `in_flight`, or for an
        iterable that is not a sequence, they are taken when they can run: at most `in_flight`
        unfinished ones (None: any number), and at most 32 between two steps. None instead of a
        request means that there is no request now; the iterator is asked again after the next step.
        None is not numbered. A sequence without `in_flight` is queued at once.

        A request that can never run raises `UsageError` with its number; for requests in a queued
        sequence that happens before the first one runs. With `on_invalid` this is called with the
        number and the error instead, and the run goes on.

        The caller may end a request or a sample between two outputs with `abort_request`. When the
        caller stops iterating (the generator is closed), or at Ctrl-C, which is raised between two
        steps, all unfinished requests are aborted. Outputs of requests that were added otherwise
        are dropped.
        """
        run = Run(requests, self._add, in_flight=in_flight, on_invalid=on_invalid)
        try:
            while not run.is_over:
                run.add_requests()
                for output in self.step() if self.has_work else ():
                    if (number := run.number_of(output)) is not None:
                        yield number, output
                run.keep(self._requests.keys())
        finally:
            with interrupts.held_back():
                for request_id in () if self.failed else run.unfinished:
                    self.abort_request(request_id)

    # Steps --------------------------------------------------------------------

    @undivided
    def step(self, *, decode: bool = True) -> list[RequestOutput]:
        """Send the device its next work, and return the outputs of the step before. With `decode`
        False the work is prefill only."""
        start, compiled = time.perf_counter(), self.model_runner.num_compilations()
        waited = self.stats.wait_seconds
        if not self._sent:
            self._idle.restart()
        outputs = self._receive_constrained(self._sent[-1]) if self._sent else []
        sent = self._send(decode, outputs)
        if sent is not None:
            self._sent.append(sent)
        while len(self._sent) > (sent is not None):
            outputs += self._receive(self._sent.popleft())
        self.stats.compilations += self.model_runner.num_compilations() - compiled
        self.stats.host_seconds += time.perf_counter() - start - (self.stats.wait_seconds - waited)
        return outputs

    def _send(self, decode: bool, outputs: list[RequestOutput]) -> Sent | None:
        scheduler, runner = self._scheduler, self.model_runner
        grown = scheduler.grow(runner.shapes.decode_steps) if decode else []
        self.stats.preemptions = scheduler.num_preemptions
        self.stats.num_times_skipped = scheduler.num_times_skipped
        if scheduler.pending_removals:  # before their pages are written by other requests
            runner.remove_sequences(scheduler.pending_removals)
            scheduler.pending_removals.clear()
        runner.update_pages(grown)
        sent, goes_on = Sent(), False
        for _ in range(self.options.max_prefill_chunks or self._calls.steps):
            if (chunk := scheduler.schedule_prefill()) is None:
                break
            self.stats.idle_seconds += self._idle.look()
            goes_on = decode and self._calls.goes_on(chunk)
            output = None if goes_on else runner.run_chunk(chunk)
            sent.chunks.append((chunk, output))
            runner.add_sequences(chunk.finished_prefill)
            self.stats.add_chunk(chunk, output.num_padding if output is not None else 0)
        if not decode:
            return sent if sent.chunks else None
        self.stats.idle_seconds += self._idle.look()
        if constrained := scheduler.schedule_constrained():
            width, drafts = self._calls.host_drafts(constrained)
            call = constrained_call(constrained, drafts, width, self.config.vocab_size)
            for sequence, error in call.failed:
                state = sequence.request_state
                outputs.append(failed_output(state, error, sample=sequence.index))
                scheduler.finish(sequence, aborted=True)
                self._forget(state)
            if call.sequences:
                sent.constrained = call, runner.run_decode_constrained(call)
                self.stats.decode_calls += 1
        if sequences := scheduler.ready_to_decode():
            sent.sequences, sent.call = sequences, self._calls.choose(sequences, goes_on)
            scheduler.plan_decode(sequences, sent.call)
            if goes_on:
                sent.tokens = runner.run_last_chunk(sent.chunks[-1][0])
                self.stats.padding_tokens += sent.tokens.num_padding
            else:
                sent.tokens = runner.run_decode(sequences, sent.call)
            self.stats.decode_calls += 1
        return sent if sent.chunks or sent.sequences or sent.constrained else None

    def _receive_constrained(self, sent: Sent) -> list[RequestOutput]:
        """Read the tokens of sequences that follow a grammar, if they have not been read yet."""
        if sent.constrained is None:
            return []
        call, tokens = sent.constrained
        sampled, sent.constrained = self._read(tokens), None
        assert sampled is not None
        if call.width > 1:
            self.stats.speculation.add(sampled, call.width, call.sequences)
        outputs = []
        for row, sequence in enumerate(call.sequences):
            if self._scheduler.is_unfinished(sequence):
                self._calls.add_tokens(sequence, sampled.token[row], 1)
                outputs.append(self._add_tokens(sequence, sampled, row))
        return outputs

    def _receive(self, sent: Sent) -> list[RequestOutput]:
        outputs = []
        for chunk, output in sent.chunks:
            if output is not None and (scores := self._read(output)) is not None:
                for part in score_outputs(chunk, scores, self._requests, self._scores):
                    outputs.append(part)
                    if part.finish_reason is not None:
                        self._drop(self._requests[part.request_id])
        if sent.tokens is not None:
            sampled = self._read(sent.tokens)
            assert sampled is not None
            if sent.call.width > 1:
                self.stats.speculation.add(sampled, sent.call.width, sent.sequences)
            for row, sequence in enumerate(sent.sequences):
                sequence.in_flight = sequence.in_flight.after_reading(sent.call)
                if self._scheduler.is_unfinished(sequence):
                    self._calls.add_tokens(sequence, sampled.token[row], sent.call.width)
                    outputs.append(self._add_tokens(sequence, sampled, row))
        return outputs

    def _read(self, output: AsyncOutput) -> SamplerOutput | None:
        self.stats.idle_seconds += self._idle.look()
        try:
            return self.model_runner.read(output)
        finally:
            self.stats.wait_seconds += self._idle.restart()

    def _add_tokens(
        self, sequence: SequenceState, sampled: SamplerOutput, row: int
    ) -> RequestOutput:
        """The output with the new tokens of a sequence. If one of them ends the sequence, it is
        finished."""
        output, count = sequence_output(sequence, sampled, row, self.eos_token_ids)
        self.stats.new_tokens += count
        if output.finish_reason is not None:
            # The model runner does not notice the end of a grammar.
            of_grammar = output.finish_reason == "stop" and output.stop_token is None
            self._scheduler.finish(sequence, aborted=of_grammar)
            self._forget(sequence.request_state)
        return output

    def _drop(self, state: RequestState) -> None:
        """End what is left of a request."""
        self._scheduler.abort(state)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        """Drop a request without sequences left to run."""
        if not state.sequences:
            self._requests.pop(state.request_id, None)
            self._scores.pop(state.request_id, None)
