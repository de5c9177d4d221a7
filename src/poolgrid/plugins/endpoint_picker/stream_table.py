"""All streams of one endpoint picker: which of them wait for their gateway, since when, and what is held for them.

The limits are those of the router's HTTP server (``poolgrid.server.http.http_settings``), with as many streams for
connections and the picker's own memory for bodies.

Rules
    1. A stream without a request, or whose answer has ended, is ended after the time of a head. A stream whose request
       is not whole is answered 408 after the time of a body, to which each second's worth of bytes adds a second.
    2. Where the gateway gathers the body itself (``BUFFERED``), its bytes are not seen until all are there. The
       announced length counts as received then, or the largest body where none is announced.
    3. When there is no room for more of a request, the unfinished request that began first is answered 429. Headers
       and metadata count as the body does, from their arrival until they and the body are given back.
    4. When there is no room for a new stream, the one that has waited longest without a request gives way, else the
       unfinished request that began first. With a pick in each, the new stream is refused.
    5. A stream whose gateway takes nothing of what is written for the HTTP server's write timeout is reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from poolgrid.plugins.endpoint_picker.picker import Booking, Shed
from poolgrid.server.http.http_settings import HttpLimits

STREAMS_FULL = "streams_full"


class Held(Protocol):
    """What this module needs of an exchange."""

    @property
    def booking(self) -> Booking | None: ...

    @property
    def body_bytes(self) -> int: ...

    def end(self, shed: Shed | None) -> None:
        """Forget the request, answer ``shed`` where there is one to answer, and end the stream."""
        ...

    def reset(self) -> None:
        """End the stream without an answer, while something is being written."""
        ...


class StreamQueue(dict[Held, float]):
    """Exchanges in the order of their coming, with the time of it."""

    def first(self) -> Held | None:
        return next(iter(self), None)


class StreamTable:
    """The streams of one picker, in its event loop."""

    def __init__(self, limits: HttpLimits, body_bytes_max: int, now_s: Callable[[], float] = monotonic) -> None:
        """``limits.connections`` are for streams, ``limits.unfinished_bytes`` for requests; ``body_bytes_max`` is for
        one body."""
        self.limits = limits
        self.body_bytes_max = body_bytes_max
        self.used_bytes = 0
        """What is held of requests without an endpoint."""
        self._now_s = now_s
        self._open: set[Held] = set()
        self._silent = StreamQueue()
        """Without a request, or after the end of the answer."""
        self._bodies = StreamQueue()
        """With an unfinished request."""
        self._writing = StreamQueue()
        """In the middle of a write."""

    def __len__(self) -> int:
        return len(self._open)

    def bookings(self) -> Iterator[Booking]:
        for exchange in self._open:
            booking = exchange.booking
            if booking is not None:
                yield booking

    # -- coming and going ----------------------------------------------------------------------------------------------

    def enter(self, exchange: Held) -> bool:
        """Count a new stream in; return False if there is no room for it."""
        if len(self._open) >= self.limits.connections:
            given_way = self._silent.first() or self._bodies.first()
            if given_way is None:
                return False
            given_way.end(Shed(429, STREAMS_FULL, "too many requests are unfinished; try again later", 1.0))
            self.leave(given_way)
        self._open.add(exchange)
        self._silent[exchange] = self._now_s()
        return True

    def leave(self, exchange: Held) -> None:
        self._open.discard(exchange)
        self.settle(exchange)
        self._writing.pop(exchange, None)

    def await_body(self, exchange: Held) -> None:
        self._silent.pop(exchange, None)
        self._bodies[exchange] = self._now_s()

    def settle(self, exchange: Held) -> None:
        """A request is whole, or over: nothing more of it is waited for."""
        self._silent.pop(exchange, None)
        self._bodies.pop(exchange, None)

    def await_end(self, exchange: Held) -> None:
        if exchange in self._open:
            self._silent.setdefault(exchange, self._now_s())

    def writes(self, exchange: Held) -> None:
        self._writing.pop(exchange, None)  # the queue is in the order of the times
        self._writing[exchange] = self._now_s()

    def wrote(self, exchange: Held) -> None:
        self._writing.pop(exchange, None)

    # -- memory --------------------------------------------------------------------------------------------------------

    def has_room(self, exchange: Held, size: int) -> bool:
        """Make room for ``size`` bytes more of a request; return False if it is the one that has to give way."""
        while self.used_bytes + size > self.limits.unfinished_bytes:
            first = self._bodies.first()
            if first is None or first is exchange:
                return False
            first.end(bodies_full())
        return True

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End what has run out of time."""
        now_s, limits = self._now_s(), self.limits
        for exchange in _until(self._silent, now_s - limits.header_timeout_s):
            exchange.end(None)
        for exchange in _until(self._writing, now_s - limits.write_timeout_s):
            exchange.reset()
        for exchange in _until(self._bodies, now_s - limits.body_timeout_s):
            if self._bodies[exchange] + limits.body_time_s(exchange.body_bytes) <= now_s:
                exchange.end(
                    Shed(
                        408,
                        "body_timeout",
                        f"reading the request body: it is not whole in time, allowed are {limits.body_timeout_s:g} s "
                        f"and a second for each {limits.body_bytes_per_s:g} bytes "
                        "(setting http_request_timeout_ms)",
                    )
                )

    def leave_out(self, pause_s: float) -> None:
        """Have no stream's time include the last ``pause_s``, in which nothing was read."""
        for queue in (self._silent, self._bodies, self._writing):
            for exchange, since_s in queue.items():
                queue[exchange] = since_s + pause_s


def bodies_full() -> Shed:
    """Return the answer to a request for which there is no memory."""
    return Shed(429, "bodies_full", "there is no room for the body now; try again later", 1.0)


def _until(queue: StreamQueue, before_s: float) -> list[Held]:
    found = []
    for exchange, since_s in queue.items():
        if since_s > before_s:
            break
        found.append(exchange)
    return found
