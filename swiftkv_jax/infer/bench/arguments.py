"""`python -m swiftkv_jax.infer bench MODE`: how fast it is, SwiftKV and its teacher side by side.

    prefill   prompts into the cache, nothing else running; and the time to the first token of one
              prompt alone
    decode    the time per output token of --batch rows of --input-len tokens
    offline   --num-prompts requests at once, continuous batching
    latency   requests that arrive at --request-rate: TTFT, TPOT, inter-token and end-to-end times

Every figure stands beside what the same devices reach in a large matrix product and a copy,
measured before and after. A model without weights will do:

    python -m swiftkv_jax.infer bench prefill --config llama-3.1-8b --load-format dummy \\
        --input-len 512,2k,8k -o result.json

The table goes to standard output, all raw numbers to -o. Prompts are random, and no two are the
same: nothing comes from the prefix cache. Both variants get the same prompts. They take turns,
first one then the other, where both fit into memory; otherwise they run one after the other.
"""

from __future__ import annotations

import argparse

from ...cli.fields import add_flags, group
from ...cli.model_options import ModelOptions
from ..engine.options import EngineOptions
from .cells import MODES
from .options import BenchOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES, help="what to measure: see above")
    add_flags(parser, ModelOptions, leave_out=("swiftkv",))
    add_flags(group(parser, "what to measure"), BenchOptions)
    add_flags(parser, EngineOptions)
