"""A structural tag as a grammar allows what the tag says: judged by the library that keeps to grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.structured_output.structural_tags import lark_grammar

TOKENIZER = LLTokenizer((TINY_MODEL_PATH / "tokenizer.json").read_text(encoding="utf-8"), eos_token=2)
NUMBER: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY_TEXT: dict[str, Any] = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "tags": [tag("<f>", NUMBER, "</f>"), tag("<g>", ANY_TEXT, "</g>")], **more}


def allows(part: Any, text: str, terse: bool = False) -> bool:
    grammar = lark_grammar(json.dumps({"type": "structural_tag", "format": part}), terse=terse)
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        (const('a "b"\n<é>'), ['a "b"\n<é>'], ["a", ""]),
        (NUMBER, ["12", "-3"], ["1.5", "x", ""]),
        (ANY_TEXT, ["", "anything <f>at all\n"], []),
        ({"type": "sequence", "elements": [const("n="), NUMBER, const(";")]}, ["n=12;"], ["n=;", "n=12", "12"]),
        ({"type": "or", "elements": [NUMBER, const("none")]}, ["7", "none"], ["non", "7none"]),
        ({"type": "or", "elements": [const(""), const("x")]}, ["", "x"], ["xx"]),
        (tag("<t>", {"type": "json_schema", "json_schema": True}, "</t>"), ["<t>[1]</t>"], ["<t></t>", "<t>[1]"]),
        (tag("<t>", ANY_TEXT, "</t>"), ["<t></t>", "<t>a<b\n</t>"], ["<t>a", "<t>a</t>b"]),
        (tags("tags_with_separator", separator=", ", at_least_one=True), ["<f>1</f>, <g>x</g>, <f>2</f>"], ["", "x"]),
        (tags("tags_with_separator", separator=";"), ["", "<f>1</f>"], ["<f>1</f>;", "<f>1</f><f>1</f>"]),
        (
            tags("tags_with_separator", separator=";", at_least_one=True, stop_after_first=True),
            ["<f>1</f>", "<g>y</g>"],
            ["<f>1</f>;<f>2</f>", ""],
        ),
        (tags("triggered_tags", triggers=["<f", "<g"]), ["text <f>1</f> more <g>x</g>", "plain"], ["a <f>x</f>"]),
        (tags("triggered_tags", triggers=["<"], stop_after_first=True), ["a <f>1</f>", "plain"], ["<f>1</f> b"]),
        (tags("triggered_tags", triggers=["<"], at_least_one=True), ["a <f>1</f> b"], ["plain"]),
    ],
)
def test_the_grammar_allows_what_the_tag_says_and_nothing_else(part: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allows(part, text)] == []
    assert [text for text in bad if allows(part, text)] == []


def test_terse_text_has_no_space_and_nothing_that_could_begin_its_end() -> None:
    for end in ("</t>", "\n</t>", "]", "^", "-", "\\", "/"):
        part = tag("<t>", ANY_TEXT, end)
        assert allows(part, f"<t>some text{end}", terse=True)
        assert not allows(part, f"<t>some {end[0]} text{end}", terse=True)
        assert allows(part, f'<t>so " text{end}')
    spaced = {"type": "json_schema", "json_schema": {"type": "array"}}
    assert (allows(spaced, "[ 1 ]"), allows(spaced, "[ 1 ]", terse=True)) == (True, False)


def test_the_older_form_means_tags_with_triggers() -> None:
    older = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    newer = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", NUMBER, "</f>")]}
    assert lark_grammar(json.dumps(older)) == lark_grammar(json.dumps({"format": newer}))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (None, "a part of the structural tag is None"),
        ({"type": "qwen_xml_parameter"}, "allowed are the types const_string"),
        ({"type": "const_string"}, "value of a const_string is None"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema is 3"),
        ({"type": "or", "elements": {}}, "elements of a or is {}"),
        ({"type": "tag", "begin": "<", "content": NUMBER}, "end of a tag is None"),
        (tags("tags_with_separator"), "separator of a tags_with_separator is None"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "tags are"),
        (tags("triggered_tags", triggers=["<f"]), "no trigger begins '<g>'"),
    ],
)
def test_what_cannot_be_a_grammar_is_named(part: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lark_grammar(json.dumps({"type": "structural_tag", "format": part}))
