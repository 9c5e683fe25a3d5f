"""Text that a model writes itself, as a second source of training text: continuations of the
beginnings of training documents, sampled at temperature 1, through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.model.model import Model
from swiftkv_jax.process import files

from . import corpus

PROMPT_TOKENS = 32
NEW_TOKENS = 480


def write(
    model: Model,
    documents: Sequence[corpus.Document],
    file: Path,
    *,
    tokens: int,
    sequences: int,
    seed: int = 0,
) -> None:
    """Write a JSONL file (fields `kind`, `name`, `text`) of `tokens` tokens or a few more, of the
    teacher; fewer if the documents end before. `sequences` decode together."""
    options = EngineOptions(
        max_model_len=PROMPT_TOKENS + NEW_TOKENS, max_num_seqs=sequences, one_size=True
    )
    engine = Engine.from_model(model, options, swiftkv=False)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=seed)
    names = list[str]()
    texts = list[list[int]]()
    written = 0

    def requests() -> Iterator[Request]:  # one after the other, when the engine has room
        for number, (_, name, text) in enumerate(corpus.in_turn(documents, seed)):
            if written >= tokens:
                return
            ids = model.tokenizer(text[: 16 * PROMPT_TOKENS])["input_ids"][:PROMPT_TOKENS]
            names.append(name)
            texts.append(list(ids))
            yield Request(ids, params, rng_stream=number)

    for number, output in engine.run(requests(), in_flight=sequences):
        texts[number] += output.token_ids
        written += len(output.token_ids)
    decode = model.tokenizer.decode
    lines = (
        {"kind": "generated", "name": name, "text": decode(ids, skip_special_tokens=True)}
        for name, ids in zip(names, texts, strict=True)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines)
    files.write_atomic(file, content.encode())
