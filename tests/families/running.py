"""What the tests of families run: logits of whole rows, and text through the engine."""

import jax
import numpy as np

import swiftkv_jax as skv
from swiftkv_jax import Model
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams

from .cases import PROMPT, tokens

SERVED = EngineOptions(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    page_size=8,
    kv_cache_memory=2**20,
    max_model_len=48,
    decode_steps=2,
    one_size=True,
)


def logits(model: Model, rows=None, **options) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(skv.logits(model, tokens() if rows is None else rows, **options))


def greedy_text(model: Model, new: int, options=SERVED, **engine_options) -> list[list[int]]:
    """Continuations of the first 20 tokens of each row, in chunks of at most 16 and pages of 8."""
    engine = Engine.from_model(model, options, **engine_options)
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    found: dict[int, list[int]] = {}
    for row, output in engine.run([Request(row[:PROMPT].tolist(), params) for row in tokens()]):
        found.setdefault(row, []).extend(output.token_ids)
    return [found[row] for row in sorted(found)]
