"""Images, sounds and files of a conversation. The model reads text: what is said now is refused by
the type of its part, and what came before has a text in its place, so that agents can go on."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..protocol import ContentPart, Message

_WORDS = {
    "audio_url": "audio",
    "container_upload": "file",
    "document": "document",
    "file": "file",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
    "search_result": "search result",
    "video_url": "video",
}
"""Types of OpenAI's parts and Anthropic's blocks -> what they are."""


def text_in_place_of(kind: str) -> str | None:
    """The text that stands for a part of this type; None for one that is no image, sound or file,
    or not known."""
    word = _WORDS.get(kind)
    return word and f"[{word} left out: this model reads text]"


def first_said_now(turns: Iterable[tuple[bool, bool]]) -> int:
    """Number of the first message that the user says now. Of each message `turns` tells whether it
    is the model's, and whether it calls tools.

    These are the messages after the model's last answer. After calls there are none: results
    follow, and what an agent adds to them.
    """
    first = number = 0
    called = False
    for number, (is_answer, calls) in enumerate(turns, start=1):
        if is_answer:
            first = number
            called = calls
    return number if called else first


def replace_media(messages: list[Message]) -> list[Message]:
    """`messages` with texts in place of images, sounds and files, but for those that the user says
    now."""
    now = first_said_now((one.role == "assistant", bool(one.tool_calls)) for one in messages)
    found = []
    for number, message in enumerate(messages):
        if isinstance(message.content, list) and (number < now or message.role == "tool"):
            content = [_replaced(part) for part in message.content]
            message = msgspec.structs.replace(message, content=content)
        if message.role == "assistant" and message.audio:
            content = message.content or text_in_place_of("input_audio")
            message = msgspec.structs.replace(message, content=content, audio=None)
        found.append(message)
    return found


def _replaced(part: ContentPart) -> ContentPart:
    text = text_in_place_of(part.type)
    return part if text is None else ContentPart(type="text", text=text)
