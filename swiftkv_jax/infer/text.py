"""Between text and tokens: text that appears as it becomes certain, stop strings, chat
templates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import DataError, UsageError
from ..text.chat_messages import MessageError, normalize_messages
from ..text.chat_template import render_chat
from ..text.special_tokens import brings_first_token
from ..text.stop_strings import StopStrings
from .engine.requests import Request

REPLACEMENT = "\ufffd"
_MESSAGES = "messages must be a list of objects with role and content, or tool_calls"
PROMPT_TOKENS = 6
"""Number of last tokens of a prompt on which its continuation's text can depend."""
HELD_TOKENS = 8
"""Bytes that are no character yet are held back for so many tokens; after that, the last four."""


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, with the tokenizer's special tokens unless the text brings its own
    first one.

    Raises `UsageError` if the text is empty, or is not Unicode text (bytes that are not UTF-8
    arrive as lone surrogates).
    """
    if not text:
        raise UsageError("the prompt is empty")
    check_unicode(text)
    return _encode(tokenizer, text)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(
        tokenizer(text, add_special_tokens=not brings_first_token(tokenizer, text))["input_ids"]
    )


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context, at least one, and of what follows it.

    Split as lm-evaluation-harness does (`lm_eval/api/model.py`, `TemplateLM`): spaces that end the
    context go to the continuation, and the continuation is what both together have after as many
    tokens as the context has alone. An empty context is the token that begins texts. Raises
    `UsageError` if the continuation adds no token, or nothing could stand before it.
    """
    check_unicode(context + continuation)
    if context:
        kept = context.rstrip()
        before = _encode(tokenizer, kept)
        after = _encode(tokenizer, kept + context[len(kept) :] + continuation)[len(before) :]
        before = before or [first_token(tokenizer)]
    else:
        before = [first_token(tokenizer)]
        after = list(tokenizer(continuation, add_special_tokens=False)["input_ids"])
        if after[:1] == before:
            after = after[1:]
    if not after:
        raise UsageError(
            f"the continuation {continuation[:40]!r} adds no token to its context: there is "
            f"nothing to score"
        )
    return before, after


def first_token(tokenizer: Any) -> int:
    """Return the token that stands before a text without context. Raises `UsageError` if the
    tokenizer has no such token."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        raise UsageError(
            "the tokenizer has no token that begins or ends texts: nothing predicts the first "
            "token of a text"
        )
    return first


def check_unicode(text: str) -> None:
    """Raise `UsageError` unless `text` can be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not UTF-8: character {error.start} is no character"
        ) from None


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation up to the assistant's turn. The template writes every special
    token itself.

    Raises `UsageError` if the tokenizer has no template, if the messages are not a list of what
    `chat_messages.normalize_message` takes, or if the template refuses them or fails on them
    (`chat_template.render_chat`).
    """
    if not isinstance(messages, list | tuple):
        raise UsageError(f"{_MESSAGES}, not {type(messages).__name__}")
    try:
        messages = normalize_messages(messages)
    except MessageError as error:
        raise UsageError(f"{_MESSAGES}; message {error.number}: {error}") from None
    if tokenizer is None:
        raise UsageError("this checkpoint has no tokenizer: a conversation needs one")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "this model's tokenizer has no chat template: use a chat model, or plain prompts"
        )
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=True)
    except DataError as error:
        raise UsageError(str(error)) from error
    check_unicode(text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Detokenizer:
    """Text of a growing row of tokens, in parts that add up to the text of the whole.

    A character may take several tokens. Text that ends in a replacement character is held back: its
    last bytes may be the beginning of a character. Of bytes that become none, only the last few
    are: a character has at most four.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        """The text is what follows that of `prompt`."""
        self._text_of = text_decoder(tokenizer)
        self._textless = textless_tokens(tokenizer)
        self._prompt = [t for t in prompt[-PROMPT_TOKENS:] if t not in self._textless]
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def push(self, token: int) -> str:
        """The text that has become certain."""
        if token in self._textless:  # kept, a run of them would be decoded again and again
            return ""
        if not self._ids:
            self._begin()
        self._ids.append(token)
        text = self._pending()
        if not text.endswith(REPLACEMENT):
            return self._release(len(self._ids), text)
        if len(self._ids) - self._done <= HELD_TOKENS:
            return ""
        certain = len(self._ids) - 4
        before = self._text_of(self._ids[self._context : self._done])
        whole = self._text_of(self._ids[self._context :])
        part = self._text_of(self._ids[self._context : certain])
        return self._release(certain, part[len(before) :]) if whole.startswith(part) else ""

    def push_all(self, tokens: Sequence[int]) -> str:
        """The text that has become certain of several tokens, at the cost of one where they end
        with a whole character."""
        tokens = [token for token in tokens if token not in self._textless]
        if not self._ids:
            self._begin()
        before = len(self._ids)
        self._ids += tokens
        if not (text := self._pending()).endswith(REPLACEMENT):
            return self._release(len(self._ids), text)
        del self._ids[before:]
        return "".join(map(self.push, tokens))

    def finish(self) -> str:
        """Return the text that was held back, with incomplete bytes as replacement characters."""
        return self._release(len(self._ids), self._pending())

    def _begin(self) -> None:
        """Decoding starts a few tokens back, because some tokenizers treat the first token of a
        text specially: Llama 2's drops its space."""
        # A prompt may end in half a character, which the text has the other half of.
        if not self._text_of(self._prompt).endswith(REPLACEMENT):
            self._ids = self._prompt
            self._done = len(self._prompt)

    def _release(self, upto: int, text: str) -> str:
        if text:
            self._context = self._done
            self._done = upto
        return text

    def _pending(self) -> str:
        done = self._text_of(self._ids[self._context : self._done])
        return self._text_of(self._ids[self._context :])[len(done) :]


