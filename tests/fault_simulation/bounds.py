"""Bounds and sums that must hold at every moment; looked at again and again during a run."""

from __future__ import annotations

import numpy as np

from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from tests.fault_simulation.processes import (
    MAX_WAITING_REQUESTS,
    AnyStore,
    RouterProcess,
    WorkerProcess,
    kept_transfers_max,
)

RECORD_BYTES_MAX = 20_000
"""The newest record of a journal in memory stays, however large it is."""


def worker_faults(worker: WorkerProcess) -> str | None:
    """Return which bound of a worker does not hold."""
    if not worker.alive or worker.stream is None or worker.service is None or worker.engine is None:
        return None
    outbox = worker.stream.outbox
    if outbox.kept_bytes > worker.world.scenario.outbox_bytes:
        return f"{worker.life}: the outbox keeps {outbox.kept_bytes} bytes"
    plan, service, load = worker.plan, worker.service, worker.engine.load()
    kept_max = kept_transfers_max(worker.world.scenario)
    owned_max = 2 * (MAX_WAITING_REQUESTS + plan.max_batch_size) + kept_max
    if len(service._peers.owners) > owned_max:
        return f"{worker.life}: {len(service._peers.owners)} requests are owned, allowed are at most {owned_max}"
    if len(service._kept) > kept_max:
        return f"{worker.life}: {len(service._kept)} transfers are kept"
    if load.waiting_requests > MAX_WAITING_REQUESTS or load.active_blocks > plan.total_kv_blocks:
        return f"{worker.life}: beyond its limits, {load}"
    return None


def ledger_faults(ledger: LoadLedger) -> str | None:
    """Return where a ledger's sums are not the sums of its entries."""
    sums = np.zeros((3, len(ledger.requests)), np.int64)
    for entry in ledger.entries().values():
        sums[:, entry.slot] += (entry.prefill_tokens, entry.active_blocks, 1)
    columns = np.stack((ledger.prefill_tokens, ledger.active_blocks, ledger.requests))
    if not np.array_equal(sums, columns):
        return f"the ledger's sums are {columns.tolist()}, those of its entries {sums.tolist()}"
    return None


def router_faults(router: RouterProcess) -> str | None:
    """Return which bound of a router does not hold."""
    service = router.service
    if not router.alive or service is None:
        return None
    waiting = len(service.queue) - len(service.queue.resumed())
    if waiting > router.settings.max_queue_requests:
        return f"{router.life}: {waiting} requests wait, those that moved left out"
    faults = ledger_faults(service.projection.ledger)
    return None if faults is None else f"{router.life}: {faults}"


def store_faults(store: AnyStore) -> str | None:
    """Return which bound of a consolidator does not hold."""
    journal = store.journal
    if isinstance(journal, MemoryJournal):
        size = journal.sizes()[1]
        if size > store.memory_journal_bytes + RECORD_BYTES_MAX:
            return f"the journal in memory has {size} bytes"
    return None
