"""An MCP server over standard input and output with one tool, ``add``, for the agents that are tried."""

from __future__ import annotations

import json
import sys
from typing import Any

ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "annotations": {"readOnlyHint": True},
}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; ``None`` for a method that there is not."""
    if method == "initialize":
        return {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "demo", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [ADD]}
    if method == "tools/call":
        total = parameters["arguments"]["a"] + parameters["arguments"]["b"]  # a model may write more than these
        return {"content": [{"type": "text", "text": f"the sum is {total}"}]}
    return {} if method == "ping" else None


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params") or {})
        told = {"error": {"code": -32601, "message": "unknown method"}} if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **told}) + "\n")
        sys.stdout.flush()
