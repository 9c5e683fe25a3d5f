"""Exact log-likelihoods: which of two continuations does the model prefer? And logits of a whole
row, of the student and of its teacher.

python examples/score.py [MODEL]
"""

from __future__ import annotations

import sys

import jax.numpy as jnp

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
    logprobs = [0.0] * len(requests)
    for number, output in engine.run(requests):  # those of long texts come in parts
        assert output.logprobs is not None
        logprobs[number] += sum(token.logprob for token in output.logprobs)
    for logprob, continuation in zip(logprobs, CONTINUATIONS, strict=True):
        print(f"{logprob:8.2f}  {continuation!r}")

    tokens = jnp.array([model.tokenizer(CONTEXT + CONTINUATIONS[0])["input_ids"]])
    student = skv.logits(model, tokens)  # [batch, tokens, vocabulary]
    teacher = skv.logits(model, tokens, swiftkv=False)
    agreement = (student.argmax(-1) == teacher.argmax(-1)).mean()
    print(f"{agreement:8.0%}  of the next tokens are those of the teacher")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo.SWIFTKV))
