"""Which kind of subscription a server of a plane gets, by the same rule as ``poolgrid.transport.dealer_choice``."""

from __future__ import annotations

from typing import Any

import zmq

from poolgrid.transport.plain_address import plainly_reached
from poolgrid.transport.stream_subscriber import StreamSubscriber
from poolgrid.transport.subscriber import OnMessages, Subscriber
from poolgrid.transport.zmq_subscriber import ZmqSubscriber


def subscribe(context: zmq.Context[Any], endpoint: str, topic: bytes, on_messages: OnMessages) -> Subscriber:
    """Begin to connect, on the running loop; raises ``zmq.ZMQError`` for an endpoint that is none."""
    address = plainly_reached(context, endpoint)
    if address is None:
        return ZmqSubscriber(context, endpoint, topic, on_messages)
    return StreamSubscriber(address.host, address.port, topic, on_messages)
