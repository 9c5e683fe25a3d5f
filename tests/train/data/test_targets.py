"""Targets are what a model generates, each token once."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.infer.text import encode
from swiftkv_jax.train.data.documents import Document, Unreadable, parse_json, parse_row
from swiftkv_jax.train.data.tokenize import Example, tokenize
from tests.chat_templates import CHATML, MISTRAL, QWEN2, QWEN3, byte_tokenizer
from tests.test_chat_messages import SHAPES

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|eot|>")


def examples(row, tokenizer) -> list[Example]:
    document = parse_row(row, "row")
    assert isinstance(document, Document), document
    found = list(tokenize([document], tokenizer))
    assert all(isinstance(one, Example) for one in found), found
    return [one for one in found if isinstance(one, Example)]


def targets(row, tokenizer) -> list[str]:
    """The targets of each of the row's examples."""
    return [tokenizer.decode(one.tokens[one.is_target]) for one in examples(row, tokenizer)]


def marked(row, tokenizer) -> str:
    """The text of a row's only example, with [ and ] around its targets."""
    (example,) = examples(row, tokenizer)
    found, inside = "", False
    for token, is_target in zip(example.tokens, example.is_target, strict=True):
        found += ("]" if inside else "[") * bool(inside != is_target) + tokenizer.decode([token])
        inside = is_target
    return found + "]" * bool(inside)


