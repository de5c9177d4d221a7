"""The workers of one model that take requests, ready to be looked at side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import ge, itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from poolgrid.router.core.candidates import FloatArray, IndexArray, RoutingRequest
from poolgrid.router.core.fleet import Worker
from poolgrid.router.core.load_ledger import LoadLedger, Pick
from poolgrid.router.core.projection import Projection
from poolgrid.wire.identifiers import Role, WorkerKey

FEW_CANDIDATES: Final = 16
"""Up to this many workers are compared as plain numbers; arrays pay beyond."""

BUSY: Final = "busy"
"""Filter reason of a worker that already has as many requests as the router gives it."""


@dataclass(slots=True)
class FewWorkers:
    """A handful of workers in plain numbers."""

    bits: list[int]
    """Of each, its bit in the index's masks."""
    pick: Pick
    """Takes their places of the ledger's sums."""
    limits: list[float]
    max_sequence_length: int
    """The smallest of them."""


@dataclass(slots=True)
class WorkerGroup:
    """Workers of one model that take requests; rebuilt when the fleet or a worker's slot changes."""

    members: tuple[Worker, ...]
    workers: tuple[WorkerKey, ...]
    slots: IndexArray
    all_rows: IndexArray
    row_of_worker: dict[WorkerKey, int]
    row_of_slot: dict[int, int]
    limits: FloatArray
    """Most requests per worker."""
    max_sequence_length: NDArray[np.int64]
    draining: Mapping[WorkerKey, str]
    """Those that take nothing new, with this as their filter reason."""
    media_kinds: tuple[frozenset[str], ...]
    last_slot: int
    """The highest of ``slots``, 0 without any."""
    few: FewWorkers | None
    """The same in plain numbers, where there are few workers and at least one."""

    def eligible(
        self, request: RoutingRequest, unavailable: Mapping[WorkerKey, str], ledger: LoadLedger
    ) -> tuple[IndexArray, Mapping[WorkerKey, str]]:
        """Return the rows of those that may serve a request, ``all_rows`` itself for all; and why the others do not."""
        few = self.few
        if (
            few is not None
            and request.isl < few.max_sequence_length
            and not request.media_kinds
            and (not unavailable or self.row_of_worker.keys().isdisjoint(unavailable))
            and not any(map(ge, ledger.requests_of_few(few.pick), few.limits))
        ):
            return self.all_rows, self.draining
        short = self.max_sequence_length <= request.isl
        out = (ledger.requests[self.slots] >= self.limits) | short
        filtered = dict(self.draining)
        for worker, why in unavailable.items():
            row = self.row_of_worker.get(worker)
            if row is not None:
                out[row] = True
                filtered[worker] = why
        if request.media_kinds:
            for row, kinds in enumerate(self.media_kinds):
                if not kinds.issuperset(request.media_kinds):
                    out[row] = True
                    filtered.setdefault(self.workers[row], f"takes no {' and '.join(request.media_kinds)}")
        if not out.any():
            return self.all_rows, filtered
        for row in np.flatnonzero(out).tolist():
            worker = self.workers[row]
            if worker not in filtered:
                limit = int(self.max_sequence_length[row])
                filtered[worker] = f"prompt of {request.isl} tokens, room for {limit - 1}" if short[row] else BUSY
        return np.flatnonzero(~out), filtered


class WorkerGroups:
    """The groups of one projection's workers, by model and roles."""

    def __init__(self, projection: Projection, requests_per_worker_factor: float) -> None:
        self._projection = projection
        self._factor = requests_per_worker_factor
        self._groups: dict[tuple[str, tuple[Role, ...]], WorkerGroup] = {}
        self._version = -1

    def of(self, model: str, roles: tuple[Role, ...]) -> WorkerGroup:
        """Return the workers of a model that have one of some roles; the ledger has room for their slots."""
        projection = self._projection
        # Both only grow. A worker whose cache was cleared is in the fleet as before and has another slot.
        version = projection.fleet.version + projection.index.slot_changes
        if self._version != version:
            self._groups.clear()
            self._version = version
        group = self._groups.get((model, roles))
        if group is None:
            group = self._groups[(model, roles)] = self._make(projection.fleet.serving(model, roles))
            projection.ledger.ensure_slot(group.last_slot)  # which never has fewer again
        return group

    def _make(self, serving: list[Worker]) -> WorkerGroup:
        index = self._projection.index
        members = tuple(worker for worker in serving if not worker.draining)
        slots = [index.slot(worker.key) for worker in members]
        limits = [max(1.0, self._factor * worker.card.limits.max_batch_size) for worker in members]
        lengths = [worker.card.limits.max_sequence_length for worker in members]
        few = None
        if 1 <= len(members) <= FEW_CANDIDATES:
            few = FewWorkers([1 << slot for slot in slots], _pick(slots), limits, min(lengths))
        return WorkerGroup(
            members,
            tuple(worker.key for worker in members),
            np.array(slots, np.intp),
            np.arange(len(members)),
            {worker.key: row for row, worker in enumerate(members)},
            {slot: row for row, slot in enumerate(slots)},
            np.array(limits, np.float64),
            np.array(lengths, np.int64),
            {worker.key: "draining" for worker in serving if worker.draining},
            tuple(frozenset(worker.card.media.kinds) for worker in members),
            max(slots, default=0),
            few,
        )


def _pick(slots: Sequence[int]) -> Pick:
    if len(slots) > 1:
        return itemgetter(*slots)
    [only] = slots
    return lambda sums: (sums[only],)
