"""How many leading blocks of a prompt each worker of a group holds, by tier: from the index, from prompts that were
just computed, and from the router's own choices where a worker's events are not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from poolgrid.router.core.candidates import RoutingRequest
from poolgrid.router.core.prefix_index import PrefixIndex, slots_of
from poolgrid.router.core.projection import Projection
from poolgrid.router.core.worker_groups import WorkerGroup
from poolgrid.wire.identifiers import WorkerKey

FEW_HOLDERS: Final = 48
"""Up to this many holders of a path are filled in one by one; beyond, their masks are unpacked at once."""

Columns = tuple[Any, Any, Any]
"""Leading blocks on device, host and disk: each a list of floats for few workers, an array for many."""


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
    if path:
        index = projection.index
        if index.groups.reported:
            found, computed = _resumed(projection, group, path, (request.isl - 1) // request.block_size)
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
    projection: Projection, group: WorkerGroup, path: Sequence[int], deepest: int
) -> tuple[list[tuple[int, int]], list[tuple[WorkerKey, int]]]:
    """Return the overlap by the index and just computed prompts, where some workers have several KV groups.

    These can resume at the end of such a prompt, where the window and the state are those that it left.
    """
    index, computed = projection.index, projection.trust.computed
    several = {
        worker
        for mask in index.groups.reported.values()
        for slot in slots_of(mask)
        if (worker := index.worker(slot)) in group.row_of_worker
    }
    prompts = [(worker, depth) for worker, depth in computed.overlaps(path) if worker not in several]
    prompts += [(worker, depth) for worker, depth in computed.continued(path) if worker in several and depth <= deepest]
    return index.find(path, deepest), prompts


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
