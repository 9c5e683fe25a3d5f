"""`python -m swiftkv_jax.eval`: benchmark tasks by lm-evaluation-harness, on this package's engine.

    python -m swiftkv_jax.eval --model runs/8b/model --tasks hellaswag,gsm8k --limit 200
    python -m swiftkv_jax.eval --model runs/8b/model --paper --swiftkv both -o accuracy

Needs `pip install 'swiftkv-jax[eval]'`, and no PyTorch. Flags that are not listed here are those of
the harness, whose `lm-eval run` runs the tasks, prints tables and writes files: --tasks,
--num_fewshot, --limit, --apply_chat_template, --gen_kwargs, --include_path and others.
Log-likelihoods are exact, generations are the engine's; texts are split, marked and truncated as by
the harness's own models, with a warning for those that were truncated. --swiftkv both measures the
unmodified teacher and the student one after the other, and their difference document by document.

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
from collections.abc import Sequence
from typing import Any

from .. import cli
from ..cli.fields import add_flags, group
from ..cli.model_options import ModelOptions
from ..infer.engine.options import EngineOptions
from .options import EvalOptions


class Parser(cli.ArgumentParser):
    """Leaves what it does not know to the harness, in `harness`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found, found.harness = self.parse_known_args(args, namespace)
        return found

    def _refuse_unknown_flags(self, args: Sequence[str]) -> None: ...


def parser() -> argparse.ArgumentParser:
    result = Parser(prog=cli.prog("eval"), description=cli.as_called(__doc__ or ""))
    add_flags(group(result, "tasks"), EvalOptions)
    add_flags(group(result, "model"), ModelOptions, leave_out=("swiftkv",))
    add_flags(group(result, "engine"), EngineOptions)
    return result


def main(argv: list[str] | None = None) -> int:
    return cli.run_command(parser(), argv, ".command", __package__ or "")


if __name__ == "__main__":
    cli.end(main())
