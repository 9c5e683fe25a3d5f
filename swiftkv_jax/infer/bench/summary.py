"""Rates, shares of the roofline and speed-ups from raw times, and their table.

Rates are those of the median repetition. Executed FLOPs are what each variant needs (`cost`): in
prefill the teacher needs only the keys and values of its last layer, and the engine runs no more,
so the student's gain is a little less than that of half the layers. Normalised FLOPs are the
paper's yardstick: 2 x the teacher's parameters x tokens, for both alike. Bytes are what must move
at least: weights once a call, keys and values once when they are written and once for each decode
step that attends to them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...model.cache import bytes_per_token
from ...model.config import Config
from ...model.params import llama_shapes
from ...plan.cost import (
    attentions_of_a_step,
    decode_flops,
    experts_read,
    layer_weights,
    prefill_flops,
    stored_layer_weights,
    visible_positions,
)
from ...plan.roofline import Roofline
from ..engine.shapes import Shapes, kv_programs
from ..runner.serving_form import Weights, num_bytes, served_config
from .cells import DRAFTS, STUDENT, TIMES, Cell, Mode, spread
from .timing import Raw


@dataclasses.dataclass(frozen=True)
class Variant:
    """Facts of an engine from which its rates follow."""

    name: str
    config: Config
    """The model's config, with its cut, whether the variant uses it or not."""
    prefill_bytes: int
    """Bytes of weights that a chunk of prefill reads, on all data-parallel shards together."""
    weight_bytes: int
    """Bytes of weights that a decode step reads, on all data-parallel shards together. Of an
    embedding that is not also the output matrix only rows are read, which do not count."""
    kv_bytes: int
    """Bytes of keys and values that a decode step reads for each position of each row: every layer
    reads its own, whether it shares them or not, each time that it attends to them."""
    written_bytes: int
    """Bytes of keys and values that are written for each token."""
    decode_steps: int
    expert_bytes: int = 0
    """Bytes of experts among `weight_bytes`, of which a step reads those that its tokens choose."""
    tail_bytes: int = 0
    """Bytes of weights besides `prefill_bytes` that a chunk reads which runs the end or the first
    token of a prompt through all layers."""

    @property
    def prompt_config(self) -> Config:
        """The config that counts prefill's operations: the last token of a prompt is the first that
        is decoded, so the tail is one token shorter."""
        return dataclasses.replace(self.config, exact_tail=max(self.config.exact_tail - 1, 0))

    @property
    def swiftkv(self) -> bool:
        return self.name == STUDENT


def variant_of(
    name: str,
    config: Config,
    weights: Weights,
    cache_dtype: Any,
    shapes: Shapes,
    *,
    kv_head_copies: int = 1,
) -> Variant:
    """Facts of an engine that serves `weights`, or their shapes, of a model with `config`, on a
    mesh that needs `kv_head_copies` of each key/value head."""
    boundary = (
        *(weights.norm_swiftkv, weights.kv, weights.kv_bias, weights.k_norm_swiftkv),
        *(weights.k_tap, weights.prompt_qkv, weights.prompt_mlp),
    )
    prompt = weights.upper[: len(weights.prompt_qkv)]  # layers of which prompts run the attention
    attention = num_bytes([(b.attn_norm, b.o, b.o_bias, b.mlp_norm) for b in prompt])
    queries = weights.upper_q[: len(weights.prompt_qkv)]
    filling = num_bytes((weights.lower, weights.lower_qkv, boundary, queries)) + attention
    if not weights.upper:  # of the last layer only the keys and values are needed
        last = weights.lower_qkv[-1]
        unused = dataclasses.replace(weights.lower[-1], attn_norm=None), last.q, last.q_bias
        filling -= num_bytes(unused)
    unread = 0 if weights.lm_head is None else num_bytes(weights.embed)
    swiftkv = name == STUDENT
    served = served_config(config, swiftkv)
    kv = kv_programs(served)
    if kv == "own":
        unread += num_bytes(boundary)
    elif kv == "boundary":
        unread += num_bytes(weights.upper_qkv)  # of an exact head, which is a prompt's
    tail = num_bytes((weights.upper, weights.upper_qkv, weights.upper_mix)) - attention
    if served.has_two_caches:
        tail += num_bytes(weights.upper_q)
    blocks = (*weights.lower, *weights.upper)
    experts = [(block.expert_gate, block.expert_up, block.expert_down) for block in blocks]
    dp_size = shapes.dp_size
    position = bytes_per_token(config, cache_dtype, swiftkv=False) // config.num_layers
    return Variant(
        name=name,
        config=config,
        prefill_bytes=dp_size * filling,
        weight_bytes=dp_size * (num_bytes(weights) - unread),
        kv_bytes=kv_head_copies * position * attentions_of_a_step(config, swiftkv=swiftkv),
        written_bytes=kv_head_copies
        * bytes_per_token(served, cache_dtype, swiftkv=not shapes.pages_per_own_page),
        decode_steps=shapes.decode_steps,
        expert_bytes=dp_size * num_bytes(experts),
        tail_bytes=dp_size * tail if shapes.tail or served.exact_head else 0,
    )


