"""A grid document as text: canonical, short, and readable as a table.

Pools by name, defaults left out, innermost arrays of the mapping on one line each. Reading the text gives an equal
document.
"""

from __future__ import annotations

import json
from typing import Any

from poolgrid.global_router.core.document.grid_document import GridDocument


def document_text(document: GridDocument) -> str:
    """Return the canonical text of a document, ending with a newline."""
    data = document.model_dump(mode="json", exclude_defaults=True)
    return json_text({"version": document.version, "mode": document.mode, **data}) + "\n"


def json_text(value: Any, indent: int = 0) -> str:
    """Return indented JSON in which an array of plain values takes one line."""
    pad = "  " * (indent + 1)
    end = "  " * indent
    if isinstance(value, dict) and value:
        rows = [f"{pad}{json.dumps(key)}: {json_text(child, indent + 1)}" for key, child in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{end}}}"
    if isinstance(value, list) and any(isinstance(child, list | dict) for child in value):
        return "[\n" + ",\n".join(pad + json_text(child, indent + 1) for child in value) + f"\n{end}]"
    if isinstance(value, list):
        return "[" + ", ".join(json_text(child, indent) for child in value) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return json.dumps(value)
