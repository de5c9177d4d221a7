"""Cut a pool's state into the parts in which a snapshot travels."""

from __future__ import annotations

from router.consolidator.core.pool_state import FrozenPool
from wire.feed import BlockChain
from wire.limits import SNAPSHOT_CHAINS_PER_PART_MAX

PART_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of hashes in one part: far below a frame's limit, few enough to encode between two turns."""


def cut_snapshot(frozen: FrozenPool) -> list[list[tuple[int, BlockChain]]]:
    """Return the chains of all workers in parts; there is always at least one, if only for the workers."""
    parts: list[list[tuple[int, BlockChain]]] = [[]]
    room = PART_BYTES_MAX
    for item in frozen.visible_chains():
        part = parts[-1]
        room -= len(item[1].sequence_hashes)
        if len(part) >= SNAPSHOT_CHAINS_PER_PART_MAX or (room < 0 and part):
            part = []
            parts.append(part)
            room = PART_BYTES_MAX - len(item[1].sequence_hashes)
        part.append(item)
    return parts
