"""Options that training and calibration share, each with its flag."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

from ..cli.fields import check_minimums, option
from ..errors import UsageError

Init = Literal["closed-form", "leader", "authors"]
"""The start of a fresh delta; see `initialization.Start` for the last two."""

TOKENS_PER_DIMENSION = 256
"""Calibration tokens per entry of the hidden state, by default."""


@dataclasses.dataclass(frozen=True)
class Steers:
    """Marks a field that steers the updates: a run continues only with the same value (see
    `setup.fingerprint`). The others may change when a run is continued: their results are in the
    fingerprint (weights, cut, data, number of steps), or they change only rounding, or what is
    saved, reported and exported."""

    earlier: Any = None
    """For a field that is missing in the first checkpoints, the value that those were trained
    with."""


def check_calibration_tokens(tokens: int | None, init: Init) -> None:
    """Raise `UsageError` for a number of tokens that no start of `init` is fitted to."""
    if tokens is not None and init != "closed-form":
        raise UsageError(
            f"`calibration_tokens`={tokens} needs `init`=closed-form, and it is {init}"
        )


def check_shared(options: Any) -> None:
    """Raise `UsageError` for a value that neither a run nor a calibration can have."""
    check_minimums(options)
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"`seed`={options.seed}: must be from 0 to {2**32 - 1}", option="seed")
    check_share("max_unreadable_share", options.max_unreadable_share)


def check_rows(options: Any) -> None:
    """Raise `UsageError` for rows that cannot be divided over the devices."""
    if options.micro_batch_size % options.mesh.rows:
        parts = options.batch_size // options.micro_batch_size
        divided = f" in {parts} micro-batches" if parts > 1 else ""
        raise UsageError(
            f"`batch_size`={options.batch_size}{divided} must be a multiple of the "
            f"{options.mesh.rows} data devices of `mesh`",
            option="batch_size",
        )


def check_share(name: str, value: float) -> None:
    """Raise `UsageError` for a share of one or more."""
    if not 0 <= value < 1:
        raise UsageError(f"`{name}`={value}: must be from 0 to below 1", option=name)


def steering[T](default: T, help: str, *, earlier: Any = None, **how: Any) -> T:
    """`option` for a field that steers the updates: see `Steers`."""
    return option(default, help, metadata={"steers": Steers(earlier)}, **how)


def shared(default: Any, help: str, **how: Any) -> Callable[..., Any]:
    """A function that makes the field of an option, for each class that has it."""
    return functools.partial(option, default, help, **how)


num_key_value_layers = shared(
    None,
    "layers that keep their own keys and values (default: as in the model's delta, or as an "
    "analysis of the data recommends; demo: half)",
    metavar="K",
    at_least=1,
)
analysis = shared(None, "take the cut that this one recommends", metavar="DIR")
key_value_group_size = shared(
    None,
    "upper layers that share one key/value cache, AcrossKV (default: as in the model's delta, or "
    "1)",
    metavar="G",
    at_least=1,
)
prompt_attention_layers = shared(
    None,
    "upper layers, the first ones, of which prompts run the attention, with a linear map in place "
    "of the MLP (default: as in the model's delta, or 0)",
    metavar="M",
)
prompt_mlp_neurons = shared(
    None,
    "neurons of each of their MLPs that prompts run beside the map (default: as in the model's "
    "delta, or 0)",
    metavar="N",
)
boundary_taps = shared(
    None,
    "1: keys come from the hidden states of a token and of the one before it (default: as in the "
    "model's delta, or 0)",
    choices=(0, 1),
)
exact_tail = shared(
    None,
    "with --generated-kv own: also the last W tokens of a prompt (default: as the model)",
    metavar="W",
)
exact_head = shared(
    None,
    "1: the first token of a text runs through all layers and keeps its own keys and values, an "
    "attention sink (default: as the model)",
    choices=(0, 1),
)
max_unreadable_share = shared(
    0.01,
    "share of unreadable rows in a source above which the command stops (default: %(default)s)",
    metavar="SHARE",
)
dtype = shared(None, "dtype of the weights (default: bfloat16 on accelerators, float32 on a CPU)")

MAX_LENGTH = "tokens in a packed row (default: %(default)s; demo: %(demo)s)"
GENERATED_KV = (
    "{} generated tokens that keep each upper layer's own keys and values (default: as the model "
    "says)"
)
"""Help of `generated_kv` in a command that does something for them."""
