"""The guided answer of a model that thinks is its content, whether the engine lets it think first or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from poolgrid.server.frontend.guided_answers import _Choices, _Scalar
from tests.frontend.answers import PATHS, Answer, body_for, read
from tests.frontend.fake_backend import FakeBackend, speak
from tests.frontend.server import FrontEnd, front_end
from tests.parsers.test_answer_ends import opening

THOUGHTS = (
    "Is it true? 7 of 9 were positive, so it is.",
    "nothing",
    "5",
    "7 days",
    "true",
    "tricky",
    "positively",
    "1. a",
)
"""Some begin as a guided answer could."""

GUIDES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"guided_choice": ["positive", "negative", "pos"]}, ("positive", "pos", "negative")),
    ({"guided_regex": r"\d{4}-\d{2}"}, ("2024-07",)),
    ({"guided_regex": "[a-z ]+"}, ("all good",)),
    ({"guided_grammar": 'root ::= "yes" | "no"'}, ("yes",)),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ("a",)),
    ({"structured_outputs": {"regex": "[ab]"}}, ("b",)),
    ({"nvext": {"guided_decoding": {"choice": ["a", "b"]}}}, ("a",)),
    ({"guided_json": {"type": "integer"}}, ("42", "-7", "0")),
    ({"guided_json": {"type": "number"}}, ("-4.5e+10", "3.25")),
    ({"guided_json": {"type": "boolean"}}, ("true", "false")),
    ({"guided_json": {"type": "null"}}, ("null",)),
    ({"guided_json": {"enum": [1, "one", None]}}, ("1", '"one"', "null")),
    ({"guided_json": {"type": "string"}}, ('"a <think> b"',)),
    ({"guided_json": {"type": "array"}}, ("[1, 2]",)),
    ({"guided_json": {"type": "object"}}, ('{"a": 1}', ' {"a": 1}')),
    ({"response_format": {"type": "json_object"}}, ('{"a": 1}',)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}},
        ("true",),
    ),
    ({"response_format": {"type": "regex", "regex": "a+"}}, ("aaa",)),
]
CASES = [(fields, text) for fields, texts in GUIDES for text in texts]

cases = pytest.mark.parametrize(("fields", "text"), CASES, ids=[f"{next(iter(f))}-{text}" for f, text in CASES])


@pytest.fixture(scope="module")
def opened() -> Iterator[FrontEnd]:
    """A model whose template opens the reasoning."""
    with front_end(models={"tiny": opening("<think>\n", "</think>")}) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> Iterator[FrontEnd]:
    """A model whose parser takes an answer for reasoning from its beginning."""
    with front_end(reasoning_parser="deepseek_r1") as made:
        yield made


def asked(
    front: FrontEnd, text: str, /, *, stride: int = 1, api: str = "chat", finish_reason: str = "stop", **fields: Any
) -> Answer:
    backend = FakeBackend(lambda _: speak(text, tokens_per_delta=stride, finish_reason=finish_reason))
    return read(api, front.post(backend, PATHS[api], json=body_for(api, **fields)))


@cases
@pytest.mark.parametrize("front", ["opened", "expected"])
@pytest.mark.parametrize("stream", [True, False])
def test_guided_answer_without_reasoning_is_content(
    request: pytest.FixtureRequest, front: str, fields: dict[str, Any], text: str, stream: bool
) -> None:
    answer = asked(request.getfixturevalue(front), text, stream=stream, **fields)
    assert (answer.content, answer.reasoning, answer.finish) == (text, "", "stop")


@cases
@pytest.mark.parametrize("stream", [True, False])
def test_guided_answer_after_reasoning_is_content_and_the_reasoning_is_not(
    opened: FrontEnd, fields: dict[str, Any], text: str, stream: bool
) -> None:
    for thought in THOUGHTS:
        answer = asked(opened, f"{thought}\n</think>\n\n{text.strip()}", stream=stream, **fields)
        assert (answer.content, answer.reasoning) == (text.strip(), thought)


@pytest.mark.parametrize("stride", [1, 2, 1000])
@pytest.mark.parametrize(("api", "fields"), [
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "boolean"}}}}),
])  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_other_apis_answer_with_the_guided_text_too(
    opened: FrontEnd, api: str, fields: dict[str, Any], stream: bool, stride: int
) -> None:
    answer = asked(opened, "true", stride=stride, api=api, stream=stream, **fields)
    assert (answer.content, answer.reasoning) == ("true", "")


@pytest.mark.parametrize("stream", [True, False])
def test_guided_answer_that_is_cut_off_is_content(opened: FrontEnd, stream: bool) -> None:
    answer = asked(opened, "2024-", stream=stream, finish_reason="length", guided_regex=r"\d{4}-\d{2}")
    assert (answer.content, answer.reasoning, answer.finish) == ("2024-", "", "length")


def test_reasoning_that_is_no_choice_streams_at_once(opened: FrontEnd) -> None:
    backend = FakeBackend(lambda _: speak("I think that it is good.</think>positive"))
    body = body_for("chat", stream=True, guided_choice=["positive", "negative"])
    response = opened.post(backend, PATHS["chat"], json=body)
    deltas = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    parts = [d["choices"][0]["delta"].get("reasoning_content") for d in deltas if d["choices"]]
    assert len([part for part in parts if part]) > 3


FORMS = (
    "-12.5e+3 ", " -0.5E-10 ", "1e5", "true ", "false", "null ", " \n 12 \t\r ", "-12", "tru e", "1 2", "12.", "--1",
    "1e+-2", " truex", "nullx", "1.2.3", "\u0661\u0662", "\x1f1",
)  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_text_fits_a_scalar_in_pieces_as_it_does_at_once(text: str) -> None:
    for end in range(1, len(text) + 1):
        at_once = _Scalar().fits(text[:end])
        scalar = _Scalar()
        assert [scalar.fits(character) for character in text[:end]][-1] is at_once
        widened = "".join(character * 40 if character in "123 " else character for character in text[:end])
        assert _Scalar().fits(widened) is at_once


@pytest.mark.parametrize("text", [" ", "7", "\n\t"])
def test_what_is_looked_at_for_a_scalar_stays_short_however_long_it_is(text: str) -> None:
    scalar = _Scalar()
    for _ in range(1000):
        assert scalar.fits(text)
        assert len(scalar._begun) <= 1


def test_choices_that_an_answer_can_no_longer_be_are_not_looked_at_again() -> None:
    choices = _Choices(["positive", "pos", "negative", "positively"])
    assert [choices.fits(text) for text in ("p", "os", "", "itive", "ly")] == [True] * 5
    assert choices._left == ["positively"]
    assert not choices.fits(" ")
    assert not choices.fits("")
