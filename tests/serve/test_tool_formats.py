"""Which format a chat template asks for. The snippets are the lines of published templates that
write a call."""

import logging

import pytest

from swiftkv_jax.serve.text.tool_formats import UNPARSED, format_of
from tests.serve.conftest import TEMPLATE, make_tokenizer
from tests.serve.test_forms import CALL, CHAT, ROOM, TOOLS, chat

LLAMA = (
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}'
    "{{- '<|python_tag|>' + tool_call.name }}{%- for t in message['tool_calls'] %}{%- endfor %}"
)


@pytest.mark.parametrize(
    ("lines", "format"),
    [
        (LLAMA, "llama3_json"),
        ("{'name': ...}", "llama3_json"),
        ("{{ message.tool_calls[0].function | tojson }}", "llama3_json"),
        ("Respond with a JSON for a function call.", "llama3_json"),
        ("{{ messages | tojson }}", "llama3_json"),
        ("{{ t | tojson }}", UNPARSED),
        ("'Call [func_name1(params_name1=params_value1)]'", UNPARSED),  # Llama 3.2, Llama 4
        ("```tool_code\n{'name': ...}", UNPARSED),  # Gemma 3
        ("'<|plugin|>' + {'name': ...}", UNPARSED),  # InternLM 2
        ("'<|tools_prefix|>[{\"' + name + '\": '", UNPARSED),  # Apertus
        ("{# <tool_call> {'name': ...} #}", UNPARSED),
        ("{#- [TOOL_CALLS]\n #}{'name': ...}", "llama3_json"),
        ("<tool_call>", "hermes"),
        (
            '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}</tool_call>',
            "hermes",
        ),
        ("'\\n<tool_call>\\n<function=' + name + '>\\n' '<parameter=' + key + '>'", "qwen3_coder"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a>", UNPARSED),  # Seed-OSS
        ("'[TOOL_CALLS] [' + (tool_call.function|tojson)", UNPARSED),  # Mistral
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", UNPARSED),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", UNPARSED),  # DeepSeek
        ("'<|tool_call|>' + (message.tool_calls|tojson)", UNPARSED),  # Granite 3
        ("<tool_call>' + tc.name + '\\n<arg_key>' + k", UNPARSED),  # GLM-4.5
        ("<|tool_calls_section_begin|><|tool_call_begin|>", UNPARSED),  # Kimi
        ('<minimax:tool_call>\n<invoke name="', UNPARSED),
        ("functools[{", UNPARSED),  # Phi-4
        ("<TOOLCALL>[", UNPARSED),  # Nemotron
        ('<function=f>{"a": 1}</function>', UNPARSED),  # Functionary
    ],
)
def test_format_of_templates(lines, format):
    assert format_of("{% if tools %}" + lines + "{% endif %}") == format
    without = lines.replace("tools", "x")
    assert format_of(without) is format_of("{# tools #}" + without) is None


def test_calls_that_are_not_parsed_come_as_text(start, says, caplog):
    """Said once, at the start; a call is not forced into a form that the model does not know."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE + "{% if false %}[TOOL_CALLS]{% endif %}"
    with caplog.at_level(logging.WARNING):
        running = start(engine=ROOM, tokenizer=tokenizer)
    (line,) = [one.getMessage() for one in caplog.records if "tools" in one.getMessage()]
    assert "calls of tools come as text" in line and "hermes" in line
    says(CALL, tokenizer)
    (choice,) = running.post(CHAT, chat(tools=TOOLS))[1]["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    status, answer = running.post(CHAT, chat(tools=TOOLS, tool_choice="required"))
    assert status == 400 and answer["error"]["param"] == "tool_choice"
    assert "does not force" in answer["error"]["message"]


def test_a_template_that_reads_tools_of_messages_alone_takes_none(start):
    """It would not show the model those of a request (Phi-4-mini)."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if 'tools' in m %}{{ m['tools'] }}{% endif %}"
        "{% endfor %}"
    )
    running = start(engine=ROOM, tokenizer=tokenizer)
    status, answer = running.post(CHAT, chat(tools=TOOLS))
    assert status == 400 and answer["error"]["param"] == "tools"


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [("Rome", "stop", '{"city": "'), (None, "tool_calls", '{"city": "Rome", "days": 3}')],
)
def test_a_stop_string_within_a_call_is_why_it_ended(start, says, stop, reason, arguments):
    running = start(engine=ROOM, tool_call_parser="llama3_json")
    says(CALL)
    body = chat(tools=TOOLS, stop=stop)
    (choice,) = running.checked(CHAT, body)["choices"]
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
