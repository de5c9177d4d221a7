"""Functions that stand for tools whose form a vendor has defined and that the client runs itself.

The vendor's models know these tools; others are shown what the vendor documents of their input. Calls are answered as
the vendor's API answers them: Messages by the tool's name, Responses with items of their own (``conversation.FORMS``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_ANTHROPIC: Final = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")

_INSERT_TEXT_SINCE: Final = 20250429
"""Versions of the editor from this date on insert ``insert_text``, and cannot undo; earlier ones insert ``new_str``."""

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer"}
_POINT: Final = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
_RANGE: Final = {**_POINT, "description": "First and last line to view, from 1; -1 = to the end."}


def anthropic_function(
    kind: str, name: str | None, width_px: int | None = None, height_px: int | None = None
) -> dict[str, Any] | None:
    """Return the function for a tool of Messages by its type, such as ``bash_20250124``; ``None`` for other tools."""
    found = _ANTHROPIC.fullmatch(kind)
    if found is None:
        return None
    family, version = found[1], int(found[2])
    if family == "bash":
        return _function(
            name or "bash",
            "Runs a command in a persistent bash session of the user's machine and returns its output.",
            {"command": _TEXT, "restart": {"type": "boolean", "description": "Restart the session instead."}},
        )
    if family == "memory":
        return _function(
            name or "memory",
            "Reads and changes files of your memory below /memories, which outlive this conversation.",
            {
                "command": _one_of("view", "create", "str_replace", "insert", "delete", "rename"),
                "path": _TEXT,
                "view_range": _RANGE,
                "file_text": {**_TEXT, "description": "Content of a file to create."},
                "old_str": _TEXT,
                "new_str": _TEXT,
                "insert_line": {**_NUMBER, "description": "Line after which to insert; 0 = at the beginning."},
                "insert_text": _TEXT,
                "old_path": {**_TEXT, "description": "Path of a file to rename."},
                "new_path": _TEXT,
            },
            "command",
        )
    if family == "text_editor":
        return _editor(name, version)
    size = f" The screen has {width_px} x {height_px} pixels." if width_px and height_px else ""
    return _function(
        name or "computer",
        f"Controls mouse and keyboard of the user's screen, and takes screenshots.{size}",
        {
            "action": _one_of(
                "screenshot", "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click",
                "middle_click", "double_click", "triple_click", "left_mouse_down", "left_mouse_up", "scroll",
                "hold_key", "wait", "cursor_position", "zoom",
            ),
            "coordinate": {**_POINT, "description": "x and y in pixels from the top left."},
            "start_coordinate": _POINT,
            "text": {**_TEXT, "description": "Text to type, or keys to press such as ctrl+s."},
            "duration": {"type": "number", "description": "Seconds to wait or to hold a key."},
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _NUMBER,
            "region": {"type": "array", "items": _NUMBER, "description": "x1, y1, x2, y2 to zoom into."},
        },
        "action",
    )  # fmt: skip


def _editor(name: str | None, version: int) -> dict[str, Any]:
    newer = version >= _INSERT_TEXT_SINCE
    commands = ("view", "create", "str_replace", "insert", *(() if newer else ("undo_edit",)))
    inserted = {"insert_text": _TEXT} if newer else {}
    return _function(
        name or ("str_replace_based_edit_tool" if newer else "str_replace_editor"),
        "Views, creates and edits text files of the user's machine.",
        {
            "command": _one_of(*commands),
            "path": {**_TEXT, "description": "File or directory."},
            "view_range": _RANGE,
            "file_text": {**_TEXT, "description": "Content of a file to create."},
            "old_str": {**_TEXT, "description": "Text to replace; it must occur exactly once."},
            "new_str": {**_TEXT, "description": f"Text in its place{'' if newer else ', or text to insert'}."},
            "insert_line": {**_NUMBER, "description": "Line after which to insert; 0 = at the beginning."},
            **inserted,
        },
        "command",
        "path",
    )


def openai_function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the function for a tool of Responses by its type; ``None`` for other tools, and what OpenAI runs."""
    kind, environment = tool.get("type"), tool.get("environment")
    if kind == "local_shell":
        return _function(
            kind,
            "Runs a command on the user's machine and returns its output.",
            {
                "command": {"type": "array", "items": _TEXT, "description": "The program and its arguments."},
                "working_directory": _TEXT,
                "timeout_ms": _NUMBER,
            },
            "command",
        )
    if kind == "shell":
        if isinstance(environment, dict) and environment.get("type") not in (None, "local"):
            return None
        return _function(
            kind,
            "Runs shell commands on the user's machine and returns their output.",
            {
                "commands": {"type": "array", "items": _TEXT, "description": "Commands to run, in order."},
                "timeout_ms": _NUMBER,
                "max_output_length": {**_NUMBER, "description": "Most characters of output to return."},
            },
            "commands",
        )
    if kind == "apply_patch":
        return _function(
            kind,
            "Creates, updates or deletes one file of the user's machine.",
            {
                "type": _one_of("create_file", "update_file", "delete_file"),
                "path": _TEXT,
                "diff": {**_TEXT, "description": "Changes as a V4A diff; the whole content as + lines to create."},
            },
            "type",
            "path",
        )
    return None


def _one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


def _function(name: str, description: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(required)
    return {"name": name, "description": description, "parameters": parameters}
