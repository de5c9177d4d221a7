"""Requests for trtllm-serve: what of a tenant reaches a server that takes less than others, and otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.wire.requests import unit_priority
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.server.forwarding.trtllm_serve import conversation_lines
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.proxy.changes import make_changes

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def sent(path: str, given: Mapping[str, Any], **asked: Any) -> dict[str, Any]:
    """Return the body that a server gets."""
    body = json.dumps(given).encode()
    values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    made: dict[str, Any] = json.loads(make_changes(path, "trtllm-serve", body, values, **asked).body)
    return made


def test_the_salt_of_a_tenant_reaches_chat_alone() -> None:
    assert sent(CHAT, {"cache_salt": "mine"}, salt="tenant") == {"cache_salt": "tenant"}
    assert sent("/v1/embeddings", {"input": "a"}, salt="tenant") == {"input": "a"}


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, MESSAGES])
def test_a_salt_is_refused_where_the_server_would_pass_over_it(path: str) -> None:
    for given, salt in (({}, "tenant"), ({"cache_salt": "mine"}, "")):
        with pytest.raises(RequestError) as refused:
            sent(path, given, salt=salt)
        assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")
    for none in (None, ""):
        assert sent(path, {"cache_salt": none}) == {"cache_salt": none}


def test_a_tenant_asks_for_no_more_than_its_priority_on_a_scale_that_ends_at_one() -> None:
    most = unit_priority(1)
    assert most == 0.75
    assert sent(CHAT, {"priority": 0.9}, priority_max=1) == {"priority": most}
    assert sent(CHAT, {"priority": 1}, priority_max=1) == {"priority": most}
    for fit in (0.7, 0, "high", None):
        assert sent(CHAT, {"priority": fit}, priority_max=1) == {"priority": fit}
    assert sent(CHAT, {"priority": 0.9}) == {"priority": 0.9}, "who has no key has no bound"


@pytest.mark.parametrize(
    ("version", "path", "is_taken"),
    [
        ("1.4.0rc4", CHAT, True),
        ("1.10.0", COMPLETIONS, True),
        ("2.0", CHAT, True),
        ("1.3.2", CHAT, False),
        ("", CHAT, False),
        ("1.4.0", RESPONSES, False),
        ("1.4.0", MESSAGES, False),
    ],
)
def test_a_hint_of_priority_reaches_versions_and_paths_that_take_one(version: str, path: str, is_taken: bool) -> None:
    assert sent(path, {}, version=version, priority=3) == ({"priority": unit_priority(3)} if is_taken else {})
    assert sent(path, {}, version=version) == {}, "without a hint"


def test_a_hint_gives_way_to_what_the_client_wrote() -> None:
    assert sent(CHAT, {"priority": 0.1}, version="1.4.0", priority=3) == {"priority": 0.1}


def test_a_conversation_is_named_unless_the_client_names_it() -> None:
    turn = SessionTurn("talk", tenant=0xAB)
    assert conversation_lines(turn, ()) == [(b"x-session-id", b"00000000000000ab-talk")]
    assert conversation_lines(None, ()) == []
    for named in (b"x-session-id", b"x-correlation-id", b"x-session-affinity", b"x-multi-turn-session-id"):
        assert conversation_lines(turn, {named: b"own"}) == []
