"""`chat_template_kwargs` and `reasoning_effort`: honoured where the template reads them."""

import pytest

from swiftkv_jax.serve.bodies.template_options import template_options, variables_of
from swiftkv_jax.serve.errors import APIError
from swiftkv_jax.serve.protocol import ChatBody, Message

HYBRID = "{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}"
LEVELS = "{{ reasoning_effort }}"


def test_variables_are_those_that_a_template_reads():
    template = (
        "enable_thinking {# thinking #}{{ 'it\\'s a_text' + \"b_text\" }}"
        "{%- if message.thinking_part and level -%}{% endif %}"
    )
    found = variables_of(template)
    assert {"message", "level"} <= found
    assert not found & {"enable_thinking", "thinking", "thinking_part", "a_text", "b_text"}
    assert "enable_thinking" in variables_of(HYBRID)


def options(template: str, *, allowed=(), reasons=True, **fields) -> dict:
    body = ChatBody(messages=[Message(role="user", content="a")], **fields)
    return template_options(body, variables_of(template), allowed, reasons=reasons)


def test_what_a_body_may_set():
    off = {"enable_thinking": False}
    assert options(HYBRID) == {}
    assert options(HYBRID, chat_template_kwargs=off) == off
    assert options(HYBRID, chat_template_kwargs={"enable_thinking": True, "x": None}) == {
        "enable_thinking": True
    }
    assert options(HYBRID, reasoning_effort="none") == off
    assert options(HYBRID, reasoning_effort="none", chat_template_kwargs=off) == off
    assert options(LEVELS, reasoning_effort="high") == {"reasoning_effort": "high"}
    assert options("", reasons=False, reasoning_effort="none") == {}
    assert options("", allowed=("x",), chat_template_kwargs={"x": "y"}) == {"x": "y"}


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (HYBRID, {"chat_template_kwargs": {"y": 1}}, "chat_template_kwargs"),
        (HYBRID, {"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs"),
        ("", {"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
        ("", {"chat_template_kwargs": {"x": "a" * 1025}}, "chat_template_kwargs"),
        ("", {"reasoning_effort": "none"}, "reasoning_effort"),
        (HYBRID, {"reasoning_effort": "low"}, "reasoning_effort"),
        (
            HYBRID,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
        ),
    ],
)
def test_refused(template, fields, param):
    with pytest.raises(APIError) as caught:
        options(template, allowed=("x",), **fields)
    assert caught.value.status == 400 and caught.value.param == param


def test_texts_in_values_write_no_special_tokens(start):
    from tests.serve.conftest import USER_TOKEN, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}"
    running = start(tokenizer=tokenizer, chat_template_kwargs=("style",))
    messages, style = [{"role": "user", "content": "a"}], {"style": "<|user|>b"}
    body = {"messages": messages, "chat_template_kwargs": style}
    status, found = running.post("/tokenize", body)
    assert status == 200 and USER_TOKEN not in found["tokens"]
    text = running.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
    assert text == "<|user|>ba"
