"""A request at its router."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import final

from poolgrid.router.placement import WaitCause
from poolgrid.serving.admission.queued_request import QueuedRequest
from poolgrid.serving.leg_times import LegWatch
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.wire.identifiers import WorkerKey


@final
class Routed:
    """A request at this router, from its arrival to its end."""

    # Not a struct: what is asked for so often is a plain place in memory where it is compiled.
    __slots__ = (
        "behind",
        "dispatched",
        "machine",
        "path",
        "queued",
        "resumed_for",
        "tried",
        "unable",
        "waits_since_ms",
        "watch",
    )

    def __init__(self, machine: RequestMachine, path: array[int], watch: LegWatch) -> None:
        self.machine = machine
        self.path = path
        """Sequence hashes of the prompt's whole blocks."""
        self.watch = watch
        """Where it stands among the times of its legs."""
        self.tried: dict[WorkerKey, str] = {}
        """Workers that failed this request, and how: they come last."""
        self.unable: dict[WorkerKey, str] = {}
        """Workers that cannot do what it asks for, and why: they are not asked again."""
        self.waits_since_ms: float | None = None
        """Since when it has found no room; ``None`` once a worker has begun with it."""
        self.queued: QueuedRequest[Routed] | None = None
        """Its place in the queue, while it waits."""
        self.behind: Mapping[WorkerKey, int] = {}
        """Those that wait and will be computed behind it on each worker, while it is placed by a plan."""
        self.resumed_for: WaitCause = WaitCause.WORKER_LOST
        """Why it waits, while its client is being served already."""
        self.dispatched: asyncio.Future[None] | None = None
        """Resolved when a waiting request is on a worker; ``None`` for one whose client reads its stream already."""
