"""Which requests come from web pages, and which hosts a server on loopback answers to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.http.browser_requests import HOSTS_KEPT_MAX, AllowedHosts, foreign_origin, is_preflight, is_unasked


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, ""),
        ({"host": "pool:8000"}, ""),
        ({"host": "pool:8000", "origin": "http://pool:8000"}, ""),
        ({"host": "pool", "origin": "https://POOL"}, ""),
        ({"host": "pool:8000", "origin": "http://pool:3000"}, "'http://pool:3000'"),
        ({"host": "pool", "origin": "http://pool.evil"}, "'http://pool.evil'"),
        ({"host": "pool", "origin": "null"}, "'null'"),
        ({"host": "", "origin": "null"}, "'null'"),
        ({"host": "pool", "origin": ""}, "''"),
        ({"host": "pool", "origin": "http://app"}, ""),
        ({"host": "pool", "origin": "http://app", "sec-fetch-site": "cross-site"}, ""),
        ({"host": "upstream", "origin": "https://pool", "sec-fetch-site": "same-origin"}, ""),
        ({"host": "pool", "sec-fetch-site": "none"}, ""),
        ({"host": "pool", "sec-fetch-site": "same-site"}, "another origin (Sec-Fetch-Site: 'same-site')"),
        ({"host": "pool", "sec-fetch-site": "cross-site"}, "another origin (Sec-Fetch-Site: 'cross-site')"),
    ],
)
def test_a_page_is_foreign_unless_it_is_the_servers_own_or_allowed(headers: dict[str, str], foreign: str) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert foreign_origin(raw, {"http://app"}) == foreign


@pytest.mark.parametrize(
    ("method", "headers", "unasked"),
    [
        ("POST", {}, True),
        ("POST", {"content-type": "text/plain;charset=UTF-8"}, True),
        ("POST", {"content-type": "Application/X-WWW-Form-Urlencoded"}, True),
        ("POST", {"content-type": "multipart/form-data; boundary=x"}, True),
        ("POST", {"content-type": "application/json"}, False),
        ("POST", {"content-type": "application/octet-stream"}, False),
        ("POST", {"content-type": "text/plain", "authorization": "Bearer k"}, False),
        ("POST", {"content-type": "text/plain", "x-api-key": "k"}, False),
        ("PUT", {}, False),
        ("DELETE", {}, False),
        ("GET", {}, False),
        ("GET", {"upgrade": "websocket"}, True),
    ],
)
def test_what_a_form_or_a_websocket_can_send_is_sent_unasked(
    method: str, headers: dict[str, str], unasked: bool
) -> None:
    assert is_unasked(method, [(name.encode(), value.encode()) for name, value in headers.items()]) is unasked


@pytest.mark.parametrize(
    ("method", "headers", "preflight"),
    [
        ("OPTIONS", {"access-control-request-method": "POST"}, True),
        ("OPTIONS", {"access-control-request-method": "POST", "content-length": "0"}, True),
        ("OPTIONS", {"access-control-request-method": "POST", "content-length": "1"}, False),
        ("OPTIONS", {"access-control-request-method": "POST", "transfer-encoding": "chunked"}, False),
        ("OPTIONS", {"origin": "http://app"}, False),
        ("POST", {"access-control-request-method": "POST"}, False),
    ],
)
def test_a_preflight_names_a_method_and_has_no_body(method: str, headers: dict[str, str], preflight: bool) -> None:
    assert is_preflight(method, [(name.encode(), value.encode()) for name, value in headers.items()]) is preflight


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        (b"localhost", True),
        (b"LocalHost:8000", True),
        (b"localhost.", True),
        (b"a.localhost:1", True),
        (b"127.0.0.1:8000", True),
        (b"127.9.9.9", True),
        (b"[::1]:8000", True),
        (b"[::1]", True),
        (b"pool.example:443", True),
        (b"evil.example", False),
        (b"localhost.evil.example:8000", False),
        (b"router:8000", True),
        (b"10.0.0.1:8000", True),
        (b"[2001:db8::1]:8000", True),
        (b"127.0.0.1.evil.example", False),
        (b"router evil.example", False),
        (b"[evil.example]:8000", False),
        (b"", False),
        (b":8000", False),
    ],
)
def test_only_names_that_cannot_be_rebound_are_answered(host: bytes, allowed: bool) -> None:
    hosts = AllowedHosts("127.0.0.1", ["Pool.Example"])
    assert [hosts.allow(host), hosts.allow(host)] == [allowed, allowed]


@given(st.binary(max_size=80))
def test_any_host_is_judged_and_few_are_kept(host: bytes) -> None:
    hosts = AllowedHosts("::1")
    hosts.allow(host)
    for number in range(HOSTS_KEPT_MAX + 9):
        assert hosts.allow(b"localhost:%d" % number)
    assert len(hosts._known) <= HOSTS_KEPT_MAX
