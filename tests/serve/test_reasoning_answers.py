"""Reasoning in chats and responses: a field, an item and a count of its own."""

import pytest

from tests.serve.conftest import make_tokenizer
from tests.serve.test_forms import CALL, CHAT, COMPLETIONS, ROOM, SCHEMA, TOOLS, check_schema

RESPONSES = "/v1/responses"
MESSAGES = (
    "{% if tools %}tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
# As Qwen3's: the model writes both tags, unless reasoning is switched off.
HYBRID = (
    MESSAGES + "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# As DeepSeek-R1's and those of Qwen3's thinking models: the prompt ends with the first tag.
BEGUN = MESSAGES + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}{# </think> #}"
THOUGHT = "<think>\nTwo, or so.\n</think>"
SAID = THOUGHT + "\n\nIt is 4."


def make_reasoning_tokenizer(template: str, *, special: bool = False):
    return make_tokenizer("<think>", "</think>", special=special, template=template)


HYBRID_TOKENIZER = make_reasoning_tokenizer(HYBRID)
BEGUN_TOKENIZER = make_reasoning_tokenizer(BEGUN)


@pytest.fixture(scope="module")
def hybrid(start):
    return start(engine=ROOM, tokenizer=HYBRID_TOKENIZER, tool_call_parser="llama3_json")


@pytest.fixture(scope="module")
def begun(start):
    return start(engine=ROOM, tokenizer=BEGUN_TOKENIZER, tool_call_parser="llama3_json")


@pytest.fixture(scope="module")
def special(start):
    return start(engine=ROOM, tokenizer=make_reasoning_tokenizer(HYBRID, special=True))


@pytest.fixture(scope="module")
def unparsed(start):
    return start(engine=ROOM, tokenizer=HYBRID_TOKENIZER, reasoning_parser="none")


def chat(**fields):
    body = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 200, "temperature": 0}
    return body | fields


def ask(running, **fields):
    """(message, choice, usage) of a chat, which is the same as a stream."""
    answer = running.checked(CHAT, chat(**fields))
    running.check_empty()
    (choice,) = answer["choices"]
    return choice["message"], choice, answer["usage"]


def num_tokens(text: str) -> int:
    return len(HYBRID_TOKENIZER(text, add_special_tokens=False)["input_ids"])


OFF = {"chat_template_kwargs": {"enable_thinking": False}}
FIRST_TAG, NO_TAGS = "assistant: <think>\n", "assistant: <think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("server", "prompt", "said", "fields", "expected", "counted"),
    [
        ("hybrid", "assistant: ", SAID, {}, ("Two, or so.", "It is 4."), THOUGHT),
        ("begun", FIRST_TAG, SAID[8:], {}, ("Two, or so.", "It is 4."), SAID[8:-10]),
        ("hybrid", NO_TAGS, "It is 4.", OFF, (None, "It is 4."), ""),
        ("hybrid", NO_TAGS, "It is 4.", {"reasoning_effort": "none"}, (None, "It is 4."), ""),
        ("hybrid", "assistant: ", "Is <think> 4.", {}, (None, "Is <think> 4."), ""),
        (
            "hybrid",
            "assistant: ",
            SAID,
            {"include_reasoning": False},
            (None, "It is 4."),
            THOUGHT,
        ),
        ("special", "assistant: ", SAID, {}, ("Two, or so.", "It is 4."), THOUGHT),
        ("unparsed", "assistant: ", SAID, {}, (None, SAID), ""),
    ],
)
def test_reasoning_is_a_field(request, says, server, prompt, said, fields, expected, counted):
    running = request.getfixturevalue(server)
    says(said, running.app.tokenizer, prompt)
    message, choice, usage = ask(running, logprobs=True, **fields)
    assert (message.get("reasoning"), message["content"]) == expected
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_tokens(counted)
    assert usage["completion_tokens"] == num_tokens(said) + 1
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == said + "<|end|>", "tokens of the reasoning too"


def test_an_answer_that_ends_in_its_reasoning(begun, hybrid, says):
    says("Two, or so, I believe.", BEGUN_TOKENIZER, "assistant: <think>\n")
    message, choice, usage = ask(begun, max_tokens=11)
    assert choice["finish_reason"] == "length"
    assert message["content"] is None and message["reasoning"] == "Two, or so,"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 11
    message, choice, usage = ask(begun)
    assert choice["finish_reason"] == "stop" and message["content"] is None
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]
    says(SAID, HYBRID_TOKENIZER)
    message, choice, _ = ask(hybrid, stop=[" so"])
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == " so"
    assert message["content"] is None and message["reasoning"] == "Two, or"