def chat(*contents: str, **fields):
    """A question, its answer, and so on."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": one} for role, one in zip(roles, contents, strict=False)]
    return {"messages": messages, **fields}


# Texts that bring their special tokens --------------------------------------------------


@pytest.mark.parametrize("adds", ["<s>", "</s>", "<s></s>", ""])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", "{bos}ab</s>"),
        ("<s>ab", "<s>ab</s>"),
        ("ab</s>", "{bos}ab</s>"),
        ("<s>ab</s>", "<s>ab</s>"),
        ("<s>ab</s>\n", "<s>ab</s>\n"),
        ("<s>a</s><s>b</s>", "<s>a</s><s>b</s>"),
        ("a<s>b", "{bos}a<s>b</s>"),
    ],
)
def test_no_special_token_is_doubled(adds, text, expected):
    """Whatever the tokenizer adds of itself."""
    tokenizer = byte_tokenizer()
    bos, eos = "<s>" in adds, "</s>" in adds
    single = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
    ids = [(one, tokenizer.convert_tokens_to_ids(one)) for one in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=ids
    )
    (example,) = examples({"text": text}, tokenizer)
    expected = expected.format(bos="<s>" * bos)
    assert tokenizer.decode(example.tokens) == expected
    assert example.is_target[1:].all()
    if not eos:  # what a server's prompt has, and the end token
        kept = example.tokens.tolist()
        assert kept[: len(encode(tokenizer, text))] == encode(tokenizer, text)
    (pair,) = examples({"prompt": text[:1], "completion": text[1:]}, tokenizer)
    assert pair.tokens.tolist() == example.tokens.tolist()


@pytest.mark.parametrize(
    ("single", "bos", "eos", "text", "expected"),
    [
        # GLM: no `bos_token`.
        ("[gMASK] <sop> $A", None, "</s>", "ab", "[gMASK]<sop>ab</s>"),
        ("[gMASK] <sop> $A", None, "</s>", "[gMASK]<sop>ab", "[gMASK]<sop>ab</s>"),
        ("[gMASK] <sop> $A", None, "</s>", "[gMASK]<sop>ab</s>", "[gMASK]<sop>ab</s>"),
        ("[gMASK] <sop> $A", None, None, "[gMASK]<sop>ab", "[gMASK]<sop>ab"),
        ("[gMASK] <sop> $A", "<s>", "</s>", "[gMASK]<sop>ab", "[gMASK]<sop>ab</s>"),
        ("[gMASK] <sop> $A", "<s>", "</s>", "<s>ab", "<s>ab</s>"),
        # BERT: neither is named.
        ("<s> $A [SEP]", None, None, "ab", "<s>ab[SEP]"),
        ("<s> $A [SEP]", None, None, "ab[SEP]", "<s>ab[SEP]"),
        ("<s> $A [SEP]", None, None, "<s>ab[SEP]", "<s>ab[SEP]"),
        ("$A </s> [SEP]", None, "</s>", "ab</s>[SEP]", "ab</s>[SEP]"),
        ("$A </s> [SEP]", None, "</s>", "ab</s>", "ab</s>"),
    ],
)
def test_what_the_post_processor_adds_is_not_doubled(single, bos, eos, text, expected):
    tokenizer = byte_tokenizer(specials=("[gMASK]", "<sop>", "[SEP]"))
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    names = [one for one in single.split() if one != "$A"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(one, tokenizer.convert_tokens_to_ids(one)) for one in names]
    )
    (example,) = examples({"text": text}, tokenizer)
    assert tokenizer.decode(example.tokens) == expected
    if single.endswith("$A"):  # the same in a server's prompt
        prompt = tokenizer.decode(encode(tokenizer, text))
        assert prompt == (expected if text.endswith("</s>") else expected.removesuffix("</s>"))


def test_texts_with_and_without_their_tokens_keep_their_order():
    tokenizer = byte_tokenizer()
    texts = [f"{'<s>' * (i % 3 == 0)}{i}{'</s>' * (i % 2)}" for i in range(600)]
    rows = list(tokenize([Document(str(i), text=one) for i, one in enumerate(texts)], tokenizer))
    for text, row in zip(texts, rows, strict=True):
        assert isinstance(row, Example)
        assert tokenizer.decode(row.tokens) == text.removesuffix("</s>") + "</s>"


# What is never generated ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[a<|im_end|>]\n"),
        (QWEN2, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[a<|im_end|>]\n"),
        (MISTRAL, "<s>[INST] q[/INST][ a</s>]"),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            "user:q\nassistant:[a\n]",
        ),
    ],
)
def test_white_space_behind_the_end_token_is_no_target(template, expected):
    tokenizer = byte_tokenizer(template, SPECIALS)
    assert marked(chat("q", "a"), tokenizer) == expected


def test_white_space_in_an_answer_is_a_target():
    tokenizer = byte_tokenizer(CHATML, SPECIALS)
    assert targets(chat("q", "a\n\n", "r", "<|im_end|>\n"), tokenizer) == [
        "a\n\n<|im_end|><|im_end|>\n<|im_end|>"
    ]


THINK = "<think>\n\n</think>\n\n"


def test_empty_reasoning_of_the_template_is_context():
    """The server writes it into the prompt where reasoning is switched off; with reasoning the
    model writes all of it."""
    tokenizer = byte_tokenizer(QWEN3, SPECIALS)
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert marked(chat("q", "a"), tokenizer) == f"{start}{THINK}[a<|im_end|>]\n"
    row = chat("q", "a")
    row["messages"][1]["reasoning_content"] = "Hm."
    assert marked(row, tokenizer) == f"{start}[<think>\nHm.\n</think>\n\na<|im_end|>]\n"
    # The first answer is rewritten once the second follows.
    assert targets(chat("q", "a", "r", "b"), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]
    assert targets(
        chat("q", "a"), byte_tokenizer(QWEN3.replace("enable_thinking", "x"), SPECIALS)
    ) == [f"{THINK}a<|im_end|>"]


# Weights --------------------------------------------------------------------------------


def weighed(*weights, template=CHATML):
    row = chat("q", "a", "r", "b", "s", "c")
    for message, weight in zip(row["messages"][1::2], weights, strict=True):
        if weight != "absent":
            message["weight"] = weight
    return row


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 1), "abc"),
        ((0, 1, 1), "bc"),
        ((1, 0, 1), "ac"),
        ((0, 0, 1), "c"),
        ((1, 0, 0), "a"),
        (("absent", 0, None), "ac"),
        ((1.0, 0.0, 1.0), "ac"),
    ],
)
@pytest.mark.parametrize("is_marked", [False, True], ids=["by difference", "marked"])
def test_answers_of_weight_0_are_context(weights, expected, is_marked):
    tokenizer = byte_tokenizer(MARKED if is_marked else CHATML, SPECIALS)
    row = weighed(*weights)
    assert targets(row, tokenizer) == ["".join(f"{one}<|im_end|>" for one in expected)]
    (example,) = examples(row, tokenizer)
    (plain,) = examples(weighed(1, 1, 1), tokenizer)
    assert example.tokens.tolist() == plain.tokens.tolist()


def test_weights_of_rewritten_answers():
    tokenizer = byte_tokenizer(QWEN3, SPECIALS)
    assert targets(weighed(0, 1, 0), tokenizer) == ["b<|im_end|>"]


@pytest.mark.parametrize("field", ["messages", "completion", "conversations"])
def test_weights_in_every_form_of_a_row(field):
    tokenizer = byte_tokenizer(CHATML, SPECIALS)
    messages = weighed(0, 1, 0)["messages"]
    rows = {
        "messages": {"messages": messages},
        "completion": {"prompt": messages[:1], "completion": messages[1:]},
        "conversations": {
            "conversations": [
                {"from": one["role"], "value": one["content"], "weight": one.get("weight")}
                for one in messages
            ]
        },
    }
    assert targets(rows[field], tokenizer) == ["b<|im_end|>"]


@pytest.mark.parametrize(
    ("weight", "role", "reason"),
    [
        (0.5, "assistant", "message 1: `weight` must be 0 or 1, not 0.5"),
        (2, "assistant", "message 1: `weight` must be 0 or 1, not 2"),
        ("1", "assistant", "message 1: `weight` must be 0 or 1, not '1'"),
        (1, "user", "message 1: `weight` 1 on role 'user': only answers are targets"),
    ],
)
def test_weights_that_are_refused(weight, role, reason):
    row = {"messages": [*chat("q")["messages"], {"role": role, "content": "a", "weight": weight}]}
    found = parse_row(row, "row")
    assert isinstance(found, Unreadable) and found.reason == reason


def test_a_row_of_weights_0_has_no_targets():
    (row,) = tokenize([parse_row(weighed(0, 0, 0), "row")], byte_tokenizer(CHATML, SPECIALS))
    assert isinstance(row, Unreadable) and "of a weight above 0" in row.reason


# Templates that mark what is generated --------------------------------------------------

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Two marks to an answer; what stands between is the template's.
MARKED_TWICE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[{%- generation -%}"
    "{{ m.reasoning_content or 'no' }}{%- endgeneration -%}]: {% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}\n{% endif %}"
    "{% endfor %}"
)
# Answers that others follow are written without their reasoning, and no prompt is a prefix.
MARKED_AND_REWRITTEN = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}{{ m.reasoning_content }}|"
    "{% endif %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [MARKED, MARKED_TWICE, MARKED_AND_REWRITTEN], ids=["once", "twice", "rewritten"]
)
def test_the_marks_of_a_template_are_those_of_transformers(template):
    tokenizer = byte_tokenizer(template, SPECIALS)
    seen = 0
    for name, row in SHAPES.items():
        document = parse_json(json.dumps(row).encode(), "row")
        assert isinstance(document, Document) and document.messages
        (found,) = tokenize([document], tokenizer)
        expected: Any = tokenizer.apply_chat_template(
            document.messages,
            tools=document.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        if isinstance(found, Unreadable):
            assert "assistant" not in [one["role"] for one in row["messages"]], name
            continue
        assert found.tokens.tolist() == expected["input_ids"], name
        assert found.is_target.tolist() == [bool(one) for one in expected["assistant_masks"]], name
        seen += 1
    assert seen > 40


def test_context_before_completions_is_no_target_of_marks():
    messages = chat("q", "a", "r", "b")["messages"]
    for template, answer in ((MARKED, "b<|im_end|>"), (MARKED_TWICE, "nob</s>")):
        tokenizer = byte_tokenizer(template, SPECIALS)
        row = {"prompt": messages[:3], "completion": messages[3:]}
        assert targets(row, tokenizer) == [answer]


def test_marks_across_tokens():
    """A token of which a part is marked is a target, as transformers has it."""
    vocab = {"a": 0, "b": 1, "ab": 2, "c": 3}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "c{{ 'a' }}{% generation %}{{ 'b' }}{% endgeneration %}c"
    (example,) = examples(chat("q", "a"), tokenizer)
    assert example.tokens.tolist() == [3, 2, 3]
    assert example.is_target.tolist() == [False, True, False]
    options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
    found: Any = tokenizer.apply_chat_template(chat("q", "a")["messages"], **options)
    assert found["assistant_masks"] == [0, 1, 0]


def test_marks_that_mark_nothing():
    tokenizer = byte_tokenizer("{% if false %}{% generation %}{% endgeneration %}{% endif %}abc")
    (row,) = tokenize([parse_row(chat("q", "a"), "row")], tokenizer)
    assert isinstance(row, Unreadable) and row.reason == "it yields no token to predict"
    tokenizer.chat_template = "{% generation %}{{ 1 // 0 }}{% endgeneration %}"
    (row,) = tokenize([parse_row(chat("q", "a"), "row")], tokenizer)
    assert isinstance(row, Unreadable) and "fails on the messages: ZeroDiv" in row.reason
