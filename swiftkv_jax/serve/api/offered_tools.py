"""The functions among a body's tools, for the APIs in which tools are also of other types."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..protocol import Function, Tool


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
