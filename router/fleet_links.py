"""The connections of a router to its pool's workers: one per worker process, and the unreachable ones.

Rules
    1. A worker that joins gets a link. One that leaves (its lease may have ended while it works on) loses it as soon
       as no leg runs on it; streams that flow are not cut. Each link is opened by itself: a worker that
       cannot be connected to is unreachable, is reported once, is tried again at each ``check``, and delays no other
       worker.
    2. A worker is reachable while its link is up. The others are named, with the reason, in ``unreachable``.
    3. A worker whose card its router cannot serve (``compatibility_check``) gets no link: it is named in
       ``unreachable`` with the reason, reported once, and never tried.
    4. ``version`` changes whenever the reachability of a worker may have.
    5. A router that starts waits for the links of the workers that it finds to come up, for ``FIRST_CONTACT_MS`` at
       most: one that reported earlier that it is ready would answer for a moment that no worker can serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import zmq

from poolgrid.process.clock import Clock, within
from poolgrid.process.log_lines import about
from poolgrid.router.core.fleet import Worker
from poolgrid.serving.legs import LegEvent
from poolgrid.serving.links import LINKS_MAX, LinkTable, OpenLink, WorkerLink
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.identifiers import WorkerId, WorkerKey

log = logging.getLogger(__name__)

UNREACHABLE = "unreachable"
"""Filter reason of a worker that the pool knows and this router cannot talk to."""

FIRST_CONTACT_MS = 1_000.0
"""A worker that lives answers in milliseconds, on a busy host in tenths of a second. One that died and whose lease
still runs never answers: a router that is started again after a crash does not wait for it any longer."""

CompatibilityCheck = Callable[[WorkerCard], str]
"""Returns why a router cannot serve a worker with this card; empty = it can."""


class FleetLinks(LinkTable):
    """The links of one router."""

    def __init__(
        self,
        open_link: OpenLink,
        links_max: int = LINKS_MAX,
        compatibility_check: CompatibilityCheck = lambda _: "",
    ) -> None:
        super().__init__(open_link, links_max)
        self.unreachable: Mapping[WorkerKey, str] = {}
        """Workers that the pool knows and this router cannot talk to, and why."""
        self.away: frozenset[WorkerKey] = frozenset()
        """Those of them whose link may come up again by itself."""
        self.version = 0
        self._endpoint_of: dict[WorkerKey, str] = {}
        self._unlinked: dict[str, str] = {}
        """Endpoints that no link could be made to, and why."""
        self._compatibility_check = compatibility_check
        self._incompatible: dict[WorkerKey, str] = {}
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
        incompatible = {key: self._compatibility_check(worker.card) for key, worker in workers.items()}
        for key, why in incompatible.items():
            if why and self._incompatible.get(key) != why:
                log.error("worker %s gets no requests: %s", key, why, extra=about(worker=str(key)))
        self._incompatible = {key: why for key, why in incompatible.items() if why}
        self._endpoint_of = {
            key: worker.card.request_endpoint for key, worker in workers.items() if key not in self._incompatible
        }
        wanted = set(self._endpoint_of.values())
        gone = self._close_left(wanted)
        self._unlinked = {each: why for each, why in self._unlinked.items() if each in wanted}
        for endpoint in self._endpoint_of.values():
            if endpoint not in self._links:
                self._try_connect(endpoint)
        self._note_reachability()
        # Last: what moves is placed among the workers that are there now, and each of those has its link.
        self._report_left(gone)

    def check(self, now_ms: float) -> None:
        """Ping every worker, notice silent ones, try again where no link could be made."""
        for link in list(self._links.values()):
            link.check(now_ms)
        self._report_left(self._close_left(set(self._endpoint_of.values())))
        if self._unlinked:
            for endpoint in list(self._unlinked):
                self._try_connect(endpoint)
            self._note_reachability()

    def _close_left(self, wanted: set[str]) -> list[str]:
        """Close links of workers that left the pool, once no leg runs on them; return their endpoints.

        What still comes over a link that is up needs no membership: it ends there, or the link does.
        """
        left = [each for each, link in self._links.items() if each not in wanted and not self._is_in_use(link)]
        for endpoint in left:
            self._links.pop(endpoint).close()
        return left

    def _report_left(self, endpoints: list[str]) -> None:
        for endpoint in endpoints:
            self._on_lost(endpoint, LegEvent.LEFT, "the worker left the pool")

    def _is_in_use(self, link: WorkerLink) -> bool:
        return link.is_up and self._has_legs(link.endpoint)

    def to_worker(self, key: WorkerKey) -> WorkerLink:
        return self._links[self._endpoint_of[key]]

    def drain(self, worker_id: WorkerId, timeout_ms: int | None) -> bool:
        """Tell a worker, with all its ranks, to drain; return False when it cannot be reached now."""
        endpoints = (endpoint for key, endpoint in self._endpoint_of.items() if key.worker_id == worker_id)
        link = self._links.get(next(endpoints, ""))
        return link is not None and link.drain(timeout_ms)

    def _try_connect(self, endpoint: str) -> None:
        try:
            self._connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            why = f"no connection can be made to {endpoint!r}: {error}"
            if self._unlinked.get(endpoint) != why:
                names = ", ".join(str(key) for key, each in self._endpoint_of.items() if each == endpoint)
                log.error("worker %s is unreachable: %s; it gets no requests, and it is tried again", names, why)
            self._unlinked[endpoint] = why
        else:
            self._unlinked.pop(endpoint, None)

    def _note_reachability(self) -> None:
        down = {
            key: self._unlinked.get(endpoint, UNREACHABLE)
            for key, endpoint in self._endpoint_of.items()
            if (link := self._links.get(endpoint)) is None or not link.is_up
        }
        self.away = frozenset(key for key in down if self._endpoint_of[key] in self._links)
        self.unreachable = {**down, **self._incompatible}
        self.version += 1
        if self._contact is not None and not self.away and not self._contact.done():
            self._contact.set_result(None)

    def _on_up(self, link: WorkerLink) -> None:
        self._note_reachability()
        super()._on_up(link)

    def _on_down(self, link: WorkerLink, why: str) -> None:
        self._note_reachability()
        super()._on_down(link, why)
