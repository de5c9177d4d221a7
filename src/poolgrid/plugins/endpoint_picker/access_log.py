"""Which gateways report the ends of requests in their access log, and what its entries hold.

A gateway writes an entry when an HTTP request is over, whatever ended it. With its log, a request stays on the books
after its ext-proc stream has ended, so the pieces of an answer need not come to the picker.

Envoy opens the stream of its log with the first entry, one in each of its threads. Until then, and where a gateway has
no such log, a request is on the books as long as its ext-proc stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from poolgrid.plugins.endpoint_picker import envoy_messages as envoy

BOOKING = "x-poolgrid-booking"
"""Metadata key of a booking, in the endpoint's namespace: the log repeats what ext-proc has set."""

NAMESPACE = "envoy.lb"

GONE_MS = 30_000.0
"""How long a gateway may be without a stream for its log before its requests count as over: a new connection takes
seconds, and requests do not outlive the gateway that forwards them."""

LOG_STREAMS_MAX = 1024
"""Open streams for logs: one for each thread of each gateway. Those beyond are refused."""


class GatewayLogs:
    """The gateways whose access logs come here, by the address of each."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._closed_ms: dict[str, float] = {}
        """When the last stream of a gateway ended."""

    def __len__(self) -> int:
        return sum(self._open.values())

    def opened(self, gateway: str) -> None:
        self._open[gateway] = self._open.get(gateway, 0) + 1
        self._closed_ms.pop(gateway, None)

    def closed(self, gateway: str, now_ms: float) -> None:
        self._open[gateway] -= 1
        if not self._open[gateway]:
            del self._open[gateway]
            self._closed_ms[gateway] = now_ms

    def comes_from(self, gateway: str) -> bool:
        """Return whether a gateway has a stream for its log."""
        return gateway in self._open

    def is_gone(self, gateway: str, now_ms: float) -> bool:
        """Return whether a gateway has had no stream for so long that its requests count as over."""
        return gateway not in self._open and now_ms - self._closed_ms.get(gateway, now_ms - GONE_MS) >= GONE_MS

    def forget(self, now_ms: float) -> None:
        """Forget the gateways that are gone."""
        for gateway in [each for each in self._closed_ms if self.is_gone(each, now_ms)]:
            del self._closed_ms[gateway]


def ended_bookings(message: Any) -> Iterator[str]:
    """Return the bookings whose requests are over by a ``StreamAccessLogsMessage``."""
    for entry in message.http_logs.log_entry:
        common = entry.common_properties
        if common.access_log_type not in (envoy.LOG_NOT_SET, envoy.LOG_DOWNSTREAM_END):
            continue
        metadata = common.metadata.filter_metadata
        if NAMESPACE in metadata and BOOKING in metadata[NAMESPACE].fields:
            yield metadata[NAMESPACE].fields[BOOKING].string_value
