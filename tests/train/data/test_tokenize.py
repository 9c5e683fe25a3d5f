"""Target masks: exactly the assistant's turns, by any template that leaves earlier turns alone."""

import copy

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from swiftkv_jax.errors import DataError
from swiftkv_jax.text.chat_template import render_chat
from swiftkv_jax.train.data.documents import Document, Unreadable
from swiftkv_jax.train.data.tokenize import Example, _inside, tokenize

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # trims contents, writes a default system turn and calls as JSON, renames tool turns
    "<|begin|>{% if messages[0].role != 'system' %}<|head|>system<|/head|>\n\nDate: "
    "today<|eot|>{% endif %}"
    "{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
    "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | "
    "trim }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
# a default system turn, neighbouring tool turns inside one user turn, descriptions of tools
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.{% if tools %} "
    "Tools: {{ tools | tojson }}{% endif %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ "
    "m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] "
    "%}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)
END = {CHATML: "<|im_end|>\n", LLAMA: "<|eot|>", QWEN: "<|im_end|>\n"}


def chat(*turns, **fields):
    return Document(
        "o", messages=[{"role": role, "content": content} for role, content in turns], **fields
    )


def with_template(tokenizer, template):
    result = copy.deepcopy(tokenizer)
    result.chat_template = template
    return result


def targets(document, tokenizer):
    (example,) = tokenize([document], tokenizer)
    assert (
        isinstance(example, Example)
        and example.tokens.dtype == np.int32
        and example.is_target.dtype == bool
    )
    return tokenizer.decode(example.tokens[example.is_target])


def reason(document, tokenizer):
    (row,) = tokenize([document], tokenizer)
    assert isinstance(row, Unreadable)
    return row.reason


@pytest.mark.parametrize("template", [CHATML, LLAMA, QWEN], ids=["chatml", "llama", "qwen"])
@pytest.mark.parametrize(
    "system", [[], [("system", "be brief")]], ids=["default system", "own system"]
)
def test_answers_that_repeat_or_are_empty(tokenizer, template, system):
    """A search for an answer's text would find it in the question; the mask must not."""
    turns = [
        ("user", "say yes"),
        ("assistant", "yes"),
        ("user", "yes?"),
        ("assistant", "yes"),
        ("user", "é"),
        ("assistant", ""),
    ]
    document = chat(*system, *turns)
    assert targets(document, with_template(tokenizer, template)) == "".join(
        answer + END[template] for answer in ("yes", "yes", "")
    )


@pytest.mark.parametrize("template", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_tool_turns(tokenizer, template):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [
        {"role": "user", "content": "1+1"},
        call,
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = targets(
        Document("o", messages=messages, tools=tools), with_template(tokenizer, template)
    )
    written = '<tool_call>{"name": "add"}</tool_call>' if template is QWEN else '{"name": "add"}'
    assert found == written + END[template] + "two" + END[template]


def test_given_messages_are_no_targets(tokenizer):
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    assert targets(chat(*turns, given=3), tokenizer) == "b<end>"


def test_text_and_completion(tokenizer):
    (example,) = tokenize([Document("o", text="two")], tokenizer)
    assert (
        isinstance(example, Example)
        and tokenizer.decode(example.tokens) == "two</s>"
        and example.is_target.all()
    )
    assert targets(Document("o", text="one two", given=4), tokenizer) == "two</s>"
    assert targets(Document("o", text="one", given=3), tokenizer) == "</s>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ('{{ strftime_now("%B %-d, %Y") }}', "July 26, 2024"),
        ("{{ strftime_now('%F %H:%M') }} 5%", "2024-07-26 00:00 5%"),
        ("{% set how = '%d%%' %}{{ strftime_now(how) }}", "26%"),
        ("{% if strftime_now is defined %}{{ strftime_now('%A') }}{% endif %}", "Friday"),
        ('{{ "it\'s " + strftime_now("%Y") }}', "it's 2024"),
        ("{{ strftime_now('%' ~ 'Y') }}", None),
    ],
)
def test_formats_of_dates(tokenizer, template, expected):
    document = chat(("user", "q"), ("assistant", "a"))
    dated = with_template(tokenizer, template + "|" + CHATML)
    (row,) = tokenize([document], dated)
    if expected is None:
        assert isinstance(row, Unreadable) and "a date in a format" in row.reason
    else:
        assert isinstance(row, Example)
        assert dated.decode(row.tokens).startswith(expected + "|<|im_start|>user")


