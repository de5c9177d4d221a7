"""Where a server is that a plain TCP connection can be made to, as far as an endpoint of ZMQ says so."""

from __future__ import annotations

from typing import Any, NamedTuple

import zmq

from poolgrid.transport.planes import PlaneContext
from poolgrid.wire.addresses import TCP


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int


def plainly_reached(context: zmq.Context[Any], endpoint: str) -> Address | None:
    """Return where the event loop may connect to an endpoint by itself; ``None`` where CURVE closes it, or where it is
    not plain TCP."""
    return plain_address(endpoint) if isinstance(context, PlaneContext) and context.keys is None else None


def plain_address(endpoint: str) -> Address | None:
    """Return the host and the port of ``tcp://HOST:PORT``; ``None`` for anything else, of which libzmq knows more."""
    host, colon, port = endpoint.removeprefix(TCP).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not endpoint.startswith(TCP) or not colon or not host or set(host) & set("/;*[]"):
        return None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        return None
    return Address(host, int(port))
