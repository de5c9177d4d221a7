"""The request plane towards workers: one connection per worker process, its messages and its health.

Rules of a link
    1. A link is *up* from its first ``Pong`` until its connection breaks or the worker is silent for ``timeout_ms``.
    2. When it goes down its owner is called once and moves the requests that were on it; when the connection comes back
       the link pings again and may come up again.
    3. Sends never wait: a link whose high-water mark is reached refuses, and the caller goes elsewhere.
    4. A frame whose taking is long is taken in several turns of the loop, and what comes after it waits. When the link
       goes down, what has come is taken first.

A card that any process publishes makes every router of the pool open a connection for it. Connections that took the
last descriptor would keep clients out. So links have a share of their own (``links_that_fit``), and a worker beyond it
is unreachable and reported as such.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import zmq

from poolgrid.process.clock import Clock, within
from poolgrid.process.log_lines import Complaints
from poolgrid.serving.legs import LegEvent
from poolgrid.transport.dealer import connect_dealer
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.limits import ANSWERS_TOGETHER_MAX, FORWARDS_TOGETHER_MAX
from poolgrid.wire.requests import (
    Cancel,
    Drain,
    ForwardBegan,
    Forwarded,
    ForwardEnded,
    FromWorker,
    Generate,
    Ping,
    Pong,
    TokenBatch,
    TokenDelta,
)
from poolgrid.wire.sessions import TurnAnswer

log: Final = logging.getLogger(__name__)

LINKS_MAX = 8192
"""Worker processes of a large fleet of pools, twice over; each link is a socket and its monitor."""

FILES_PER_LINK = 4
"""A link's connection, and the descriptors by which its socket and both ends of its monitor are woken."""

ANSWERS_TOGETHER_S: Final = 0.05
"""Ends of turns wait so long for others: a message and a record for each would cost more than the rest of sessions.
This router knows of them at once, and no other is asked for the next turn sooner, unless its client has nothing to
do."""

FIRST_PING_RETRY_S: Final = 0.005
"""libzmq may tell of a connection a moment before it takes messages for it; the first ping is then tried again."""


class _Soon:
    """Calls ``report`` a moment after the first of several things to report, or at once when they are many."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[], None]) -> None:
        self._loop = loop
        self._report = report
        self._timer: asyncio.TimerHandle | None = None

    def added(self, waiting: int, most: int) -> None:
        """Note that something was added, which makes it ``waiting`` of at most ``most``."""
        if waiting >= most:
            self._now()
        elif self._timer is None:
            self._timer = self._loop.call_later(ANSWERS_TOGETHER_S, self._now)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now(self) -> None:
        self.cancel()
        self._report()


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
        self._loop = asyncio.get_running_loop()
        """Asking for it is a system call until Python 3.12."""
        self._answers: list[TurnAnswer] = []
        """Not reported to the worker yet."""
        self._began: list[ForwardBegan] = []
        self._computed: list[str] = []
        self._ended: list[ForwardEnded] = []
        """Of forwarded requests, not reported yet; the worker takes them in this order."""
        self._soon_answers = _Soon(self._loop, self._report_answers)
        self._soon_forwards = _Soon(self._loop, self._report_forwards)
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
        """Why what is there was last not taken for a worker; it is tried once a second, and logged once."""
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

    def answered(self, answer: TurnAnswer) -> None:
        """Have the worker soon put the end of a turn into the pool's journal; a link that is down loses it."""
        self._answers.append(answer)
        self._soon_answers.added(len(self._answers), ANSWERS_TOGETHER_MAX)

    def _report_answers(self) -> None:
        answers, self._answers = self._answers, []
        if self.is_up:
            self._dealer.send(codec.to_worker.encode(Cancel(answers[0].request_id, tuple(answers))))

    def forward_began(self, began: ForwardBegan) -> None:
        """Have the worker soon book a request that went straight to its server; a link that is down loses it."""
        self._began.append(began)
        self._soon_forwards.added(len(self._began), FORWARDS_TOGETHER_MAX)

    def forward_computed(self, request_id: str) -> None:
        self._computed.append(request_id)
        self._soon_forwards.added(len(self._computed), FORWARDS_TOGETHER_MAX)

    def forward_ended(self, ended: ForwardEnded) -> None:
        self._ended.append(ended)
        self._soon_forwards.added(len(self._ended), FORWARDS_TOGETHER_MAX)

    def _report_forwards(self) -> None:
        report = Forwarded(tuple(self._began), tuple(self._computed), tuple(self._ended))
        self._began, self._computed, self._ended = [], [], []
        if self.is_up:
            self._dealer.send(codec.to_worker.encode(report))

    def drain(self, timeout_ms: int | None) -> bool:
        """Order the worker to drain, within ``timeout_ms`` or its own time; return False when it is unreachable."""
        return self.is_up and self._dealer.send(codec.to_worker.encode(Drain(timeout_ms)))

    def ping(self) -> bool:
        """Keep the lease at the worker, and ask whether it lives; return False when it could not be sent."""
        self._nonce += 1
        return self._dealer.send(codec.to_worker.encode(Ping(self._nonce)))

    def _first_ping(self) -> None:
        """Ping as soon as the new connection takes a message; its end ends the trying."""
        self._retry = None
        if not self.ping():
            self._retry = self._loop.call_later(FIRST_PING_RETRY_S, self._first_ping)

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
        """End the connection without a message."""
        self.is_up = False
        self._waiting.clear()
        self._stop_trying()
        self._soon_answers.cancel()
        self._soon_forwards.cancel()
        self._dealer.close()

    def on_frame(self, frame: bytes) -> None:
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
                self._loop.call_soon(self._take_waiting)
        elif isinstance(message, Pong) and not self.is_up and message.nonce >= self._fresh_from:
            self.is_up = True
            self._on_up(self)

    def _take_waiting(self) -> None:
        if self._waiting and self._take_one():
            self._loop.call_soon(self._take_waiting)

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


