"""What a request asks of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAME_CHARS_MAX = 256
"""Longest name of a function; OpenAI allows 64."""

_ANY: Mapping[str, Any] = {}
"""The schema of a function without one."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request asks of tools. ``named``: the function that must be called; ``required``: some function must."""

    names: frozenset[str]
    """The functions that may be called."""
    parallel: bool = True
    required: bool = False
    named: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON schema of each function's parameters, by its name; also of those that may not be called."""

    @property
    def allowed(self) -> dict[str, Mapping[str, Any]]:
        """Return the schemas of the functions that may be called, in the order of the request."""
        return {name: schema for name, schema in self.declared.items() if name in self.names}

    @property
    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the schemas of all functions of the request, empty for one without."""
        if self.names <= self.schemas.keys():
            return self.schemas
        return {**self.schemas, **{name: _ANY for name in self.names if name not in self.schemas}}

    @property
    def guided(self) -> bool:
        """Return whether the engine is told to write calls and nothing else."""
        return self.required or bool(self.named)
