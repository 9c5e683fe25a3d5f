"""Prompts of token ids, made of texts and messages. Texts go to separate threads: the tokenizer's
batch methods let other threads run meanwhile, its others hold the interpreter for half a second
and more."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ...errors import DataError, UsageError
from ...infer.engine.page_pool import page_keys
from ...infer.text import check_unicode, rust_tokenizer
from ...text.chat_template import render_chat
from ...text.special_tokens import brings_first_token
from ..errors import PromptTooLong, invalid
from ..protocol import Message

WORKERS = 2
LONG_WORKERS = 2
LONG = 8192
"""Characters from which on a text is long: it has other threads than the rest."""
SHORT = 512
"""Characters that are tokenized and hashed in about 0.2 ms: two changes of threads take longer."""
FEW_IDS = 2048
"""Token ids that are checked and hashed in 0.1 ms, the time that a thread takes to begin."""
COUNTED = 4
"""Times `max_model_len` that the tokens of a text may be that is only counted: clients learn by how
much it is too long, and cut it."""
TEMPLATE_SECONDS = 5.0
_SENTINELS = tuple(chr(0xE000 + index) for index in range(64))
"""Characters for private use (Unicode 23.5): one that no message has marks control tokens."""


class Prompt(NamedTuple):
    """A prompt as the engine takes it."""

    token_ids: np.ndarray
    """i32[T]"""
    page_keys: list[bytes]
    text: str | None
    """Text that the client sent; None for token ids, and for a text of which a part remains."""


class Truncation(NamedTuple):
    """The tokens of a prompt that remain."""

    num_tokens: int
    side: Literal["left", "right"]
    """Side on which tokens are cut off: left keeps the last."""

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids that remain."""
        if self.side == "left":
            return ids[-self.num_tokens :]
        return ids[: self.num_tokens]


class Encoding(NamedTuple):
    """The way in which texts or messages become prompts."""

    salt: str
    param: str = "messages"
    """Field that errors name."""
    add_special_tokens: bool = False
    truncation: Truncation | None = None
    counting: bool = False
    """True if nothing continues the prompts: they may be empty, or too long (`COUNTED`)."""
    prompt_digest: bytes = b""
    """Digest of the adapter, for `page_keys`."""


