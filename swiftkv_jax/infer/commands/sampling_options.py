"""Flags for `SamplingParams`, and the sampling parameters of a command.

A flag left out is None in the parsed arguments, so that the default of the checkpoint or of
`SamplingParams` takes its place.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, UsageError
from .engine_options import given_fields

if TYPE_CHECKING:
    from ...model.model import Model
    from ..engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that are read from `GENERATION_CONFIG`."""


def add_sampling_arguments(parser: argparse._ActionsContainer, *, max_tokens: int) -> None:
    """Add flags for the fields of `SamplingParams`, but for those of `add_result_arguments`."""
    add = parser.add_argument
    names = ("--max-tokens", "--max-new-tokens")
    add(
        *names,
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most new tokens (default: {max_tokens})",
    )
    add(
        "--min-tokens",
        type=int,
        metavar="N",
        help="no end token, and no stop string, before this many (default: 0)",
    )
    add_distribution_arguments(parser)
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=VALUE",
        help="added to a token's logit; repeat to add more",
    )
    add("--seed", type=int, help="seed of the draws (default: 0)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; repeat to add more")
    add(
        "--stop-token-ids",
        type=_token_ids,
        metavar="ID,...",
        help="tokens that end the text as the model's own end tokens do",
    )
    add("--ignore-eos", action="store_true", default=None, help="go on after an end token")


def add_distribution_arguments(
    parser: argparse._ActionsContainer, *, temperature: float = 0
) -> None:
    """Add flags for what changes the distribution that tokens are drawn from. `temperature` is the
    default of the command."""
    add = parser.add_argument
    add(
        "--temperature",
        "--temp",
        type=float,
        help=f"0 takes the likeliest token (default: {GENERATION_CONFIG}'s, or {temperature:g})",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0 is off")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the fewest tokens that hold probability P; 1 is off",
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest; 0 is off",
    )
    add(
        "--repetition-penalty",
        "--repeat-penalty",
        type=float,
        metavar="R",
        help="penalty of tokens in prompt or output; 1 is off",
    )
    add(
        "--presence-penalty",
        type=float,
        metavar="R",
        help="penalty of tokens in the output; 0 is off",
    )
    add(
        "--frequency-penalty",
        type=float,
        metavar="R",
        help="penalty of tokens in the output, each time; 0 is off",
    )


def add_result_arguments(parser: argparse._ActionsContainer) -> None:
    """Add flags for the fields of `SamplingParams` that give more than one text."""
    add = parser.add_argument
    add("--n", type=int, metavar="N", help="samples of each prompt (default: 1)")
    add(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probabilities of the tokens, and of the K likeliest (default: none)",
    )


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})=(.+)", text)
    try:
        return int(match[1]), float(match[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 17=-100") from None


def _token_ids(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids, such as 2,13")
    return [int(token) for token in text.split(",")]


def given_sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `SamplingParams` for which there was a flag."""
    from ..engine.sampling_params import SamplingParams

    given = given_fields(SamplingParams, args)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def sampling_params(given: dict[str, Any], model: Model) -> SamplingParams:
    """The `given` parameters, over those of the model's generation_config.json if it sets
    `do_sample`, over greedy ones.

    Raises `UsageError` that names the parameter, and `CheckpointError` for values in the file that
    are out of range.
    """
    from ..engine.sampling_params import SamplingParams

    return SamplingParams(**checkpoint_params(model) | given)


def checkpoint_params(model: Model) -> dict[str, Any]:
    """Fields of `SamplingParams` that the model's generation_config.json sets, if it draws. Raises
    `CheckpointError`."""
    from ..engine.sampling_params import SamplingParams

    if GENERATION_CONFIG not in model.auxiliary_files.contents:
        return {}
    config = json.loads(model.auxiliary_files.contents[GENERATION_CONFIG])
    if not config.get("do_sample"):
        return {}
    found: dict[str, Any] = {"temperature": 1.0} | {
        name: config[name] for name in GENERATION_CONFIG_FIELDS if config.get(name) is not None
    }
    try:
        SamplingParams(**found)
    except UsageError as error:
        text = str(error).replace("`", "")  # a field of the file, not a flag
        raise CheckpointError(f"{GENERATION_CONFIG}: {text}") from None
    logger.info(
        f"sampling as {GENERATION_CONFIG} says, where flags do not: "
        + ", ".join(f"{name} {value}" for name, value in found.items())
    )
    return found
