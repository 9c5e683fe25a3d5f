"""The parser of reasoning: one text gives one answer, however it is cut."""

import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken

from swiftkv_jax.errors import UsageError
from swiftkv_jax.serve.text.reasoning import (
    Reasoning,
    ReasoningParser,
    is_in_template,
    reasoning_of,
    tokens_through,
    with_visible_tags,
)
from tests.serve.conftest import make_tokenizer

SIZES = (1, 2, 5, 8, 64, 10**6)


def parse(text: str, size: int, start: Any = "possible", **options) -> tuple[str, str]:
    """(reasoning, content) of a text that comes in parts of `size`."""
    parser = ReasoningParser(start, **options)
    found = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    found.append(parser.finish())
    reasoning, content = zip(*found, strict=True)
    ended = next((number for number, part in enumerate(content) if part), len(found))
    assert not any(reasoning[ended + 1 :]), "reasoning comes before content"
    return "".join(reasoning), "".join(content)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        # The model writes both tags: Qwen3, SmolLM3; GLM-4 after a line break.
        ("possible", "<think>\nSo.\n\nYes\n</think>\n\nHi  \n", "So.\n\nYes", "Hi  \n"),
        ("possible", "\n<think>So</think>Hi", "So", "Hi"),
        ("possible", "<think>\n\n</think>\n\nHi", "", "Hi"),
        ("possible", "<think></think>", "", ""),
        ("possible", "<think>a < b </thin </think> <think>c</think>", "a < b </thin ", None),
        # It ends within the reasoning.
        ("possible", "<think>\nSo, \n", "So, \n", ""),
        ("possible", "<think>So</thi", "So</thi", ""),
        ("begun", "<thi", "<thi", ""),
        # There is none.
        ("possible", "  Hi <think>x</think>", "", "  Hi <think>x</think>"),
        ("possible", "<thinking> Hi", "", "<thinking> Hi"),
        ("possible", "\n<thi", "", "\n<thi"),
        ("possible", "So</think>Hi", "", "So</think>Hi"),
        ("possible", " " * 65 + "<think>x</think>", "", " " * 65 + "<think>x</think>"),
        ("over", "\n<think>x</think>", "", "\n<think>x</think>"),
        ("possible", "", "", ""),
        # The prompt ends with the first tag: DeepSeek-R1, Qwen3's thinking models.
        ("begun", "So\n</think>\n\nHi", "So", "Hi"),
        ("begun", "\n\nSo", "So", ""),
        ("begun", "<think>\nSo</think>Hi", "So", "Hi"),
        ("begun", "</think>Hi", "", "Hi"),
        # The answer goes on within the reasoning.
        ("continued", "\n\nand so\n</think>\nHi", "\n\nand so", "Hi"),
        ("continued", "<think>", "<think>", ""),
    ],
)
def test_a_text_is_read_the_same_however_it_comes(start, text, reasoning, content):
    if content is None:
        content = " <think>c</think>"
    for size in SIZES:
        assert parse(text, size, start) == (reasoning, content), size


def read(text: str, start: str) -> tuple[str, str]:
    """The same of a whole text."""
    if start == "over":
        return "", text
    if start != "continued":
        tag = re.match(r"\s{0,64}<think>", text)
        if tag is None and start == "possible":
            return "", text
        text = text[tag.end() if tag else 0 :].lstrip("\n")
    reasoning, tag, content = text.partition("</think>")
    return (reasoning.rstrip("\n"), content.lstrip("\n")) if tag else (reasoning, "")


def test_random_texts():
    rng = random.Random(0)
    parts = ["<think>", "</think>", "\n", "<", "</thi", "nk>", "So, ", " ", "a<b", "<think"]
    reasoned = 0
    for _ in range(500):
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        for start in ("possible", "begun", "continued", "over"):
            expected = read(text, start)
            assert all(parse(text, size, start) == expected for size in SIZES), text
            reasoned += bool(expected[0])
    assert reasoned > 500


def test_it_may_be_left_out():
    for size in SIZES:
        assert parse("<think>\nSo\n</think>\n\nHi", size, omit=True) == ("", "Hi")


def test_the_cost_of_a_token_is_bounded():
    """What is held back is the beginning of a tag; line breaks are counted."""
    for parser, text in (
        (ReasoningParser("begun"), "x" + "\n" * 5000 + "</think"),
        (ReasoningParser("possible"), " " * 5000),
    ):
        held = 0
        for sign in text:
            parser.push(sign)
            held = max(held, len(parser._text))
        assert held <= 72
    assert parse("x" + "\n" * 500 + "y", 3, "begun") == ("x" + "\n" * 500 + "y", "")


@pytest.mark.parametrize(
    ("prompt", "continued", "start"),
    [
        ("<|im_start|>user\nuse <think><|im_end|>\n<|im_start|>assistant\n", "", "possible"),
        ("<|Assistant|><think>\n", "", "begun"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "over"),
        ("<|assistant|></think>", "", "over"),
        ("assistant: <think>\n\n</think>\nSure", "Sure", "over"),
        ("assistant: <think>\nI", "<think>\nI", "continued"),
        ("assistant: <think>a</think>b", "<think>a</think>b", "over"),
        ("assistant: <think>\na\n</think>\n\n", "", "over"),
        (None, "", "possible"),
    ],
)
def test_where_an_answer_starts(prompt, continued, start):
    assert Reasoning.start(prompt, continued) == start


def test_the_chat_template_tells_whether_a_model_reasons():
    assert is_in_template("{% set content = content.split('</think>')[-1] %}")
    assert not is_in_template("{{ messages }}")
    facts = {"vocab_size": 97, "eos_token_ids": [0]}
    tokenizer = make_tokenizer()
    assert reasoning_of("auto", tokenizer, "{{ messages }}", **facts) is None
    assert reasoning_of("none", tokenizer, "</think>", **facts) is None
    assert reasoning_of("auto", tokenizer, "</think>", **facts) is not None
    assert reasoning_of("think", tokenizer, "", **facts) is not None


def with_tags(*, special: bool):
    tokenizer = make_tokenizer()
    tokens = [AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")]
    tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("special", [False, True])
def test_texts_have_the_tags_though_they_are_special_tokens(special):
    tokenizer = with_tags(special=special)
    ids = tokenizer("<think>a</think>b<|end|>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    made = with_visible_tags(tokenizer)
    assert (made is tokenizer) == (not special)
    assert made.backend_tokenizer.decode(ids) == "<think>a</think>b"
    plain = "ab" if special else "<think>a</think>b"
    assert tokenizer.backend_tokenizer.decode(ids) == plain, "completions are as before"


def test_a_tokenizer_that_always_leaves_them_out_is_refused():
    class Slow:
        added_tokens_decoder = with_tags(special=True).added_tokens_decoder

    facts = {"vocab_size": 99, "eos_token_ids": [0]}
    assert reasoning_of("auto", Slow(), "</think>", **facts) is None
    with pytest.raises(UsageError, match="leaves the tags"):
        reasoning_of("think", Slow(), "</think>", **facts)


def test_tokens_are_counted_up_to_the_tag():
    tokenizer = make_tokenizer()

    def count(text: str) -> int:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens_through("</think>", ids, tokenizer.decode)

    for length in (0, 1, 30, 500):
        assert count("x" * length + "</think>yes</think>") == length + 8
        assert count("x" * length + "</think>" + "y" * 100) == length + 8
    assert count("abc") == 3
