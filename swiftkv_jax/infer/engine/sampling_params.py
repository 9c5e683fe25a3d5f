"""Sampling parameters, with vLLM's names and meanings. A value out of range is refused, never
adjusted."""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from ...cli.fields import option
from ...errors import UsageError

MAX_SAMPLES = 16
MAX_LOGPROBS = 20  # OpenAI's `top_logprobs`
MAX_BIASES = 300  # OpenAI
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_END_TOKENS = 24
_MAX_INT = 2**31 - 1

_RANGES: Mapping[str, tuple[type, float, float, str]] = {
    "max_tokens": (int, 1, _MAX_INT, ""),
    "temperature": (float, 0, 100, "0 is greedy"),
    "top_k": (int, -1, _MAX_INT, "0 and -1 are off"),
    "top_p": (float, 0, 1, "1 is off"),
    "min_p": (float, 0, 1, "0 is off"),
    "repetition_penalty": (float, 0.01, 100, "1 is off"),
    "presence_penalty": (float, -2, 2, "0 is off"),
    "frequency_penalty": (float, -2, 2, "0 is off"),
    "seed": (int, -(2**63), 2**63 - 1, ""),
    "n": (int, 1, MAX_SAMPLES, ""),
}
"""The parameters that are numbers by themselves: type, smallest, largest, and what errors add."""

_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}

FOREIGN_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "early_stopping": (False,),
    "echo": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tfs": (1,),
    "top_a": (0,),
    "top_logprobs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
