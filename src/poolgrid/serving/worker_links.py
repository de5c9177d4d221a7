"""Connections to workers that are met one by one: opened when a worker is first chosen, closed when it is forgotten.

Rules
    1. One link per worker process, by the endpoint of its request plane.
    2. A link that is new, or down, may take a moment to come up: ``up`` waits for it, at most for a given time.
    3. A link that has been down or unused for ``idle_ms`` is closed, unless somebody holds it for requests. Beyond
       ``links_max`` links no worker is reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import zmq

from poolgrid.process.awake_clock import within
from poolgrid.process.clock import Clock
from poolgrid.serving.link_budget import LINKS_MAX
from poolgrid.serving.worker_link import WorkerLink
from poolgrid.wire.requests import Generate, TokenDelta

log = logging.getLogger(__name__)


class Link(Protocol):
    """What dispatching needs of a connection."""

    endpoint: str
    is_up: bool

    def generate(self, message: Generate, at_once: bool = False) -> bool:
        """Send a request, ``at_once`` to a worker with nothing to do; return False when that is not possible now."""
        ...

    def cancel(self, request_id: str) -> None:
        """Tell the worker to stop a request."""
        ...


class LinkOwner(Protocol):
    """Who is told what links say."""

    def on_tokens(self, link: Link, deltas: Iterator[TokenDelta]) -> bool:
        """Take a worker's output, as much of it as one turn may; return whether that was all."""
        ...

    def on_link_down(self, endpoint: str, why: str) -> None:
        """Move what was on a link that broke."""
        ...

    def holds(self, endpoint: str) -> bool:
        """Tell whether requests are on a link."""
        ...


class Links(Protocol):
    """The connections to the workers of many pools."""

    async def up(self, endpoint: str, timeout_s: float) -> Link | None:
        """Return the link to a worker once it is up, or ``None`` when it does not come up in time."""
        ...

    def get(self, endpoint: str) -> Link | None:
        """Return a link that is there."""
        ...

    def check(self) -> None:
        """Ping every worker, notice silent ones, close what nobody needs; called at a fraction of the timeout."""
        ...


class WorkerLinks:
    """``Links`` over real sockets."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        timeout_ms: float,
        idle_ms: float,
        clock: Clock,
        on_undecodable: Callable[[], None],
        links_max: int = LINKS_MAX,
    ) -> None:
        self._links_max = links_max
        self._context = context
        self._timeout_ms = timeout_ms
        self._idle_ms = idle_ms
        self._clock = clock
        self._on_undecodable = on_undecodable
        self._owner: LinkOwner | None = None
        self._links: dict[str, WorkerLink] = {}
        self._used_ms: dict[str, float] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def attach(self, owner: LinkOwner) -> None:
        """Say who is told what links say; once, before the first link."""
        self._owner = owner

    async def up(self, endpoint: str, timeout_s: float) -> Link | None:
        """Return the link to a worker once it is up, or ``None`` when it does not come up in time."""
        link = self._links.get(endpoint) or self._open(endpoint)
        if link is None:
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

    def get(self, endpoint: str) -> Link | None:
        return self._links.get(endpoint)

    def check(self) -> None:
        """Ping every worker, notice silent ones, close what nobody needs; called at a fraction of the timeout."""
        assert self._owner is not None, "attached before the first link"
        now_ms = self._clock.monotonic_ms()
        for endpoint, link in list(self._links.items()):
            link.check(now_ms)
            idle = now_ms - self._used_ms[endpoint] > self._idle_ms
            if idle and endpoint not in self._waiters and not self._owner.holds(endpoint):
                link.close()
                del self._links[endpoint], self._used_ms[endpoint]

    def close(self) -> None:
        """Close every link; nobody is told."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._links)

    def _open(self, endpoint: str) -> WorkerLink | None:
        assert self._owner is not None, "attached before the first link"
        if len(self._links) >= self._links_max:
            log.error("connecting to worker %s: there are %d links, the most that fit", endpoint, self._links_max)
            return None
        try:
            link = WorkerLink(
                self._context,
                endpoint,
                self._timeout_ms,
                self._clock,
                self._owner.on_tokens,
                self._on_up,
                self._on_down,
                self._on_undecodable,
            )
        except zmq.ZMQError as error:
            log.warning("connecting to worker %s: %s", endpoint, error.strerror)
            return None
        self._links[endpoint] = link
        return link

    def _on_up(self, link: WorkerLink) -> None:
        for waiter in self._waiters.get(link.endpoint, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _on_down(self, link: WorkerLink, why: str) -> None:
        assert self._owner is not None, "attached before the first link"
        log.warning("worker at %s is unreachable: %s", link.endpoint, why)
        self._owner.on_link_down(link.endpoint, why)