def test_tags_of_many_tokens(start, says):
    """Characters, here; the count is exact however many tokens a call decodes."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = HYBRID
    said = "<think>Two, or so.</think>It is 4."
    for steps in (1, 3, 8):
        engine = ROOM | {"decode_steps": steps, "single_step_rows": 0}
        running = start(engine=engine, tokenizer=tokenizer)
        says(said, tokenizer)
        message, _, usage = ask(running, stop=["zzz", "</think>\n"])
        assert (message["reasoning"], message["content"]) == ("Two, or so.", "It is 4.")
        assert usage["completion_tokens_details"]["reasoning_tokens"] == said.index("It")


def test_completions_are_as_they_were(hybrid, says):
    says(SAID, HYBRID_TOKENIZER)
    body = {"prompt": "assistant: ", "max_tokens": 200, "temperature": 0}
    assert hybrid.post(COMPLETIONS, body)[1]["choices"][0]["text"] == SAID


def test_calls_come_after_the_reasoning(hybrid, says):
    """What looks like a call in the reasoning is none."""
    says(f"<think>I may say {CALL}.</think>\n\nWell. {CALL}", HYBRID_TOKENIZER)
    message, choice, _ = ask(hybrid, tools=TOOLS)
    assert message["reasoning"] == f"I may say {CALL}." and message["content"] == "Well."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "forecast" and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", ["hybrid", "begun"])
def test_a_form_holds_after_the_reasoning(request, name):
    """Also where the model begins with the form at once; reasoning cannot end the answer."""
    running = request.getfixturevalue(name)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    reasoned = ended = 0
    for seed in range(8):
        # All that counts is where tokens are allowed: most of them are of the reasoning.
        body = chat(response_format=form, seed=seed, temperature=1, max_tokens=800)
        (choice,) = running.post(CHAT, body)[1]["choices"]
        message = choice["message"]
        reasoned += bool(message.get("reasoning"))
        if choice["finish_reason"] == "stop":
            ended += 1
            check_schema(message["content"])
        else:
            assert choice["finish_reason"] == "length"
            assert message["content"] is None or message["content"].startswith("{")
    assert ended > 1 and (reasoned == 8 or name == "hybrid")


def test_a_form_without_tokens_for_the_tags_holds_at_once(start):
    """Then there is no reasoning."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = BEGUN
    running = start(engine=ROOM, tokenizer=tokenizer)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    message, choice, _ = ask(running, response_format=form, temperature=1, seed=1)
    assert choice["finish_reason"] == "stop" and "reasoning" not in message
    check_schema(message["content"])


def test_an_answer_that_goes_on(hybrid, says):
    """Within the reasoning, or after it."""
    user = {"role": "user", "content": "2+2?"}
    says("or so.\n</think>\n\nIt is 4.", HYBRID_TOKENIZER, "Two, ")
    for content, reasoning in (("<think>\nTwo, ", "or so."), ("Two, ", "")):
        messages = [user, {"role": "assistant", "content": content}]
        message, _, _ = ask(hybrid, messages=messages, continue_final_message=True)
        assert message.get("reasoning", "") == reasoning
        if reasoning:
            assert message["content"] == "It is 4."


def test_reasoning_may_be_sent_back(hybrid):
    user = {"role": "user", "content": "2+2?"}

    def text(**fields) -> str:
        messages = [user, {"role": "assistant", "content": None} | fields, user]
        status, found = hybrid.post("/tokenize", {"messages": messages})
        assert status == 200, found
        return hybrid.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]

    said = text(reasoning="Two.", content="4")
    assert "assistant: <think>Two.</think>4" in said
    assert said == text(reasoning_content="Two.", content="4")
    assert "assistant: <think>Two.</think><|user|>" in text(reasoning="Two.")
    for message, param in (
        ({"role": "user", "content": "a", "reasoning": "b"}, "messages[0].reasoning"),
        (
            {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"},
            "messages[0].reasoning",
        ),
        ({"role": "assistant", "content": "a", "reasoning": 3}, "messages[0].reasoning"),
    ):
        status, answer = hybrid.post(CHAT, chat(messages=[message]))
        assert status == 400 and answer["error"]["param"] == param, answer


# Responses ----------------------------------------------------------------------------
