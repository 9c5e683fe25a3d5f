"""Images and files: refused in what is said now, a text in their place in what came before."""

from typing import Any

import pytest

from swiftkv_jax.serve.bodies.media import first_said_now

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = "[{} left out: this model reads text]"


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def answer(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "see", "arguments": "{}"}}],
}
URL = {"url": "data:image/png;base64,AAAA"}
PARTS = [
    ({"type": "image_url", "image_url": URL}, "image"),
    ({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}, "audio"),
    ({"type": "file", "file": {"file_data": "A", "filename": "a.pdf"}}, "file"),
    ({"type": "input_image", "image_url": "data:A", "detail": "auto"}, "image"),
    ({"type": "input_file", "file_id": "f"}, "file"),
    ({"type": "video_url", "video_url": URL}, "video"),
]
IMAGE = PARTS[0][0]


def result(*content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": list(content)}


SHAPES = {
    "older turn": lambda part: [user(text("a"), part), answer("b"), user(text("c"))],
    "result": lambda part: [user(text("a")), CALL, result(text("b"), part)],
    "beside a result": lambda part: [user(text("a")), CALL, result(text("b")), user(part)],
    "answer": lambda part: [user(text("a")), {"role": "assistant", "content": [part]}, user()],
    "question before calls": lambda part: [user(text("a"), part), CALL, result(text("b"))],
    "result before the last answer": lambda part: [
        *(user(text("a")), CALL, result(part), answer("b"), user(text("c")))
    ],
}
"""Conversations with a part in one of their places."""


@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize(("part", "word"), PARTS)
def test_a_text_stands_in_the_place_of_what_came_before(server, place, part, word):
    """The prompt is that of the text, token for token."""
    found, expected = (
        server.post("/tokenize", {"messages": SHAPES[place](one)})
        for one in (part, text(TEXT.format(word)))
    )
    assert found[0] == 200 and found == expected


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("part", [part for part, _ in PARTS])
@pytest.mark.parametrize(
    "before",
    [[], [user(text("a")), answer("b")], [user(text("a")), CALL, result(text("b")), answer("c")]],
)
def test_what_is_said_now_is_refused(server, path, before, part):
    for messages in ([*before, user(text("d"), part)], [*before, user(text("d"), part), user()]):
        status, found = server.post(path, {"messages": messages})
        assert status == 400, found
        assert found["error"]["param"] == f"messages[{len(before)}].content[1].type"
        assert repr(part["type"]) in found["error"]["message"]


def test_an_answer_may_go_on_after_what_was_left_out(server):
    """Its beginning has the text too."""
    messages = [user(text("a")), {"role": "assistant", "content": [text("Well, "), IMAGE]}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 2}
    assert server.post(CHAT, body)[0] == 200


def test_unknown_parts_are_refused_everywhere(server):
    status, found = server.post(CHAT, {"messages": SHAPES["older turn"]({"type": "smell"})})
    assert status == 400 and found["error"]["param"] == "messages[0].content[1].type"


# Responses ------------------------------------------------------------------------------


SEEN = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
CALLED = {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"}


def output(*content: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "a", "output": list(content)}


def said(what: str) -> dict[str, Any]:
    return {"type": "input_text", "text": what}


@pytest.mark.parametrize(
    "items",
    [
        lambda part: [user(said("a")), CALLED, output(part)],
        lambda part: [user(part), answer("b"), user(said("c"))],
        lambda part: [user(said("a")), CALLED, output(said("b")), user(part)],
    ],
)
def test_items_of_responses(server, items):
    """Codex's `view_image` returns one."""
    body = {"max_output_tokens": 8, "temperature": 0}
    found, expected = (
        server.post(RESPONSES, body | {"input": items(one)})
        for one in (SEEN, said(TEXT.format("image")))
    )
    assert found[0] == 200, found
    assert found[1]["usage"]["input_tokens"] == expected[1]["usage"]["input_tokens"]
    assert found[1]["output"][0]["content"] == expected[1]["output"][0]["content"]


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_items_that_are_said_now(server, kind):
    items = [user(said("a")), answer("b"), user(said("c"), {"type": kind})]
    status, found = server.post(RESPONSES, {"input": items})
    assert status == 400 and found["error"]["param"] == "input[2].content[1].type"


# Messages -------------------------------------------------------------------------------


SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
BLOCKS = [
    ({"type": "image", "source": SOURCE}, TEXT.format("image")),
    ({"type": "document", "source": SOURCE, "title": "a"}, TEXT.format("document")),
    (
        {"type": "search_result", "source": "a", "title": "b", "content": [text("c")]},
        TEXT.format("search result"),
    ),
    ({"type": "tool_reference", "tool_name": "see"}, "[tool reference: see]"),
]
USED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}],
}


def returned(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(content)}


@pytest.mark.parametrize(("block", "stand_in"), BLOCKS)
@pytest.mark.parametrize(
    "messages",
    [
        lambda block: [user(text("a")), USED, user(returned(text("b"), block))],
        lambda block: [user(text("a")), USED, user(returned(text("b")), block, text("c"))],
        lambda block: [user(block), answer("b"), user(text("c"))],
        lambda block: [user(returned(block))],
    ],
)
def test_blocks_of_messages(server, messages, block, stand_in):
    """What Claude Code sends after it has read a picture, and in every later request."""
    count = "/v1/messages/count_tokens"
    found, expected = (
        server.post(count, {"messages": messages(one)}) for one in (block, text(stand_in))
    )
    assert found[0] == 200 and found == expected, found
    body = {"messages": messages(block), "max_tokens": 2}
    assert server.post(MESSAGES, body)[0] == 200


@pytest.mark.parametrize("block", [block for block, _ in BLOCKS])
def test_blocks_that_are_said_now(server, block):
    messages = [
        user(text("a")),
        USED,
        user(returned(text("b"))),
        answer("c"),
        user(text("d"), block),
    ]
    status, found = server.post(MESSAGES, {"messages": messages, "max_tokens": 2})
    assert status == 400, found
    message = found["error"]["message"]
    assert message.startswith(f"messages[4].content[1].type: a block of type '{block['type']}'")


def test_first_said_now():
    user, answer, call = (False, False), (True, False), (True, True)
    for turns, first in (
        ([], 0),
        ([user], 0),
        ([user, user], 0),
        ([user, answer], 2),
        ([user, answer, user, user], 2),
        ([user, call, user, user], 4),
        ([user, call, user, answer, user], 4),
        ([user, answer, user, call], 4),
    ):
        assert first_said_now(turns) == first, turns


def test_an_answer_that_was_spoken(server):
    """Its text stays; one that has none has a text in its place."""
    for content, left in ((None, TEXT.format("audio")), ("b", "b")):
        spoken = {"role": "assistant", "content": content, "audio": {"id": "audio_a"}}
        counts = [
            server.post(CHAT, {"messages": [user(text("a")), one, user(text("c"))]})
            for one in (spoken, answer(left))
        ]
        assert {status for status, _ in counts} == {200}
        found = [one["usage"]["prompt_tokens"] for _, one in counts]
        assert found[0] == found[1]
