"""A SUB's connection to one server of a plane, kept by the event loop itself (``poolgrid.transport.stream_client``)."""

from __future__ import annotations

import logging
from typing import Final

from poolgrid.transport.stream_client import StreamClient
from poolgrid.transport.subscriber import OnMessages
from poolgrid.transport.zmtp import SUB, subscription

log: Final = logging.getLogger(__name__)


class StreamSubscriber:
    """Subscribed, or being connected again."""

    def __init__(self, host: str, port: int, topic: bytes, on_messages: OnMessages) -> None:
        """Begin to connect, on the running loop."""
        self._address = f"{host}:{port}"
        self._topic = topic
        self._refused = ""
        self._client = StreamClient(host, port, SUB, self, lambda message: on_messages([message]))

    @property
    def has_more(self) -> bool:
        """Return whether messages have come that were not handed over: others have their turn first."""
        conversation = self._client.conversation
        return conversation is not None and bool(conversation.waiting)

    def close(self) -> None:
        """End; nothing more is handed over."""
        self._client.close()

    # -- as the connection tells -----------------------------------------------------------------------------------

    def on_connected(self) -> None:
        """Say what is wanted, to a server that knows nothing yet."""
        assert self._client.conversation is not None, "this tells of one"
        self._client.conversation.send(subscription(self._topic))

    def on_disconnected(self) -> None:
        """Who reads sees what is missing by what comes later."""

    def on_refused(self, why: str) -> None:
        """Say what is wrong with what is there, once."""
        if why != self._refused:
            self._refused = why
            log.warning("what is published at %s cannot be listened to: %s", self._address, why)
