"""Prompts in, tokens out, in one call. For more than that keep an `Engine`."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from jax.sharding import Mesh

from ..cache import KVCacheDtype
from ..errors import DataError, UsageError
from ..model import Model
from ..pallas_kernels import Implementation
from .engine.checks import check_request
from .engine.engine import engine_for
from .engine.options import EngineOptions
from .engine.requests import NOT_FINITE, Request
from .engine.sampling_params import SamplingParams


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    swiftkv: bool | None = None,
    ignore_eos: bool = False,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    decode_steps: int = 8,
    kv_cache_dtype: KVCacheDtype = "auto",
    mesh: Mesh | None = None,
    attention: Implementation | None = None,
    **sampling,
) -> list[list[int]]:
    """The new tokens of each prompt, without the end token.

    `swiftkv` False runs the unmodified teacher, True the student, None the student if there is a
    delta. Sampling parameters, `sampling` among them, are those of `SamplingParams`; the rest those
    of `EngineOptions`. Raises `ValueError` that names the prompt or parameter, also if the model
    breaks down over it (`requests.NOT_FINITE`). Each call copies the layers into serving form and
    prepares the programs: for many calls, keep an `Engine`.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    params = SamplingParams.from_json(sampling, params)
    if params.n != 1:
        raise UsageError(
            f"n={params.n}: this function returns one answer a prompt; keep an Engine for more"
        )
    lengths = [len(prompt) if isinstance(prompt, Sized) else 1 for prompt in prompts]
    longest, rows = max(lengths, default=1), min(max_num_seqs, max(len(prompts), 1))
    options = EngineOptions(
        max_model_len=max_model_len
        or min(longest + max_tokens, model.config.max_position_embeddings),
        max_num_seqs=rows,
        decode_steps=decode_steps,
        kv_cache_dtype=kv_cache_dtype,
        one_size=True,
    )
    requests = [Request(prompt, params, rng_stream=number) for number, prompt in enumerate(prompts)]
    for number, request in enumerate(requests):
        try:
            check_request(request, model.config, options)
        except UsageError as error:
            raise UsageError(f"prompt {number}: {error}") from error
    engine = engine_for(model, options, swiftkv=swiftkv, mesh=mesh, attention=attention)
    outputs: list[list[int]] = [[] for _ in prompts]
    for event in engine.run(requests):
        if event.finish_reason == "error":
            raise DataError(f"prompt {event.request}: {NOT_FINITE}")
        outputs[event.request] += event.tokens
    return outputs
