"""Pydantic AI, over chats, responses and messages."""

# pyright: reportMissingImports=false

import base64
from typing import Any

import harness
from harness import CHAT, CITY, LONG, MODEL, STRUCTURED, TOOL, City
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def stream(model: Any) -> list[str]:
    async with Agent(model).run_stream(CHAT) as found:
        return [text async for text in found.stream_text(delta=True, debounce_by=None)]


def image(model: Any) -> str:
    picture = BinaryContent(base64.b64decode(harness.PNG), media_type="image/png")
    history = [
        ModelRequest([UserPromptPart(["What is this?", picture])]),
        ModelResponse([TextPart("A dot.")]),
    ]
    return Agent(model).run_sync(CHAT, message_history=history).output


def features(model: Any) -> dict[str, Any]:
    weather = Agent(model, tools=[harness.weather])
    by_call, native = Agent(model, output_type=City), Agent(model, output_type=NativeOutput(City))
    script = harness.call_of("final_result", CITY)
    return {
        "chat": lambda: Agent(model).run_sync(CHAT).output,
        "stream": lambda: stream(model),
        "tool": lambda: weather.run_sync(TOOL).output,
        "forced": lambda: by_call.run_sync(script).output.model_dump(),
        "structured": lambda: native.run_sync(STRUCTURED).output.model_dump(),
        "context": lambda: harness.error_of(lambda: Agent(model).run_sync(LONG)),
        "image": lambda: image(model),
    }


openai = OpenAIProvider(base_url=f"{harness.URL}/v1", api_key="none")
anthropic = AnthropicProvider(base_url=harness.URL, api_key="none")
harness.report(
    {
        "Pydantic AI: chat": features(OpenAIChatModel(MODEL, provider=openai)),
        "Pydantic AI: responses": features(OpenAIResponsesModel(MODEL, provider=openai)),
        "Pydantic AI: anthropic": features(AnthropicModel(MODEL, provider=anthropic)),
    }
)
