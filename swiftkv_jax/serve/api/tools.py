"""Tools of the Responses and Messages APIs: which of them the model is offered, and under which
names. Those that the server itself would run are accepted, and left out: it has none."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from ..bodies.decoding import convert
from ..errors import invalid, unsupported
from ..protocol import (
    AllowedTools,
    AllowedToolsChoice,
    Function,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from ..text.call_parser import MAX_NAME
from .message_bodies import ClientTool
from .response_bodies import AllowedChoice, FunctionChoice, FunctionTool, NamespaceTool

_HOSTED = re.compile(
    "(code_interpreter|file_search|image_generation|mcp|programmatic_tool_calling|tool_search"
    r"|web_search)(_preview)?(_\d{4}_\d\d_\d\d)?"
)
"""Types of tools that a server of the Responses API runs."""
_HOSTED_OF_MESSAGES = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex)|mcp_toolset)(_\d{8})?"
)
_JOIN = "__"


@dataclasses.dataclass
class OfferedTools:
    """The tools of a body that the model may call."""

    tools: list[Tool] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)
    """Path of each of them in the body."""
    namespaced: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Name that the model has for a function -> (namespace, name)."""
    ignored: list[str] = dataclasses.field(default_factory=list)
    """Paths of what has no effect."""

    def add(
        self,
        place: str,
        name: str,
        description: str | None,
        parameters: dict[str, Any] | None,
        strict: bool | None,
    ) -> None:
        """Add a function, whose path in the body is `place`."""
        function = Function(
            name=name, description=description, parameters=parameters, strict=strict
        )
        self.tools.append(Tool(type="function", function=function))
        self.places.append(place)


def chat_choice(choice: Any, tools: OfferedTools) -> ToolChoice | None:
    """A body's `tool_choice` as that of a chat with `tools`. Raises `APIError`."""
    if isinstance(choice, FunctionChoice):
        return _named(choice, tools)
    if not isinstance(choice, AllowedChoice):
        return choice
    allowed = []
    for number, tool in enumerate(choice.tools):
        kind = tool.get("type")
        at = f"tool_choice.tools[{number}]"
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            continue
        if kind != "function":
            message = f"`tool_choice`: a tool of type {str(kind)!r} is not supported"
            raise unsupported(f"{at}.type", message)
        one, _ = convert(FunctionChoice, tool, at, ignore_unknown=False)
        allowed.append(_named(one, tools))
    return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=allowed))


def _named(choice: FunctionChoice, tools: OfferedTools) -> NamedToolChoice:
    return NamedToolChoice(function=FunctionName(name=_name_of(choice, tools)))


def _name_of(choice: FunctionChoice, tools: OfferedTools) -> str:
    """The name that the model has for a function. Without a `namespace` it is one that has none, or
    else the only one of this name."""
    if choice.namespace is not None:
        return shown_name(choice.namespace, choice.name)
    if any(tool.function.name == choice.name for tool in tools.tools):
        return choice.name
    found = [shown for shown, (_, name) in tools.namespaced.items() if name == choice.name]
    return found[0] if len(found) == 1 else choice.name


def offered(tools: Sequence[dict[str, Any]] | None, *, ignore_unknown: bool) -> OfferedTools:
    """The functions of `tools`, those in namespaces too. `ignore_unknown` is that of `decode`.
    Raises `APIError`."""
    found = OfferedTools()
    for number, tool in enumerate(tools or ()):
        at = f"tools[{number}]"
        kind = tool.get("type")
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            found.ignored.append(at)
        elif kind == "namespace":
            group, ignored = convert(NamespaceTool, tool, at, ignore_unknown=ignore_unknown)
            found.ignored += ignored
            for place, one in enumerate(group.tools):
                _add(found, one, f"{at}.tools[{place}]", group, ignore_unknown=ignore_unknown)
        else:
            _add(found, tool, at, None, ignore_unknown=ignore_unknown)
    return found


def _add(
    found: OfferedTools,
    tool: dict[str, Any],
    at: str,
    group: NamespaceTool | None,
    *,
    ignore_unknown: bool,
) -> None:
    """Add a function, which `group` has if it is in a namespace. Raises `APIError`."""
    kind = tool.get("type")
    if kind is None:
        raise invalid(f"{at}.type", "`type` is missing")
    if kind != "function":
        message = f"a tool of type {str(kind)!r} is not supported: declare it as a function"
        raise unsupported(f"{at}.type", message)
    one, ignored = convert(FunctionTool, tool, at, ignore_unknown=ignore_unknown)
    found.ignored += ignored
    name = one.name
    description = one.description
    if group is not None:
        name = shown_name(group.name, one.name)
        if group.description and group.tools[0] is tool:  # once: it may be long
            description = "\n\n".join(filter(None, (group.description, description)))
        found.namespaced.setdefault(name, (group.name, one.name))
    found.add(at, name, description, one.parameters, one.strict)


def shown_name(namespace: str | None, name: str) -> str:
    """The name that the model has for a function of a namespace. It depends on these two alone, so
    that a conversation keeps it; one that is too long ends in a digest."""
    if not namespace:
        return name
    joined = f"{namespace.removesuffix(_JOIN)}{_JOIN}{name}"
    if len(joined) <= MAX_NAME:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:8]
    return f"{joined[: MAX_NAME - 9]}_{digest}"


def client_tools(tools: Sequence[dict[str, Any]] | None, *, ignore_unknown: bool) -> OfferedTools:
    """The functions of `tools` of the Messages API. `ignore_unknown` is that of `decode`. Raises
    `APIError`."""
    found = OfferedTools()
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type")
        at = f"tools[{number}]"
        if isinstance(kind, str) and _HOSTED_OF_MESSAGES.fullmatch(kind):
            found.ignored.append(at)
            continue
        if kind not in (None, "custom"):
            message = (
                f"a tool of type {str(kind)!r} is not supported: define it as a tool with an "
                "`input_schema`, without `type`"
            )
            raise unsupported(f"{at}.type", message)
        one, ignored = convert(ClientTool, tool, at, ignore_unknown=ignore_unknown)
        found.ignored += ignored
        found.add(at, one.name, one.description, one.input_schema, one.strict)
    return found
