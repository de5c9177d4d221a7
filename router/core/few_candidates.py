"""The candidates of a small pool, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from poolgrid.wire.identifiers import WorkerKey


@final
class FewCandidates:
    """The columns of ``Candidates`` for a handful of workers: walking through them costs less than an array."""

    __slots__ = (
        "active_blocks",
        "device_overlap",
        "disk_overlap",
        "host_overlap",
        "prefill_tokens",
        "requests",
        "workers",
    )

    def __init__(
        self,
        workers: tuple[WorkerKey, ...],
        prefill_tokens: Sequence[float],
        active_blocks: Sequence[float],
        requests: Sequence[float],
        device_overlap: Sequence[float],
        host_overlap: Sequence[float],
        disk_overlap: Sequence[float],
    ) -> None:
        """Take columns of equal length, one row per worker, in the order of worker keys."""
        self.workers = workers
        self.prefill_tokens = prefill_tokens
        self.active_blocks = active_blocks
        self.requests = requests
        self.device_overlap = device_overlap
        self.host_overlap = host_overlap
        self.disk_overlap = disk_overlap

    def __len__(self) -> int:
        """Return the number of candidates, at least 1."""
        return len(self.workers)
