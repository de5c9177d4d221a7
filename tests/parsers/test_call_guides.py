"""What a guide to calls makes a model write is read as those calls, for every form: the two must go together.

The simulated engine writes under the guide, as any engine would; the parser of the same form reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import pytest

from poolgrid.plugins.parsers.formats import CALL_NAMES, call_format
from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.answer_pieces import PieceKind
from poolgrid.server.frontend.guides import json_guide
from poolgrid.server.frontend.tool_use import ToolUse
from poolgrid.server.frontend.tools import beside_calls
from poolgrid.server.structured_output.guide_parts import any_of, within
from tests.workers.test_guided_tokens import asked, stream, text_of

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"], "type": "string"},
            "days": {"type": "integer"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"summary": {"$ref": "#/$defs/place"}},
    "required": ["summary"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string"}},
}
GUIDED = [name for name in CALL_NAMES if call_format(name).guides or name == "llama3_json"]
VARIANTS = [(name, "") for name in GUIDED] + [
    (name, guide.template) for name in GUIDED for guide in call_format(name).guides if guide.template
]


@pytest.mark.parametrize(("form", "template"), VARIANTS)
@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_beside_tools_is_calls_or_keeps_to_the_schema(form: str, template: str, parallel: bool) -> None:
    output_format = OutputFormat("", form)
    use = ToolUse(frozenset(TOOLS), parallel, schemas=TOOLS)
    guide = beside_calls(json_guide(ANSWER, "response_format"), "response_format", use, output_format, template)

    found: set[str] = set()
    for seed in range(24):
        made = stream(asked(seed, 1200, **guide))
        assert made.finish_reason == "stop", text_of(made)
        parser = output_format.parser(use, guided=True)
        assert parser is not None
        pieces = [*parser.feed(text_of(made)), *parser.finish()]
        calls = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
        content = "".join(piece.text for piece in pieces if piece.kind is PieceKind.CONTENT)
        if not calls:
            jsonschema_rs.validate(ANSWER, json.loads(content))
            found.add("answer")
            continue
        assert content == "", text_of(made)
        assert parallel or len(calls) == 1
        arguments = "".join("\x00" if piece.kind is PieceKind.CALL else piece.text for piece in pieces).split("\x00")[
            1:
        ]
        for name, given in zip(calls, arguments, strict=True):
            jsonschema_rs.validate(dict(TOOLS[name]), json.loads(given))
            found.add(name)
    assert found == {"answer", *TOOLS}, "each happens"


@pytest.mark.parametrize(("form", "template"), VARIANTS)
def test_a_guide_has_only_parts_that_xgrammar_takes_where_they_stand(form: str, template: str) -> None:
    """As tried with XGrammar 0.1.25, that of TensorRT-LLM 1.2: repetitions stand alone, and texts are not empty."""
    use = ToolUse(frozenset(TOOLS), schemas=TOOLS)
    guide = beside_calls(json_guide(ANSWER, "p"), "p", use, OutputFormat("", form), template)
    todo: list[Any] = [json.loads(guide["structural_tag"])["format"]] if "structural_tag" in guide else []
    assert todo or form == "llama3_json"
    while todo:
        part = todo.pop()
        kind = part["type"]
        assert kind in ("const_string", "json_schema", "sequence", "or", "tag"), "free text only up to the end of a tag"
        assert kind != "const_string" or part["value"]
        assert kind != "tag" or (part["begin"] and part["end"])
        todo += part.get("elements", [])
        content = part.get("content")
        assert kind == "tag" or content is None
        if content is not None and content["type"] != "any_text":
            todo.append(content)


def test_many_tools_allow_fewer_calls_of_one_answer_and_no_huge_guide() -> None:
    properties = {f"argument_{number}": {"type": "string"} for number in range(20)}
    sizes = []
    for count in (1, 30, 300):
        tools = {f"f{number}": {"type": "object", "properties": properties} for number in range(count)}
        use = ToolUse(frozenset(tools), schemas=tools)
        guide = beside_calls(json_guide(ANSWER, "p"), "p", use, OutputFormat("", "hermes"), "")["structural_tag"]
        sizes.append((guide.count('"f0'), len(guide) // count))
    copies = [number for number, _ in sizes]
    assert copies[0] > copies[1] > copies[2] == 1
    assert sizes[2][1] < 2000


def test_reasoning_is_not_looked_for_in_a_guided_call() -> None:
    use = ToolUse(frozenset(TOOLS), schemas=TOOLS)
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for text, kinds in (
        (call, [PieceKind.CALL, PieceKind.ARGUMENTS]),
        ('{"summary": ""}', [PieceKind.CONTENT]),
        ("Hm", [PieceKind.REASONING]),
    ):
        for cut in range(len(text)):
            parser = OutputFormat("deepseek_r1", "hermes").parser(use, guided=True)
            assert parser is not None
            pieces = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
            assert list(dict.fromkeys(piece.kind for piece in pieces)) == kinds, (text, cut)


def test_only_the_functions_that_may_be_called_are_in_the_guide() -> None:
    use = ToolUse(frozenset({"get_time"}), schemas=TOOLS)
    for form in GUIDED:
        guide = beside_calls(json_guide(ANSWER, "p"), "p", use, OutputFormat("", form), "")
        [value] = guide.values()
        text = value.decode() if isinstance(value, bytes) else value
        assert "get_time" in text, form
        assert "get_weather" not in text, form


def test_schemas_that_are_one_of_several_keep_definitions_of_their_own() -> None:
    one = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}, "$ref": {"type": "object"}}}
    other = {
        "properties": {"$ref": {"$ref": "#"}, "const": {"const": {"$ref": "#/x"}}},
        "$defs": {"a": {"type": "null"}},
    }
    both = any_of([one, other])
    assert jsonschema_rs.is_valid(both, "text")
    assert jsonschema_rs.is_valid(both, {"$ref": {"$ref": {}}, "const": {"$ref": "#/x"}})
    assert not jsonschema_rs.is_valid(both, {"const": {"$ref": "#/$defs/s1/x"}})
    assert not jsonschema_rs.is_valid({"$ref": "#/$defs/x", "$defs": {"x": within(one, "#/$defs/x")}}, None)
