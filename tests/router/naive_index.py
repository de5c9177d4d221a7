"""The slow and obvious twin of the prefix index: a dict of sets."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.kernel.wire.identifiers import Tier, WorkerKey


class NaiveIndex:
    """Per worker and tier, the set of blocks it holds; overlap walks the path."""

    def __init__(self) -> None:
        self.held: dict[WorkerKey, dict[Tier, set[int]]] = {}

    def store(self, worker: WorkerKey, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        self.held.setdefault(worker, {each: set() for each in Tier})[tier].update(hashes)

    def remove(self, worker: WorkerKey, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        if worker in self.held:
            self.held[worker][tier].difference_update(hashes)

    def drop(self, worker: WorkerKey) -> None:
        self.held.pop(worker, None)

    def overlap(self, path: Sequence[int], worker: WorkerKey) -> tuple[int, int, int]:
        """Return leading blocks of the path by the fastest tier that has them."""
        tiers = self.held.get(worker)
        counts = [0, 0, 0]
        for block in path:
            fastest = next((tier for tier in Tier if tiers and block in tiers[tier]), None)
            if fastest is None:
                break
            counts[fastest] += 1
        return counts[0], counts[1], counts[2]