def derive(
    mode: Mode, cell: Cell, raws: Sequence[Raw], variant: Variant, roofline: Roofline
) -> dict[str, Any]:
    """Figures of a cell by name: seconds, units per second, and shares of the roofline."""
    seconds = statistics.median(raw["seconds"] for raw in raws)
    row: dict[str, Any] = {
        "compilations": sum(raw["compilations"] for raw in raws),
        "seconds": seconds,
    }
    row |= {"prefill": _prefill, "decode": _decode, "offline": _offline, "latency": _latency}[mode](
        cell, raws, variant, seconds
    )
    for share, part in {"idle_share": "idle", "cpu_share": "cpu_seconds"}.items():
        row[share] = statistics.median(raw[part] / raw["seconds"] for raw in raws)
    shares = {"flops_share": "flops_per_s", "normalised_flops_share": "normalised_flops_per_s"}
    row |= {share: row[rate] / roofline.flops for share, rate in shares.items()}
    if "bytes_per_s" in row:
        row["bandwidth_share"] = row["bytes_per_s"] / roofline.bandwidth
    if "drafts" in raws[0]:
        drafts, tokens, accepted = (sum(raw[name] for raw in raws) for name in DRAFTS)
        row["acceptance_length"] = 1 + accepted / max(drafts, 1)
        row["acceptance_rate"] = accepted / max(tokens, 1)
    return row


def compare(mode: Mode, student: Sequence[Raw], teacher: Sequence[Raw]) -> dict[str, float]:
    """Speed of the student divided by that of the teacher: by medians, by best repetitions, and on
    a CPU by processor time.

    In latency by mean waiting times: when requests that arrive one by one end depends mostly on
    when they arrive.
    """
    if mode == "latency":
        found = {}
        for name in TIMES:
            slow, fast = _pooled(teacher, name), _pooled(student, name)
            if slow and fast and statistics.fmean(fast) > 0:
                found[f"{name}_speed_up"] = statistics.fmean(slow) / statistics.fmean(fast)
        return {"speed_up": found["e2e_speed_up"]} | found

    def ratio(choose: Callable, key: str) -> float:
        return choose(raw[key] for raw in teacher) / choose(raw[key] for raw in student)

    found = {
        "speed_up": ratio(statistics.median, "seconds"),
        "speed_up_of_best": ratio(min, "seconds"),
    }
    if jax.default_backend() == "cpu":
        found["speed_up_in_cpu_time"] = ratio(min, "cpu_seconds")
    if mode == "prefill":
        found["ttft_speed_up"] = ratio(statistics.median, "ttft")
    return found


def parameters(config: Config) -> int:
    """Number of parameters of the plain Llama that a token runs through, embedding and output
    matrix included."""
    unused = stored_layer_weights(config) - layer_weights(config)
    stored = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(llama_shapes(config)))
    return stored - config.num_layers * unused


def _rates(variant: Variant, executed: float, tokens: int, seconds: float) -> dict[str, float]:
    normalised = 2 * parameters(variant.config) * tokens
    return {
        "flops": executed,
        "flops_per_s": executed / seconds,
        "normalised_flops_per_s": normalised / seconds,
    }


def _prefill(cell: Cell, raws: Sequence[Raw], variant: Variant, seconds: float) -> dict[str, Any]:
    length = cell.input_len - 1
    tokens = cell.prompts * length
    executed = cell.prompts * prefill_flops(variant.prompt_config, length, swiftkv=variant.swiftkv)
    ttft = statistics.median(raw["ttft"] for raw in raws)
    moved = raws[0]["chunks"] * variant.prefill_bytes + tokens * variant.written_bytes
    moved += variant.tail_bytes  # at least once
    return {
        "tokens_per_s": tokens / seconds,
        "ttft": ttft,
        "bytes_per_s": moved / seconds,
    } | _rates(variant, executed, tokens, seconds)


def _decode(cell: Cell, raws: Sequence[Raw], variant: Variant, seconds: float) -> dict[str, Any]:
    steps = statistics.mean(raw["steps"] for raw in raws)
    accepted = statistics.mean(raw.get("accepted_tokens", 0) for raw in raws)
    passes = steps - accepted / cell.prompts
    # The mean over the steps that were timed.
    context = cell.input_len - 1 + variant.decode_steps + (steps + 1) / 2
    executed = cell.prompts * steps * decode_flops(variant.config, context, swiftkv=variant.swiftkv)
    seen = visible_positions(variant.config, context)
    weights = variant.weight_bytes
    if variant.expert_bytes:
        weights -= variant.expert_bytes * (1 - experts_read(variant.config, cell.prompts))
    read = passes * (weights + cell.prompts * seen * variant.kv_bytes)
    return {
        "seconds_per_output_token": seconds / steps,
        "tokens_per_s": cell.prompts * steps / seconds,
        "context": context,
        "bytes_per_s": read / seconds,
    } | _rates(variant, executed, cell.prompts * steps, seconds)


