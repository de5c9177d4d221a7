"""Header lines pass but those of one connection, those that the sender writes, and keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.secret_texts import blotted
from poolgrid.server.forwarding.headers import (
    DIGESTS,
    HOP_BY_HOP,
    KEYS,
    SET_BY_SENDER,
    Header,
    request_headers,
    response_headers,
)

OWN = [
    (b"x-session-id", b"s-1"),
    (b"x-vendor", b"a, b"),
    (b"x-vendor", b"c"),
    (b"anthropic-beta", b"a-1,b-2"),
    (b"openai-organization", b"org-1"),
    (b"x-data-parallel-rank", b"1"),
    (b"accept-encoding", b"gzip"),
    (b"cookie", b"a=1"),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    (b"tracestate", b"vendor=1"),
    (b"baggage", b"k=v"),
    (b"origin", b"http://ui.test"),
]
ANSWER = [
    (b"content-type", b"text/event-stream"),
    (b"set-cookie", b"one=1; Path=/"),
    (b"set-cookie", b"two=2; Path=/"),
    (b"retry-after", b"7"),
    (b"x-ratelimit-remaining-requests", b"41"),
    (b"content-length", b"12"),
    (b"access-control-allow-origin", b"*"),
    (b"location", b"http://inner/x"),
]


def test_the_clients_lines_pass_in_their_order() -> None:
    assert request_headers(OWN) == OWN


def test_the_servers_lines_pass_in_their_order() -> None:
    assert response_headers(ANSWER) == ANSWER


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP | SET_BY_SENDER | KEYS))
@pytest.mark.parametrize("form", [bytes.lower, bytes.title])
def test_these_lines_of_a_request_are_left_out(name: bytes, form: object) -> None:
    spelled = name.title() if form is bytes.title else name

    assert request_headers([OWN[0], (spelled, b"x"), OWN[1]]) == OWN[:2]


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_these_lines_of_an_answer_are_left_out(name: bytes) -> None:
    assert response_headers([ANSWER[0], (name.title(), b"x")]) == ANSWER[:1]


@pytest.mark.parametrize("connection", [b"x-vendor", b"close, X-Vendor", b" keep-alive ,x-vendor, "])
def test_what_connection_names_is_left_out(connection: bytes) -> None:
    lines = [(b"Connection", connection), (b"x-vendor", b"1"), (b"X-Vendor", b"2"), (b"x-other", b"3")]

    assert request_headers(lines) == [(b"x-other", b"3")]
    assert response_headers(lines) == [(b"x-other", b"3")]


def test_an_added_line_replaces_the_clients() -> None:
    received = [(b"X-Request-Id", b"client"), (b"x-a", b"1"), (b"authorization", b"Bearer client")]
    added = [(b"x-request-id", b"ours"), (b"authorization", b"Bearer server")]

    assert request_headers(received, added) == [(b"x-a", b"1"), *added]


@pytest.mark.parametrize("name", [b"x-forwarded-authorization", b"x-auth-key", b"cookie", b"referer"])
def test_the_clients_key_is_left_out_in_whichever_line(name: bytes) -> None:
    lines = [(name, b"Bearer sk-client-1"), (b"x-a", b"sk-client")]

    assert request_headers(lines, client_key=b"sk-client-1") == [(b"x-a", b"sk-client")]


def test_a_short_key_takes_no_other_line_away() -> None:
    assert request_headers(OWN, client_key=b"a") == OWN


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (b"realtime, openai-insecure-api-key.sk-1, openai-beta.realtime-v1", b"realtime, openai-beta.realtime-v1"),
        (b"openai-insecure-api-key.sk-1", None),
        (b"realtime,  odd", b"realtime,  odd"),
    ],
)
def test_a_key_in_a_websockets_subprotocol_is_left_out(value: bytes, kept: bytes | None) -> None:
    line = b"sec-websocket-protocol"

    assert request_headers([(line, value)]) == ([] if kept is None else [(line, kept)])


@pytest.mark.parametrize("value", [b"a\r\nx-b: 1", b"a\nb", b"a\x00"])
def test_a_value_with_a_line_break_passes_in_neither_direction(value: bytes) -> None:
    assert request_headers([(b"x-a", value)]) == []
    assert response_headers([(b"x-a", value)]) == []


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_a_changed_body_has_no_digest(name: bytes) -> None:
    lines = [(b"content-type", b"x"), (name, b"y")]

    assert response_headers(lines) == lines
    assert response_headers(lines, is_body_changed=True) == lines[:1]


def test_a_servers_key_reaches_no_client() -> None:
    lines = [(b"www-authenticate", b'Bearer error="key sk-server-1 is wrong"'), (b"x-echo", b"sk-other;sk-server-1")]

    assert response_headers(lines, [b"sk-server-1", b"sk-other"]) == [
        (b"www-authenticate", b'Bearer error="key *********** is wrong"'),
        (b"x-echo", b"********;***********"),
    ]


@pytest.mark.parametrize(
    ("text", "keys", "after"),
    [
        (b'{"error":"bad key a\\"b\\/c"}', [b'a"b/c'], b'{"error":"bad key *******"}'),
        (b'{"error":"bad key a\\"b/c"}', [b'a"b/c'], b'{"error":"bad key ******"}'),
        (b"key-long key", [b"key", b"key-long"], b"******** ***"),
        (b"nothing", [b"", b"key"], b"nothing"),
        (b"k\xe9y1", [b"k\xe9y1"], b"****"),
    ],
)
def test_a_key_is_blotted_out_as_it_is_and_as_json_writes_it(text: bytes, keys: list[bytes], after: bytes) -> None:
    assert blotted(text, keys) == after


NAMES = st.sampled_from(
    [b"x-a", b"X-B", b"connection", b"TE", b"host", b"authorization", b"content-type", b"set-cookie"]
)
LINES = st.lists(st.tuples(NAMES, st.sampled_from([b"", b"1", b"x-a", b"close, x-b", b"content-type"])), max_size=8)


def naive(lines: list[Header], dropped: set[bytes]) -> list[Header]:
    for name, value in lines:
        if name.lower() == b"connection":
            dropped = dropped | {part.strip().lower() for part in value.split(b",")}
    return [(name, value) for name, value in lines if name.lower() not in dropped]


@given(LINES)
def test_lines_equal_the_naive_choice(lines: list[Header]) -> None:
    assert request_headers(lines) == naive(lines, {b"connection", b"te", b"host", b"authorization"})
    assert response_headers(lines) == naive(lines, {b"connection", b"te"})
