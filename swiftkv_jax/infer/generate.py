"""Text or tokens in, text or tokens out, in one call. For more calls keep an `Engine`."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh

from ..errors import DataError, UsageError
from ..model.cache import KVCacheDtype
from ..model.config import GeneratedKV
from ..model.model import Model, check_model
from ..pallas_kernels import Implementation
from .engine.checks import check_request
from .engine.engine import Engine
from .engine.options import OFFLINE_PREFILL_CHUNKS, EngineOptions
from .engine.requests import Request
from .engine.sampling_params import SamplingParams
from .runner.choose_shapes import offline_num_seqs
from .text import TextStream, encode, encode_chat


@overload
def generate(model: Model, prompts: str, *, max_tokens: int, **options: Any) -> str: ...
@overload
def generate(
    model: Model, prompts: list[str] | tuple[str, ...], *, max_tokens: int, **options: Any
) -> list[str]: ...
@overload
def generate(
    model: Model, prompts: Sequence[int], *, max_tokens: int, **options: Any
) -> list[int]: ...
@overload
def generate(
    model: Model, prompts: Sequence[Sequence[int]], *, max_tokens: int, **options: Any
) -> list[list[int]]: ...
def generate(
    model: Model,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_tokens: int,
    swiftkv: bool | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    decode_steps: int = 8,
    kv_cache_dtype: KVCacheDtype = "auto",
    generated_kv: GeneratedKV | None = None,
    exact_tail: int | None = None,
    mesh: Mesh | None = None,
    attention: Implementation | None = None,
    on_compile: Callable[[int, int], object] | None = None,
    **sampling: Any,
) -> str | list[str] | list[int] | list[list[int]]:
    """Continue prompts. A text gives a text and token ids give token ids, one prompt or a list.

    Texts need `model.tokenizer`; they get its special tokens, unless they begin with the first of
    them, and the answer ends before a stop string. An answer in token ids ends before the end
    token, or with the token that completes a stop string. `sampling` are fields of
    `SamplingParams` but `n` and `logprobs`, greedy by default, and neutral values of what vLLM and
    Transformers have besides. The number of a prompt is its random stream, so equal prompts draw
    differently. `swiftkv` False runs the unmodified teacher, True the student, None the student if
    there is a delta; `mesh` and `attention` are as in `Engine.from_model`, and so is `on_compile`,
    a callback with the numbers of compiled programs and of all; the rest as in `EngineOptions`.

    Raises `UsageError` (a `ValueError`) that names the prompt or the parameter, `DataError` (a
    `ValueError`) if the logits are not finite, and the errors of `Engine.from_model`. Each call
    copies the layers into serving form and compiles the programs: for many calls keep an `Engine`.
    """
    check_model(model)
    defaults = SamplingParams(max_tokens=max_tokens)
    params = SamplingParams.from_json({"max_tokens": max_tokens, **sampling}, defaults)
    for name, only in (("n", 1), ("logprobs", None)):
        if (value := getattr(params, name)) != only:
            raise UsageError(
                f"`{name}`={value}: this function returns one answer a prompt, in text or tokens "
                f"alone; keep an Engine for more"
            )
    if not isinstance(prompts, str | Sequence):
        prompts = _as_lists(prompts)
    if not isinstance(prompts, str):
        prompts = [_plain(prompt) for prompt in prompts]
    one = isinstance(prompts, str) or _is_token_ids(prompts)
    many: list[Any] = [prompts] if one else list(prompts)
    text = any(isinstance(prompt, str) for prompt in many)
    if text and not all(isinstance(prompt, str) for prompt in many):
        raise UsageError("`prompts` must be all texts or all token ids, got both")
    for number, prompt in enumerate(many):
        if isinstance(prompt, numbers.Number):
            raise UsageError(
                f"`prompts`: entry {number} is {prompt!r}: expected token ids, all whole numbers, "
                f"or a list of prompts"
            )
    tokenizer = _tokenizer(model) if text or params.stop else None
    lengths = [1]
    requests = []
    for number, prompt in enumerate(many):
        with _naming(None if one else number):
            token_ids = encode(tokenizer, prompt) if text else prompt
            requests.append(Request(token_ids, params, rng_stream=number))
            lengths.append(len(token_ids) if isinstance(token_ids, Sized) else 1)
    positions = model.config.max_position_embeddings
    if max_model_len is None:  # the cache fits these prompts, the model is what it is for any
        max_model_len = min(max(lengths) + params.max_tokens, positions)
        model = dataclasses.replace(model, config=model.config.at_length(positions))
    if max_num_seqs is None:
        (device, *_) = model.llama.embed.devices()
        max_num_seqs = offline_num_seqs(device.platform, len(many))
    options = EngineOptions(
        max_model_len=max_model_len,
        max_num_seqs=min(max_num_seqs, max(len(many), 1)),
        max_prefill_chunks=OFFLINE_PREFILL_CHUNKS,
        decode_steps=decode_steps,
        kv_cache_dtype=kv_cache_dtype,
        generated_kv=generated_kv,
        exact_tail=exact_tail,
        one_size=True,
        sampling=not params.is_plain_greedy,
    )
    for number, request in enumerate(requests):
        with _naming(None if one else number):
            check_request(request, model.config, options)
    if not many:
        return []
    engine = Engine.from_model(
        model, options, swiftkv=swiftkv, mesh=mesh, attention=attention, on_compile=on_compile
    )
    answers = _run(engine, requests, tokenizer, text)
    return answers[0] if one else answers


def chat(
    model: Model, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, **options: Any
) -> str:
    """The assistant's answer to a conversation, a list of {"role": ..., "content": ...}, by the
    tokenizer's chat template.

    `options` are those of `generate`. Raises its errors, and `UsageError` if the model has no chat
    template or the template fails on the messages.
    """
    check_model(model)
    tokenizer = _tokenizer(model)
    prompt = encode_chat(tokenizer, messages)
    token_ids = generate(model, prompt, max_tokens=max_tokens, **options)
    stop = SamplingParams(max_tokens=max_tokens, stop=options.get("stop") or ()).stop
    stream = TextStream(tokenizer, stop, prompt=prompt, min_tokens=options.get("min_tokens") or 0)
    return stream.push(token_ids) + stream.finish()


def _run(engine: Engine, requests: list[Request], tokenizer: Any, text: bool) -> list[Any]:
    """The answers to all requests: texts, or token ids."""
    streams = [TextStream.of(tokenizer, request) for request in requests]
    texts = [""] * len(requests)
    for number, output in engine.run(requests):
        if output.finish_reason == "error":
            raise DataError(f"prompt {number}: {output.error}")
        texts[number] += streams[number].push(output.token_ids)
        if streams[number].stopped:
            engine.abort_request(output.request_id)
    if not text:
        return [stream.token_ids for stream in streams]
    return [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]


@contextlib.contextmanager
def _naming(number: int | None) -> Iterator[None]:
    """Name the prompt in a `UsageError`."""
    try:
        yield
    except UsageError as error:
        text = str(error) if number is None else f"prompt {number}: {error}"
        raise UsageError(text, option=error.option) from error


def _as_lists(prompts: Any) -> Any:
    """An array of token ids, of NumPy or JAX, as lists."""
    if not isinstance(prompts, np.ndarray | jax.Array) or prompts.ndim == 0:
        raise UsageError(
            f"`prompts` must be a text or token ids, or a list of either, got "
            f"{type(prompts).__name__}"
        )
    return np.asarray(prompts).tolist()


def _plain(prompt: Any) -> Any:
    """A prompt, or a token id, an array of JAX or one without axes as Python's numbers."""
    if isinstance(prompt, jax.Array) or (isinstance(prompt, np.ndarray) and prompt.ndim == 0):
        return np.asarray(prompt).tolist()
    return prompt


def _is_token_ids(prompts: Sequence[Any]) -> bool:
    """True if `prompts` is one prompt of token ids."""
    return len(prompts) > 0 and all(isinstance(token, int | np.integer) for token in prompts)


def _tokenizer(model: Model) -> Any:
    if model.tokenizer is None:
        raise UsageError("the model has no tokenizer: give prompts as token ids, without `stop`")
    return model.tokenizer
