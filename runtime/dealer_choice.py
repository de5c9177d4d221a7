"""Which kind of connection a server of a plane gets.

Where nothing is closed by CURVE, and over TCP, the event loop reads and writes the socket by itself
(``poolgrid.runtime.stream_dealer``): no thread, and one system call for all that is sent in a turn of the loop.
Otherwise libzmq does (``poolgrid.runtime.zmq_dealer``). Both speak ZMTP, so a server does not see which it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import zmq

from poolgrid.runtime.dealer import Dealer, DealerOwner
from poolgrid.runtime.planes import PlaneContext
from poolgrid.runtime.stream_dealer import StreamDealer
from poolgrid.runtime.zmq_dealer import ZmqDealer
from poolgrid.wire.addresses import TCP


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int


def connect_dealer(context: zmq.Context[Any], endpoint: str, owner: DealerOwner) -> Dealer:
    """Begin to connect, on the running loop; raises ``zmq.ZMQError`` for an endpoint that is none."""
    address = plain_address(endpoint) if isinstance(context, PlaneContext) and context.keys is None else None
    if address is None:
        return ZmqDealer(context, endpoint, owner)
    return StreamDealer(address.host, address.port, owner)


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
