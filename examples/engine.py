"""Requests that come and go while the engine runs: continuous batching.

python examples/engine.py [MODEL]
"""

from __future__ import annotations

import sys

import swiftkv_jax as skv
from swiftkv_jax import demo
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams

PROMPTS = ["def read_lines(path):", "class Stack:", "import os\n\ndef walk(top):"]


def main(path: str) -> None:
    model = skv.load(path)
    engine = Engine.from_model(model, EngineOptions(max_model_len=256, max_num_seqs=4))
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=1)

    waiting = [Request(model.tokenizer(text)["input_ids"], params) for text in PROMPTS]
    texts: dict[int, list[int]] = {}
    while waiting or engine.has_work:
        if waiting:  # one more before each step; an engine takes them at any time
            texts[engine.add_request(waiting.pop(0))] = []
        for output in engine.step():
            texts[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ids = texts[output.request_id]
                print(f"request {output.request_id} ended ({output.finish_reason}):", end=" ")
                print(repr(model.tokenizer.decode(ids)))
    stats = engine.stats
    print(f"{stats.new_tokens} tokens in {stats.decode_calls} calls of decoding")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo.SWIFTKV))
