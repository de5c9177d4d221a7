"""Functions that stand for tools whose form a vendor has defined and that the client runs itself.

The vendor's models know these tools; others are shown what the vendor documents of their input. Calls are answered as
the vendor's API answers them: Messages by the tool's name, Responses with items of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}


def openai_function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the function for a tool of Responses by its type; ``None`` for other tools, and what OpenAI runs."""
    kind, environment = tool.get("type"), tool.get("environment")
    if kind == "local_shell":
        return function_of(
            kind,
            "Runs a command on the user's machine and returns its output.",
            {
                "command": {"type": "array", "items": TEXT, "description": "The program and its arguments."},
                "working_directory": TEXT,
                "timeout_ms": NUMBER,
            },
            "command",
        )
    if kind == "shell":
        if isinstance(environment, dict) and environment.get("type") not in (None, "local"):
            return None
        return function_of(
            kind,
            "Runs shell commands on the user's machine and returns their output.",
            {
                "commands": {"type": "array", "items": TEXT, "description": "Commands to run, in order."},
                "timeout_ms": NUMBER,
                "max_output_length": {**NUMBER, "description": "Most characters of output to return."},
            },
            "commands",
        )
    if kind == "apply_patch":
        return function_of(
            kind,
            "Creates, updates or deletes one file of the user's machine.",
            {
                "type": one_of("create_file", "update_file", "delete_file"),
                "path": TEXT,
                "diff": {**TEXT, "description": "Changes as a V4A diff; the whole content as + lines to create."},
            },
            "type",
            "path",
        )
    return None


def one_of(*words: str) -> dict[str, Any]:
    """Return the schema of a text that is one of some words."""
    return {"type": "string", "enum": list(words)}


def function_of(name: str, description: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return a function as chat writes it."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(required)
    return {"name": name, "description": description, "parameters": parameters}