class PromptEncoder:
    """Makes prompts of what clients send."""

    def __init__(
        self, tokenizer: Any, *, max_model_len: int, vocab_size: int, page_size: int, caching: bool
    ):
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.page_size = page_size
        self._caching = caching
        self._backend = rust_tokenizer(tokenizer)
        self._plain: Any = None
        """The same tokenizer, to which the spelling of a special token is text."""
        if self._backend is not None:
            self._plain = Tokenizer.from_str(self._backend.to_str())
            self._plain.encode_special_tokens = True
            self._backend.no_truncation()
            self._backend.no_padding()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._specials = [str(token) for token in added.values() if token.special]
        self._specials_in_json = [_in_json(token) for token in self._specials]
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        """Characters of a token, at most."""
        self._pool = concurrent.futures.ThreadPoolExecutor(WORKERS, "tokenizer")
        self._long = concurrent.futures.ThreadPoolExecutor(LONG_WORKERS, "tokenizer-long")

    async def encode(self, texts: Sequence[str | list[int]], how: Encoding) -> list[Prompt]:
        """Prompts of texts or token ids. Raises `APIError`."""
        for text in texts:
            if isinstance(text, str):
                self._check_length(text, how.param)
            elif len(text) > self._max_model_len and how.truncation is None:
                raise self._too_long(len(text), how.param)

        def work() -> list[Prompt]:
            return [self._prompt(text, how) for text in texts]

        length = sum(map(len, texts))
        has_text = any(isinstance(text, str) for text in texts)
        if length <= SHORT or (length <= FEW_IDS and not has_text):
            return work()
        return await self.in_thread(work, length)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        how: Encoding,
        *,
        num_bytes: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a conversation of some `num_bytes`, with the tools that it may call, as
        OpenAI's objects, and further `variables` of the template. What all of them spell is text:
        special tokens are the template's alone. Raises `APIError`."""

        def work() -> Prompt:
            rendered = [message.rendered(number) for number, message in enumerate(messages)]
            (contents, described, given), sentinel = self._guard(
                ([{**message, "role": ""} for message in rendered], tools, variables)
            )
            guarded = [
                {**content, "role": message["role"]}
                for content, message in zip(contents, rendered, strict=True)
            ]
            try:
                text = render_chat(
                    self._tokenizer,
                    guarded,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=described,
                    variables=given,
                    deadline_s=TEMPLATE_SECONDS,
                )
            except DataError as error:
                raise invalid("messages", str(error)[:200], "template_error") from None
            self._check_length(text, "messages")
            self._check_unicode(text, "messages")
            # Each odd segment is the number of a special token that a message spells.
            segments = [text]
            if sentinel:
                segments = _split(text, sentinel)
            ids: list[int] = []
            for number, segment in enumerate(segments):
                if number % 2:
                    ids += self._plain.encode_batch(
                        [self._specials[int(segment)]], add_special_tokens=False
                    )[0].ids
                elif segment:
                    ids += self._ids(segment, how.add_special_tokens and not number)
            return self._made(np.asarray(ids, np.int32), text, how)

        return await self.in_thread(work, num_bytes)

    async def encode_prediction(self, text: str) -> np.ndarray:
        """Token ids (i32[T]) of a text that an answer may repeat. Raises `APIError`."""
        param = "prediction.content"

        def check(tokens: int, bound: str = "") -> None:
            if tokens > (limit := self._max_model_len):
                message = f"`{param}` has {bound}{tokens} tokens, an answer at most {limit}"
                raise invalid(param, message)

        def work() -> np.ndarray:
            ids = np.asarray(self._ids(text, False), np.int32)
            check(ids.size)
            return ids

        check(self._fewest_tokens(text), "at least ")
        return await self.in_thread(work, len(text))

    async def detokenize(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included. Raises `APIError`."""
        if len(token_ids) > self._max_model_len:
            raise self._too_long(len(token_ids), "tokens")

        def work() -> str:
            ids = self._checked(token_ids, "tokens")
            if self._backend is None:
                return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            return self._backend.decode_batch([ids.tolist()], skip_special_tokens=False)[0]

        return await self.in_thread(work, len(token_ids))

    def close(self) -> None:
        for pool in (self._pool, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    async def in_thread[T](self, work: Callable[[], T], length: int) -> T:
        """Return the result of `work`, in a thread; `length` are the characters that it works on.
        If the caller is cancelled before a thread has begun, none will."""
        pool = self._pool
        if length > LONG:
            pool = self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    # In a thread -----------------------------------------------------------------

    def _prompt(self, text: str | list[int], how: Encoding) -> Prompt:
        if not isinstance(text, str):
            return self._made(self._checked(text, how.param), None, how)
        if not text and not how.counting:
            raise invalid(how.param, "the prompt is empty")
        self._check_unicode(text, how.param)
        special = how.add_special_tokens and not brings_first_token(self._tokenizer, text)
        ids = np.asarray(self._ids(text, special), np.int32)
        is_whole = how.truncation is None or ids.size <= how.truncation.num_tokens
        return self._made(ids, text if is_whole else None, how)

    def _made(self, ids: np.ndarray, text: str | None, how: Encoding) -> Prompt:
        if not ids.size and not how.counting:
            raise invalid(how.param, "the prompt is empty")
        if how.truncation is not None:
            ids = how.truncation.of(ids)
        limit = self._max_model_len * (COUNTED if how.counting else 1)
        if ids.size > limit:
            raise self._too_long(ids.size, how.param)
        keys = []
        if self._caching and not how.counting:
            keys = page_keys(
                ids,  # type: ignore[arg-type]
                self.page_size,
                how.salt,
                prompt_digest=how.prompt_digest,
            )
        return Prompt(ids, keys, text)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def _guard(self, content: Any) -> tuple[Any, str | None]:
        """(`content`, in which the spelling of special token i is SiS, the character S)."""
        said = json.dumps(content, ensure_ascii=False)
        spelled = [i for i, token in enumerate(self._specials_in_json) if token in said]
        if not spelled or self._plain is None:
            return content, None
        sentinel = next((one for one in _SENTINELS if one not in said), None)
        if sentinel is None:
            raise invalid("messages", "too many characters for private use")
        # A token that holds another comes first.
        spelled.sort(key=lambda i: -len(self._specials[i]))

        def guard(value: Any) -> Any:
            if isinstance(value, str):
                for i in spelled:
                    value = value.replace(self._specials[i], f"{sentinel}{i}{sentinel}")
                return value
            if isinstance(value, list | tuple):
                return [guard(each) for each in value]
            if isinstance(value, Mapping):
                return {guard(name): guard(each) for name, each in value.items()}
            return value

        return guard(content), sentinel

    # Checks -----------------------------------------------------------------------

    def _checked(self, ids: list[int], param: str) -> np.ndarray:
        for extreme in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= extreme < self.vocab_size:
                message = f"is outside the vocabulary of {self.vocab_size}"
                raise invalid(param, f"`{param}`: token id {extreme} {message}")
        return np.asarray(ids, np.int32)

    def _fewest_tokens(self, text: str) -> int:
        return -(-len(text) // self._longest)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text that is too long, before it is tokenized. Raises `APIError`."""
        fewest = self._fewest_tokens(text)
        if fewest > self._max_model_len:
            raise self._too_long(fewest, param, at_least=True)

    @staticmethod
    def _check_unicode(text: str, param: str) -> None:
        try:
            check_unicode(text)
        except UsageError as error:
            raise invalid(param, str(error)) from None

    def _too_long(self, tokens: int, param: str, *, at_least: bool = False) -> PromptTooLong:
        return PromptTooLong(
            param,
            prompt_tokens=tokens,
            limit=self._max_model_len,
            is_chat=param == "messages",
            at_least=at_least,
        )


def _in_json(text: str) -> str:
    """`text` as it stands in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _split(text: str, sentinel: str) -> list[str]:
    """Split a text at the marks of `PromptEncoder._guard`: every second part is a mark. One that
    the template has cut is left out."""
    parts = re.split(f"{sentinel}([0-9]+){sentinel}", text)
    return [
        part if number % 2 else re.sub(f"{sentinel}[0-9]*", "", part)
        for number, part in enumerate(parts)
    ]
