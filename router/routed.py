"""A request at its router."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping

import msgspec

from poolgrid.admission.admission_queue import QueuedRequest
from poolgrid.dispatch.leg_times import LegWatch
from poolgrid.dispatch.request_machine import RequestMachine
from poolgrid.router.placement import WaitCause
from poolgrid.wire.identifiers import WorkerKey


class Routed(msgspec.Struct, eq=False):
    """A request at this router, from its arrival to its end."""

    machine: RequestMachine
    path: array[int]
    """Sequence hashes of the prompt's whole blocks."""
    watch: LegWatch
    """Where it stands among the times of its legs."""
    tried: dict[WorkerKey, str] = {}
    """Workers that failed this request or refused it, and how: they come last."""
    queued: QueuedRequest[Routed] | None = None
    """Its place in the queue, while it waits."""
    behind: Mapping[WorkerKey, int] = {}
    """Those that wait and will be computed behind it on each worker, while it is placed by a plan."""
    resumed_for: WaitCause = WaitCause.WORKER_LOST
    """Why it waits, while its client is being served already."""
    dispatched: asyncio.Future[None] | None = None
    """Resolved when a waiting request is on a worker; ``None`` for one whose client reads its stream already."""
