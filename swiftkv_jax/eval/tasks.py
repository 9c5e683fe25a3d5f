"""Tasks of lm-evaluation-harness, run on a `TextModel`. The harness is imported when tasks are
opened, and needs no PyTorch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .text_model import HarnessRequest, TextModel

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


class Tasks:
    """Sets of tasks, found and checked before any model is read."""

    def __init__(
        self,
        sets: Sequence[TaskSet],
        *,
        include_path: Path | None = None,
        limit: float | None = None,
    ):
        """`include_path` is a folder with more tasks (YAML); `limit` takes only the first documents
        of each task, a share if below 1.

        Raises `UsageError` for an unknown task, and if the harness is not installed.
        """
        manager = harness("tasks").TaskManager
        if include_path is not None and not include_path.is_dir():
            raise UsageError(f"`include_path`={include_path}: is not a folder")
        self.sets = tuple(sets)
        self._limit = limit
        self._manager = manager(include_path=None if include_path is None else str(include_path))
        known = set(self._manager.all_tasks)
        if unknown := [name for one in self.sets for name in one.tasks if name not in known]:
            instead = (
                f": there it is {RENAMED[unknown[0]]}"
                if unknown[0] in RENAMED
                else " (`lm-eval ls tasks` lists them)"
            )
            raise UsageError(
                f"`tasks`: {unknown[0]!r} is not a task of the installed harness{instead}"
            )

    def check(self, model: TextModel) -> None:
        """Raise `UsageError` for settings that the model cannot honour, before any task runs."""
        for one in self.sets:
            model.generation(harness("utils").simple_parse_args_string(one.gen_kwargs))
            if one.chat:
                model.apply_chat_template([{"role": "user", "content": "?"}])

    def run(self, model: TextModel) -> dict[str, Any]:
        """Run all sets and return one report of the harness: `results`, `groups`, `group_subtasks`,
        `n-shot`, `versions`, `samples`, ..."""
        lm = harness_model(model)
        report = dict[str, Any]()
        for one in self.sets:
            found = harness("evaluator").simple_evaluate(
                model=lm,
                tasks=list(one.tasks),
                num_fewshot=one.num_fewshot,
                apply_chat_template=one.chat,
                fewshot_as_multiturn=one.multiturn,
                gen_kwargs=one.gen_kwargs,
                limit=self._limit,
                task_manager=self._manager,
            )
            assert found is not None  # None is for processes of other ranks, and there is one
            _merge(report, found)
        return report


def _merge(report: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add the tables of `found`, which have a row for each task, to those of `report`; other
    entries stay as the first report had them."""
    for name, value in found.items():
        if isinstance(report.get(name), dict) and isinstance(value, dict) and name != "config":
            report[name] |= value
        else:
            report.setdefault(name, value)


def harness_model(model: TextModel) -> Any:
    """The model as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)` too. Raises
    `UsageError` without the harness."""

    class SwiftKVLM(harness("api.model").TemplateLM):
        tokenizer = model.tokenizer

        @property
        def eot_token_id(self) -> int:
            return model.tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return model.prefix_token_id

        @property
        def max_length(self) -> int:
            return model.engine.max_model_len

        @property
        def tokenizer_name(self) -> str:
            return str(model.tokenizer.name_or_path).replace("/", "__")

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            return model.tok_encode(string, add_special_tokens)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return model.apply_chat_template(chat_history, add_generation_prompt)

        def loglikelihood(
            self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            return model.loglikelihood(requests)

        def loglikelihood_rolling(
            self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
        ) -> list[float]:
            return model.loglikelihood_rolling(requests)

        def generate_until(
            self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
        ) -> list[str]:
            return model.generate_until(requests)

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            raise NotImplementedError  # `loglikelihood` does it all

    return SwiftKVLM()
