"""openai-agents, over chats and responses."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import agents
import harness
import openai
from harness import CHAT, LONG, MODEL, STRUCTURED, TOOL, City

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{harness.URL}/v1", api_key="none")
WEATHER = agents.function_tool(harness.weather)


def agent(model: Any, **fields: Any) -> Any:
    return agents.Agent(name="helper", model=model, **fields)


async def run(asked: Any, content: Any) -> Any:
    return (await agents.Runner.run(asked, content)).final_output


async def stream(model: Any) -> list[str]:
    events = agents.Runner.run_streamed(agent(model), CHAT).stream_events()
    data = [one.data async for one in events if one.type == "raw_response_event"]
    return [one.delta for one in data if one.type == "response.output_text.delta"]


async def structured(model: Any) -> Any:
    return (await run(agent(model, output_type=City), STRUCTURED)).model_dump()


async def context(model: Any) -> list[str]:
    try:
        return [f"no error but {await run(agent(model), LONG)}"]
    except Exception as error:
        return harness.name_and_sign(error)


async def image(model: Any) -> str:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{harness.PNG}"}
    question = {"type": "input_text", "text": "What is this?"}
    history = [
        {"role": "user", "content": [question, picture]},
        {"role": "assistant", "content": "A dot."},
    ]
    return await run(agent(model), [*history, {"role": "user", "content": CHAT}])


def features(model: Any) -> dict[str, Any]:
    forced = agents.ModelSettings(tool_choice="required")
    return {
        "chat": lambda: run(agent(model), CHAT),
        "stream": lambda: stream(model),
        "tool": lambda: run(agent(model, tools=[WEATHER]), TOOL),
        "forced": lambda: run(agent(model, tools=[WEATHER], model_settings=forced), TOOL),
        "structured": lambda: structured(model),
        "context": lambda: context(model),
        "image": lambda: image(model),
    }


harness.report(
    {
        "openai-agents: chat": features(agents.OpenAIChatCompletionsModel(MODEL, client)),
        "openai-agents: responses": features(agents.OpenAIResponsesModel(MODEL, client)),
    }
)
