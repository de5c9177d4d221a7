"""The workers of one model that take requests, ready to be looked at side by side, and what they hold of a prompt: from
the index, from prompts that were just computed, and from the router's own choices where events are not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import ge, itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from poolgrid.kernel.decision.policy import FloatArray, IndexArray, RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex, slots_of
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.load_ledger import LoadLedger, Pick
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.wire.identifiers import Role, WorkerKey

FEW_CANDIDATES: Final = 16
"""Up to this many workers are compared as plain numbers; arrays pay beyond."""

FEW_HOLDERS: Final = 48
"""Up to this many holders of a path are filled in one by one; beyond, their masks are unpacked at once."""

BUSY: Final = "busy"
"""Filter reason of a worker that already has as many requests as the router gives it."""

FORWARDED_ONLY: Final = "its server takes requests as their clients wrote them"
"""Filter reason of a worker that follows an engine server, for a request by token ids."""

Columns = tuple[Any, Any, Any]
"""Leading blocks on device, host and disk: each a list of floats for few workers, an array for many."""


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
    servers: tuple[int, ...]
    """Rows of those that follow engine servers, which take forwarded requests only."""
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
            and (request.is_forwarded or request.isl < few.max_sequence_length)
            and not request.media_kinds
            and (request.is_forwarded or not self.servers)
            and (not unavailable or self.row_of_worker.keys().isdisjoint(unavailable))
            and not any(map(ge, ledger.requests_of_few(few.pick), few.limits))
        ):
            return self.all_rows, self.draining
        short = self.max_sequence_length <= (0 if request.is_forwarded else request.isl)
        out = (ledger.requests[self.slots] >= self.limits) | short
        filtered = dict(self.draining)
        for worker, why in unavailable.items():
            row = self.row_of_worker.get(worker)
            if row is not None:
                out[row] = True
                filtered[worker] = why
        for row in () if request.is_forwarded else self.servers:
            out[row] = True
            filtered.setdefault(self.workers[row], FORWARDED_ONLY)
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
            tuple(row for row, worker in enumerate(members) if worker.card.server_url),
            max(slots, default=0),
            few,
        )


def _pick(slots: Sequence[int]) -> Pick:
    if len(slots) > 1:
        return itemgetter(*slots)
    [only] = slots
    return lambda sums: (sums[only],)


def overlap_columns(
    projection: Projection,
    group: WorkerGroup,
    path: Sequence[int],
    request: RoutingRequest,
    untrusted: Mapping[WorkerKey, str],
    now_ms: float,
    as_numbers: bool = False,
) -> Columns:
    """Return the leading blocks of a path that the workers of a group hold; as lists where ``as_numbers``."""
    size = len(group.workers)
    columns: Columns
    if as_numbers:
        columns = [0.0] * size, [0.0] * size, [0.0] * size
    else:
        columns = np.zeros(size), np.zeros(size), np.zeros(size)
    if path and request.by_text and projection.follows_blocks:
        for place, worker in enumerate(group.workers):
            _set(columns, place, projection.trust.predicted(worker, path, now_ms).device)
    elif path:
        index = projection.index
        if index.groups.reported:
            found, computed = _resumed(projection, group, path, request)
        else:
            found, computed = index.find(path), projection.trust.computed.overlaps(path)
        if found:
            _fill(index, group, path, found, columns)
        for worker, depth in computed:
            row = group.row_of_worker.get(worker)
            if row is not None and depth > columns[0][row] + columns[1][row] + columns[2][row]:
                _set(columns, row, depth)  # blocks that a worker has not reported are on its device
        for worker in untrusted:
            row = group.row_of_worker.get(worker)
            if row is not None:
                _set(columns, row, projection.trust.predicted(worker, path, now_ms).device)
    return columns


def _resumed(
    projection: Projection, group: WorkerGroup, path: Sequence[int], request: RoutingRequest
) -> tuple[list[tuple[int, int]], list[tuple[WorkerKey, int]]]:
    """Return the overlap by the index and just computed prompts, where some workers have several KV groups.

    These can resume at the end of such a prompt, where the window and the state are those that it left.
    """
    index, computed = projection.index, projection.trust.computed
    deepest = (request.isl - 1) // request.block_size
    several = {
        worker
        for mask in index.groups.reported.values()
        for slot in slots_of(mask)
        if (worker := index.worker(slot)) in group.row_of_worker
    }
    prompts = [(worker, depth) for worker, depth in computed.overlaps(path) if worker not in several]
    prompts += [(worker, depth) for worker, depth in computed.continued(path) if worker in several and depth <= deepest]
    return index.find(path, deepest, request.following), prompts


def _set(columns: Columns, row: int, device: int, host: int = 0, disk: int = 0) -> None:
    columns[0][row], columns[1][row], columns[2][row] = float(device), float(host), float(disk)


def _fill(
    index: PrefixIndex, group: WorkerGroup, path: Sequence[int], found: Sequence[tuple[int, int]], columns: Columns
) -> None:
    """Fill in what ``PrefixIndex.find`` found. No worker is in two of its masks."""
    device = columns[0]
    if index.lower.in_use:
        for depth, mask in found:
            for slot in slots_of(mask):
                row = group.row_of_slot.get(slot)
                if row is not None:
                    overlap = index.by_tier(path, slot, depth)
                    _set(columns, row, overlap.device, overlap.host, overlap.disk)
    elif group.few is not None:
        bits = group.few.bits
        for depth, mask in found:
            for row, bit in enumerate(bits):
                if mask & bit:
                    device[row] = depth
    elif sum(mask.bit_count() for _, mask in found) <= FEW_HOLDERS:
        for depth, mask in found:
            for slot in slots_of(mask):
                row = group.row_of_slot.get(slot)
                if row is not None:
                    device[row] = depth
    else:
        # Every mask as a row of bits, all of them unpacked at once.
        width = (max(group.last_slot + 1, *(mask.bit_length() for _, mask in found)) + 7) // 8
        packed = b"".join([mask.to_bytes(width, "little") for _, mask in found])
        held = np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").view(bool))
        depths = np.zeros(8 * width)
        depths[held % (8 * width)] = np.array([depth for depth, _ in found], np.float64)[held // (8 * width)]
        device[:] = depths[group.slots]
