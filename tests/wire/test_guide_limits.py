"""What would overflow a compiler of guides is seen before, in one pass, and what people write is not refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.limits import GUIDE_BYTES_MAX
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.structured_output.guide_limits import (
    DEPTH_MAX,
    NESTING_MAX,
    NODES_MAX,
    REPETITIONS_MAX,
    RULES_MAX,
    objection,
)


def of_schema(schema: Any) -> str | None:
    return objection(Sampling(1, guided_json=json.dumps(schema).encode()))


def of_expression(text: str) -> str | None:
    return objection(Sampling(1, guided_regex=text))


def of_grammar(text: str) -> str | None:
    return objection(Sampling(1, guided_grammar=text))


def chain(links: int) -> dict[str, Any]:
    """A schema in which each object refers to the next."""
    objects = {
        f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}, "required": ["a"]}
        for number in range(links)
    }
    return {"$defs": {**objects, f"d{links}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def nested(levels: int, keyword: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {keyword: [schema, {"type": "string"}]}
    return schema


def rules(count: int) -> str:
    body = "".join(f'r{number} ::= "a" r{number + 1}\n' for number in range(count))
    return f'root ::= r0\n{body}r{count} ::= "b"\n'


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
        }
    },
    "$ref": "#/$defs/node",
}
GRAMMAR = r"""
// arithmetic
?start: expr
expr: expr ("+" | "-") term | term
term: term ("*" | "/") factor | factor
factor: NUMBER | "(" expr ")" | "[" expr "]"
NUMBER: /[0-9]{1,9}(\.[0-9]+)?/
"""


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"$ref": "#"},
        {"$defs": {"a/b%": {"type": "string"}}, "$ref": "#/$defs/a~1b%25"},
        {"$defs": {"a": {"$anchor": "here", "type": "string"}}, "$ref": "#here"},
        {"$ref": "https://elsewhere.example/schema"},
        {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(1000)}},
        {"enum": [f"value {number}" for number in range(5000)]},
        {"type": "string", "pattern": r"^(?:[a-z0-9]{1,63}\.){1,8}[a-z]{2,63}$", "maxLength": 253},
        {"type": "object", "patternProperties": {"^x-[a-z]{1,40}$": {"type": "string"}}},
        {"properties": {"maxLength": {"type": "integer"}, "pattern": {"type": "string"}}},
        {"const": {"maxLength": 10**12, "pattern": "(" * 500}},
        True,
        nested(50, "anyOf"),
        chain(100),
    ],
)
def test_schemas_that_people_write_are_let_through(schema: Any) -> None:
    assert of_schema(schema) is None


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (chain(1000), "references followed"),
        (nested(100, "anyOf"), "$.anyOf[0].anyOf[0].anyOf[0] … "),
        (nested(100, "allOf"), f"is nested {NESTING_MAX + 1} deep"),
        ({"items": [{}] * NODES_MAX}, f"more than {NODES_MAX} objects"),
        ({"properties": {"list": {"type": "array", "minItems": 10**9}}}, "$.properties.list.minItems is 1000000000"),
        ({"type": "string", "maxLength": float(REPETITIONS_MAX + 1)}, "$.maxLength is 1000001.0"),
        ({"items": {"pattern": "((a{1000}){1000})"}}, "$.items.pattern: it has more than"),
        ({"patternProperties": {"^((a{999}){999})": {}}}, "$.patternProperties: it has more than"),
        ({"$ref": "elsewhere#/a", "anyOf": [{}] * DEPTH_MAX}, "$.$ref is 'elsewhere#/a'"),
    ],
)
def test_schemas_that_would_overflow_a_compiler_are_refused_with_the_place(schema: Any, place: str) -> None:
    assert place in (of_schema(schema) or "")


def test_the_schemas_inside_grammars_and_structural_tags_are_measured_too() -> None:
    deep = chain(1000)
    tag = {"structures": [{"begin": "<f>", "schema": deep, "end": "</f>"}], "triggers": ["<f"]}
    harmless = {**tag, "structures": [{"begin": "<f>", "schema": TREE, "end": "</f>"}]}

    assert "references followed" in (of_grammar(f"start: %json {json.dumps(deep)}") or "")
    assert "references followed" in (objection(Sampling(1, structural_tag=json.dumps(tag))) or "")
    assert "nested" in (objection(Sampling(1, structural_tag="[" * 5000 + "]" * 5000)) or "")
    assert of_grammar(f"start: %json {json.dumps(TREE)}") is None
    assert objection(Sampling(1, structural_tag=json.dumps(harmless))) is None


def test_expressions_and_grammars_that_people_write_are_let_through() -> None:
    assert of_grammar(GRAMMAR) is None
    assert of_grammar(rules(RULES_MAX - 2)) is None
    assert of_expression(r"[a-z]{1,10000}") is None
    assert of_expression(r"(?P<year>\d{4})-(?i:[01]\d)(?:-[^]\n]{2})?|\p{L}+\x{1F600}[[:alpha:]]") is None


@pytest.mark.parametrize(
    "text",
    ["((a{1000}){1000})", "(((x{99}){99}){99})", "a{100}{100}{100}", "(" * 200 + ")" * 200, "a" * 30_000, "a{0099999}"],
)
def test_an_expression_that_is_large_written_out_is_refused(text: str) -> None:
    assert of_expression(text) is not None
    assert of_grammar(f"start: /{text}/") is not None


@pytest.mark.parametrize(
    "text", [rules(4000), "start: " + "(" * 500 + '"a"' + ")" * 500, "a" * 9 + ":" + "\nb: a" * 4000]
)
def test_a_grammar_of_many_rules_or_brackets_is_refused(text: str) -> None:
    assert of_grammar(text) is not None


@pytest.mark.parametrize("piece", [*'([{\\*|a"/#:.?x', "[[:a:", "(?", "\\x{", "{ ", "[a]", "()", "%json{", "/[", '["'])
def test_the_longest_guides_are_measured_in_one_pass(piece: str) -> None:
    """What goes back over what it has read would take hours for a mebibyte of these."""
    text = (piece * GUIDE_BYTES_MAX)[:GUIDE_BYTES_MAX]

    of_expression(text)
    of_grammar(text)
    of_schema({"pattern": text[: GUIDE_BYTES_MAX // 2]})


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Definitions that refer to each other at random, some of them nested in each other."""
    count = draw(st.integers(1, 8))

    def reference() -> dict[str, Any]:
        return {"$ref": f"#/$defs/d{draw(st.integers(0, count - 1))}"}

    definitions = {}
    for number in range(count):
        schema: dict[str, Any] = {"anyOf": [reference() for _ in range(draw(st.integers(0, 3)))]}
        for _ in range(draw(st.integers(0, 3))):
            schema = {"properties": {"a": schema}}
        definitions[f"d{number}"] = schema
    return {"$defs": definitions, **reference()}


def deepest_recursion(schema: dict[str, Any]) -> int:
    """How deep a walk goes that follows references and passes each object and list once on its way."""

    def walk(node: Any, above: frozenset[int], child: Callable[[Any], Any]) -> int:
        if not isinstance(node, dict | list) or id(node) in above:
            return 0
        below = above | {id(node)}
        parts = list(node.values() if isinstance(node, dict) else node)
        if isinstance(node, dict) and "$ref" in node:
            parts.append(child(node["$ref"]))
        return 1 + max((walk(part, below, child) for part in parts), default=0)

    return walk(schema, frozenset(), lambda reference: schema["$defs"][reference.removeprefix("#/$defs/")])


@given(schemas())
def test_no_walk_through_a_schema_goes_deeper_than_was_counted(schema: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["poolgrid.server.structured_output.guide_limits"], "DEPTH_MAX", 0)
        counted = int((of_schema(schema) or "").removeprefix("it is ").split(" ")[0])

    assert counted >= deepest_recursion(schema)
