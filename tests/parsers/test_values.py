"""Values in the notations of models become JSON while they arrive, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.plugins.parsers.call_forms import JsonCall
from poolgrid.plugins.parsers.values import GEMMA, JSON, PYTHON, Notation, ValueReader, strict_json
from poolgrid.server.frontend.answer_pieces import FEED_CHARS_MAX
from tests.examples import examples
from tests.parsers.writers import gemma_value

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
CONTAINERS = VALUES.filter(lambda value: isinstance(value, dict | list))


def written(notation: Notation, parts: list[str], in_call: bool = False) -> tuple[str, str, bool, bool]:
    """Return the JSON of a value, the text after it, and whether it ended or was none."""
    reader = ValueReader(notation, in_call=in_call)
    text = left = ""
    for part in parts:
        if reader.done or reader.failed:
            left += part
            continue
        reader.feed(part)
        text += reader.take()
        if reader.done or reader.failed:
            left = reader.left
    return text, left, reader.done, reader.failed


def in_parts(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True) if a < b]


@given(CONTAINERS, st.sampled_from((None, 1, "\t")), st.booleans(), st.data())
@settings(max_examples=examples(60))
def test_json_is_passed_on_unchanged(value: Any, indent: Any, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert written(JSON, [*in_parts(text, data), " x"]) == (text, " x", True, False)


@given(CONTAINERS, st.data())
@settings(max_examples=examples(60))
def test_json_as_python_prints_it_becomes_json(value: Any, data: st.DataObject) -> None:
    for notation in (JSON, PYTHON):
        found, left, done, _ = written(notation, [*in_parts(repr(value), data), " x"])
        assert (json.loads(found), left, done) == (value, " x", True)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.data())
@settings(max_examples=examples(60))
def test_arguments_of_a_python_call_become_an_object(values: dict[str, Any], data: st.DataObject) -> None:
    text = ", ".join(f"{key}={value!r}" for key, value in values.items()) + ")"
    found, left, done, _ = written(PYTHON, [*in_parts(text, data), "]"], in_call=True)
    assert (json.loads(found), left, done) == (values, "]", True)


@given(CONTAINERS.filter(lambda value: '<|"' not in repr(value)), st.data())
@settings(max_examples=examples(60))
def test_gemmas_notation_becomes_json(value: Any, data: st.DataObject) -> None:
    found, left, done, _ = written(GEMMA, [*in_parts(gemma_value(value), data), "<tool_call|>"])
    assert (json.loads(found), left, done) == (value, "<tool_call|>", True)


ANYTHING = st.text(alphabet="{}[]()\"'\\,:=<|> a1tn\n-.", max_size=40)


@given(ANYTHING, st.sampled_from((JSON, PYTHON, GEMMA)), st.data())
@settings(max_examples=examples(150))
def test_a_value_ends_or_fails_at_the_same_place_however_it_is_cut(
    text: str, notation: Notation, data: st.DataObject
) -> None:
    whole = written(notation, ["{" + text])
    assert written(notation, ["{", *text]) == whole
    assert written(notation, in_parts("{" + text, data)) == whole
    if whole[2]:
        json.loads(whole[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("('a\\x41\\u00e9\\U0001F600\\101\\a\\\nb', 1_000, 0x10)", ["aAé😀A\ab", 1000, 16]),
        ("[(True, None), {1: 2, 'a': false}]", [[True, None], {"1": 2, "a": False}]),
        ("['''a\n'b' ''', \"\"\"c\"\"\"]", ["a\n'b' ", "c"]),
        ('[\'it\'s\', "a "b" c"]', ["it's", 'a "b" c']),
    ],
)
def test_literals_of_python_have_pythons_meaning_and_unescaped_quotes_are_text(text: str, value: Any) -> None:
    whole = written(PYTHON, [text])
    assert json.loads(whole[0]) == value
    assert written(PYTHON, list(text)) == whole


@pytest.mark.parametrize("text", ["{'a': 1", "[1, 2}", "{a: 1}", "[NaN]", "[01]", "[" * 201 + "]" * 201, "", "{} x"])
def test_what_is_no_value_in_any_notation_is_none(text: str) -> None:
    assert strict_json(text) is None


LONG = {
    "numbers": "[" + "1, " * 40_000 + "1]",
    "strings": str(["a\\b\n'" * 3] * 8_000),
    "members": "{" + ", ".join(f"'k{number}': True" for number in range(9_000)) + "}",
    "white space": "[1," + " " * 100_000 + "2]",
    "one string": "'" + "a\n" * 40_000 + "'",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_text_in_one_piece_is_read_in_slices_and_gives_the_same(text: str) -> None:
    longest = 0

    class Watched(ValueReader):
        """Notes how much text its states copy at most."""

        @property
        def _buffer(self) -> str:
            return self._watched

        @_buffer.setter
        def _buffer(self, text: str) -> None:
            nonlocal longest
            self._watched = text
            longest = max(longest, len(text))

    reader = Watched()
    reader.feed(text)
    assert reader.done
    assert longest < 2 * FEED_CHARS_MAX
    assert not reader.left
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert (reader.take(), "", True, False) == written(JSON, pieces)
    assert strict_json(text) == written(JSON, [text])[0]


def test_text_after_a_value_is_left_whole_where_the_value_ends_in_an_early_slice() -> None:
    after = " and then " + "x" * 3 * FEED_CHARS_MAX
    assert written(JSON, ["[1, 2]" + after]) == ("[1, 2]", after, True, False)
    assert written(JSON, ["[1, %" + after])[1:] == ("%" + after, False, True)


def test_long_arguments_before_the_name_are_those_after_it() -> None:
    arguments = json.dumps({"x": [*range(20_000)]})
    calls = [JsonCall({"f": {}}), JsonCall({"f": {}})]
    calls[0].feed(f'{{"arguments": {arguments}, "name": "f"}}')
    calls[1].feed(f'{{"name": "f", "arguments": {arguments}}}')
    assert [call.done for call in calls] == [True, True]
    assert [call.take() for call in calls] == [arguments] * 2