OnTokens = Callable[[WorkerLink, Iterator[TokenDelta]], bool]
OpenLink = Callable[[str, OnTokens, Callable[[WorkerLink], None], Callable[[WorkerLink, str], None]], WorkerLink]
"""Connects to an endpoint; gets what takes tokens, and what is called when the link comes up and goes down."""


def link_opener(
    context: zmq.Context[Any], timeout_ms: float, clock: Clock, on_undecodable: Callable[[], None]
) -> OpenLink:
    """Return what opens links over real sockets."""
    return lambda endpoint, on_tokens, on_up, on_down: WorkerLink(
        context, endpoint, timeout_ms, clock, on_tokens, on_up, on_down, on_undecodable
    )


def links_that_fit(wanted: int = LINKS_MAX) -> int:
    """Return how many links half of the limit of open files allows; raises that limit for them where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = max(soft, 2 * FILES_PER_LINK * wanted)
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        log.info("raised the limit of open files from %d to %d for %d connections to workers", soft, allowed, wanted)
    fit = max(1, min(wanted, allowed // 2 // FILES_PER_LINK))
    if fit < wanted:
        log.info("%d connections to workers fit into half of the limit of %d open files (ulimit -n)", fit, allowed)
    return fit


class LinkTable:
    """The links of one router, by endpoint, at most ``links_max``."""

    def __init__(self, open_link: OpenLink, links_max: int = LINKS_MAX) -> None:
        self._open_link = open_link
        self._links_max = links_max
        self._links: dict[str, WorkerLink] = {}

    def attach(
        self,
        on_tokens: OnTokens,
        on_lost: Callable[[str, LegEvent, str], None],
        has_legs: Callable[[str], bool],
        on_reachable: Callable[[], None],
    ) -> None:
        """Connect the table with the tracker of its router; once, before the first link.

        ``on_lost`` is called for an endpoint that broke or left, ``on_reachable`` when a link came up; ``has_legs``
        tells whether requests run on an endpoint.
        """
        self._on_tokens = on_tokens
        self._on_lost = on_lost
        self._has_legs = has_legs
        self._on_reachable = on_reachable

    def get(self, endpoint: str) -> WorkerLink | None:
        return self._links.get(endpoint)

    def endpoints(self) -> list[str]:
        return list(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _connect(self, endpoint: str) -> WorkerLink:
        """Open a link; raises ``zmq.ZMQError``, or ``ValueError`` beyond ``links_max``."""
        if len(self._links) >= self._links_max:
            raise ValueError(f"there are {self._links_max} connections to workers, the most that fit")
        link = self._links[endpoint] = self._open_link(endpoint, self._on_tokens, self._on_up, self._on_down)
        return link

    def _on_up(self, link: WorkerLink) -> None:
        self._on_reachable()

    def _on_down(self, link: WorkerLink, why: str) -> None:
        log.warning("worker at %s is unreachable: %s", link.endpoint, why)
        self._on_lost(link.endpoint, LegEvent.LOST, why)


class LinksOnDemand(LinkTable):
    """Links to workers of many pools: opened when a worker is first chosen, closed when it is no longer used.

    A link that is new, or down, may take a moment to come up: ``up`` waits for it. One that has been down or unused for
    ``idle_ms`` is closed, unless requests run on it.
    """

    def __init__(self, open_link: OpenLink, idle_ms: float, clock: Clock, links_max: int = LINKS_MAX) -> None:
        super().__init__(open_link, links_max)
        self._idle_ms = idle_ms
        self._clock = clock
        self._used_ms: dict[str, float] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    async def up(self, endpoint: str, timeout_s: float) -> WorkerLink | None:
        """Return the link to a worker once it is up, or ``None`` when it does not come up in time."""
        link = self._links.get(endpoint)
        if link is None:
            try:
                link = self._connect(endpoint)
            except (zmq.ZMQError, ValueError) as error:
                log.warning("connecting to worker %s: %s", endpoint, error)
                return None
        self._used_ms[endpoint] = self._clock.monotonic_ms()
        if link.is_up:
            return link
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(endpoint, [])
        waiters.append(waiter)
        try:
            await within(1000 * timeout_s, self._clock, waiter)
        except TimeoutError:
            return None
        finally:
            waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(endpoint, None)
        return link if link.is_up else None

    def check(self) -> None:
        """Ping every worker, notice silent ones, close idle links; called at a fraction of the timeout."""
        now_ms = self._clock.monotonic_ms()
        for endpoint, link in list(self._links.items()):
            link.check(now_ms)
            idle = now_ms - self._used_ms[endpoint] > self._idle_ms
            if idle and endpoint not in self._waiters and not self._has_legs(endpoint):
                link.close()
                del self._links[endpoint], self._used_ms[endpoint]

    def close(self) -> None:
        super().close()
        for endpoint in list(self._waiters):
            self._resolve(endpoint)

    def _on_up(self, link: WorkerLink) -> None:
        self._resolve(link.endpoint)

    def _resolve(self, endpoint: str) -> None:
        for waiter in self._waiters.get(endpoint, ()):
            if not waiter.done():
                waiter.set_result(None)
