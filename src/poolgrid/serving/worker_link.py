"""The request plane towards one worker process: one connection, its messages and its health.

Rules
    1. A link is *up* from its first ``Pong`` until its connection breaks or the worker is silent for ``timeout_ms``.
    2. When it goes down its owner is told once and moves the requests that were on it; when the connection comes back
       the link pings again and may come up again.
    3. Sends never wait: a link whose high-water mark is reached refuses, and the caller goes elsewhere.
    4. A frame whose taking is long is taken in several turns of the loop, and what comes after it waits. When the link
       goes down, what has come is taken first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from poolgrid.process.clock import Clock
from poolgrid.process.complaints import Complaints
from poolgrid.transport.dealer import connect_dealer
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.requests import Cancel, Drain, FromWorker, Generate, Ping, Pong, TokenBatch, TokenDelta

log: Final = logging.getLogger(__name__)

FIRST_PING_RETRY_S: Final = 0.005
"""libzmq may tell of a connection a moment before it takes messages for it; the first ping is then tried again."""


class WorkerLink:
    """A connection to one worker process."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        timeout_ms: float,
        clock: Clock,
        on_tokens: Callable[[WorkerLink, Iterator[TokenDelta]], bool],
        on_up: Callable[[WorkerLink], None],
        on_down: Callable[[WorkerLink, str], None],
        on_undecodable: Callable[[], None],
    ) -> None:
        """Begin to connect; raises ``zmq.ZMQError``, and keeps no socket then.

        ``on_tokens`` takes deltas of a frame, and returns whether that was all; if not, it is given the rest later.
        """
        self.endpoint = endpoint
        self.is_up = False
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._on_tokens = on_tokens
        self._on_up = on_up
        self._on_down = on_down
        self._on_undecodable = on_undecodable
        self._complaints = Complaints(log, clock)
        self._waiting: deque[Iterator[TokenDelta]] = deque()
        """What is left of a frame, and the frames after it: bounded by the tokens of the requests there."""
        self._nonce = 0
        self._retry: asyncio.TimerHandle | None = None
        self._fresh_from = 1
        """Answers to pings before this one are from before the connection broke, and prove nothing."""
        self._heard = False
        """Whether anything came since the last look; there are too many frames to ask a clock about each."""
        self._heard_ms = clock.monotonic_ms()
        """When that was last found."""
        self._refused = ""
        """Why what is there was last not taken for a worker; it is tried once a second, and said once."""
        self._dealer = connect_dealer(context, endpoint, self)
        self.ping()

    def generate(self, message: Generate, at_once: bool = False) -> bool:
        """Send a request; return False when the link is down or full.

        ``at_once`` is for a worker that has nothing to do: it is not kept waiting until all that is sent in this turn
        of the loop leaves together.
        """
        if not self.is_up or not self._dealer.send(codec.to_worker.encode(message)):
            return False
        if at_once:
            self._dealer.flush()
        return True

    def cancel(self, request_id: str) -> None:
        """Tell the worker to stop a request; a link that is down forgets its requests anyway."""
        self._dealer.send(codec.to_worker.encode(Cancel(request_id)))

    def drain(self, timeout_ms: int | None) -> bool:
        """Tell the worker to drain, within ``timeout_ms`` or its own time; return False when it cannot be told now."""
        return self.is_up and self._dealer.send(codec.to_worker.encode(Drain(timeout_ms)))

    def ping(self) -> bool:
        """Keep the lease at the worker, and ask whether it lives; return False when it could not be sent."""
        self._nonce += 1
        return self._dealer.send(codec.to_worker.encode(Ping(self._nonce)))

    def _first_ping(self) -> None:
        """Ping as soon as the new connection takes a message; its end ends the trying."""
        self._retry = None
        if not self.ping():
            self._retry = asyncio.get_running_loop().call_later(FIRST_PING_RETRY_S, self._first_ping)

    def _stop_trying(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def check(self, now_ms: float) -> None:
        """Ping, and go down when the worker has been silent for too long; called at a fraction of the timeout."""
        if self._heard:
            self._heard = False
            self._heard_ms = now_ms
        elif self.is_up and now_ms - self._heard_ms > self._timeout_ms:
            self._go_down(f"silent for {now_ms - self._heard_ms:.0f} ms, allowed are {self._timeout_ms:.0f}")
        self.ping()

    def close(self) -> None:
        """End the connection; nobody is told."""
        self.is_up = False
        self._waiting.clear()
        self._stop_trying()
        self._dealer.close()

    def on_frame(self, frame: bytes) -> None:
        """Take what the worker sent."""
        try:
            message: FromWorker = codec.from_worker.decode(frame)
        except DecodeError as error:
            self._on_undecodable()
            self._complaints.about(self.endpoint, error)
            return
        self._heard = True
        if type(message) is TokenBatch:
            deltas = iter(message.deltas)
            if self._waiting:
                self._waiting.append(deltas)
            elif not self._on_tokens(self, deltas):
                self._waiting.append(deltas)
                asyncio.get_running_loop().call_soon(self._take_waiting)
        elif isinstance(message, Pong) and not self.is_up and message.nonce >= self._fresh_from:
            self.is_up = True
            self._on_up(self)

    def _take_waiting(self) -> None:
        """Take what one turn may of the frames that wait."""
        if self._waiting and self._take_one():
            asyncio.get_running_loop().call_soon(self._take_waiting)

    def _take_one(self) -> bool:
        """Take some of the frame that waits longest; return whether anything is left to take."""
        try:
            whole = self._on_tokens(self, self._waiting[0])
        except Exception:  # as for every message: it costs what is left of its own frame
            log.exception("handling the rest of a message failed; it was dropped")
            whole = True
        if whole and self._waiting:
            self._waiting.popleft()
        return bool(self._waiting)

    def on_connected(self) -> None:
        """Ask at once whether the worker lives."""
        self._refused = ""
        self._stop_trying()
        self._first_ping()

    def on_disconnected(self) -> None:
        """Go down."""
        self._stop_trying()
        self._fresh_from = self._nonce + 1
        self._go_down("connection lost")

    def on_refused(self, why: str) -> None:
        """Say what is wrong with what is there, once."""
        if why != self._refused:
            self._refused = why
            log.warning("worker at %s cannot be talked to: %s", self.endpoint, why)

    def _go_down(self, why: str) -> None:
        if self.is_up:
            self.is_up = False
            self._fresh_from = self._nonce + 1
            while self._waiting:
                self._take_one()
            self._on_down(self, why)
