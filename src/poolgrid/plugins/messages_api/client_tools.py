"""Functions that stand for tools of Anthropic's models that the client runs itself."""

from __future__ import annotations

import re
from typing import Any, Final

from poolgrid.server.frontend.client_tools import NUMBER, TEXT, function_of, one_of

_ANTHROPIC: Final = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")

_INSERT_TEXT_SINCE: Final = 20250429
"""Versions of the editor from this date on insert ``insert_text``, and cannot undo; earlier ones insert ``new_str``."""

_POINT: Final = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
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
        return function_of(
            name or "bash",
            "Runs a command in a persistent bash session of the user's machine and returns its output.",
            {"command": TEXT, "restart": {"type": "boolean", "description": "Restart the session instead."}},
        )
    if family == "memory":
        return function_of(
            name or "memory",
            "Reads and changes files of your memory below /memories, which outlive this conversation.",
            {
                "command": one_of("view", "create", "str_replace", "insert", "delete", "rename"),
                "path": TEXT,
                "view_range": _RANGE,
                "file_text": {**TEXT, "description": "Content of a file to create."},
                "old_str": TEXT,
                "new_str": TEXT,
                "insert_line": {**NUMBER, "description": "Line after which to insert; 0 = at the beginning."},
                "insert_text": TEXT,
                "old_path": {**TEXT, "description": "Path of a file to rename."},
                "new_path": TEXT,
            },
            "command",
        )
    if family == "text_editor":
        return _editor(name, version)
    size = f" The screen has {width_px} x {height_px} pixels." if width_px and height_px else ""
    return function_of(
        name or "computer",
        f"Controls mouse and keyboard of the user's screen, and takes screenshots.{size}",
        {
            "action": one_of(
                "screenshot", "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click",
                "middle_click", "double_click", "triple_click", "left_mouse_down", "left_mouse_up", "scroll",
                "hold_key", "wait", "cursor_position", "zoom",
            ),
            "coordinate": {**_POINT, "description": "x and y in pixels from the top left."},
            "start_coordinate": _POINT,
            "text": {**TEXT, "description": "Text to type, or keys to press such as ctrl+s."},
            "duration": {"type": "number", "description": "Seconds to wait or to hold a key."},
            "scroll_direction": one_of("up", "down", "left", "right"),
            "scroll_amount": NUMBER,
            "region": {"type": "array", "items": NUMBER, "description": "x1, y1, x2, y2 to zoom into."},
        },
        "action",
    )  # fmt: skip


def _editor(name: str | None, version: int) -> dict[str, Any]:
    newer = version >= _INSERT_TEXT_SINCE
    commands = ("view", "create", "str_replace", "insert", *(() if newer else ("undo_edit",)))
    inserted = {"insert_text": TEXT} if newer else {}
    return function_of(
        name or ("str_replace_based_edit_tool" if newer else "str_replace_editor"),
        "Views, creates and edits text files of the user's machine.",
        {
            "command": one_of(*commands),
            "path": {**TEXT, "description": "File or directory."},
            "view_range": _RANGE,
            "file_text": {**TEXT, "description": "Content of a file to create."},
            "old_str": {**TEXT, "description": "Text to replace; it must occur exactly once."},
            "new_str": {**TEXT, "description": f"Text in its place{'' if newer else ', or text to insert'}."},
            "insert_line": {**NUMBER, "description": "Line after which to insert; 0 = at the beginning."},
            **inserted,
        },
        "command",
        "path",
    )
