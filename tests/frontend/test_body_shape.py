"""A body is refused for the number of its values before anything is made of them, and never for its text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.frontend import request_body
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.request_body import (
    NUMBERS_PER_VALUE,
    SHORT_BYTES,
    VALUES_PER_PART,
    check_shape,
    count_values,
)
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tokenization import TokenizationPool
from tests.frontend.server import post_to_shared

LIMIT = FrontendSettings().max_body_values
NUMBERS = LIMIT * NUMBERS_PER_VALUE
CONTEXT = 1_048_576
"""The longest context of published models."""

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('",[]{}\\\n a', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('",[]{}\\', max_size=4), inner, max_size=4),
    max_leaves=30,
)


def walk(value: Any) -> tuple[int, int, int, int]:
    """Return the commas, texts, containers and members of a value as JSON."""
    if not isinstance(value, dict | list):
        return 0, int(isinstance(value, str)), 0, 0
    inner = [walk(each) for each in (value.values() if isinstance(value, dict) else value)]
    commas, texts, containers, members = (sum(counts) for counts in zip(*inner, (0, 0, 0, 0), strict=True))
    own = len(value) if isinstance(value, dict) else 0
    return commas + max(0, len(value) - 1), texts, containers + 1, members + own


@given(values, st.booleans(), st.sampled_from([5, 40, request_body.PIECE_BYTES]))
def test_values_are_counted_as_a_parser_would_find_them(value: Any, ascii_only: bool, piece_bytes: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "PIECE_BYTES", piece_bytes)

        assert count_values(body, 10_000) == walk(value)


@pytest.mark.parametrize("text", ["w", "\n", "w" * 2000, "\n" * 2000], ids=["short", "escaped", "long", "long escaped"])
def test_whoever_counts_many_strings_lets_others_have_a_turn_now_and_then(text: str) -> None:
    body = json.dumps([text] * (2_000_000 // len(text) // 5)).encode()
    breaths: list[None] = []

    assert count_values(body, 10**9, lambda: breaths.append(None))[0] == 2_000_000 // len(text) // 5 - 1
    assert len(breaths) > len(body) // (2 * request_body.PIECE_BYTES)


def post(path: str, content: bytes, **settings: Any) -> httpx.Response:
    return post_to_shared(None, path, settings, content=content, headers={"content-type": "application/json"})


CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]'
MANY_LISTS = b"[" + b"[]," * (1 + LIMIT // VALUES_PER_PART) + b"[]]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b"1," * (NUMBERS + 1) + b"1]}"),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b'"",' * (LIMIT + 1) + b'""]}'),
        ("/v1/completions", b'{"model":"tiny","prompt":"x","unknown":' + MANY_LISTS + b"}"),
        ("/v1/chat/completions", CHAT + b',"tools":' + MANY_LISTS.replace(b"[]", b"{}") + b"}"),
        ("/v1/chat/completions", CHAT + b',"chat_template_kwargs":{"x":' + MANY_LISTS + b"}}"),
        (
            "/v1/completions",
            b'{"model":"tiny","prompt":"x","guided_json":{'
            + b",".join(b'"%d":1' % number for number in range(LIMIT // VALUES_PER_PART))
            + b"}}",
        ),
        ("/v1/responses", b'{"model":"tiny","input":' + MANY_LISTS + b"}"),
        ("/tokenize", b'{"model":"tiny","prompt":"x","x":' + MANY_LISTS + b"}"),
        ("/detokenize", b'{"model":"tiny","tokens":[' + b"1," * (NUMBERS + 1) + b"1]}"),
    ],
)
def test_a_body_of_too_many_values_is_refused_wherever_it_comes(path: str, body: bytes) -> None:
    response = post(path, body)

    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_complex")
    assert str(LIMIT) in response.json()["error"]["message"]


def test_text_may_hold_as_many_commas_and_brackets_as_it_likes() -> None:
    text = '{"a": [1, 2], "b\\"": "\\\\"}, ' * 40_000
    body = json.dumps({"model": "tiny", "prompt": text}).encode()
    assert body.count(b":") > LIMIT // VALUES_PER_PART
    assert body.count(b"[") + body.count(b"{") > LIMIT // VALUES_PER_PART

    answer = post("/tokenize", body)

    assert answer.status_code == 200


@pytest.mark.parametrize("prompts", [1, 2, 64])
def test_token_ids_of_a_whole_context_are_taken_in_one_prompt_or_several(prompts: int) -> None:
    """The model refuses them for their length, as it does their text."""
    each = [40] * (CONTEXT // prompts)
    for body in (
        {"model": "tiny", "prompt": each if prompts == 1 else [each] * prompts, "max_tokens": 1},
        {"model": "tiny", "prompt": "a " * CONTEXT, "max_tokens": 1},
    ):
        response = post("/v1/completions", json.dumps(body).encode())

        fits = isinstance(body["prompt"], list) and prompts == 64
        assert response.status_code == (200 if fits else 400), response.text
        assert fits or response.json()["error"]["code"] == "context_length_exceeded"


def test_token_ids_of_a_whole_context_become_text_again() -> None:
    response = post("/detokenize", json.dumps({"model": "tiny", "tokens": [40] * CONTEXT}).encode())

    assert response.status_code == 200
    assert len(response.json()["prompt"]) == CONTEXT


async def test_short_bodies_and_those_below_the_limit_are_not_looked_at_twice() -> None:
    pool = TokenizationPool(1, 1, 0)
    try:
        await check_shape(b"[" * SHORT_BYTES, 1, pool)
        await check_shape(b"1," * SHORT_BYTES, SHORT_BYTES // NUMBERS_PER_VALUE, pool)
        assert pool._executor._threads == set()
        with pytest.raises(RequestError, match="more than 1000 texts"):
            await check_shape(b"1," * SHORT_BYTES, 1000, pool)
    finally:
        pool.close()
