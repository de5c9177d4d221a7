"""Which kind of connection a server of a plane gets.

Where nothing is closed by CURVE, and over TCP, the event loop reads and writes the socket by itself
(``poolgrid.transport.stream_dealer``): no thread, and one system call for all that is sent in a turn of the loop.
Otherwise libzmq does (``poolgrid.transport.zmq_dealer``). Both speak ZMTP, so a server does not see which it is.
"""

from __future__ import annotations

from typing import Any

import zmq

from poolgrid.transport.dealer import Dealer, DealerOwner
from poolgrid.transport.plain_address import plainly_reached
from poolgrid.transport.stream_dealer import StreamDealer
from poolgrid.transport.zmq_dealer import ZmqDealer


def connect_dealer(context: zmq.Context[Any], endpoint: str, owner: DealerOwner) -> Dealer:
    """Begin to connect, on the running loop; raises ``zmq.ZMQError`` for an endpoint that is none."""
    address = plainly_reached(context, endpoint)
    if address is None:
        return ZmqDealer(context, endpoint, owner)
    return StreamDealer(address.host, address.port, owner)
