"""Workers of the pool that still load, by their own reports; see ``poolgrid.wire.loading``. No part of its state."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.wire.loading import LOADING_TTL_S, LOADING_WORKERS_MAX, LoadingWorker

LOADING_TTL_MS = 1000.0 * LOADING_TTL_S


class LoadingTable:
    """The last word of each."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, LoadingWorker]] = {}

    def note(self, worker: LoadingWorker, now_ms: float) -> None:
        """Keep a word; of workers beyond the bound nothing is kept."""
        if worker.worker_id not in self._said and len(self._said) >= LOADING_WORKERS_MAX:
            self.workers(now_ms)
            if len(self._said) >= LOADING_WORKERS_MAX:
                return
        self._said[worker.worker_id] = (now_ms, worker)

    def replace(self, workers: Sequence[LoadingWorker], now_ms: float) -> None:
        self._said = {worker.worker_id: (now_ms, worker) for worker in workers}

    def workers(self, now_ms: float) -> list[LoadingWorker]:
        """Return the loading workers by name; those that were silent for too long are dropped."""
        self._said = {name: each for name, each in self._said.items() if now_ms - each[0] < LOADING_TTL_MS}
        return [worker for _, (_, worker) in sorted(self._said.items())]
