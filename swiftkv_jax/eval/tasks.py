"""Tasks of lm-evaluation-harness. The harness is imported when they are opened, and needs no
PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .generation import generation

INSTALL = "pip install 'swiftkv-jax[eval]'"
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


def open_tasks(names: Iterable[str], include_path: Path | None) -> Any:
    """The harness's `TaskManager` that finds these tasks; `include_path` is a folder with more of
    them (YAML). Raises `UsageError` for an unknown task, and if the harness is not installed."""
    manager = harness("tasks").TaskManager
    if include_path is not None and not include_path.is_dir():
        raise UsageError(f"`include_path`={include_path}: is not a folder")
    found = manager(include_path=include_path and str(include_path))
    known = set(found.all_tasks)
    for name in names:
        if name not in known:
            instead = " (`lm-eval ls tasks` lists them)"
            if name in RENAMED:
                instead = f": there it is {RENAMED[name]}"
            raise UsageError(f"`tasks`: {name!r} is not a task of the installed harness{instead}")
    return found


def run_tasks(
    runs: Sequence[Mapping[str, Any]], manager: Any, model: Any, limit: float | None
) -> dict[str, Any]:
    """Make all runs (`EvalOptions.runs`) on a `harness_model` and return one report of the harness:
    `results`, `groups`, `group_subtasks`, `n-shot`, `versions`, `samples`, ... `limit` takes only
    the first documents of each task, a share if below 1. Raises `UsageError` for settings that the
    model cannot honour, before any task runs."""
    for run in runs:
        settings = harness("utils").simple_parse_args_string(run["gen_kwargs"])
        generation(settings, model.special_tokens)
        if run["apply_chat_template"]:
            model.apply_chat_template([{"role": "user", "content": "?"}])
    report = dict[str, Any]()
    for run in runs:
        settings = dict(run) | {"tasks": list(run["tasks"]), "limit": limit}
        found = harness("evaluator").simple_evaluate(model, task_manager=manager, **settings)
        for name, value in found.items():  # tables, which have a row for each task, are joined
            if isinstance(report.get(name), dict) and isinstance(value, dict) and name != "config":
                report[name] |= value
            else:
                report.setdefault(name, value)
    return report
