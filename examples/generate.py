"""Continue texts with the demo model, or with a model of yours.

python examples/generate.py [MODEL]
"""

from __future__ import annotations

import sys

import swiftkv_jax as skv
from swiftkv_jax import demo

PROMPTS = ["def read_lines(path):", "class Stack:"]


def main(path: str) -> None:
    model = skv.load(path)
    for prompt, text in zip(PROMPTS, skv.generate(model, PROMPTS, max_tokens=24), strict=True):
        print(prompt + text, end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo.SWIFTKV))
