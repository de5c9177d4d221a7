"""What ``runtime`` replaces of uvicorn and httptools, as it was when it was replaced.

A failure here says that a new version has changed something of it: read the change, carry over what matters to
``src/poolgrid/http/bounded_protocol.py``, ``held_connection.py``, ``flow_control.py``, ``http_protocol.py`` and
``http_server.py``, then write the new digest, and raise the upper bound in ``pyproject.toml``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httptools
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server

from poolgrid.http.bounded_protocol import EMPTY_LINE, BoundedProtocol
from poolgrid.http.direct_cycle import DefaultLines, DirectCycle
from poolgrid.http.flow_control import Reading
from poolgrid.http.http_protocol import DirectProtocol
from poolgrid.http.http_server import _Server

DIGESTS = {
    "HttpToolsProtocol.__init__": "4f08999410347141",
    "HttpToolsProtocol.connection_made": "6efb565ff3d36b91",
    "HttpToolsProtocol.connection_lost": "c91a4c9bf2e29c55",
    "HttpToolsProtocol.eof_received": "5652627579a02369",
    "HttpToolsProtocol.data_received": "010a7ae59a5d3b1a",
    "HttpToolsProtocol.on_message_begin": "96d377fdc7c2baef",
    "HttpToolsProtocol.on_headers_complete": "1ea8589acfad92d8",
    "HttpToolsProtocol.on_body": "dba9c32aeba35b6a",
    "HttpToolsProtocol.on_message_complete": "1fbad42dc31fc01f",
    "HttpToolsProtocol.on_response_complete": "64e254f28e389e76",
    "HttpToolsProtocol.on_header": "65d62c044f61fdbd",
    "HttpToolsProtocol.on_url": "37be44e962b04ca8",
    "HttpToolsProtocol.pause_writing": "17a8fd215d96a13c",
    "HttpToolsProtocol.resume_writing": "7844bbaa8cceb1ef",
    "HttpToolsProtocol.shutdown": "d7351fa33f00d430",
    "HttpToolsProtocol._start_asgi_task": "9c08c2571ae9b038",
    "HttpToolsProtocol.send_400_response": "ae5a4a3782b646fd",
    "HttpToolsProtocol._unset_keepalive_if_required": "00a6a4e47214e68e",
    "RequestResponseCycle.__init__": "4d2f220910c33c12",
    "RequestResponseCycle.run_asgi": "0f33f2449a444bc2",
    "RequestResponseCycle.send": "abdd8601b326a8da",
    "RequestResponseCycle.receive": "8124ae006be71184",
    "FlowControl.pause_reading": "7c27388bb984e9ed",
    "FlowControl.resume_reading": "a0429d30857e8488",
    "Server.startup": "2aa1d70a244bfcf2",
    "Server.shutdown": "9b33c50562992b1e",
    "Server.on_tick": "60ea49b06ccf68c1",
    "Server.main_loop": "afccb353a119333f",
    "Server.capture_signals": "e1bbcd4770d1c887",
    "Server.serve": "112ef41af52167e3",
    "Server._serve": "4575b7a50adfede8",
}
"""Of uvicorn 0.54.0: what is replaced, and what the replacements lean on."""


def digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_what_is_replaced_or_leant_on_is_as_it_was(name: str) -> None:
    owner, _, method = name.partition(".")
    classes = {each.__name__: each for each in (HttpToolsProtocol, RequestResponseCycle, FlowControl, Server)}

    assert digest(getattr(classes[owner], method)) == DIGESTS[name], f"uvicorn has changed {name}"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BoundedProtocol, HttpToolsProtocol),
        (DirectProtocol, HttpToolsProtocol),
        (Reading, FlowControl),
        (_Server, Server),
    ],
)
def test_every_method_that_is_replaced_is_watched(ours: type, theirs: type) -> None:
    replaced = {
        name
        for each in ours.__mro__[: ours.__mro__.index(theirs)]
        for name, value in vars(each).items()
        if inspect.isfunction(value) and hasattr(theirs, name)
    }

    assert {f"{theirs.__name__}.{name}" for name in replaced - {"__init__"}} <= set(DIGESTS)


def test_a_cycle_of_ours_does_what_uvicorns_does_and_that_is_watched() -> None:
    methods = {name for name, value in vars(RequestResponseCycle).items() if inspect.isfunction(value)}
    ours = {name for name in methods if hasattr(DirectCycle, name)}

    assert methods - ours == {"send_500_response"}, "which nobody but a cycle itself calls"
    assert {f"RequestResponseCycle.{name}" for name in ours} <= set(DIGESTS)


def test_a_cycle_of_ours_has_all_that_uvicorns_has() -> None:
    names = inspect.signature(RequestResponseCycle.__init__).parameters
    theirs = RequestResponseCycle(**dict.fromkeys(set(names) - {"self"}))  # type: ignore[arg-type]
    protocol = Mock(tasks=set(), default_lines=DefaultLines(), server_state=Mock(default_headers=[]))
    ours = DirectCycle(protocol, None, keep_alive=True)

    # Its own log and the server's headers as they are; ours has one log, and the lines that it sends.
    without = {"logger", "access_logger", "default_headers"}
    assert {name for name in vars(theirs) if not hasattr(ours, name)} == without


class Events:
    """What a parser tells, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_: self.told.append(name)


def parsed(*parts: bytes) -> tuple[list[str], Exception | None]:
    events = Events()
    parser = httptools.HttpRequestParser(events)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    try:
        for part in parts:
            parser.feed_data(part)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        return events.told, error
    return events.told, None


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/1.1\r\na: b\n\n",
        b"GET / HTTP/1.1\r\na: b\r\n\n",
        b"GET / HTTP/1.1\r\na: b\n\r\n",
        b"GET /\n",
        b"GET /\r\nGET /\r\n",
        b"GET / HTTP/1.1\r\r",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\n\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx0\r\n\n",
    ],
)
def test_no_head_and_no_chunked_body_ends_without_an_empty_line(request_bytes: bytes) -> None:
    told, error = parsed(request_bytes, b"GET / HTTP/1.1\r\n")

    assert EMPTY_LINE not in request_bytes.removeprefix(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    assert "on_message_complete" not in told
    assert error is not None


def test_the_end_of_one_request_is_told_before_the_next_is_fed() -> None:
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nt: x\r\n\r\n"
    for request in (b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\nx", chunked):
        told, error = parsed(request)
        assert error is None
        assert told[-1] == "on_message_complete"


def test_a_request_that_would_upgrade_ends_with_its_head() -> None:
    told, error = parsed(b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: x\r\ncontent-length: 1\r\n\r\n", b"x")

    assert told[-1] == "on_message_complete"
    assert isinstance(error, httptools.HttpParserUpgrade)
