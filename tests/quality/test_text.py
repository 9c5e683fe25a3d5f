"""Held-out text: its rows, recalled identifiers, and functions that are to be written."""

import re

import numpy as np
import pytest

from benchmarks.quality import generation, held_out

T, PROMPT = held_out.LENGTH, held_out.PROMPT


def offsets_of(text: str) -> np.ndarray:
    """Tokens of three characters of a word at most, others of one; the first is empty."""
    found = re.finditer(r"\w{1,3}|\W", text)
    return np.array([(0, 0), *(match.span() for match in found)])


def recalled(text: str, start: int = 0, stop: int | None = None) -> list[str]:
    """The recalled tokens among those of a slice, as text."""
    offsets = offsets_of(text)
    words = list(held_out.find_words(text, offsets))
    found = held_out.recalled_tokens(words, start, len(offsets) if stop is None else stop)
    return [text[slice(*offsets[token])] for token in found]


FILLER = "x = 1\n" * (held_out.MIN_DISTANCE // 6 + 1)
"""At least `MIN_DISTANCE` tokens."""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("alphabet = 1\n" + FILLER + "alphabet\n", ["hab", "et"]),  # the first token is not one
        ("alphabet = 1\n" + FILLER + "# alphabet\n", []),  # no identifier there
        ("# alphabet\n" + FILLER + "alphabet\n", ["hab", "et"]),  # but seen in a comment
        ("alphabet = 1\n" + FILLER + "alphabet\nalphabet\n", ["hab", "et"]),  # the third is near
        ("alphabet = alphabet\n" + FILLER + "alphabet\n", []),  # seen twice before
        ("alphabet = 1\n" + FILLER[:-60] + "alphabet\n", []),  # too near
        ("alp = 1\n" + FILLER + "alp\n", []),  # too short
        ("alph = 1\n" + FILLER + "alph\n", ["h"]),
        ("nonlocal_ = 1\n" + FILLER + "nonlocal_2 = 1\n", []),  # another word
        ("if x:\n    return\n" + FILLER + "return\n", []),  # a keyword
    ],
)
def test_recalled_identifiers(text, expected):
    assert recalled(text) == expected


def test_only_what_the_model_sees_was_seen():
    text = "alphabet = 1\n" + FILLER + "alphabet\n"
    assert recalled(text, start=0) and not recalled(text, start=3)
    assert not recalled(text, stop=len(offsets_of(text)) - 2), "cut in the middle of the word"


def test_rows_hold_the_text_of_one_document_each(texts, tokenizer):
    found = held_out.held_out_rows(texts, tokenizer, batch_size=4)
    ids = [held_out.encode(text, tokenizer)[0] for _, text in texts]
    assert ids[0][-1] == tokenizer.eos_token_id and len(ids[0]) > 2 * T
    rows = [row[:length].tolist() for row, length in zip(found.tokens, found.lengths, strict=True)]
    assert len(rows) % 4 == 0 and found.document.tolist()[:2] == [0, 0]
    assert rows[0] + rows[1] == ids[0][: 2 * T] and ids[1] in rows
    assert (found.lengths > PROMPT).tolist() == sorted(found.lengths > PROMPT, reverse=True)
    assert found.num_long_rows == (found.lengths > PROMPT).sum()
    assert found.predicted.sum() == np.maximum(found.lengths - 1, 0).sum()
    after = [length - PROMPT for length in found.lengths if length > PROMPT]
    assert found.answers.sum() == sum(after), "the first token after the prompt is one of them"
    assert not (found.recalled & ~found.answers).any() and found.recalled.any()
    counted = found.per_document(np.ones(found.tokens.shape), found.predicted)
    assert sum(counted) == found.predicted.sum() and counted[1] == len(ids[1]) - 1


def test_a_limit_takes_rows_of_every_document(texts, tokenizer):
    found = held_out.held_out_rows(texts, tokenizer, batch_size=2, limit=2)
    assert sorted(found.document) == [0, 1]
    assert held_out.held_out_rows(texts, tokenizer, batch_size=1, document_tokens=600).lengths[
        :2
    ].tolist() == [T, 600 - T]


# Functions that are written ----------------------------------------------------


@pytest.mark.parametrize(
    "header, continuation, block, ended",
    [
        ("def f(x):", "\n    return x\n\n\nclass", "def f(x):\n    return x\n\n\n", True),
        ("    def f(x):", "\n        pass\n    y = 1\n", "    def f(x):\n        pass\n", True),
        ("def f(x):", "\n    return x\n    retu", "def f(x):\n    return x\n", False),
        ("def f(\n    x,\n):", "\n    return x\nz", "def f(\n    x,\n):\n    return x\n", True),
        ("def f(x):", "  # no", "def f(x):  # no\n", False),
    ],
)
def test_blocks_end_with_their_indentation(header, continuation, block, ended):
    assert generation.block_of(header, continuation) == (block, ended)


@pytest.mark.parametrize(
    "block, ended, expected",
    [
        ("def f(x):\n    return x\n", True, True),
        ("    def f(self):\n        return self\n", True, True),
        ("def f(x):\n    return x +\n", True, False),
        ("def f(x):\n", True, False),
        ("def f(x):\n    return g(x,\n", False, True),  # may go on
        ("def f(x):\n    return g(x,\n", True, False),
        ("def f(x):\n    '''Text\n", False, True),
        ("def f(x):\n    return x y\n", False, False),
    ],
)
def test_what_parses(block, ended, expected):
    assert generation.parses(block, ended) == expected


def test_prompts_end_with_a_header(tokenizer):
    text = (
        "import os\n\n\nclass A:\n    @property\n    def f(\n        self,\n    ):\n        pass\n"
    )
    texts = [("a", text), ("b", "def g(): return 1\ndef h():\n    return 2\n"), ("c", "x = 1\n")]
    first, second = generation.find_prompts(texts, tokenizer)
    assert first.header == "    def f(\n        self,\n    ):" and second.header == "def h():"
    assert (
        tokenizer.decode(first.tokens, skip_special_tokens=True) == text[: -len("\n        pass\n")]
    )
    assert len(generation.find_prompts(texts, tokenizer, count=1)) == 1
