"""The SwiftKV cut of a model: how many layers keep their own keys and values, how many of the
others share a cache, and which tokens keep their own in those too."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import ConfigError, UsageError
from .config import Config, GeneratedKV

CUT_FIELDS = (
    "num_key_value_layers",
    "key_value_group_size",
    "prompt_attention_layers",
    "prompt_mlp_neurons",
    "boundary_taps",
    "exact_head",
    "generated_kv",
    "exact_tail",
)
"""Fields of a `Config` that say where a model is cut, and how its prompts and generated tokens
run."""


def choose_cut(
    config: Config,
    num_key_value_layers: int | None = None,
    key_value_group_size: int | None = None,
    *,
    prompt_attention_layers: int | None = None,
    prompt_mlp_neurons: int | None = None,
    boundary_taps: int | None = None,
) -> Config:
    """The architecture at the given cut. Numbers that are None are those of the cut that `config`
    has; without one, half of the layers are upper layers, without groups, prompt attention layers,
    neurons and taps.

    Raises `UsageError` if the layers cannot be cut so.
    """
    layers = num_key_value_layers
    if layers is None:
        layers = config.num_key_value_layers
        if not config.num_upper_layers:
            layers = max(1, config.num_layers // 2)
    group = key_value_group_size
    if group is None:
        group = 1
        if layers == config.num_key_value_layers:
            group = config.key_value_group_size
    prompt = {
        "prompt_attention_layers": prompt_attention_layers,
        "prompt_mlp_neurons": prompt_mlp_neurons,
    }
    try:
        return config.cut(layers, group, boundary_taps=boundary_taps, **prompt)
    except ConfigError as error:
        more = "".join(f", `{name}`={value}" for name, value in prompt.items() if value)
        raise UsageError(
            f"`num_key_value_layers`={layers} with `key_value_group_size`={group}{more}: {error}"
        ) from None


def quarter_of_neurons(config: Config) -> int:
    """Return as many of `Config.prompt_mlp_neurons` as were worth their cost beside a map on
    SmolLM2-135M: a quarter of the MLP, in multiples of 64 for the devices' tiles; none of
    experts."""
    return 0 if config.num_experts else 64 * round(config.mlp_dim / 4 / 64)


def has_same_delta(config: Config, other: Config) -> bool:
    """True if two architectures differ, at most, in the tokens that keep their own upper keys and
    values."""
    one, another = (
        dataclasses.replace(each, generated_kv="boundary", exact_tail=0, exact_head=0)
        for each in (config, other)
    )
    return one == another


def ungrouped(config: Config) -> Config:
    """The architecture with a cache for each layer. Programs that run the teacher alone are
    compiled for it: one for all group sizes."""
    return dataclasses.replace(config, key_value_group_size=1, shared_kv_heads=None)


def drop_own(config: Config, generated_kv: GeneratedKV | None, exact_head: int | None) -> Config:
    """`config` without those tokens that keep their own upper keys and values and by these fields
    no longer do, as for another cut, which they may not fit."""
    if generated_kv == "boundary":
        config = dataclasses.replace(config, generated_kv="boundary", exact_tail=0)
    if exact_head == 0:
        config = dataclasses.replace(config, exact_head=0)
    return config


def choose_generated_kv(
    config: Config,
    generated_kv: GeneratedKV | None = None,
    exact_tail: int | None = None,
    exact_head: int | None = None,
) -> Config:
    """`config` with these fields; fields that are None keep the values of `config`, except that
    `exact_tail` is 0 unless `generated_kv` is own.

    Raises `UsageError` if the model cannot have them.
    """
    kv = generated_kv or config.generated_kv
    tail = exact_tail
    if tail is None:
        tail = config.exact_tail if kv == "own" else 0
    if isinstance(tail, bool) or not isinstance(tail, int) or tail < 0:
        raise UsageError(f"`exact_tail`={tail!r}: must be a whole number, at least 0")
    if tail and kv == "boundary":
        raise UsageError(f"`exact_tail`={tail} needs `generated_kv`=own")
    if tail > (positions := config.max_position_embeddings):
        raise UsageError(f"`exact_tail`={tail}: this model has {positions} positions")
    try:
        config = dataclasses.replace(config, generated_kv=kv, exact_tail=tail)
    except ConfigError as error:
        raise UsageError(f"`generated_kv`={kv}: {error}") from None
    if exact_head is None:
        return config
    try:
        return dataclasses.replace(config, exact_head=exact_head)
    except ConfigError as error:
        raise UsageError(f"`exact_head`={exact_head}: {error}") from None


def describe_cut(cut: Any, num_layers: int) -> str:
    """The cut of a `Config`, or of another object with its fields:
    `K=18 of 30 layers with a tap, an exact head, generated_kv own and a tail of 64`."""
    text = f"K={cut.num_key_value_layers} of {num_layers} layers"
    if cut.key_value_group_size > 1:
        text += f" in groups of {cut.key_value_group_size}"
    parts = []
    if cut.prompt_attention_layers:
        count = cut.prompt_attention_layers
        parts.append(f"the attention of {count} more layer{'s' * (count > 1)}")
    if cut.prompt_mlp_neurons:
        parts[-1] += f" and {cut.prompt_mlp_neurons:,} neurons of each MLP"
    if cut.boundary_taps:
        parts.append("a tap")
    if cut.exact_head:
        parts.append("an exact head")
    if parts:
        text += f" with {', '.join(parts)}"
    tail = f" and a tail of {cut.exact_tail}" if cut.exact_tail else ""
    return f"{text}, generated_kv {cut.generated_kv}{tail}"
