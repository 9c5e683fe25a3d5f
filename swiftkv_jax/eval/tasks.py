"""Tasks of lm-evaluation-harness and their settings. The harness is imported when tasks are opened,
and needs no PyTorch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .generation import generation

INSTALL = "pip install 'swiftkv-jax[eval]'"


@dataclasses.dataclass(frozen=True)
class TaskSet:
    """Tasks that run with the same settings."""

    tasks: tuple[str, ...]
    """Names of tasks, groups or tags."""
    num_fewshot: int | None = None
    """Examples before each question; None is each task's own number."""
    chat: bool = False
    """Whether prompts are conversations, by the model's chat template."""
    multiturn: bool = False
    """Whether each few-shot example is a turn of its own."""
    gen_kwargs: str | None = None
    """Settings such as `"max_gen_toks=1024,temperature=0"`, which replace those of the tasks."""


_LONG = "max_gen_toks=1024"
PAPER = (
    TaskSet(("arc_challenge_llama",), 0, chat=True, gen_kwargs=_LONG),
    TaskSet(("winogrande",), 5, gen_kwargs=_LONG),
    TaskSet(("hellaswag",), 10, gen_kwargs=_LONG),
    TaskSet(("truthfulqa_mc2",), 0, gen_kwargs=_LONG),
    TaskSet(("mmlu_llama",), 5, chat=True, multiturn=True, gen_kwargs=_LONG),
    TaskSet(("mmlu_cot_llama",), 0, chat=True, gen_kwargs=_LONG),
    TaskSet(("gsm8k_llama",), 8, chat=True, multiturn=True, gen_kwargs=_LONG),
)
"""The tasks that the authors of SwiftKV measured with vLLM and a fork of the harness
(`Snowflake-Labs/vllm`, examples/swiftkv), at most 4096 tokens a row. The fork's
`*_llama_3.1_instruct` tasks have the names of the harness itself here, where their prompts and
scoring may differ: `RENAMED`."""
RENAMED = {
    "arc_challenge_llama_3.1_instruct": "arc_challenge_llama",
    "mmlu_llama_3.1_instruct": "mmlu_llama",
    "mmlu_cot_0shot_llama_3.1_instruct": "mmlu_cot_llama",
    "gsm8k_cot_llama_3.1_instruct": "gsm8k_llama",
}
"""Names in the authors' fork -> names in the harness."""


def harness(module: str) -> Any:
    """Import a module of lm-evaluation-harness. Raises `UsageError` if it is not installed."""
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise UsageError(f"tasks need lm-evaluation-harness ({error}): {INSTALL}") from None


def open_tasks(sets: Sequence[TaskSet], include_path: Path | None) -> Any:
    """The harness's `TaskManager` that finds the tasks of `sets`; `include_path` is a folder with
    more of them (YAML). Raises `UsageError` for an unknown task, and if the harness is not
    installed."""
    manager = harness("tasks").TaskManager
    if include_path is not None and not include_path.is_dir():
        raise UsageError(f"`include_path`={include_path}: is not a folder")
    found = manager(include_path=None if include_path is None else str(include_path))
    known = set(found.all_tasks)
    if unknown := [name for one in sets for name in one.tasks if name not in known]:
        name = unknown[0]
        instead = " (`lm-eval ls tasks` lists them)"
        if name in RENAMED:
            instead = f": there it is {RENAMED[name]}"
        raise UsageError(f"`tasks`: {name!r} is not a task of the installed harness{instead}")
    return found


def run_tasks(
    sets: Sequence[TaskSet], manager: Any, model: Any, limit: float | None
) -> dict[str, Any]:
    """Run all sets on a `harness_model` and return one report of the harness: `results`, `groups`,
    `group_subtasks`, `n-shot`, `versions`, `samples`, ... `limit` takes only the first documents of
    each task, a share if below 1. Raises `UsageError` for settings that the model cannot honour,
    before any task runs."""
    for one in sets:
        settings = harness("utils").simple_parse_args_string(one.gen_kwargs)
        generation(settings, model.special_tokens)
        if one.chat:
            model.apply_chat_template([{"role": "user", "content": "?"}])
    report = dict[str, Any]()
    for one in sets:
        found = harness("evaluator").simple_evaluate(
            model=model,
            tasks=list(one.tasks),
            num_fewshot=one.num_fewshot,
            apply_chat_template=one.chat,
            fewshot_as_multiturn=one.multiturn,
            gen_kwargs=one.gen_kwargs,
            limit=limit,
            task_manager=manager,
        )
        for name, value in found.items():  # tables, which have a row for each task, are joined
            if isinstance(report.get(name), dict) and isinstance(value, dict) and name != "config":
                report[name] |= value
            else:
                report.setdefault(name, value)
    return report
