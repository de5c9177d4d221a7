"""The connections of a router to its pool's workers: one per worker process, and who cannot be reached.

Rules
    1. A worker that joins gets a link. One that leaves (its lease may have ended while it works on) loses it as soon
       as nothing is under way on it; streams that flow are not cut. Each link is opened by itself: a worker that
       cannot be connected to is unreachable, is said to be so once, is tried again at each ``check``, and is nobody
       else's trouble.
    2. A worker is reachable while its link is up. Whoever is not is named, with the reason, in ``unreachable``.
    3. A worker whose card its router cannot serve (``objection``) gets no link: it is named in ``unreachable`` with the
       reason, said to be so once, and never tried.
    4. ``version`` changes whenever somebody's reachability may have.
    5. A router that starts waits for the links of the workers that it finds to come up, for ``FIRST_CONTACT_MS`` at
       most: one that said before that it is ready would answer for a moment that nobody can serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

import zmq

from poolgrid.process.awake_clock import within
from poolgrid.process.clock import Clock
from poolgrid.process.log_lines import about
from poolgrid.router.core.fleet import Worker
from poolgrid.router.metrics import RouterMetrics
from poolgrid.router.settings import RouterSettings
from poolgrid.serving.happened import Happened
from poolgrid.serving.worker_link import WorkerLink
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.requests import TokenDelta

log = logging.getLogger(__name__)

UNREACHABLE = "unreachable"
"""Filter reason of a worker that the pool knows and this router cannot talk to."""

FIRST_CONTACT_MS = 1_000.0
"""A worker that lives answers in milliseconds, on a busy host in tenths of a second. One that died and whose lease runs
on answers never: a router started anew after a crash does not wait for it any longer."""

OpenLink = Callable[
    [
        str,
        Callable[[WorkerLink, Iterator[TokenDelta]], bool],
        Callable[[WorkerLink], None],
        Callable[[WorkerLink, str], None],
    ],
    WorkerLink,
]
"""Connects to an endpoint; told who hears of tokens, of the link coming up, and of its going down."""


def link_opener(
    context: zmq.Context[zmq.Socket[bytes]], settings: RouterSettings, metrics: RouterMetrics, clock: Clock
) -> OpenLink:
    """Return what opens links over real sockets."""
    timeout_ms, on_undecodable = settings.worker_timeout_ms, metrics.stream_faults.labels("undecodable").inc
    return lambda endpoint, on_tokens, on_up, on_down: WorkerLink(
        context, endpoint, timeout_ms, clock, on_tokens, on_up, on_down, on_undecodable
    )


Objection = Callable[[WorkerCard], str]
"""Says why a router cannot serve a worker with this card; empty = it can."""


class FleetLinks:
    """The links of one router."""

    def __init__(
        self,
        open_link: OpenLink,
        links_max: int,
        on_tokens: Callable[[WorkerLink, Iterator[TokenDelta]], bool],
        on_reachable: Callable[[], None],
        on_lost: Callable[[str, Happened, str], None],
        holds: Callable[[str], bool],
        objection: Objection = lambda _: "",
    ) -> None:
        """``on_reachable`` is told when a link came up, ``on_lost`` of an endpoint that broke or left, and why;
        ``holds`` tells whether requests are under way on an endpoint, ``objection`` why none may go to a worker."""
        self.unreachable: Mapping[WorkerKey, str] = {}
        """Workers that the pool knows and this router cannot talk to, and why."""
        self.away: frozenset[WorkerKey] = frozenset()
        """Those of them whose link may come up again by itself."""
        self.version = 0
        self._open_link = open_link
        self._links_max = links_max
        self._on_tokens = on_tokens
        self._on_reachable = on_reachable
        self._on_lost = on_lost
        self._holds = holds
        self._links: dict[str, WorkerLink] = {}
        self._endpoint_of: dict[WorkerKey, str] = {}
        self._unlinked: dict[str, str] = {}
        """Endpoints that no link could be made to, and why."""
        self._objection = objection
        self._misfits: dict[WorkerKey, str] = {}
        """Workers that this router cannot serve, and why."""
        self._contact: asyncio.Future[None] | None = None
        """Done once no link is down that may come up; of a router that starts."""

    async def first_contact(self, clock: Clock) -> bool:
        """Wait until every link is up, for ``FIRST_CONTACT_MS`` at most; return whether all are."""
        if self.away:
            self._contact = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                await within(FIRST_CONTACT_MS, clock, self._contact)
            self._contact = None
        return not self.away

    def sync(self, workers: Mapping[WorkerKey, Worker]) -> None:
        """Have exactly one link per worker process of the fleet."""
        misfits = {key: self._objection(worker.card) for key, worker in workers.items()}
        for key, why in misfits.items():
            if why and self._misfits.get(key) != why:
                log.error("worker %s gets no requests: %s", key, why, extra=about(worker=str(key)))
        self._misfits = {key: why for key, why in misfits.items() if why}
        self._endpoint_of = {
            key: worker.card.request_endpoint for key, worker in workers.items() if key not in self._misfits
        }
        wanted = set(self._endpoint_of.values())
        # What still comes over a link that is up needs no membership: it ends there, or the link does.
        gone = [each for each, link in self._links.items() if each not in wanted and not self._is_in_use(link)]
        for endpoint in gone:
            self._links.pop(endpoint).close()
        self._unlinked = {each: why for each, why in self._unlinked.items() if each in wanted}
        for endpoint in self._endpoint_of.values():
            if endpoint not in self._links:
                self._open(endpoint)
        self._note_reachability()
        # Last: what moves is placed among the workers that are there now, and each of those has its link.
        for endpoint in gone:
            self._on_lost(endpoint, Happened.LEFT, "the worker left the pool")

    def check(self, now_ms: float) -> None:
        """Ping every worker, notice silent ones, try again where no link could be made."""
        for link in list(self._links.values()):
            link.check(now_ms)
        self.close_left()
        if self._unlinked:
            for endpoint in list(self._unlinked):
                self._open(endpoint)
            self._note_reachability()

    def close_left(self) -> None:
        """Close links of workers that left the pool once nothing is under way on them."""
        wanted = set(self._endpoint_of.values())
        left = [each for each, link in self._links.items() if each not in wanted and not self._is_in_use(link)]
        for endpoint in left:
            self._links.pop(endpoint).close()
            self._on_lost(endpoint, Happened.LEFT, "the worker left the pool")

    def _is_in_use(self, link: WorkerLink) -> bool:
        return link.is_up and self._holds(link.endpoint)

    def to_worker(self, key: WorkerKey) -> WorkerLink:
        """Return the link to a worker of the fleet that is not in ``unreachable``."""
        return self._links[self._endpoint_of[key]]

    def drain(self, worker_id: WorkerId, timeout_ms: int | None) -> bool:
        """Tell a worker, with all its ranks, to drain; return False when it cannot be told now."""
        endpoints = (endpoint for key, endpoint in self._endpoint_of.items() if key.worker_id == worker_id)
        link = self._links.get(next(endpoints, ""))
        return link is not None and link.drain(timeout_ms)

    def get(self, endpoint: str) -> WorkerLink | None:
        return self._links.get(endpoint)

    def endpoints(self) -> list[str]:
        """Return where there are links to."""
        return list(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def close(self) -> None:
        """Close every link; nobody is told."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _open(self, endpoint: str) -> None:
        try:
            if len(self._links) >= self._links_max:
                raise ValueError(f"there are {self._links_max} connections to workers, the most that fit")
            link = self._open_link(endpoint, self._on_tokens, self._on_up, self._on_down)
        except (zmq.ZMQError, ValueError) as error:
            why = f"no connection can be made to {endpoint!r}: {error}"
            if self._unlinked.get(endpoint) != why:
                names = ", ".join(str(key) for key, each in self._endpoint_of.items() if each == endpoint)
                log.error("worker %s is unreachable: %s; it gets no requests, and it is tried again", names, why)
            self._unlinked[endpoint] = why
            return
        self._unlinked.pop(endpoint, None)
        self._links[endpoint] = link

    def _is_up(self, endpoint: str) -> bool:
        link = self._links.get(endpoint)
        return link is not None and link.is_up

    def _note_reachability(self) -> None:
        down = {
            key: self._unlinked.get(endpoint, UNREACHABLE)
            for key, endpoint in self._endpoint_of.items()
            if not self._is_up(endpoint)
        }
        self.away = frozenset(key for key in down if self._endpoint_of[key] in self._links)
        self.unreachable = {**down, **self._misfits}
        self.version += 1
        if self._contact is not None and not self.away and not self._contact.done():
            self._contact.set_result(None)

    def _on_up(self, _: WorkerLink) -> None:
        self._note_reachability()
        self._on_reachable()

    def _on_down(self, link: WorkerLink, why: str) -> None:
        self._note_reachability()
        log.warning("worker at %s is unreachable: %s", link.endpoint, why)
        self._on_lost(link.endpoint, Happened.LOST, why)
