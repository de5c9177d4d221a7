"""How long a Messages request asks to keep its prompt, and what its answer says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import pytest

from poolgrid.plugins.messages_api.cache_lifetime import keep_ms_of_messages
from poolgrid.plugins.messages_api.schema import MessagesBody
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.schema import parse
from poolgrid.server.frontend.session_fields import HOUR_MS
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.kept_prompts import CACHED_TOKENS, kept
from tests.frontend.server import application, served_in_thread

MINUTE_MS = 60_000
HI: Any = [{"role": "user", "content": "hi"}]
CONTROL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
MESSAGES = msgspec.json.Decoder(MessagesBody)


def of_messages(**fields: Any) -> int:
    body = {"model": "m", "max_tokens": 1, "messages": HI, **fields}
    return keep_ms_of_messages(parse(MESSAGES, msgspec.json.encode(body)))


def block(control: Any) -> dict[str, Any]:
    return {"type": "text", "text": "hi", "cache_control": control}


@pytest.mark.parametrize(
    ("fields", "keep_ms"),
    [
        ({}, 0),
        ({"messages": [{"role": "user", "content": [block(CONTROL)]}]}, 5 * MINUTE_MS),
        ({"messages": [{"role": "user", "content": [block({**CONTROL, "ttl": "5m", "scope": "global"})]}]}, 300_000),
        ({"messages": [{"role": "user", "content": [block(None), {"type": "text", "text": "hi"}]}]}, 0),
        ({"system": [block(HOUR)], "messages": [{"role": "user", "content": [block(CONTROL)]}]}, HOUR_MS),
        ({"tools": [{"name": "t", "input_schema": {}, "cache_control": HOUR}]}, HOUR_MS),
        ({"cache_control": CONTROL}, 5 * MINUTE_MS),
        ({"messages": [{"role": "user", "content": [block(CONTROL)] * 5 + [block(HOUR)]}]}, HOUR_MS),
    ],
)
def test_a_messages_request_asks_for_the_longest_time_in_it(fields: dict[str, Any], keep_ms: int) -> None:
    assert of_messages(**fields) == keep_ms


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"system": [block({"type": "ephemeral", "ttl": "2h"})]}, "system[0].cache_control.ttl", "allowed is 5m or 1h"),
        ({"system": [block({"type": "ephemeral", "ttl": 300})]}, "system[0].cache_control.ttl", "allowed is 5m or 1h"),
        ({"system": [block({"type": "ephemeral", "ttl": []})]}, "system[0].cache_control.ttl", "allowed is 5m or 1h"),
        (
            {"messages": [{"role": "user", "content": [block(None), block({"type": "for ever"})]}]},
            "messages[0].content[1].cache_control.type",
            "allowed is ephemeral",
        ),
        ({"tools": [{"name": "t", "cache_control": "5m"}]}, "tools[0].cache_control", "allowed is an object"),
        ({"cache_control": {}}, "cache_control.type", "allowed is ephemeral"),
    ],
)
def test_a_malformed_cache_control_is_refused_by_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        of_messages(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_in_thread(application(FakeBackend(kept))) as at:
        yield at


def test_anthropics_usage_has_what_is_newly_kept_by_its_time(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:

        def ask(control: Any) -> Any:
            message = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": control}]}
            asked: Any = {"model": "tiny", "max_tokens": 100, "messages": [message]}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                final = stream.get_final_message().usage
            assert final.cache_creation_input_tokens == whole.usage.cache_creation_input_tokens
            assert final.input_tokens == whole.usage.input_tokens
            assert final.cache_creation is None or not whole.usage.cache_creation_input_tokens, "never a wrong zero"
            return whole.usage

        plain, minutes, hour = ask(None), ask(CONTROL), ask(HOUR)
    assert [each.cache_read_input_tokens for each in (plain, minutes, hour)] == [CACHED_TOKENS] * 3
    assert [each.cache_creation_input_tokens for each in (plain, minutes, hour)] == [0, 7, 7]
    assert [each.cache_creation.ephemeral_5m_input_tokens for each in (plain, minutes, hour)] == [0, 7, 0]
    assert [each.cache_creation.ephemeral_1h_input_tokens for each in (plain, minutes, hour)] == [0, 0, 7]
    assert plain.input_tokens == minutes.input_tokens + 7 == hour.input_tokens + 7
