"""Whatever a chat template does, it ends as text or as one `DataError`."""

import threading

import pytest
from transformers import AutoTokenizer

from swiftkv_jax import demo
from swiftkv_jax.errors import DataError
from swiftkv_jax.text.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.LLAMA)


def render(tokenizer, template, **options) -> str:
    tokenizer.chat_template = template
    return render_chat(tokenizer, MESSAGES, add_generation_prompt=True, **options)


def test_text_is_that_of_the_tokenizer(tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}{{ tools | length }}"
    )
    text = render(tokenizer, template, tools=[{"name": "a"}])
    assert text == "user: hi\nassistant: there\nassistant: 1"
    assert text == tokenizer.apply_chat_template(
        MESSAGES, tools=[{"name": "a"}], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "fails on the messages: ZeroDivisionError: division by zero"),
        ("{{ raise_exception('one\ntwo') }}", "refuses the messages: one two"),
        ("{{ messages | nonsense }}", "has a mistake in line 1: No filter named 'nonsense'."),
        ("{% if", "has a mistake in line 1: "),
        ("{{ messages.no.thing }}", "refuses the messages: "),
        ("{{ messages + 1 }}", "fails on the messages: TypeError: "),
        ("{{ 'a' * 10**15 }}", "fails on the messages: MemoryError"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails on the messages: OverflowError: "),
        (
            "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
            "fails on the messages: RecursionError: ",
        ),
        ({"tool_use": "a", "rag": "b"}, "refuses the messages: "),
    ],
)
def test_failures_are_one_line(tokenizer, template, message):
    with pytest.raises(DataError) as error:
        render(tokenizer, template)
    assert str(error.value).startswith(f"the chat template {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ lipsum(n=10**9) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(tokenizer, template):
    with pytest.raises(DataError, match=r"^the chat template runs longer than 0.1 s"):
        render(tokenizer, template, deadline_s=0.1)
    assert render(tokenizer, "fine") == "fine"


def test_a_template_that_fills_memory_is_stopped(tokenizer):
    template = (
        "{% set text = namespace(it='x') %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% if text.it | length < 2**28 %}{% set text.it = text.it ~ text.it %}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"takes over 0.0625 GiB of memory"):
        render(tokenizer, template, max_memory=2**26)


def test_limits_hold_in_every_thread_alone(tokenizer):
    errors = []

    def endless() -> None:
        try:
            render(
                AutoTokenizer.from_pretrained(demo.LLAMA),
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                deadline_s=0.1,
            )
        except DataError as error:
            errors.append(str(error))

    thread = threading.Thread(target=endless)
    thread.start()
    texts = {render(tokenizer, "{{ messages[0].content }}") for _ in range(100)}
    thread.join()
    assert texts == {"hi"}
    assert errors == ["the chat template runs longer than 0.1 s on the messages"]
