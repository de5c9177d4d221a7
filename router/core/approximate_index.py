"""A prefix index without events: what the router itself sent where, believed for a limited time.

Rules
    1. Each choice says: this worker now holds this path. A later choice of the same path renews the belief.
    2. A belief expires ``ttl_ms`` after its last renewal.
    3. Nothing is ever corrected by the worker: this is for engines whose events cannot be had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from router.core.prefix_index import PrefixIndex
from wire.identifiers import WorkerKey


class ApproximateIndex:
    """Feeds a ``PrefixIndex`` from choices and expiry."""

    def __init__(self, index: PrefixIndex, ttl_ms: float) -> None:
        if ttl_ms <= 0:
            raise ValueError(f"making an approximate index: ttl_ms is {ttl_ms}, allowed are values above 0")
        self.index = index
        self._ttl_ms = ttl_ms
        self._renewed_ms: dict[WorkerKey, dict[int, float]] = {}
        self._due: deque[tuple[float, WorkerKey, tuple[int, ...]]] = deque()

    def record(self, worker: WorkerKey, path: Sequence[int], now_ms: float) -> None:
        """Believe that a worker holds a path from now on."""
        self.expire(now_ms)
        if not path:
            return
        self.index.store(worker, None, path)
        self._renewed_ms.setdefault(worker, {}).update(dict.fromkeys(path, now_ms))
        self._due.append((now_ms + self._ttl_ms, worker, tuple(path)))

    def drop(self, worker: WorkerKey) -> None:
        """Forget a worker."""
        self._renewed_ms.pop(worker, None)
        self.index.drop(worker)

    def expire(self, now_ms: float) -> None:
        """Drop every belief whose time is over."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, worker, path = self._due.popleft()
            renewed = self._renewed_ms.get(worker)
            if renewed is None:
                continue
            over = [h for h in reversed(path) if renewed.get(h, due_ms) + self._ttl_ms <= due_ms]
            for sequence_hash in over:
                del renewed[sequence_hash]
            self.index.remove(worker, over)
