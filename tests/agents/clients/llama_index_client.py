"""LlamaIndex, the client for servers like OpenAI's."""

# pyright: reportMissingImports=false

from typing import Any

import harness
from harness import CALL, CHAT, LONG, MODEL, STRUCTURED, TOOL, City
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model: Any = OpenAILike(
    model=MODEL,
    api_base=f"{harness.URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
)
WEATHER = FunctionTool.from_defaults(harness.weather)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def tool() -> str:
    messages = [user(TOOL)]
    answer = model.chat_with_tools([WEATHER], chat_history=messages)
    messages.append(answer.message)
    for call in model.get_tool_calls_from_response(answer):
        more = {"tool_call_id": call.tool_id}
        content = str(WEATHER(**call.tool_kwargs))
        messages.append(ChatMessage(role="tool", content=content, additional_kwargs=more))
    return model.chat_with_tools([WEATHER], chat_history=messages).message.content


def forced() -> list[Any]:
    answer = model.chat_with_tools([WEATHER], user_msg=CALL, tool_required=True)
    named = model.chat_with_tools([WEATHER], user_msg=CALL, tool_choice="weather")
    return [model.get_tool_calls_from_response(one)[0].tool_kwargs for one in (answer, named)]


def image() -> str:
    picture = ImageBlock(image=harness.PNG.encode(), image_mimetype="image/png")
    shown = ChatMessage(role="user", blocks=[TextBlock(text="What is this?"), picture])
    dot = ChatMessage(role="assistant", content="A dot.")
    return model.chat([shown, dot, user(CHAT)]).message.content


harness.report(
    {
        "LlamaIndex openai-like": {
            "chat": lambda: model.chat([user(CHAT)]).message.content,
            "stream": lambda: [one.delta for one in model.stream_chat([user(CHAT)])],
            "tool": tool,
            "forced": forced,
            "structured": lambda: (
                model.as_structured_llm(City).chat([user(STRUCTURED)]).raw.model_dump()
            ),
            "context": lambda: harness.error_of(lambda: model.chat([user(LONG)])),
            "image": image,
        }
    }
)