def _offline(cell: Cell, raws: Sequence[Raw], variant: Variant, seconds: float) -> dict[str, Any]:
    new = cell.prompts * cell.output_len
    total = cell.prompts * cell.length
    # The mean of the positions that the first and the last decode step attend to.
    context = (cell.input_len + cell.length - 1) / 2
    executed = cell.prompts * (
        prefill_flops(variant.prompt_config, cell.input_len - 1, swiftkv=variant.swiftkv)
        + cell.output_len * decode_flops(variant.config, context, swiftkv=variant.swiftkv)
    )
    chunks, calls = (
        statistics.median(raw[kind] for raw in raws) for kind in ("chunks", "decode_calls")
    )
    moved = chunks * variant.prefill_bytes + variant.tail_bytes
    moved += calls * variant.decode_steps * variant.weight_bytes
    moved += total * variant.written_bytes
    moved += new * visible_positions(variant.config, context) * variant.kv_bytes
    row = {
        "tokens_per_s": total / seconds,
        "output_tokens_per_s": new / seconds,
        "requests_per_s": cell.prompts / seconds,
    }
    if "drafts" not in raws[0]:  # with drafts, calls differ in their passes through the weights
        row["bytes_per_s"] = moved / seconds
    return row | _rates(variant, executed, total, seconds)


def _latency(cell: Cell, raws: Sequence[Raw], variant: Variant, seconds: float) -> dict[str, Any]:
    row = _offline(cell, raws, variant, seconds)
    for name in TIMES:
        if values := _pooled(raws, name):
            row |= {f"{name}_{part}": value for part, value in spread(values).items()}
    return row


def _pooled(raws: Sequence[Raw], name: str) -> list[float]:
    """Times of all requests of all repetitions."""
    return [value for raw in raws for value in raw[name]]


# The table --------------------------------------------------------------------

Column = tuple[str, str, str, float]
"""Heading, key, format, scale."""
_FLOPS: tuple[Column, ...] = (
    ("TFLOP/s", "flops_per_s", ".4g", 1e-12),
    ("% of FLOP/s", "flops_share", ".1f", 100),
    ("normalised TFLOP/s", "normalised_flops_per_s", ".4g", 1e-12),
    ("% of FLOP/s, normalised", "normalised_flops_share", ".1f", 100),
)
_BYTES: tuple[Column, ...] = (
    ("GB/s", "bytes_per_s", ".1f", 1e-9),
    ("% of bandwidth", "bandwidth_share", ".1f", 100),
)
_HOST: tuple[Column, ...] = (
    ("device idle %", "idle_share", ".1f", 100),
    ("CPU %", "cpu_share", ".0f", 100),
)
_OF_DRAFTS: tuple[Column, ...] = (
    ("acceptance length", "acceptance_length", ".2f", 1),
    ("% accepted", "acceptance_rate", ".1f", 100),
)
_COLUMNS: dict[Mode, tuple[Column, ...]] = {
    "prefill": (
        ("tokens/s", "tokens_per_s", ".0f", 1),
        ("TTFT ms", "ttft", ".1f", 1e3),
        *_FLOPS,
        *_BYTES,
    ),
    "decode": (
        ("ms/token", "seconds_per_output_token", ".3f", 1e3),
        ("tokens/s", "tokens_per_s", ".0f", 1),
        *_BYTES,
        ("% of FLOP/s", "flops_share", ".1f", 100),
        *_HOST,
    ),
    "offline": (
        ("tokens/s", "tokens_per_s", ".0f", 1),
        ("output tokens/s", "output_tokens_per_s", ".1f", 1),
        *_FLOPS,
        *_BYTES,
        *_HOST,
    ),
    "latency": (
        ("output tokens/s", "output_tokens_per_s", ".1f", 1),
        *(
            (f"{name.upper()} {part} ms", f"{name}_{part}", ".1f", 1e3)
            for name in TIMES
            for part in ("mean", "p50", "p90", "p99")
        ),
        *_HOST,
    ),
}


def table(mode: Mode, rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line for each cell and variant. `rows` are those of the JSON
    document."""
    columns = _COLUMNS[mode]
    if any("acceptance_rate" in row for row in rows):
        columns += _OF_DRAFTS
    lines = [["cell", "variant", *(heading for heading, *_ in columns), "times as fast"]]
    for row in rows:
        figures = [
            format(scale * row[key], spec) if key in row else "" for _, key, spec, scale in columns
        ]
        faster = f"{row['speed_up']:.3f}" if "speed_up" in row else ""
        lines.append([row["label"], row["variant"], *figures, faster])
    rule = ["---", "---", *["---:"] * (len(columns) + 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))
