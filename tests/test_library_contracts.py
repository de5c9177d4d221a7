"""What we read in other libraries' words and types, one table each: a version that says it otherwise fails here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = Path(__file__).parents[1]

BOUNDED = {
    "httptools": "the HTTP parser's callbacks (src/poolgrid/server/http/request_framing.py)",
    "jinja2": "contexts and macros (src/poolgrid/server/frontend/chat_template.py)",
    "msgspec": "the words of its validation errors (src/poolgrid/server/frontend/schema.py)",
    "pydantic": "the types and words of its validation errors (global_router/document/reader.py)",
}
"""Libraries of which we use more than they promise, and what."""


@pytest.mark.parametrize("library", sorted(BOUNDED))
def test_a_library_whose_inside_we_use_has_an_upper_bound(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [each for each in project["dependencies"] if each.startswith(f"{library}>")]

    assert ",<" in requirement, f"{requirement}: we use {BOUNDED[library]}"


class _Inner(msgspec.Struct):
    number: int


class _Body(msgspec.Struct):
    inner: _Inner | None = None
    few: list[Annotated[int, Meta(le=3)]] = []
    named: dict[Annotated[str, Meta(max_length=2)], int] = {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "Expected `object`, got `array`"),
        (b'{"inner": 3}', "Expected `object | null`, got `int` - at `$.inner`"),
        (b'{"inner": {}}', "Object missing required field `number` - at `$.inner`"),
        (b'{"inner": {"number": "x"}}', "Expected `int`, got `str` - at `$.inner.number`"),
        (b'{"few": [1, 4]}', "Expected `int` <= 3 - at `$.few[1]`"),
        (b'{"named": {"long": 1}}', "Expected `str` of length <= 2 - at `key` in `$.named`"),
        (b'{"named": {"a": "x"}}', "Expected `int`, got `str` - at `$.named[...]`"),
    ],
)
def test_msgspec_names_the_place_of_a_wrong_value_as_we_read_it(body: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=_Body)

    assert str(caught.value) == message


class _Nested(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    count: int = Field(ge=1)


class _Document(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    nested: _Nested
    some: tuple[int, ...] = Field((), min_length=1, max_length=2)
    by_name: dict[Annotated[str, Field(pattern="^a")], int] = {}
    word: Literal["one", "two"] = "one"


@pytest.mark.parametrize(
    ("data", "kind", "place", "words"),
    [
        ({}, "missing", ("nested",), "Field required"),
        ({"nested": 1}, "model_type", ("nested",), ""),
        ({"nested": {"count": 1, "x": 1}}, "extra_forbidden", ("nested", "x"), ""),
        ({"nested": {"count": 0}}, "greater_than_equal", ("nested", "count"), "Input should be greater than"),
        ({"nested": {"count": "1"}}, "int_type", ("nested", "count"), "Input should be a valid integer"),
        ({"nested": {"count": 1}, "some": 3}, "tuple_type", ("some",), ""),
        ({"nested": {"count": 1}, "some": ()}, "too_short", ("some",), ""),
        ({"nested": {"count": 1}, "some": (1, 2, 3)}, "too_long", ("some",), ""),
        ({"nested": {"count": 1}, "by_name": 3}, "dict_type", ("by_name",), ""),
        ({"nested": {"count": 1}, "by_name": {"b": 1}}, "string_pattern_mismatch", ("by_name", "b", "[key]"), ""),
        ({"nested": {"count": 1}, "word": "three"}, "literal_error", ("word",), ""),
    ],
)
def test_pydantic_names_what_is_wrong_and_where_as_we_read_it(
    data: dict[str, Any], kind: str, place: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        _Document.model_validate(data)

    (detail,) = caught.value.errors(include_url=False)
    assert (detail["type"], detail["loc"]) == (kind, place)
    assert detail["msg"].startswith(words)
    context = detail.get("ctx", {})
    if kind in ("too_short", "too_long"):
        assert context["min_length" if kind == "too_short" else "max_length"] in (1, 2)
    if kind == "literal_error":
        assert context["expected"] == "'one' or 'two'"
