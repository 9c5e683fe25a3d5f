"""`python -m swiftkv_jax.eval`: benchmark tasks by lm-evaluation-harness, on this package's engine.

    python -m swiftkv_jax.eval --model runs/8b/model --tasks hellaswag,gsm8k --limit 200
    python -m swiftkv_jax.eval --model runs/8b/model --paper --swiftkv both -o accuracy.json

Needs `pip install 'swiftkv-jax[eval]'`, and no PyTorch. Log-likelihoods are exact, generations are
the engine's; texts are split, marked and truncated as by the harness's own models, with a warning
for those that were truncated. The table goes to stdout. --swiftkv both measures the unmodified
teacher and the student one after the other, and their difference document by document.

--paper runs the seven tasks of the authors' own table with their settings. Four of them come from a
fork of the harness; here they are the harness's own versions, whose prompts and scoring may differ:
arc_challenge_llama, mmlu_llama, mmlu_cot_llama and gsm8k_llama for the fork's arc_challenge_,
mmlu_, mmlu_cot_0shot_ and gsm8k_cot_llama_3.1_instruct.
"""

from __future__ import annotations

from ..process import interrupts

if __name__ == "__main__":
    interrupts.install()  # before the imports that take a second

import argparse

from .. import cli
from ..cli import flags_elsewhere
from ..cli.fields import add_flags, group
from ..cli.model_options import ModelOptions
from ..infer.engine.options import EngineOptions
from .options import EvalOptions, Sides


def parser() -> argparse.ArgumentParser:
    result = cli.ArgumentParser(
        prog=cli.prog("eval"),
        description=cli.as_called(__doc__ or ""),
        elsewhere=flags_elsewhere.VLLM,
    )
    add_flags(group(result, "tasks"), EvalOptions)
    add_flags(group(result, "model"), ModelOptions, leave_out=("swiftkv",))
    add_flags(group(result, "model"), Sides)
    add_flags(group(result, "engine"), EngineOptions)
    return result


def main(argv: list[str] | None = None) -> int:
    return cli.run_command(parser(), argv, ".command", __package__ or "")


if __name__ == "__main__":
    cli.end(main())
