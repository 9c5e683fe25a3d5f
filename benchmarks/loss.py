"""The distillation loss at full vocabulary: what the chunked linear-KL saves over all logits at
once.

    python -m benchmarks.loss                     on a GPU or a TPU: times it there
    python -m benchmarks.loss --shapes smoke      tiny shapes, also on a CPU

Without a GPU it compiles it for an H200 and counts:

    PYTHONPATH=.venv/compilers JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m benchmarks.loss

Every row is one compiled program: the sums of `linear_kl` and the gradient in the student's
hidden states, for one packed row of 8,192 tokens, 128,256 entries of vocabulary and width 4096 in
bfloat16. `naive` is the same formula on all logits in float32 with JAX's own gradient. Temporaries
are the compiler's figure; FLOPs are XLA's count, in which a loop's body is counted once, times the
chunks of that loop. With a device each fused row is also checked against the naive one of its
divergence and both are timed. The table goes to stdout, JSON to `benchmarks/results/` (of a smoke
run only to `--output`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax import cli
from swiftkv_jax.plan.hardware import GIB
from swiftkv_jax.plan.roofline import Roofline
from swiftkv_jax.plan.topology import topology_mesh
from swiftkv_jax.train.loss import distill
from swiftkv_jax.train.loss.divergence import divergence_and_gradient
from swiftkv_jax.train.loss.objective import AUTHORS, Divergence

from . import report
from .hlo_flops import matmul_flops
from .report import TOPOLOGY
from .timing import SMOKE_PLAN, Plan, jax_program, measure

TEMPERATURE = AUTHORS.temperature
TARGET = 1.4
"""GiB of temporaries that the fused form may take at full size, with the package's own chunk."""
TOLERANCE = 0.02
"""Relative error of the fused gradient against the naive one: both multiply a bfloat16 gradient of
the logits."""


class Size(NamedTuple):
    tokens: int
    vocabulary: int
    width: int
    chunks: tuple[int, ...]
    """Positions in a chunk, besides what the package chooses."""


