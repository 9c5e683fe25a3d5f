"""Exact log-likelihoods: which of two continuations does the model prefer?

python examples/score.py [MODEL]
"""

from __future__ import annotations

import sys

import swiftkv_jax as skv
from swiftkv_jax import demo
from swiftkv_jax.infer import Engine, EngineOptions, ScoreRequest

CONTEXT = "def read_lines(path):"
CONTINUATIONS = ["\n    with open(path) as file:", "\n    with banana as file:"]


def main(path: str) -> None:
    model = skv.load(path)
    engine = Engine.from_model(model, EngineOptions(max_model_len=256, scoring=True))
    start = len(model.tokenizer(CONTEXT)["input_ids"])
    requests = [
        ScoreRequest(model.tokenizer(CONTEXT + continuation)["input_ids"], start)
        for continuation in CONTINUATIONS
    ]
    for number, output in engine.run(requests):  # a score comes in one piece
        assert output.logprobs is not None
        logprob = sum(token.logprob for token in output.logprobs)
        print(f"{logprob:8.2f}  {CONTINUATIONS[number]!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo.SWIFTKV))
