"""Blocks of code that a model writes, through the engine: do they parse?"""

from __future__ import annotations

import ast
import codeop
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.model.model import Model

from .held_out import PROMPT
from .scores import Mode

NEW_TOKENS = 96
PROMPTS = 64
SEQUENCES = 16
"""Sequences that decode together."""
_CONTEXT_CHARACTERS = 16 * PROMPT  # no token of code is that long on average


class Prompt(NamedTuple):
    """Source up to the end of a function's header."""

    tokens: list[int]
    header: str
    """The header's lines, without the line break at their end."""


def find_prompts(
    texts: Iterable[tuple[str, str]], tokenizer: Any, *, count: int = PROMPTS
) -> list[Prompt]:
    """Functions of Python files, spread over the files: the first of each, then the second, ...;
    `PROMPT` tokens of source at most, the header at their end."""
    in_turn = itertools.zip_longest(*(list(find_headers(text)) for _, text in texts))
    found = (header for headers in in_turn for header in headers if header is not None)
    prompts = []
    for before, header in itertools.islice(found, count):
        ids = tokenizer(before[-_CONTEXT_CHARACTERS:] + header, verbose=False)["input_ids"]
        prompts.append(Prompt(ids[-PROMPT:], header))
    return prompts


def find_headers(text: str) -> Iterator[tuple[str, str]]:
    """(source before it, header) of each function whose body starts on a line of its own."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start, stop = node.lineno - 1, node.body[0].lineno - 1
            header = "".join(lines[start:stop]).rstrip("\n")
            if header.endswith(":"):
                yield "".join(lines[:start]), header


def block_of(header: str, continuation: str) -> tuple[str, bool]:
    """(header and body, whether the body has ended): up to the first line that is indented no more
    than the header, else up to the last complete line."""
    lines, first = (header + continuation).split("\n"), header.count("\n") + 1
    for number, line in enumerate(lines[first:], start=first):
        if line.strip() and _indent(line) <= _indent(header):
            return "\n".join(lines[:number]) + "\n", True
    return "\n".join(lines[: max(first, len(lines) - 1)]) + "\n", False


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" \t"))


def parses(block: str, ended: bool) -> bool:
    """Whether a block is Python; one that has not ended may be incomplete, but not wrong."""
    if _indent(block):
        block = "if True:\n" + block
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if ended:
                ast.parse(block)
            else:
                codeop.compile_command(block, symbol="exec")
        except (SyntaxError, ValueError, OverflowError):
            return False
    return True


def parsed_blocks(
    model: Model, prompts: list[Prompt], mode: Mode | None, *, new_tokens: int = NEW_TOKENS
) -> list[bool]:
    """For each prompt whether its greedy continuation parses; those of the student in a mode, or
    of the teacher."""
    tail = None if mode is None else mode.exact_tail
    options = EngineOptions(
        max_model_len=PROMPT + new_tokens,
        max_num_seqs=SEQUENCES,
        one_size=True,
        generated_kv="boundary" if tail is None else "own",
        exact_tail=tail,
    )
    engine = Engine.from_model(model, options, swiftkv=mode is not None)
    params = SamplingParams(max_tokens=new_tokens)
    new: list[list[int]] = [[] for _ in prompts]
    for number, output in engine.run([Request(prompt.tokens, params) for prompt in prompts]):
        new[number] += output.token_ids
    return [
        parses(*block_of(prompt.header, model.tokenizer.decode(ids)))
        for prompt, ids in zip(prompts, new, strict=True)
    ]
