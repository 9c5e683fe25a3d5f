"""Text that a model writes itself, as a second source of training text: continuations of the
beginnings of training documents, sampled at temperature 1, through the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.io import files
from swiftkv_jax.model import Model

from . import corpus

PROMPT_TOKENS, NEW_TOKENS = 32, 480


def write(
    model: Model,
    documents: Sequence[corpus.Document],
    file: Path,
    *,
    tokens: int,
    sequences: int,
    seed: int = 0,
) -> None:
    """Write a JSONL file (fields `kind`, `name`, `text`) of about `tokens` tokens, of the teacher.
    `sequences` decode together."""
    chosen = list(corpus.in_turn(documents, seed))[: -(-tokens // (PROMPT_TOKENS + NEW_TOKENS))]
    prompts = [
        model.tokenizer(text[: 16 * PROMPT_TOKENS])["input_ids"][:PROMPT_TOKENS]
        for _, _, text in chosen
    ]
    options = EngineOptions(
        max_model_len=PROMPT_TOKENS + NEW_TOKENS, max_num_seqs=sequences, one_size=True
    )
    engine = Engine.from_model(model, options, swiftkv=False)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=seed)
    new: list[list[int]] = [[] for _ in prompts]
    requests = (Request(ids, params, rng_stream=i) for i, ids in enumerate(prompts))
    for number, output in engine.run(requests):
        new[number] += output.token_ids
    decode = model.tokenizer.decode
    lines = (
        {
            "kind": "generated",
            "name": name,
            "text": decode([*ids, *found], skip_special_tokens=True),
        }
        for (_, name, _), ids, found in zip(chosen, prompts, new, strict=True)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines)
    files.write_atomic(file, content.encode())
