"""How long a call takes on the device.

A *program* is one compiled function that makes several calls in a row, each on input sets of its
own: what a call reads is not in a cache, and neither XLA's common-subexpression elimination nor its
dead-code elimination has anything to remove, since inputs differ and all outputs are returned.
Programs are enqueued without waiting, and a run of them ends with one `block_until_ready`. Each
sample is two such runs, of n and of 3n programs, and the time per call is their difference over the
2n programs: what a run costs once (waking up the device, the last synchronisation, the host
noticing) cancels.

Why not a `lax.scan`? Choosing the input set of a step would copy it, as many bytes as decoding
reads; and feeding each result to the next call would time attention to averages of averages, on
which the chip runs faster than on random data.

Checks of the method, recorded with every timing: `scaling` is the time of 3n programs over that of
n, which must be about three; `host_share` is how much of the long run the host spent enqueueing.
Near one with a short queue, what was timed is the host. Implementations of a row are sampled in
turn, so that a drift of the clocks meets all of them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

ENQUEUED_BYTES = 16e9
"""Most bytes of outputs in the queue. JAX may hold the memory of every program that has not run
yet."""


class Run(NamedTuple):
    seconds: float
    """Seconds from the first program enqueued to the last one finished."""
    enqueueing: float
    """Seconds of these in which the host was still enqueueing programs."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that is compiled, has run once, and is ready to be timed."""

    run: Callable[[int], Run]
    """Function that runs the program a number of times and waits."""
    calls: int
    """Number of calls in the program."""
    result: Any
    """Result of the last call of the first run."""
    output_bytes: int = 0
    compile_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and how often programs are run."""

    short_run: float = 0.02
    """Seconds that the shorter run should take, as far as `max_repeats` allows."""
    seconds: float = 0.6
    """Seconds for all samples of one program, beyond `min_rounds`."""
    min_rounds: int = 5
    max_rounds: int = 40
    max_repeats: int = 10
    """Most programs in the shorter run: three times as many stay below JAX's limit of 32 in flight,
    so enqueueing never waits for the device."""
    warm_up: float = 0.15
    """Seconds for which a program runs before it is timed."""


SMOKE_PLAN = Plan(short_run=0.002, seconds=0.02, min_rounds=3, max_rounds=5, warm_up=0.0)


@dataclasses.dataclass(frozen=True)
class Timing:
    seconds: float
    """Seconds of one call: the median over all samples."""
    spread: float
    """Quartile distance of the samples over their median."""
    scaling: float
    """Time of 3n programs over that of n."""
    host_share: float
    """Share of the long run in which the host was enqueueing."""
    linear: bool
    """True if `scaling` is near three: then the time is that of the calls."""
    calls: int
    repeats: int
    short_runs: list[float]
    long_runs: list[float]


def jax_program(call: Callable, sets: Sequence) -> Program:
    """A program of `call` of each of `sets`, compiled and run once."""
    options = None
    if jax.default_backend() == "gpu":
        # As plain launches on one stream, calls run one after the other. A CUDA graph could overlap
        # them, and would have to be updated on every run, whose outputs lie elsewhere.
        options = {"xla_gpu_enable_command_buffer": ""}
    program = jax.jit(lambda sets: [call(one) for one in sets], compiler_options=options)
    start = time.perf_counter()
    results = jax.block_until_ready(program(list(sets)))
    compile_seconds = time.perf_counter() - start
    output_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(results))
    last = results[-1]
    del results

    def run(repeats: int) -> Run:
        start = time.perf_counter()
        out = None
        for _ in range(repeats):
            out = program(list(sets))  # drops the outputs before, whose memory is used again
        queued = time.perf_counter()
        jax.block_until_ready(out)
        return Run(time.perf_counter() - start, queued - start)

    return Program(run, len(sets), last, output_bytes, compile_seconds)


def measure(
    programs: Mapping[str, Program],
    plan: Plan,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """(timings, errors of the programs that failed): all programs in turn, round by round.

    `clock` counts the seconds of the warm-up.
    """
    samplers = {}
    failed = {}
    for name, program in programs.items():
        try:
            samplers[name] = _Sampler(program, plan, clock)
        except Exception as error:  # the other programs go on
            failed[name] = error
    for number in range(plan.max_rounds):
        for name, sampler in list(samplers.items()):
            if number < sampler.rounds:
                try:
                    sampler.sample()
                except Exception as error:
                    failed[name] = error
                    del samplers[name]
    return {name: sampler.timing() for name, sampler in samplers.items()}, failed


class _Sampler:
    """The samples of one program."""

    def __init__(self, program: Program, plan: Plan, clock: Callable[[], float]):
        """Warm up, and choose from the time of the warm program how often it runs."""
        self.program, start = program, clock()
        single = program.run(1).seconds
        while True:
            single = min(single, program.run(1).seconds)
            if clock() - start >= plan.warm_up:
                break
        single = max(single, 1e-7)
        repeats = min(
            plan.max_repeats,
            plan.short_run / single,
            ENQUEUED_BYTES / (3 * max(1, program.output_bytes)),
        )
        self.repeats = max(1, round(repeats))
        self.rounds = int(
            min(plan.max_rounds, max(plan.min_rounds, plan.seconds / (4 * self.repeats * single)))
        )
        self.short: list[Run] = []
        self.long: list[Run] = []

    def sample(self):
        self.short.append(self.program.run(self.repeats))
        self.long.append(self.program.run(3 * self.repeats))

    def timing(self) -> Timing:
        short, long = ([run.seconds for run in runs] for runs in (self.short, self.long))
        calls = self.repeats * self.program.calls
        samples = sorted((b - a) / (2 * calls) for a, b in zip(short, long, strict=True))
        scaling = statistics.median(long) / statistics.median(short)
        seconds = statistics.median(samples)
        if seconds <= 0:  # more noise than signal, as on a busy host: the long runs as they are
            seconds = statistics.median(long) / (3 * calls)
        first, _, third = (
            statistics.quantiles(samples, n=4) if len(samples) > 1 else (seconds, seconds, seconds)
        )
        return Timing(
            seconds=seconds,
            spread=(third - first) / seconds,
            scaling=scaling,
            host_share=statistics.median(run.enqueueing / run.seconds for run in self.long),
            linear=2.3 <= scaling <= 3.4,
            calls=self.program.calls,
            repeats=self.repeats,
            short_runs=short,
            long_runs=long,
        )