SIZES = {
    "full": Size(8192, 128256, 4096, (128, 256, 512, 1024, 2048)),
    "smoke": Size(48, 96, 32, (16,)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row."""

    divergence: Divergence = "forward"
    top_k: int | None = None
    naive: bool = False
    positions: int | None = None
    """Positions in a chunk; None is the package's choice."""

    @property
    def name(self) -> str:
        asked = self.divergence if self.top_k is None else f"{self.divergence}, top {self.top_k}"
        form = (
            "naive"
            if self.naive
            else "fused"
            if self.positions is None
            else f"fused, chunks of {self.positions}"
        )
        return f"{asked}, {form}"


def cases(size: Size) -> list[Case]:
    """The naive form of each loss before its fused one; chunk sizes last."""
    asked: list[tuple[Divergence, int | None]] = [
        ("forward", None),
        ("reverse", None),
        ("jsd", None),
        ("forward", 64),
    ]
    pairs = [
        Case(divergence, top_k, naive) for divergence, top_k in asked for naive in (True, False)
    ]
    return pairs + [Case(positions=positions) for positions in size.chunks]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is that of `swiftkv_jax.cli.exit`; 1 also if a result is wrong or the target is
    missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loss", description="Memory and time of the distillation loss."
    )
    report.add_flags(parser, tables=tuple(SIZES), seconds=420, rows=False)
    args = parser.parse_args(argv)
    return cli.run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    start, seed, size = time.monotonic(), report.new_seed(args.seed), SIZES[args.shapes]
    # Without a device the programs are compiled for a described one.
    here = jax.default_backend() != "cpu" or args.shapes == "smoke"
    document, path = report.begin(args, "loss", seed, None if here else TOPOLOGY)
    document |= {
        "tokens": size.tokens,
        "vocabulary": size.vocabulary,
        "width": size.width,
        "temperature": TEMPERATURE,
    }
    plan, key = SMOKE_PLAN if args.shapes == "smoke" else Plan(), jax.random.key(seed)
    roofline = report.roofline(args.shapes) if here else None
    if roofline is not None:
        report.add_roofline(document, roofline)
    sharding = None if here else NamedSharding(topology_mesh(TOPOLOGY, (1, 1)), PartitionSpec())
    sets = [draw(size, jax.random.fold_in(key, number)) for number in range(2)] if here else []
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    for case in cases(size):
        if time.monotonic() - start > args.seconds:
            rows.append(
                _described(case, size) | {"skipped": f"the budget of {args.seconds:g} s was spent"}
            )
            continue
        cli.log(case.name)
        rows.append(measure_row(case, size, sharding, sets, roofline, plan))
        print(_line(rows[-1]), flush=True)
        report.write_json(path, document)
    document["targets"] = judge(rows, args.shapes)
    for target in document["targets"]:
        print(
            f"target {target['row']}: temporaries of {target['at_most']:g} GiB at most: "
            f"{target['verdict']}"
        )
    report.write_json(path, document)
    if path is not None:
        cli.log(f"wrote {path}")
    wrong = [
        row["name"] for row in rows if row.get("wrong") or ("error" in row and not row["naive"])
    ]
    if wrong:
        cli.log(f"error: wrong or broken: {', '.join(wrong)}")
    missed = any(target["verdict"].startswith("MISSED") for target in document["targets"])
    return cli.ERROR if wrong or missed else cli.OK


def judge(rows: Sequence[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    """Every fused loss with the package's own chunk against the target; tiny shapes are not
    judged."""
    verdicts = []
    for row in rows if table == "full" else ():
        if row["naive"] or row["positions"] is not None or "temporary_bytes" not in row:
            continue
        found = row["temporary_bytes"] / GIB
        verdicts.append(
            {
                "row": row["name"],
                "at_most": TARGET,
                "verdict": f"{'met' if found <= TARGET else 'MISSED'}, {found:.2f}",
            }
        )
    return verdicts


# Programs ---------------------------------------------------------------------


def fused(case: Case) -> Callable:
    """(student_x, teacher_x, head, next_tokens, weights) -> (((loss, (agreement, teacher nll,
    student nll, KL)), d loss / d student_x)."""

    def sums(student_x, teacher_x, head, next_tokens, weights):
        loss, *others = distill.linear_kl(
            TEMPERATURE,
            student_x,
            teacher_x,
            head,
            next_tokens,
            weights,
            divergence=case.divergence,
            top_k=case.top_k,
            chunk=case.positions,
        )
        return loss, tuple(others)

    return jax.value_and_grad(sums, has_aux=True)


def naive(case: Case) -> Callable:
    """The same from all logits in float32, differentiated by JAX."""

    def sums(student_x, teacher_x, head, next_tokens, weights):
        student, teacher = (
            jnp.einsum("BTD,VD->BTV", x, head, preferred_element_type=jnp.float32)
            for x in (student_x, jax.lax.stop_gradient(teacher_x))
        )
        loss, _ = divergence_and_gradient(
            case.divergence, student, teacher, TEMPERATURE, case.top_k
        )
        kl, _ = divergence_and_gradient("forward", student, teacher, 1.0)
        same = student.argmax(axis=-1) == teacher.argmax(axis=-1)
        nlls = [
            optax.losses.softmax_cross_entropy_with_integer_labels(logits, next_tokens)
            for logits in (teacher, student)
        ]
        return (weights * loss).sum(), tuple((weights * part).sum() for part in (same, *nlls, kl))

    return jax.value_and_grad(sums, has_aux=True)


@functools.cache
def reference(divergence: Divergence, top_k: int | None) -> Callable:
    """The compiled naive form, to check against."""
    return jax.jit(naive(Case(divergence, top_k, naive=True)))


def program(case: Case) -> Callable:
    return naive(case) if case.naive else fused(case)


def operands(size: Size) -> tuple[jax.ShapeDtypeStruct, ...]:
    hidden = jax.ShapeDtypeStruct((1, size.tokens, size.width), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((size.vocabulary, size.width), jnp.bfloat16)
    next_tokens, weights = (
        jax.ShapeDtypeStruct((1, size.tokens), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    return hidden, hidden, head, next_tokens, weights


def draw(size: Size, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random operands with logits of standard deviation 2 and a student near its teacher."""

    def one_set(key):
        keys = jax.random.split(key, 4)
        teacher_x, noise = (
            jax.random.normal(each, (1, size.tokens, size.width)) for each in keys[:2]
        )
        head = 2 * size.width**-0.5 * jax.random.normal(keys[2], (size.vocabulary, size.width))
        student_x, teacher_x, head = (
            x.astype(jnp.bfloat16) for x in (teacher_x + 0.3 * noise, teacher_x, head)
        )
        next_tokens = jax.random.randint(keys[3], (1, size.tokens), 0, size.vocabulary)
        return student_x, teacher_x, head, next_tokens, jnp.ones((1, size.tokens), jnp.float32)

    return jax.block_until_ready(jax.jit(one_set)(key))


# One row ----------------------------------------------------------------------


def measure_row(
    case: Case,
    size: Size,
    sharding: NamedSharding | None,
    sets: list[tuple[jax.Array, ...]],
    roofline: Roofline | None,
    plan: Plan,
) -> dict[str, Any]:
    """The compiler's figures, and with `roofline` the device's; a failure is recorded as
    `error`."""
    row = _described(case, size)
    try:
        row |= count(case, size, sharding)
        if roofline is not None:
            row |= timed(case, size, sets, roofline, plan)
    except (
        Exception
    ) as error:  # one that fails, out of memory for example, must not lose the others
        row["error"] = report.reason(error)
    return row


def _described(case: Case, size: Size) -> dict[str, Any]:
    chosen = case.positions or distill.chunk_length(1, size.tokens, size.vocabulary)
    chunk = size.tokens if case.naive else chosen
    return (
        {"name": case.name}
        | dataclasses.asdict(case)
        | {"chunk": chunk, "chunks": -(-size.tokens // chunk)}
    )


def count(case: Case, size: Size, sharding: NamedSharding | None) -> dict[str, Any]:
    """Compile, and read the compiler's figures."""
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in operands(size)
    ]
    start = time.perf_counter()
    compiled = jax.jit(program(case)).lower(*shapes).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": matmul_flops(compiled.as_text() or "").all,
        "least_flops": least_flops(size),
        "compile_seconds": seconds,
    }


def least_flops(size: Size) -> int:
    """FLOPs of the three products with the output matrix: both logits and the gradient."""
    return 3 * 2 * size.tokens * size.vocabulary * size.width


def timed(
    case: Case, size: Size, sets: list[tuple[jax.Array, ...]], roofline: Roofline, plan: Plan
) -> dict[str, Any]:
    """Time per call, its share of the measured rate of a large product, and the error against the
    naive form."""
    call = program(case)
    calls = jax_program(lambda operands: call(*operands), sets)
    found = (
        {}
        if case.naive
        else compare(calls.result, reference(case.divergence, case.top_k)(*sets[-1]))
    )
    timings, failed = measure({case.name: calls}, plan)
    for error in failed.values():
        raise error
    timing = timings[case.name]
    rate = least_flops(size) / timing.seconds / 1e12
    return found | {
        "seconds": timing.seconds,
        "tflops": rate,
        "share_of_matmul": rate / (roofline.flops / 1e12),
        "timing": dataclasses.asdict(timing),
    }


def compare(result: Any, wanted: Any) -> dict[str, Any]:
    """Relative errors of the sums and, by norm, of the gradient."""
    ((loss, others), gradient), ((wanted_loss, wanted_others), wanted_gradient) = result, wanted
    difference = gradient.astype(jnp.float32) - wanted_gradient.astype(jnp.float32)
    errors = {
        "gradient": float(
            jnp.linalg.norm(difference) / jnp.linalg.norm(wanted_gradient.astype(jnp.float32))
        )
    }
    for name, a, b in zip(
        ("loss", "agreement", "teacher_nll", "student_nll", "kl"),
        (loss, *others),
        (wanted_loss, *wanted_others),
        strict=True,
    ):
        errors[name] = float(abs(a - b) / jnp.maximum(abs(b), 1e-6))
    return {"errors": errors, "wrong": not all(error <= TOLERANCE for error in errors.values())}


def _line(row: dict[str, Any]) -> str:
    line = f"{row['name']:32} chunks {row['chunks']:4} x {row['chunk']:5}"
    if "temporary_bytes" in row:
        line += (
            f"  temporaries {row['temporary_bytes'] / GIB:8.3f} GiB  "
            f"{row['flops'] / 1e12:8.4g} TFLOP"
        )
        line += f", {row['flops'] / row['least_flops']:.3f} of the least"
    if "seconds" in row:
        line += (
            f"  {report.duration(row['seconds']):>10} {row['tflops']:7.4g} TFLOP/s "
            f"{row['share_of_matmul']:6.1%} of the matrix product"
        )
    if "errors" in row:
        line += f"  error {max(row['errors'].values()):.1e}{' WRONG' if row['wrong'] else ''}"
    return line + (f"  {row['error']}" if "error" in row else "")


if __name__ == "__main__":
    sys.exit(main())