"""Parameters of OpenAI, vLLM and Transformers that `SamplingParams` does not have, with the values
besides null at which they change nothing. The server refuses those of them that it lacks too."""


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether a value is null or one of `neutral`. A truth value is no number here."""
    return value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
    )


def parse_bias(text: str) -> tuple[int, float]:
    """`"17=-100"` -> (17, -100.0). Raises `UsageError`."""
    match = re.fullmatch(r"(\d{1,9})=(.+)", text)
    try:
        return int(match[1]), float(match[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise UsageError(f"{text!r} is not ID=VALUE, such as 17=-100") from None


def parse_token_ids(text: str) -> tuple[int, ...]:
    """`"2,13"` -> (2, 13). Raises `UsageError`."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise UsageError(f"{text!r} is not a list of token ids, such as 2,13")
    return tuple(int(token) for token in text.split(","))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens that follow one prompt. The defaults are greedy.

    The order is vLLM's: `min_tokens` and `logit_bias`, then the penalties, on the logits; a
    temperature of 0 takes the largest of those; otherwise `temperature`, `min_p`, `top_k`, `top_p`,
    each within what the one before left, and a draw. Of tokens whose probabilities are equal in
    float32 the lower id ranks first.
    Raises `UsageError` (a `ValueError`) that names the parameter, its value and the range.
    """

    max_tokens: int = option(
        128,
        "most new tokens (default: %(default)s)",
        metavar="N",
        names=("--max-tokens", "--max-new-tokens"),
    )
    """The end token counts too."""
    min_tokens: int = option(
        0, "no end token, and no stop string, before this many (default: %(default)s)", metavar="N"
    )
    temperature: float = option(
        0.0,
        "0 takes the likeliest token (default: generation_config.json's, or %(default)s)",
        names=("--temperature", "--temp"),
    )
    top_k: int = option(0, "draw from the K likeliest tokens; 0 is off", metavar="K")
    """-1 is off too."""
    top_p: float = option(
        1.0, "draw from the fewest tokens that hold probability P; 1 is off", metavar="P"
    )
    """0 leaves the likeliest."""
    min_p: float = option(
        0.0, "draw from tokens at least P times as likely as the likeliest; 0 is off", metavar="P"
    )
    repetition_penalty: float = option(
        1.0,
        "penalty of tokens in prompt or output; 1 is off",
        metavar="R",
        names=("--repetition-penalty", "--repeat-penalty"),
    )
    """Divisor of the positive and factor of the negative logits."""
    presence_penalty: float = option(0.0, "penalty of tokens in the output; 0 is off", metavar="R")
    """Number subtracted from the logits."""
    frequency_penalty: float = option(
        0.0, "penalty of tokens in the output, each time; 0 is off", metavar="R"
    )
    """Number subtracted from a token's logit for each time it occurs."""
    logit_bias: Mapping[int, float] = option(
        {}, "added to a token's logit; repeat to add more", metavar="ID=VALUE", parse=parse_bias
    )
    seed: int = option(0, "seed of the draws (default: %(default)s)")
    """A draw depends on the seed, the request's `rng_stream`, the number of the sample and the
    position, and on nothing else."""
    stop: tuple[str, ...] = option((), "end before this text; repeat to add more", metavar="TEXT")
    """The first of them after `min_tokens` ends the text. Only callers that turn tokens into text
    handle them (`generate`, the commands); an `Engine` sees only token ids and does not stop."""
    stop_token_ids: tuple[int, ...] = option(
        (),
        "tokens that end the text as the model's own end tokens do",
        metavar="ID,...",
        parse=parse_token_ids,
    )
    ignore_eos: bool = option(False, "go on after an end token")
    """Up to `max_tokens`. `stop` and `stop_token_ids` still end the output."""
    n: int = option(1, "samples of each prompt (default: %(default)s)", metavar="N")
    logprobs: int | None = option(
        None, "log-probabilities of the tokens, and of the K likeliest (default: none)", metavar="K"
    )
    """None for none, 0 for the chosen token's, k for those of the k likeliest as well."""

    def __post_init__(self):
        for name, (kind, *limits, note) in _RANGES.items():
            self._set(name, _number(kind, name, getattr(self, name), *limits, note=note))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        least = _number(
            int, "min_tokens", self.min_tokens, 0, self.max_tokens, note="at most max_tokens"
        )
        self._set("min_tokens", least)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(
                f"`ignore_eos`={short(self.ignore_eos)} must be true or false", option="ignore_eos"
            )
        if self.logprobs is not None:
            count = _number(
                int, "logprobs", self.logprobs, 0, MAX_LOGPROBS, note="None reports none"
            )
            self._set("logprobs", count)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen

    @property
    def is_plain_greedy(self) -> bool:
        """True if each token is simply the model's likeliest one and no other feature is used."""
        changes = self.has_penalty or self.logit_bias or self.min_tokens
        return self.temperature == 0 and not changes and self.logprobs is None

    @property
    def has_penalty(self) -> bool:
        """True if token counts are needed."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
        """`defaults` with the `fields` of one request. A null keeps the default, except that of
        `logprobs`, where None is a value.

        `stop` may be one string, and the keys of `logit_bias` strings of digits. Raises
        `UsageError` that names the field: an unknown one, one of OpenAI or vLLM that is not
        supported and would change the tokens, or a value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for field, value in fields.items():
            name = _ALIASES.get(field, field)
            if field in FOREIGN_PARAMS:
                if not is_neutral(value, FOREIGN_PARAMS[field]):
                    raise UsageError(f"`{field}` is not supported", option=field)
            elif name not in known:
                raise UsageError(
                    f"{short(field)} is not a sampling parameter; known are "
                    f"{', '.join(sorted(known))}"
                )
            elif value is not None or name == "logprobs":
                if name in given:
                    raise UsageError(
                        f"`{field}` says `{name}` a second time; give one of them", option=field
                    )
                given[name] = value
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = {
                _json_key(key): bias for key, bias in given["logit_bias"].items()
            }
        return dataclasses.replace(defaults, **given)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `UsageError` unless every token id in `logit_bias` and `stop_token_ids` is below
        `vocab_size`."""
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in tokens:
                if token >= vocab_size:
                    raise UsageError(
                        f"`{name}`: token {token} is outside the vocabulary, 0 to {vocab_size - 1}",
                        option=name,
                    )

    def end_token_ids(self, eos_token_ids: Sequence[int]) -> list[int]:
        """Tokens that end a sequence: the model's `eos_token_ids`, unless they are ignored, and
        `stop_token_ids`. Raises `UsageError` if there are more than 24."""
        eos = () if self.ignore_eos else eos_token_ids
        found = list(dict.fromkeys([*eos, *self.stop_token_ids]))
        if len(found) > MAX_END_TOKENS:
            raise UsageError(
                f"`stop_token_ids` and the model's end tokens are {len(found)} together; at most "
                f"{MAX_END_TOKENS} are possible",
                option="stop_token_ids",
            )
        return found


_KINDS = {int: (numbers.Integral, "an integer"), float: (numbers.Real, "a number")}


def _number[Kind: (int, float)](
    kind: type[Kind],
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    at: str = "",
    note: str = "",
) -> Kind:
    """Check a number of the parameter `name`, Python's or NumPy's, or the one `at` a place in it.
    NaN is in no range, and a bool is no number."""
    wanted, words = _KINDS[kind]
    if isinstance(value, wanted) and not isinstance(value, bool) and low <= value <= high:
        return kind(value)
    remark = f" ({note})" if note else ""
    message = f"`{name}`{at}={short(value)} must be {words} from {low} to {high}{remark}"
    raise UsageError(message, option=name, value=value)


def _listed(name: str, value: Any, cap: int, items: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"`{name}`={short(value)} must be a list of {items}", option=name)
    if len(value) > cap:
        raise UsageError(
            f"`{name}` has {len(value)} entries; at most {cap} are possible", option=name
        )
    return tuple(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = _listed("stop", (value,) if isinstance(value, str) else value, MAX_STOPS, "strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise UsageError(
                f"`stop`={short(stop)} must be a string of 1 to {MAX_STOP_LENGTH} characters",
                option="stop",
            )
    return stops


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(
        _number(int, name, token, 0, _MAX_INT)
        for token in _listed(name, value, MAX_STOPS, "token ids")
    )


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UsageError(
            f"`logit_bias`={short(value)} must map token ids to numbers", option="logit_bias"
        )
    if len(value) > MAX_BIASES:
        raise UsageError(
            f"`logit_bias` has {len(value)} entries; at most {MAX_BIASES} are possible",
            option="logit_bias",
        )
    return {
        _number(int, "logit_bias", token, 0, _MAX_INT, at=": token"): _number(
            float, "logit_bias", bias, -100, 100, at=f"[{short(token)}]"
        )
        for token, bias in value.items()
    }


def _json_key(key: Any) -> Any:
    """The token id of a JSON key: "17" is token 17. Other keys, "017" among them, are left for the
    check of token ids to refuse."""
    return int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,9}", key) else key
