"""Dumps of the pool's state at one offset, made in slices while further records are applied."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.wire.feed import BlockChain
from poolgrid.kernel.wire.limits import SNAPSHOT_CHAINS_PER_PART_MAX
from poolgrid.server.consolidator.service_context import ServiceContext
from poolgrid.server.process.tasks import BulkWork

T = TypeVar("T")

SLICE_BLOCKS = 512
"""Blocks freed in one turn: a quarter to half a millisecond."""

PART_BYTES_MAX = 1024 * 1024
"""Bytes of hashes in one part: far below a frame's limit, few enough to encode and send between two turns."""

STEP_BYTES = 16 * 1024
"""Bytes of hashes, and 32 for each chain, that are gathered in one step: half a millisecond to one."""

Part = list[tuple[int, BlockChain]]
"""Chains, each with the position of its worker."""


def cut_snapshot(frozen: FrozenPool) -> Iterator[Part | None]:
    """Yield the chains of all workers in parts; there is always at least one, if only for the workers.

    ``None`` means that there is more to gather for the current part: other work may have its turn.
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


class StateDumps:
    """Makes dumps, one at a time, and frees what workers no longer hold."""

    def __init__(self, pool: PoolState, bulk: BulkWork, context: ServiceContext) -> None:
        self._pool = pool
        self._bulk = bulk
        self._context = context
        self._freezing = asyncio.Lock()
        self._freeing = False

    @property
    def offset(self) -> int:
        return self._pool.offset

    async def make(self, make: Callable[[FrozenPool], Iterator[T]]) -> tuple[FrozenPool, list[T]]:
        """Make something of the state as it is at one offset; return it and the result.

        Others have their turn after each item that ``make`` yields. What happens in these turns is not in it.
        """
        async with self._freezing:
            frozen = self._pool.freeze()
            made: list[T] = []
            for item in make(frozen):
                made.append(item)
                await self._bulk.turn()
                if self._context.stopping:
                    break  # the result is not needed any more
            return frozen, made

    def free_discarded(self) -> None:
        """Free what workers no longer hold, a slice at a time, each once others had their turn."""
        if self._pool.discarded and not self._freeing:
            self._free()

    def _free(self) -> None:
        self._freeing = self._pool.discarded.free(SLICE_BLOCKS)
        if self._freeing and not self._context.stopping:
            self._bulk.soon(self._free)
