"""The function that requests to ``/v1/responses`` offer in tests."""

from __future__ import annotations

from typing import Any

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
