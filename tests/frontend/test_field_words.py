"""What a field may be is read off its type, in words that somebody can act on."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from poolgrid.frontend.field_words import allowed, words_at
from poolgrid.frontend.schema import ChatBody, CompletionBody
from tests.frontend.untold_fields import fields_without_words


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("stream", "true or false"),
        ("min_p", "a number from 0 to 1"),
        ("top_p", "a number above 0 and up to 1"),
        ("n", "an integer from 1"),
        ("top_logprobs", "an integer from 0 to 20"),
        ("seed", "a signed 64-bit integer"),
        ("nvext.agent_hints.priority", "a signed 32-bit integer"),
        ("stop", "a string or a list of strings"),
        ("tools", "a list of objects"),
        ("stop_token_ids", "a list of at most 512 token ids"),
        ("messages[3].role", "assistant, developer, function, system, tool or user"),
        ("messages[0].content[1].text", "a string"),
        ("guided_regex", "a regular expression"),
        ("nothing.of.the.kind", None),
    ],
)
def test_a_field_says_what_it_may_be(path: str, words: str | None) -> None:
    assert words_at(ChatBody, path) == words


def test_a_name_that_two_bodies_have_means_what_it_means_in_each() -> None:
    assert words_at(ChatBody, "logprobs") == "true or false"
    assert words_at(CompletionBody, "logprobs") == "an integer from 0 to 20"


class Inner(Struct):
    told: Annotated[Any, allowed("something")] = None
    untold: Any = None


class Outer(Struct):
    number: Annotated[float, Meta(ge=0.5, le=2)]
    inner: list[Inner] | None = None
    forgotten: Any = None


def test_fields_that_nobody_described_are_found_wherever_they_are() -> None:
    assert words_at(Outer, "number") == "a number from 0.5 to 2"
    assert words_at(Outer, "inner[0].told") == "something"
    assert fields_without_words(Outer) == ["inner[0].untold", "forgotten"]
