"""How long a Responses request asks to keep its prompt, and what its answer says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from poolgrid.plugins.responses_api.endpoint import parse_responses
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.session_fields import HOUR_MS, keep_ms_of
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.kept_prompts import kept
from tests.frontend.server import application, served_in_thread


def of_responses(**fields: Any) -> int:
    return keep_ms_of(parse_responses(msgspec.json.encode({"model": "m", "input": "hi", **fields})))


def test_responses_ask_by_the_fields_of_openai() -> None:
    assert of_responses() == of_responses(prompt_cache_key="k") == 0
    assert of_responses(prompt_cache_retention="24h") == 24 * HOUR_MS
    assert of_responses(prompt_cache_options={"ttl": "12h", "mode": "implicit"}) == 12 * HOUR_MS
    assert of_responses(nvext={"cache_control": {"type": "ephemeral", "ttl": "1h"}}) == HOUR_MS


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
    ],
)
def test_a_malformed_field_of_openai_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        of_responses(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_in_thread(application(FakeBackend(kept))) as at:
        yield at


def test_usage_has_what_is_newly_kept_where_a_request_asks(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = client.responses.create(model="tiny", input="hi", prompt_cache_options={"ttl": "30m"}).usage
        unasked = client.responses.create(model="tiny", input="hi").usage

    assert asked is not None
    assert asked.input_tokens_details.cache_write_tokens == 7
    assert unasked is not None
    assert unasked.input_tokens_details.cache_write_tokens == 0
