"""Sampling parameters from the settings that a task of the harness has for its generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from ..infer.engine.sampling_params import SamplingParams

MAX_GEN_TOKS = 256
"""New tokens if a task sets none: the harness's own default."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of one setting; the first that is given counts, as in
`lm_eval.models.utils.normalize_gen_kwargs`."""
_ONE_PLAIN_TEXT = {"n": 1, "logprobs": None}
"""Settings with only one accepted value, since a generation is one text."""


def generation(
    gen_kwargs: Mapping[str, Any], special_tokens: Mapping[str, int]
) -> tuple[SamplingParams, list[str]]:
    """Sampling parameters and stop strings of a task's `gen_kwargs`, with the defaults of the
    harness.

    `do_sample` False is greedy whatever `temperature` says; left out, a temperature above 0
    samples; True without a temperature samples at 1. A stop string that is one of `special_tokens`
    (text -> id) becomes a stop token: decoded text never shows those. Raises `UsageError` that
    names what is unknown or out of range.
    """
    fields = dict(gen_kwargs)
    for name, value in _ONE_PLAIN_TEXT.items():
        if fields.pop(name, value) != value:
            raise UsageError(
                f"{name} is not supported: the harness takes one text for each request"
            )
    limits = [limit for name in _LIMITS if (limit := fields.pop(name, None)) is not None]
    stops = [stop for name in ("until", "stop") for stop in _strings(name, fields.pop(name, None))]
    tokens = [special_tokens[stop] for stop in stops if stop in special_tokens]
    fields["max_tokens"] = limits[0] if limits else MAX_GEN_TOKS
    fields["temperature"] = _temperature(fields.pop("do_sample", None), fields.get("temperature"))
    fields["stop_token_ids"] = [*(fields.get("stop_token_ids") or ()), *dict.fromkeys(tokens)]
    params = SamplingParams.from_json(fields, SamplingParams())
    return params, [stop for stop in stops if stop not in special_tokens]


def _strings(name: str, value: Any) -> list[str]:
    """The strings that are not empty: tasks use an empty one for "none"."""
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, list | tuple) or not all(isinstance(one, str) for one in values):
        raise UsageError(f"{name}={value!r} must be a string or a list of strings")
    return [one for one in values if one]


def _temperature(do_sample: Any, temperature: Any) -> Any:
    if do_sample not in (None, True, False):
        raise UsageError(f"do_sample={do_sample!r} must be true or false")
    if do_sample is False:
        return 0.0
    return temperature if temperature is not None else float(do_sample is True)