def test_a_conversation_that_is_served_has_todays_date(tokenizer):
    dated = with_template(tokenizer, "{{ strftime_now('%d %b %Y') }} " + CHATML)
    found = render_chat(dated, [{"role": "user", "content": "q"}], add_generation_prompt=True)
    assert not found.startswith("26 Jul 2024")


def test_order_is_kept_over_kinds_and_batches(tokenizer):
    documents = [
        [
            Document(str(i), text=f"t{i}"),
            chat(("user", "q"), ("assistant", f"{i}")),
            Unreadable(str(i), "bad"),
        ][i % 3]
        for i in range(600)
    ]
    rows = list(tokenize(documents, tokenizer))
    assert len(rows) == 600
    for i, row in enumerate(rows):
        if isinstance(row, Unreadable):
            assert i % 3 == 2 and row.origin == str(i)
        else:
            expected = f"t{i}</s>" if i % 3 == 0 else f"{i}<end>"
            assert tokenizer.decode(row.tokens[row.is_target]) == expected


def test_tokens_across_the_edge_of_an_answer_are_no_targets():
    """And white space is a target even where the tokenizer trims it out of the offsets."""
    merged = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "Ġ": 3}, merges=[("a", "b")]))
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert merged.encode("aab").offsets == [(0, 1), (1, 3)]
    assert _inside(np.array([(0, 1), (1, 3)]), ((2, 3),)).tolist() == [False, False]
    assert _inside(np.array([(0, 1), (1, 2), (3, 3), (3, 4)]), ((1, 4),)).tolist() == [
        False,
        True,
        True,
        True,
    ]
    assert _inside(np.array([(0, 0), (0, 2), (2, 2), (2, 3)]), ((2, 2), (2, 3))).tolist() == [
        False,
        False,
        False,
        True,
    ]


def test_a_model_without_a_chat_template_ends_the_run(tokenizer):
    with pytest.raises(DataError, match="no chat template, .* put a chat_template.jinja into"):
        list(tokenize([chat(("user", "q"), ("assistant", "a"))], with_template(tokenizer, None)))


@pytest.mark.parametrize(
    ("document", "template", "expected"),
    [
        (chat(("user", "hello")), CHATML, "no message with role 'assistant'"),
        (
            chat(("user", "q"), ("assistant", "a"), ("user", "r"), given=2),
            CHATML,
            "no message with role 'assistant'",
        ),
        (
            chat(("user", "q"), ("assistant", "a")),
            "{{ raise_exception('no such role') }}",
            "refuses the messages: no such role .the first 2 of them",
        ),
        (
            chat(("assistant", "a"), ("user", "q")),
            LLAMA,
            "refuses the messages: .* .the first 0 of them",
        ),
        (
            chat(("user", "q"), ("assistant", "a")),
            "{{ 1 // 0 }}",
            "the chat template fails on the messages: ZeroDivisionError",
        ),
        (
            chat(("user", "q"), ("assistant", "a")),
            "{% for i in range(10**9) %}{% endfor %}",
            "the chat template fails on the messages: OverflowError",
        ),
        (
            chat(*[("user", "x"), ("assistant", "x")] * 2),
            "{{ messages | length }}" + CHATML,
            "rewrites earlier turns, so answer 1",
        ),
        (
            chat(("user", "q"), ("assistant", "")),
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "no token to predict",
        ),
        (Document("o", text=""), None, "no token to predict"),
        (Document("o", text="\ud800"), None, "not Unicode text .a lone surrogate at character 0"),
    ],
)
def test_unreadable(tokenizer, document, template, expected):
    with pytest.raises(ValueError, match=expected):
        raise ValueError(reason(document, with_template(tokenizer, template)))


def test_an_unreadable_row_is_reported_before_the_next_is_rendered(tokenizer):
    """A template may take its time over each."""
    documents = iter([chat(("user", "a")), chat(("user", "b"))])
    rows = tokenize(documents, tokenizer)
    assert isinstance(next(rows), Unreadable)
    assert next(documents).messages == [{"role": "user", "content": "b"}]
