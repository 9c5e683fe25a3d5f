"""Reasoning in the text of a model, between `<think>` and `</think>`, as it comes: one parser for
streams and for whole answers.

Qwen3, SmolLM3 and GLM-4 write both tags themselves. DeepSeek-R1 and the thinking models of Qwen get
the first one from their chat template, which ends the prompt with it. A template may also end the
prompt with an empty block: then there is no reasoning. Line breaks next to the tags belong to them,
as templates write them back.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ...errors import UsageError
from ...infer.engine.grammar import Matcher
from ...infer.structured.reasoning_grammar import ReasoningGrammar
from ...infer.text import rust_tokenizer
from .call_parser import begun
from .token_text import TokenSpellings

logger = logging.getLogger(__name__)

BEGIN = "<think>"
END = "</think>"
_MAX_GAP = 64
"""White space before the first tag."""

Start = Literal["possible", "begun", "continued", "over"]
"""Place where an answer starts: before reasoning that the model may begin, after the tag that
begins it, within it, or after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A part of the reasoning."""

    text: str


class ReasoningParser:
    """Reads one answer: reasoning first, if there is some, then content."""

    def __init__(self, start: Start, *, omit: bool = False):
        """Make a parser. With `omit` the reasoning is read and left out."""
        self._omit = omit
        self._text = ""
        """Text that is not certain yet."""
        self._num_breaks = 0
        """Line breaks that follow the reasoning so far; dropped where it ends."""
        self._is_blank = False
        """True while nothing but line breaks has come since a tag."""
        self._inside = start in ("begun", "continued")
        self._state = {
            "possible": self._read_tag,
            "begun": self._read_tag,
            "continued": self._read_reasoning,
            "over": self._read_content,
        }[start]
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def has_begun(self) -> bool:
        """There is or was reasoning."""
        return self._inside

    @property
    def is_over(self) -> bool:
        """True once all that follows is content."""
        return self._state == self._read_content

    def push(self, text: str) -> tuple[str, str]:
        """Add text. Returns (reasoning, content) that has become certain; all of the reasoning
        comes before any content."""
        self._text += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """The end of the text: what was held back, as in `push`."""
        if self._inside and self._state == self._read_tag:
            self._is_blank = True
            self._state = self._read_reasoning
            self._state()
        rest = self._text
        self._text = ""
        if self._inside and not self.is_over:
            self._reasoning.append("\n" * self._num_breaks + rest)
        else:
            self._content.append(rest)
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        reasoning = "".join(self._reasoning)
        content = "".join(self._content)
        self._reasoning = []
        self._content = []
        return "" if self._omit else reasoning, content

    # States: each reads some of the text, and returns whether another may go on -----------------

    def _read_tag(self) -> bool:
        """Up to the first tag. Some models repeat the one of the prompt."""
        text = self._text.lstrip()
        is_near = len(self._text) - len(text) <= _MAX_GAP
        if is_near and len(text) < len(BEGIN) and BEGIN.startswith(text):
            return False
        if is_near and text.startswith(BEGIN):
            self._text = text[len(BEGIN) :]
            self._inside = True
        self._state = self._read_reasoning if self._inside else self._read_content
        self._is_blank = self._inside
        return True

    def _read_reasoning(self) -> bool:
        at = self._text.find(END)
        certain = at if at >= 0 else len(self._text) - len(begun(self._text, END))
        text = self._text[:certain]
        self._text = self._text[certain:]
        if self._is_blank:
            text = text.lstrip("\n")
        if kept := text.rstrip("\n"):
            self._reasoning.append("\n" * self._num_breaks + kept)
            self._num_breaks = 0
            self._is_blank = False
        self._num_breaks += len(text) - len(kept)
        if at < 0:
            return False
        self._text = self._text[len(END) :]
        self._num_breaks = 0
        self._is_blank = True
        self._state = self._read_content
        return True

    def _read_content(self) -> bool:
        text = self._text
        self._text = ""
        if self._is_blank:
            text = text.lstrip("\n")
        if text:
            self._content.append(text)
            self._is_blank = False
        return False


class Reasoning:
    """Reader of the answers of one model."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]):
        """`vocab_size` and `eos_token_ids` are the model's. Raises `UsageError` for a tokenizer
        whose texts cannot have the tags."""
        self.tokenizer = with_visible_tags(tokenizer)
        """The same, but its texts have the tags, which may be special tokens."""
        self._spellings = TokenSpellings(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self._begin_id, self._end_id = vocabulary.get(BEGIN), vocabulary.get(END)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @staticmethod
    def start(prompt: str | None, continued: str = "") -> Start:
        """Return where the answer to a prompt starts. `continued` is the text that it goes on
        with."""
        if continued.strip():
            return "continued" if continued.rfind(BEGIN) > continued.rfind(END) else "over"
        end = (prompt or "").rstrip()
        if end.endswith(BEGIN):
            return "begun"
        return "over" if end.endswith(END) else "possible"

    def before(self, grammar: Matcher, start: Start) -> Matcher | None:
        """Return a matcher of reasoning, followed by what `grammar` allows. None where that cannot
        be held exactly, because a tag is no token of its own."""
        if start == "over":
            return grammar
        if self._end_id is None or (start == "possible" and self._begin_id is None):
            return None
        return ReasoningGrammar(
            grammar,
            self._vocab_size,
            end_tag=END.encode(),
            spelling_of=lambda token: self._spellings[token].content,
            begin_token=self._begin_id if start == "possible" else None,
            end_token_ids=self._eos_token_ids,
        )


def reasoning_of(
    parser: str, tokenizer: Any, template: str, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> Reasoning | None:
    """Return the reader of answers of a model with this chat template; None for a model that does
    not reason. `parser` is the option of `ServerOptions`. Raises `UsageError` where that asks for
    what cannot be."""
    if parser == "none" or (parser == "auto" and not is_in_template(template)):
        return None
    try:
        return Reasoning(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    except UsageError as error:
        if parser != "auto":
            raise
        logger.warning("reasoning stays in the content: %s", error)
        return None


def is_in_template(template: str) -> bool:
    """Return whether a chat template takes reasoning out of earlier answers, or writes it into
    them."""
    return END in template


def with_visible_tags(tokenizer: Any) -> Any:
    """`tokenizer`, or where a tag is one of its special tokens, which texts leave out, a copy in
    which it is none. Raises `UsageError` where that cannot be made."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if not any(token.special and str(token) in (BEGIN, END) for token in added.values()):
        return tokenizer
    from tokenizers import Tokenizer

    if (backend := rust_tokenizer(tokenizer)) is None:
        raise UsageError("this tokenizer leaves the tags of reasoning out of texts")
    found = json.loads(backend.to_str())
    for token in found["added_tokens"]:
        token["special"] &= token["content"] not in (BEGIN, END)
    made = copy.copy(tokenizer)
    made._tokenizer = Tokenizer.from_str(json.dumps(found))
    return made


def tokens_through(text: str, token_ids: list[int], text_of: Callable[[list[int]], str]) -> int:
    """Tokens up to the one that completes the first `text` near their end; all of them where there
    is none. `text_of` decodes tokens."""
    width = 32
    while text not in text_of(token_ids[-width:]) and width < len(token_ids):
        width *= 4
    first = max(len(token_ids) - width, 0)
    last = token_ids[first:]
    return first + bisect.bisect_left(
        range(len(last)), True, key=lambda n: text in text_of(last[:n])
    )
