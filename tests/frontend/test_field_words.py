"""What a field may be is read off its type, in words that somebody can act on."""

from __future__ import annotations

import pytest

from poolgrid.frontend.field_words import words_at
from poolgrid.frontend.schema import ChatBody, CompletionBody


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
