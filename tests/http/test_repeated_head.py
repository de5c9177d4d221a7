"""Heads that a connection has had before: what is known again, and what is not."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.http.repeated_head import LENGTH_DIGITS_MAX, Headers, RepeatedHead

BYTES_MAX = 1000


class Parsed:
    """What the parser makes of a request."""

    def __init__(self, request: bytes) -> None:
        self.headers: Headers = []
        self.body = b""
        self.ended = 0
        httptools.HttpRequestParser(self).feed_data(request)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended += 1


def request(body: bytes, *lines: bytes, length: bytes | None = None) -> bytes:
    length = b"%d" % len(body) if length is None else length
    head = [b"POST /v1/completions HTTP/1.1", b"Host: here", b"Content-Length: " + length, *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def head_of(whole: bytes, bytes_max: int = BYTES_MAX) -> RepeatedHead | None:
    return RepeatedHead.of(whole, Parsed(whole).headers, bytes_max)


BODIES = st.one_of(st.binary(max_size=30), st.integers(0, 3000).map(bytes))


@given(first=BODIES, second=BODIES, lines=st.lists(st.sampled_from([b"A: b", b"a: B", b"X-Length: 3"]), max_size=3))
def test_a_request_with_the_same_head_is_what_the_parser_makes_of_it(
    first: bytes, second: bytes, lines: list[bytes]
) -> None:
    head = head_of(request(first, *lines))
    assert head is not None
    whole = request(second, *lines)

    parsed = Parsed(whole)
    assert head.taken(whole) == (parsed.headers, parsed.body)
    assert parsed.body == second


@given(
    body=BODIES,
    cut=st.integers(0, 200),
    put=st.binary(max_size=6),
    removed=st.integers(0, 6),
)
def test_what_it_takes_the_parser_takes_as_one_request_with_the_same_head(
    body: bytes, cut: int, put: bytes, removed: int
) -> None:
    head = head_of(request(b"four"))
    assert head is not None
    whole = request(body)
    changed = whole[:cut] + put + whole[cut + removed :]

    taken = head.taken(changed)

    if taken is not None:
        parsed = Parsed(changed)
        assert parsed.ended == 1
        assert taken == (parsed.headers, parsed.body)


@pytest.mark.parametrize(
    "other",
    [
        request(b"four", b"Accept: */*"),
        request(b"four").replace(b"Host", b"host"),
        request(b"four")[:-1],
        request(b"four") + b"P",
        request(b"four") + request(b"four"),
        request(b"four", length=b"+4"),
        request(b"four", length=b"4 "),
        request(b"four", length=b" 4"),
        request(b"four", length=b""),
        request(b"four", length=b"0x4"),
        request(b"four", length=b"4, 4"),
        request(b"four", length=b"0" * LENGTH_DIGITS_MAX + b"4"),
        request(b"four", length=b"5"),
        request(b"four", length="४".encode()),
    ],
)
def test_anything_else_is_left_to_the_parser(other: bytes) -> None:
    head = head_of(request(b"four"))

    assert head is not None
    assert head.taken(request(b"four")) is not None
    assert head.taken(other) is None


@pytest.mark.parametrize(
    "whole",
    [
        request(b"four", length=b"4 "),
        request(b"").replace(b"Content-Length: 0", b"Accept: */*"),
        request(b"four")[:-1],
        request(b"four") + request(b"four"),
        request(b"four", b"A: " + b"b" * BYTES_MAX),
    ],
    ids=["blanks behind the length", "no length", "not whole", "two requests", "too long"],
)
def test_not_every_head_can_be_known_again(whole: bytes) -> None:
    assert head_of(whole) is None


def test_two_lengths_are_none() -> None:
    whole = request(b"four", b"content-length: 4")

    assert RepeatedHead.of(whole, [(b"content-length", b"4"), (b"content-length", b"4")], BYTES_MAX) is None
