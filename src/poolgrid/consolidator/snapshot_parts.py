"""Cut a pool's state into the parts in which a snapshot travels."""

from __future__ import annotations

from collections.abc import Iterator

from poolgrid.consolidator.core.pool_state import FrozenPool
from poolgrid.wire.feed import BlockChain
from poolgrid.wire.limits import SNAPSHOT_CHAINS_PER_PART_MAX

PART_BYTES_MAX = 1024 * 1024
"""Bytes of hashes in one part: far below a frame's limit, few enough to encode and send between two turns."""

STEP_BYTES = 16 * 1024
"""Bytes of hashes, and 32 for each chain, that are gathered in one step: half a millisecond to one."""

Part = list[tuple[int, BlockChain]]
"""Chains, each with the position of its worker."""


def cut_snapshot(frozen: FrozenPool) -> Iterator[Part | None]:
    """Yield the chains of all workers in parts; there is always at least one, if only for the workers.

    ``None`` says that there is more to gather for the part under way: others may have their turn.
    """
    part: Part = []
    room, step = PART_BYTES_MAX, STEP_BYTES
    for item in frozen.visible_chains():
        size = len(item[1].sequence_hashes)
        if len(part) >= SNAPSHOT_CHAINS_PER_PART_MAX or (room < size and part):
            yield part
            part = []
            room, step = PART_BYTES_MAX, STEP_BYTES
        part.append(item)
        room -= size
        step -= size + 32
        if step <= 0:
            step = STEP_BYTES
            yield None
    yield part
