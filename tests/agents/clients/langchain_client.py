"""LangChain's clients of OpenAI and Anthropic."""

# pyright: reportMissingImports=false

from typing import Any

import harness
from harness import CALL, CHAT, LONG, MODEL, STRUCTURED, TOOL, City
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def tool(model: Any) -> str:
    model, messages = model.bind_tools([harness.weather]), [HumanMessage(TOOL)]
    answer = model.invoke(messages)
    messages.append(answer)
    for call in answer.tool_calls:
        result = harness.weather(**call["args"])
        messages.append(ToolMessage(result, tool_call_id=call["id"]))
    return model.invoke(messages).text


def forced(model: Any, choices: tuple[str, str]) -> list[Any]:
    """By `tool_choice`, and the kind of structured output that is built on it."""
    found = [
        model.bind_tools([harness.weather], tool_choice=one).invoke(CALL).tool_calls[0]["args"]
        for one in choices
    ]
    calling = model.with_structured_output(City, method="function_calling")
    city = calling.invoke(harness.call_of("City", harness.CITY))
    assert city.model_dump() == harness.CITY, city
    return found


def features(model: Any, choices: tuple[str, str], image: Any) -> dict[str, Any]:
    structured = model.with_structured_output(City, method="json_schema")
    return {
        "chat": lambda: model.invoke(CHAT).text,
        "stream": lambda: [one.text for one in model.stream(CHAT)],
        "tool": lambda: tool(model),
        "forced": lambda: forced(model, choices),
        "structured": lambda: structured.invoke(STRUCTURED).model_dump(),
        "context": lambda: harness.error_of(lambda: model.invoke(LONG)),
        "image": lambda: model.invoke(image(CHAT)).text,
    }


openai: Any = ChatOpenAI(model=MODEL, base_url=f"{harness.URL}/v1", api_key="none")
anthropic: Any = ChatAnthropic(model=MODEL, base_url=harness.URL, api_key="none", max_tokens=500)
harness.report(
    {
        "LangChain OpenAI": features(openai, ("required", "weather"), harness.openai_image),
        "LangChain Anthropic": features(anthropic, ("any", "weather"), harness.anthropic_image),
    }
)
