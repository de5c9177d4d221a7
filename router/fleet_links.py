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
    6. A worker that joins with a cache that others filled is not asked before it has listed what that holds, for
       ``LISTING_MAX_MS`` at most: its prompts would be placed elsewhere, and others' on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import zmq

from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.requests.legs import LegEvent
from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.feed import own_stream
from poolgrid.kernel.wire.identifiers import StreamState, WorkerId, WorkerKey
from poolgrid.server.process.clock import Clock, within
from poolgrid.server.serving.links import LINKS_MAX, LinkTable, OpenLink, WorkerLink

log = logging.getLogger(__name__)

UNREACHABLE = "unreachable"
"""Filter reason of a worker that the pool knows and this router cannot talk to."""

FIRST_CONTACT_MS = 1_000.0
"""A worker that lives answers in milliseconds, on a busy host in tenths of a second. One that died and whose lease
still runs never answers: a router that is started again after a crash does not wait for it any longer."""

LISTING = "it still lists what its cache holds"
"""Filter reason of a worker that has joined and has not said yet what it has."""

LISTING_MAX_MS = 10_000.0
"""A list of a million blocks takes a second or two; one that does not end must not keep a worker from its work."""

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
        self._listing: dict[WorkerKey, float | None] = {}
        """Workers that list what they hold, and when that was looked at first."""
        self._never_listed: set[WorkerKey] = set()
        """Those of which the end of the list is not awaited any more."""
        self._contact: asyncio.Future[None] | None = None
        """Done once ``_is_contact`` holds; of a router that starts."""
        self._is_contact: Callable[[], bool] = lambda: True

    async def first_contact(self, clock: Clock) -> bool:
        """Wait until every worker has listed what it holds and every link is up, for ``LISTING_MAX_MS`` and
        ``FIRST_CONTACT_MS`` at most; return whether all are."""
        for limit_ms, holds in ((LISTING_MAX_MS, self._all_listed), (FIRST_CONTACT_MS, self._all_up)):
            if not holds():
                self._contact, self._is_contact = asyncio.get_running_loop().create_future(), holds
                with contextlib.suppress(TimeoutError):
                    await within(limit_ms, clock, self._contact)
                self._contact = None
        return not self.away

    def _all_listed(self) -> bool:
        return not self._listing

    def _all_up(self) -> bool:
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
        lists = {key for key, worker in workers.items() if _lists(worker)}
        self._never_listed &= lists
        self._listing = {key: self._listing.get(key) for key in lists - self._never_listed}
        wanted = set(self._endpoint_of.values())
        gone = self._close_left(wanted)
        self._unlinked = {each: why for each, why in self._unlinked.items() if each in wanted}
        for endpoint in self._endpoint_of.values():
            if endpoint not in self._links:
                self._try_connect(endpoint)
        self._note_reachability()
        # Last: what moves is placed among the workers that are there now, and each of those has its link.
        self._report_left(gone)

    def note_listed(self, workers: Mapping[WorkerKey, Worker]) -> None:
        """Look at who has listed what it holds by now; after each change of the pool's state."""
        if not self._listing:
            return
        over = [key for key in self._listing if key not in workers or not _lists(workers[key])]
        for key in over:
            del self._listing[key]
        if over:
            self._note_reachability()

    def check(self, now_ms: float) -> None:
        """Ping every worker, notice silent ones, try again where no link could be made."""
        for key, since_ms in list(self._listing.items()):
            if since_ms is None:
                self._listing[key] = now_ms
            elif now_ms - since_ms >= LISTING_MAX_MS:
                log.warning("worker %s does not end the list of what it holds: it gets requests without", key)
                del self._listing[key]
                self._never_listed.add(key)
                self._note_reachability()
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

    def of(self, key: WorkerKey) -> WorkerLink | None:
        """Return the link to a worker; ``None`` for one that has left, or gets none."""
        return self._links.get(self._endpoint_of.get(key, ""))

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
        down |= {key: LISTING for key in self._listing if key in self._endpoint_of and key not in down}
        self.away = frozenset(key for key in down if self._endpoint_of[key] in self._links)
        self.unreachable = {**down, **self._incompatible}
        self.version += 1
        if self._contact is not None and self._is_contact() and not self._contact.done():
            self._contact.set_result(None)

    def _on_up(self, link: WorkerLink) -> None:
        self._note_reachability()
        super()._on_up(link)

    def _on_down(self, link: WorkerLink, why: str) -> None:
        self._note_reachability()
        super()._on_down(link, why)


def _lists(worker: Worker) -> bool:
    """Return whether a worker has announced what it holds and has not ended the list."""
    own = own_stream(worker.streams.values())
    return own.state is StreamState.SNAPSHOTTING or (own.state is StreamState.SYNCING and bool(own.reason))
