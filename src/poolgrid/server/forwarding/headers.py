"""Which header lines of a request reach the server, and which of its answer reach the client.

All do but these: lines of one connection (hop-by-hop, and what ``Connection`` names), lines that the sender of the
request writes itself, and keys. Order and repeated lines are kept. W3C trace context passes like any other line.

Cookies pass: ``Set-Cookie`` of an answer passes too, and a load balancer in front of the servers may need its own back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from poolgrid.kernel.wire.secret_texts import blotted
from poolgrid.server.forwarding.hop import HOP_HEADER

Header = tuple[bytes, bytes]

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
"""Of one connection (RFC 9110, 7.6.1). A tunnel's sender adds ``Connection`` and ``Upgrade`` itself."""

SET_BY_SENDER: Final = frozenset({b"host", b"content-length", b"expect"})
"""The body may be changed, and is sent without waiting for ``100 Continue``, which poolgrid has answered."""

KEYS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"ocp-apim-subscription-key"})
"""What clients of OpenAI, Anthropic, Azure and Google send their key in. It is poolgrid's, not the server's."""

KEY_IN_SUBPROTOCOL: Final = b"openai-insecure-api-key."
"""What browsers send the key of a realtime session in: a websocket cannot have header lines of its own there."""

KEY_BYTES_MIN: Final = 8
"""Of a client's key that is looked for in other lines. A shorter one is found in lines that have nothing to do with
it."""

DIGESTS: Final = frozenset({b"content-length", b"content-md5", b"digest", b"content-digest", b"repr-digest", b"etag"})
"""Of the bytes of a body: untrue when something was taken out of it."""

EVENT_STREAM: Final = b"text/event-stream"

_OF_THE_SENDER: Final = HOP_BY_HOP | SET_BY_SENDER | KEYS | {HOP_HEADER}
_NO_FURTHER_NAMES: Final = HOP_BY_HOP | {b"close"}
_LINE_BREAK = re.compile(rb"[\r\n\x00]")


def request_headers(
    received: Iterable[Header], added: Sequence[Header] = (), client_key: bytes | None = None
) -> list[Header]:
    """Return the lines for the server.

    Args:
        received: The client's lines, in its order.
        added: Lines that poolgrid sets, the server's key among them; they replace the client's of the same name.
        client_key: The key that the client was authenticated by. A line of any name that holds it is left out.
    """
    received = _without_line_breaks(received)
    left_out = _OF_THE_SENDER
    others = _named_in_connection(received).union(name.lower() for name, _ in added)
    if others:
        left_out = left_out | others
    key = client_key if client_key is not None and len(client_key) >= KEY_BYTES_MIN else None
    kept: list[Header] = []
    for name, value in received:
        plain = name.lower()
        if plain in left_out:
            continue
        if plain == b"sec-websocket-protocol" and KEY_IN_SUBPROTOCOL in value:
            kept += _without_key(name, value)
        elif key is None or key not in value:
            kept.append((name, value))
    return [*kept, *added]


def response_headers(
    received: Iterable[Header], server_keys: Collection[bytes] = (), *, is_body_changed: bool = False
) -> list[Header]:
    """Return the lines for the client, with the servers' keys blotted out.

    Args:
        received: The server's lines, in its order.
        server_keys: Keys that poolgrid sends to servers.
        is_body_changed: Whether something was taken out of the body, so that its length and digests are untrue.
    """
    received = _without_line_breaks(received)
    left_out = HOP_BY_HOP | _named_in_connection(received) | (DIGESTS if is_body_changed else frozenset())
    return [(name, blotted(value, server_keys)) for name, value in received if name.lower() not in left_out]


def is_event_stream(headers: Iterable[Header]) -> bool:
    """Return whether an answer with these lines is a stream of events that can be read."""
    fields = dict(headers)
    return fields.get(b"content-type", b"").startswith(EVENT_STREAM) and b"content-encoding" not in fields


def _named_in_connection(received: list[Header]) -> frozenset[bytes]:
    """Further names; those of ``HOP_BY_HOP`` and ``close`` are no lines that would pass."""
    found = [item.lower() for name, value in received if name.lower() == b"connection" for item in _items(value)]
    return frozenset(found) - _NO_FURTHER_NAMES if found else frozenset()


def _without_line_breaks(received: Iterable[Header]) -> list[Header]:
    """What would be two lines is none."""
    received = list(received)
    if _LINE_BREAK.search(b"".join([value for _, value in received])) is None:
        return received
    return [(name, value) for name, value in received if _LINE_BREAK.search(value) is None]


def _without_key(name: bytes, value: bytes) -> list[Header]:
    """The subprotocols but the key; no line if that was all."""
    rest = [item for item in _items(value) if not item.startswith(KEY_IN_SUBPROTOCOL)]
    return [(name, b", ".join(rest))] if rest else []


def _items(value: bytes) -> list[bytes]:
    return [item for item in (each.strip() for each in value.split(b",")) if item]
