"""Which parsers a model gets without being asked, and what a schema says of an argument."""

from __future__ import annotations

import json
from typing import Any

import pytest

from poolgrid.plugins.parsers.argument_types import as_json, types_of
from poolgrid.plugins.parsers.call_forms import CALL_CHARS_MAX
from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.tools import CallIds
from poolgrid.server.process.parser_names import AUTO
from tests.parsers.test_golden import read
from tests.parsers.transcripts import GLM, TOOLS

TEMPLATES = {
    # The lines by which templates tell their models how to call, shortened.
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "kimi_k2": "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>",
    "": "<function=f>{arguments}</function>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_how_its_model_calls(name: str) -> None:
    assert OutputFormat.choose(AUTO, AUTO, TEMPLATES[name]).tools == name


def test_kimis_vocabulary_shows_it_too() -> None:
    assert OutputFormat.choose(AUTO, AUTO, "", ("<|tool_call_argument_begin|>",)).tools == "kimi_k2"


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]}, {"string", "object"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "nullable": False}, {"string"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/nowhere"}, None),
        ({"$ref": "other.json"}, None),
        (True, None),
    ],
)
def test_a_schema_says_which_types_an_argument_may_have(schema: Any, types: set[str] | None) -> None:
    root = {"properties": {"a": schema}, "$defs": {"A": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of(root, "a") == types
    assert types_of(root, "b") is None
    assert types_of(None, "a") is None


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("12", {"string", "null"}, '"12"'),
        ("12", {"number"}, "12"),
        ("1.0", {"integer"}, "1"),
        ("-2.00", {"integer", "null"}, "-2"),
        ("1.5", {"integer"}, '"1.5"'),
        ("1e999", {"integer"}, '"1e999"'),
        ("5.0", {"number"}, "5.0"),
        ('"5"', {"integer"}, "5"),
        ("TRUE", {"boolean"}, "true"),
        ("FALSE", {"string"}, '"FALSE"'),
        ("None", {"integer"}, "null"),
        ("['a', \"it's\", 'say \"x\"', True, None,]", {"array"}, '["a", "it\'s", "say \\"x\\"", true, null]'),
        ("{'a': {'b': [1, False]}}", {"object"}, '{"a": {"b": [1, false]}}'),
        ("{'a': 'line\nbreak \\d \\x41 \\u00e9'}", {"object"}, '{"a": "line\\nbreak \\\\d \\u0041 \\u00e9"}'),
        ("{'a': 1}", {"object", "string"}, "\"{'a': 1}\""),
        ("{'a': 1", {"object"}, "\"{'a': 1\""),
        ("1e999", {"number"}, "1e999"),
        ("NaN", None, '"NaN"'),
        ("", {"integer"}, '""'),
        (" true ", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ('"a"', {"string", "null"}, '"\\"a\\""'),
        ("[1,", None, '"[1,"'),
        ("[" * 300 + "]" * 300, None, f'"{"[" * 300}{"]" * 300}"'),
    ],
)
def test_a_value_is_json_where_the_schema_lets_it_be(text: str, types: set[str] | None, written: str) -> None:
    assert as_json(text, None if types is None else frozenset(types)) == written


def parts_of(text: str) -> list[list[str]]:
    return [[text], [text[:-30], text[-30:]], [text[at : at + 5000] for at in range(0, len(text), 5000)]]


def test_a_call_too_long_to_be_held_back_is_content() -> None:
    text = '<tool_call>{"arguments": {"q": "' + "x" * CALL_CHARS_MAX + '"}, "name": "search"}</tool_call>'
    for parts in parts_of(text):
        parser = OutputFormat(tools="hermes").parser(TOOLS)
        assert parser is not None
        found = read(parser, parts)
        assert found.calls == ()
        assert found.content == text


def test_arguments_that_come_as_they_are_written_may_be_of_any_length() -> None:
    value = "x" * (CALL_CHARS_MAX + 100)
    for parts in parts_of(f"<tool_call>search<arg_key>q</arg_key><arg_value>{value}</arg_value></tool_call>"):
        parser = GLM.parser(TOOLS)
        assert parser is not None
        assert read(parser, parts).calls == (("search", json.dumps({"q": value})),)


def test_ids_are_as_the_models_template_wants_them() -> None:
    assert CallIds("r", "hermes").of(0, 0, "f").startswith("call_")
    assert len(CallIds("r", "mistral").of(0, 0, "f")) == 9
    assert CallIds("r", "kimi_k2", 3).of(0, 1, "f") == "functions.f:4"
