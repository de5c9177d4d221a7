"""What models are asked to call, in many kinds: each format's tests write these calls as its models do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from poolgrid.server.frontend.tool_use import ToolUse


class Call(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "limit": {"type": "number"},
            "units": {"type": "array", "items": {"type": "string"}},
            "place": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "number": {"type": "integer"},
                    "floors": {"type": "array", "items": {"type": "integer"}},
                    "owner": {"type": "object", "properties": {"name": {"type": "string"}}},
                },
            },
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
    "edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"old": {"type": "string"}, "new": {"type": "string"}, "all": {"type": "boolean"}},
                },
            },
        },
        "required": ["path", "edits"],
    },
    "get_time": {"type": "object", "properties": {}},
    "mcp__server-1__find_items": {"type": "object", "properties": {"query": {"type": "string"}}},
}
USE = ToolUse(frozenset(SCHEMAS), schemas=SCHEMAS)

_CODE = 'def f(x):\n    """Say \'hi\'."""\n    return {"a": [x, 1], "b": f"{x}\\n"}  # done\n'
_HTML = '<ul class="a">\n  <li>1 &amp; 2</li>\n</ul>'
_REGEX = r'^\d+\s*"[^"\\]*"$'
_LONG = "".join(f"line {number}: the quick brown fox\n" for number in range(130)).rstrip()
SAMPLES: dict[str, tuple[Call, ...]] = {
    "one": (Call("get_weather", {"city": "Bern"}),),
    "two": (Call("get_weather", {"city": "Bern"}), Call("get_weather", {"city": "Zürich", "days": 3})),
    "three functions": (
        Call("get_weather", {"city": "Bern"}),
        Call("write_file", {"path": "a.txt", "content": "b"}),
        Call("mcp__server-1__find_items", {"query": "c"}),
    ),
    "no arguments": (Call("get_time", {}),),
    "no arguments, then some": (Call("get_time", {}), Call("get_weather", {"city": "Bern"})),
    "integer": (Call("get_weather", {"city": "Bern", "days": -12}),),
    "number": (Call("get_weather", {"city": "Bern", "limit": 2.5}),),
    "true": (Call("get_weather", {"city": "Bern", "metric": True}),),
    "false before text": (Call("get_weather", {"metric": False, "city": "Bern"}),),
    "list": (Call("get_weather", {"city": "Bern", "units": ["K", "mm", "it's"]}),),
    "object": (Call("get_weather", {"city": "Bern", "place": {"street": "Gasse", "number": 4}}),),
    "nested": (
        Call(
            "get_weather",
            {"city": "Bern", "place": {"floors": [1, 2], "owner": {"name": "A, B: {C}"}, "street": "x"}, "days": 1},
        ),
    ),
    "list of objects": (
        Call(
            "edit", {"path": "a.py", "edits": [{"old": "x = 1", "new": "x = 2"}, {"old": "y", "new": "z", "all": True}]}
        ),
    ),
    "text that looks like a number": (Call("get_weather", {"city": "12"}),),
    "text that looks like a name": (Call("get_weather", {"city": "true"}),),
    "text that looks like JSON": (Call("write_file", {"path": "a.json", "content": '{"a": [1, null]}'}),),
    "empty text": (Call("write_file", {"path": "a", "content": ""}),),
    "code": (Call("write_file", {"path": "f.py", "content": _CODE}),),
    "html": (Call("write_file", {"path": "a.html", "content": _HTML}),),
    "backslashes": (Call("write_file", {"path": r"C:\new\table", "content": _REGEX}),),
    "quotes": (Call("write_file", {"path": "a", "content": "'one' and \"two\" and `three`"}),),
    "emoji": (Call("get_weather", {"city": "São Paulo 🇧🇷 東京"}),),
    "tabs and line ends": (Call("write_file", {"path": "a.tsv", "content": "a\tb\r\nc\td"}),),
    "markdown": (Call("write_file", {"path": "a.md", "content": "# A\n\n```json\n[1]\n```\n- b"}),),
    "long": (Call("write_file", {"path": "long.txt", "content": _LONG}),),
}
"""At least twenty for each format."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