def text_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Text of token ids without special tokens: by the Rust tokenizer itself where there is one,
    because the method of transformers that calls it takes most of a token's time."""
    if (backend := rust_tokenizer(tokenizer)) is not None:
        return backend.decode  # leaves special tokens out by default
    return functools.partial(
        tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def textless_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids that `text_decoder` leaves out: the special tokens; none where it decodes them too."""
    if rust_tokenizer(tokenizer) is None:
        return frozenset(getattr(tokenizer, "all_special_ids", ()))
    return _special_ids(tokenizer)


@functools.lru_cache(maxsize=8)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the special ids of a Rust tokenizer. They are read once: some have hundreds."""
    added = rust_tokenizer(tokenizer).get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


def rust_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer, or None."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else None


class NoText:
    """The `Detokenizer` of a model without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def push_all(self, tokens: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class TextStream:
    """Tokens of one row in, its text out, up to a stop string. Without a tokenizer no text comes,
    and no stop string is found."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Iterable[str] = (),
        *,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        """The text follows that of `prompt`. A stop string counts only if it ends after the first
        `min_tokens` tokens, as in vLLM."""
        self._detokenizer: Detokenizer | NoText = NoText()
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []
        """Tokens taken so far: up to the one that completed a stop string."""

    @classmethod
    def of(cls, tokenizer: Any, request: Request) -> TextStream:
        """The stream of one sample of a request."""
        return cls(
            tokenizer,
            request.params.stop,
            prompt=request.prompt,
            min_tokens=request.params.min_tokens,
        )

    @property
    def stopped(self) -> bool:
        """A stop string has appeared."""
        return self._stops.hit is not None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that has appeared, or None."""
        return self._stops.hit

    def push(self, tokens: Iterable[int]) -> str:
        """The text that has become certain. Tokens after a stop string are ignored."""
        if self._stops.is_empty:
            self.token_ids += (tokens := [*tokens])
            return self._detokenizer.push_all(tokens)
        text = ""
        for token in tokens:
            if self.stopped:
                break
            self.token_ids.append(token)
            text += self._before_stop(self._detokenizer.push(token))
        return text

    def finish(self) -> str:
        """Return the text that was held back. No token may follow."""
        return self._before_stop(self._detokenizer.finish()) + self._stops.finish()

    def _before_stop(self, text: str) -> str:
        """The part of new text that certainly lies before a stop string."""
        return self._stops.push(text, counts=len(self.token_ids) > self._min_tokens)
