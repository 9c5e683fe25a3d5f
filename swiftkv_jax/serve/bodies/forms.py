"""The form that a body asks of its answer: a grammar, calls of tools, or free text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...errors import UsageError, spelled
from ...infer.structured.json_schema import checked_schema, read_schema
from ...infer.structured.structured_outputs import StructuredOutputs, json_grammar
from ..errors import APIError, invalid, unsupported
from ..protocol import AllowedToolsChoice, ChatBody, NamedToolChoice, Sampling, Tool
from ..text.call_parser import CallParser
from ..text.tool_calls import ToolCallParser
from ..text.tool_formats import UNPARSED, ToolFormat
from ..text.xml_tool_calls import XMLToolCallParser
from .call_grammars import calls_grammar

MAX_TOOLS = 128
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""Schema of a function that names no parameters: at OpenAI it has none."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of an answer, and how it is read."""

    grammar: str | None = None
    """Grammar in llguidance's form; None for free text."""
    param: str = ""
    """Field that asks for the grammar."""
    tools: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Functions that the answer may call -> schemas of their arguments."""
    tool_format: ToolFormat | None = None
    single_call: bool = False

    def parser(self) -> CallParser | None:
        """Return a parser of the calls of one answer; None if it has none."""
        if self.tool_format is None:
            return None
        if self.tool_format.name == "qwen3_coder":
            return XMLToolCallParser(
                self.tools, single=self.single_call, forced=self.grammar is not None
            )
        return ToolCallParser(
            self.tools,
            self.tool_format.name,
            single=self.single_call,
            forced=self.grammar is not None,
        )


def form_of(body: Sampling, tool_format: ToolFormat | None) -> Form:
    """The form that a body asks for. `tool_format` is that of the model, None if it takes no tools.
    Raises `APIError`."""
    grammar, param = _structured(body)
    if not isinstance(body, ChatBody) or body.tools is None:
        choice = getattr(body, "tool_choice", None)
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "`tool_choice` needs `tools`")
        return Form(grammar, param)
    tools = _check_tools(body, tool_format)
    choice = body.tool_choice or "auto"
    if choice == "none":
        return Form(grammar, param)
    if isinstance(choice, AllowedToolsChoice):
        allowed = [one.function.name for one in choice.allowed_tools.tools]
        if not allowed:
            raise invalid("tool_choice", "`tool_choice`: there is no function among its `tools`")
        for name in allowed:
            _check_is_tool(name, tools)
        tools = {name: tool for name, tool in tools.items() if name in allowed}
        choice = choice.allowed_tools.mode
    assert tool_format is not None
    single = body.parallel_tool_calls is False
    if choice == "auto" and grammar is not None:
        return Form(grammar, param)  # the form leaves no room for a call
    if tool_format.name == UNPARSED:
        if choice == "auto":
            return Form(grammar, param)
        raise unsupported(
            "tool_choice",
            "`tool_choice`: this model's chat template asks for calls in a format that this server "
            "does not force; leave it at 'auto', and read the calls from the text",
        )
    form = Form(grammar, param, tools, tool_format, single)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        _check_is_tool(name, tools)
        form = dataclasses.replace(form, tools={name: tools[name]}, single_call=True)
    elif choice == "auto":
        return form
    if grammar is not None:
        raise invalid(param, f"`{param}` does not go with a `tool_choice` that asks for calls")
    schemas = {
        tool.function.name: _followed(tools[tool.function.name], f"tools[{number}].function")
        for number, tool in enumerate(body.tools)
        if tool.function.name in form.tools
    }
    try:
        lark = calls_grammar(schemas, tool_format, single=form.single_call)
    except UsageError as error:
        raise invalid("tools", f"`tools`: {error}", "invalid_grammar") from None
    return dataclasses.replace(form, grammar=lark, param="tools")


def _check_is_tool(name: str, tools: Mapping[str, Any]) -> None:
    """Raise `APIError` for a tool that `tool_choice` names and the body does not have."""
    if name not in tools:
        raise invalid("tool_choice", f"`tool_choice`: {name!r} is not one of the tools")


def _structured(body: Sampling) -> tuple[str | None, str]:
    """(grammar of `response_format` or `structured_outputs`, name of the field)."""
    response = body.response_format
    wanted = body.structured_outputs
    if response is not None and response.type != "json_schema" and response.json_schema:
        raise invalid(
            "response_format.json_schema", f"`json_schema` does not go with {response.type!r}"
        )
    if response is not None and response.type == "text":
        response = None
    if response is not None and wanted is not None:
        raise invalid(
            "structured_outputs", "`structured_outputs` and `response_format` exclude each other"
        )
    try:
        if wanted is not None:
            fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
            if fields.pop("json_object"):
                if wanted.json is not None:
                    raise UsageError("`json` and `json_object` exclude each other")
                fields["json"] = True
            return StructuredOutputs(**fields).to_grammar(), "structured_outputs"
        if response is None:
            return None, ""
        if response.type == "json_object":
            return json_grammar(True), "response_format"
        if response.json_schema is None:
            raise invalid("response_format.json_schema", "`json_schema` is missing")
        schema = response.json_schema.schema
        return json_grammar(True if schema is None else schema), "response_format"
    except UsageError as error:
        param = "response_format" if wanted is None else "structured_outputs"
        raise invalid(param, f"`{param}`: {error}", "invalid_grammar") from None


def check_takes_tools(tools: list[Tool] | None, tool_format: ToolFormat | None) -> None:
    """Raise `APIError` for tools of a body whose model takes none, in any format."""
    if tools is not None and tool_format is None:
        raise unsupported("tools", "this model's chat template takes no tools")


def _check_tools(body: ChatBody, tool_format: ToolFormat | None) -> dict[str, Mapping[str, Any]]:
    """The tools by their names, with the schemas of their arguments. Raises `APIError`."""
    tools = body.tools or []
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid("tools", f"`tools` must have 1 to {MAX_TOOLS} tools")
    check_takes_tools(tools, tool_format)
    found: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        param = f"tools[{number}].function"
        name = tool.function.name
        schema = NO_ARGUMENTS
        if name in found:
            raise invalid(f"{param}.name", f"two tools are called {name!r}")
        if tool.function.parameters is not None:
            schema = {"type": "object"} | tool.function.parameters
            if schema["type"] != "object":
                raise invalid(f"{param}.parameters", "`parameters` must be of type object")
            try:
                read_schema(schema)
            except UsageError as error:
                raise _of_parameters(error, param) from None
        found[name] = schema
    return found


def _followed(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A schema that the arguments of a forced call follow. Raises `APIError`."""
    try:
        return checked_schema(schema)
    except UsageError as error:
        raise _of_parameters(error, param) from None


def _of_parameters(error: UsageError, param: str) -> APIError:
    message = spelled(str(error), lambda name: "`parameters`" if name == "json" else None)
    return invalid(f"{param}.parameters", message)
