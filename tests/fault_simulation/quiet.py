"""What must hold once faults are over and nothing is under way: everybody agrees with what the engines hold.

``unquiet`` returns the first thing that does not hold yet, or ``None``. A run that does not become quiet in time has
failed, and that thing is what it failed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

import numpy as np

from poolgrid.kernel.consolidation.feed_reader import FeedState
from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.kernel.journal.stored_records import stored_records
from poolgrid.kernel.wire.feed import WORKER_SOURCE
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.plugins.nats.history import StreamHistory
from poolgrid.server.consolidator.journal.files import FileJournal
from poolgrid.server.router.feeds import RemoteFeed
from tests.fault_simulation.bounds import ledger_faults
from tests.fault_simulation.processes import (
    BLOCKS_PER_WORKER_MAX,
    AnyStore,
    GlobalRouterProcess,
    RouterProcess,
    SharedStore,
    WorkerProcess,
)
from tests.fault_simulation.watcher import Watcher
from tests.router.index_structure import holdings

FOLLOWED = frozenset({StreamState.LIVE, StreamState.SYNCING})
"""States of a stream of which nothing is missing."""


def _key(worker: WorkerProcess) -> WorkerKey:
    return WorkerKey(WorkerId(worker.name))


def held(worker: WorkerProcess) -> set[tuple[int, Tier]]:
    """Return what a worker's engine really holds."""
    assert worker.engine is not None
    return {
        (sequence_hash, chain.tier)
        for chain in worker.engine.resident_blocks()
        for sequence_hash in unpack_hashes(chain.sequence_hashes)
    }


def unquiet_worker(worker: WorkerProcess) -> str | None:
    """Return what a worker still has to do."""
    service, stream, engine = worker.service, worker.stream, worker.engine
    if service is None or stream is None or engine is None or not service.is_ready:
        return f"{worker.life} is not ready"
    load = engine.load()
    if load.running_requests or load.waiting_requests or load.active_blocks or load.prefill_tokens:
        return f"{worker.life} is busy: {load}"
    rest: dict[str, Sized] = {
        "requests": service._peers.owners,
        "peers": service._peers,
        "fetches": service._transfers.fetching,
        "kept transfers": service._kept,
        "endings": service._endings,
        "fetches of the fetcher": worker.fetcher._fetches if worker.fetcher is not None else (),
    }
    for name, things in rest.items():
        if len(things):
            return f"{worker.life} still has {len(things)} {name}"
    if not stream.is_settled:
        return f"{worker.life} has {len(stream.outbox)} batches that are not acknowledged"
    return None


def unquiet_store(store: AnyStore, workers: Iterable[WorkerProcess], watcher: Watcher) -> str | None:
    """Return where a consolidator does not agree with the workers of its pool."""
    service = store.service
    if service is None or not service.ready:
        return f"the consolidator on {store.machine_name} is not ready"
    pool = service.core.pool
    here = {_key(worker): worker for worker in workers}
    if set(pool.workers) != set(here):
        return f"{service.consolidator_id} knows {sorted(pool.workers)}, there are {sorted(here)}"
    for key, worker in here.items():
        known = pool.workers[key]
        assert worker.stream is not None
        if known.epoch != worker.epoch:
            return f"{service.consolidator_id} knows epoch {known.epoch} of {key}, it lives in {worker.epoch}"
        if known.cursors[WORKER_SOURCE].next_seq != worker.stream.outbox.next_seq:
            return f"{service.consolidator_id} is behind {key}"
        if {stream.state for stream in known.streams.values()} - FOLLOWED:
            return f"{service.consolidator_id} believes of the streams of {key}: {known.streams}"
        if known.requests or known.restating or known.draining:
            return (
                f"{service.consolidator_id} believes of {key}: {list(known.requests)}, restating {known.restating}, "
                f"draining {known.draining}"
            )
        believed = {
            (sequence_hash, tier)
            for position, chain in FrozenPool(0, [w for w in pool.freeze().workers if _of(w, key)]).visible_chains()
            for tier in [chain.tier]
            for sequence_hash in unpack_hashes(chain.sequence_hashes)
        }
        if believed != held(worker):
            return _differ(f"{service.consolidator_id} on {key}", believed, held(worker))
    history = watcher.histories.get(service.consolidator_id)
    if history is None:
        return f"{service.consolidator_id} has no history"
    return differ(f"the fold of {service.consolidator_id}'s journal", history.reference, pool)


def _of(worker: object, key: WorkerKey) -> bool:
    state = worker.entry.state  # type: ignore[attr-defined]
    return bool((state.worker_id, state.dp_rank) == key)


def differ(what: str, one: PoolState, other: PoolState) -> str | None:
    """Return where two states of a pool differ."""
    a, b = one.freeze(), other.freeze()
    if a.offset != b.offset:
        return f"{what} is at offset {a.offset}, the consolidator at {b.offset}"
    if [worker.entry for worker in a.workers] != [worker.entry for worker in b.workers]:
        return f"{what} has other workers than the consolidator"
    for left, right in zip(a.workers, b.workers, strict=True):
        mine = {(tier, group, source): set(blocks) for tier, group, source, blocks in left.held if blocks}
        theirs = {(tier, group, source): set(blocks) for tier, group, source, blocks in right.held if blocks}
        if mine != theirs:
            return f"{what} has other blocks of {left.entry.state.worker_id} than the consolidator"
    return None


def unquiet_router(router: RouterProcess, workers: Iterable[WorkerProcess]) -> str | None:
    """Return where a router does not agree with its pool, or what it still has to do."""
    service = router.service
    if service is None or not service.ready:
        return f"{router.life} is not ready"
    active, waiting = service.counts()
    links = service.tracker.endpoints()
    if active or waiting or links:
        return f"{router.life} has {list(service.tracker.requests)} active, {waiting} waiting, on links {links}"
    feed, offset = router.feed, router.store.offset
    if isinstance(feed, RemoteFeed):
        follower = feed._follower
        if follower is None or follower.state is not FeedState.LIVE or follower.next_offset != offset:
            return f"{router.life} does not follow the feed up to {offset}"
    projection = service.projection
    if projection.next_offset != offset:
        return f"{router.life} is at offset {projection.next_offset}, the consolidator at {offset}"
    here = {_key(worker): worker for worker in workers}
    if set(projection.fleet.workers) != set(here):
        return f"{router.life} knows {sorted(projection.fleet.workers)}, there are {sorted(here)}"
    if service.links.unreachable:
        return f"{router.life} cannot reach {sorted(service.links.unreachable)}"
    for key, worker in here.items():
        known = projection.fleet.workers[key]
        if known.epoch != worker.epoch or known.draining or known.card != worker.card:
            return f"{router.life} knows epoch {known.epoch} of {key}, draining {known.draining}"
        if projection.trust.stream(key)[0] not in FOLLOWED:
            return f"{router.life} believes of the stream of {key}: {projection.trust.stream(key)}"
        blocks_of = holdings(projection.index, key)
        believed = {(sequence_hash, tier) for tier, blocks in blocks_of.items() for sequence_hash in blocks}
        if believed != held(worker):
            return _differ(f"{router.life} on {key}", believed, held(worker))
    ledger = projection.ledger
    if ledger.entries():
        return f"the ledger of {router.life} has {sorted(ledger.entries())}"
    if np.any(ledger.requests) or np.any(ledger.prefill_tokens) or np.any(ledger.active_blocks):
        return f"{router.life}: {ledger_faults(ledger)}"
    return None


def unquiet_global(router: GlobalRouterProcess) -> str | None:
    """Return what the global router still has to do."""
    service = router.service
    if service is None or not router.ready:
        return f"{router.life} is not ready"
    if len(service) or service.tracker.endpoints():
        return f"{router.life} has {list(service.tracker.requests)} under way"
    for pool in service.pools.all():
        if pool.status is None or not pool.status.ready:
            return f"{router.life} has lost pool {pool.name}: {pool.last_error}"
        if any(link._asks for link in pool._links.values()):
            return f"{router.life} has questions open at pool {pool.name}"
    return None


class _Reading:
    """The stream as it is, without a fault on the way."""

    def __init__(self, store: SharedStore) -> None:
        servers = store.servers
        self.name = servers.machine
        self.facts, self.read = servers.facts, servers.read
        self.snapshots = lambda: sorted(servers.objects, key=lambda anchor: anchor.offset)
        self.get_snapshot = servers.objects.__getitem__


def _unsound_stream(store: SharedStore) -> str | None:
    service = store.service
    if service is None:
        return f"none of {store.machine_name} is active"
    truth = PoolState(BLOCKS_PER_WORKER_MAX)
    for record in store.servers.records:
        truth.apply(record)
    different = differ("the fold of all that was ever stored", truth, service.core.pool)
    if different is not None:
        return different
    reading = _Reading(store)
    try:
        read = StreamHistory(reading).recover(BLOCKS_PER_WORKER_MAX, reading.facts())
    except JournalCorrupt as error:
        return f"the stream cannot be read again: {error}"
    return differ("the stream, read again,", read, service.core.pool)


def unsound_journal(store: AnyStore) -> str | None:
    """Return what is wrong with a journal on disk, or in a stream."""
    if isinstance(store, SharedStore):
        return _unsound_stream(store)
    service, journal = store.service, store.journal
    if not isinstance(journal, FileJournal) or service is None:
        return None
    disk = store.disk()
    oldest = journal.oldest_offset
    try:
        for expected, record in enumerate((each.record for each in stored_records(disk)), oldest):
            if record.offset != expected:
                return f"the journal has record {record.offset} where {expected} should be"
        reopened = FileJournal(disk)
        if reopened.next_offset != journal.next_offset:
            return f"the journal reopens at {reopened.next_offset}, it is at {journal.next_offset}"
        return differ("the journal, read again,", reopened.recover(BLOCKS_PER_WORKER_MAX), service.core.pool)
    except JournalCorrupt as error:
        return f"the journal cannot be read again: {error}"


def _differ(who: str, believed: set[tuple[int, Tier]], truth: set[tuple[int, Tier]]) -> str:
    extra, missing = sorted(believed - truth), sorted(truth - believed)
    return (
        f"{who}: believes {len(believed)} blocks, the engine holds {len(truth)}; "
        f"{len(extra)} too many {_names(extra)}, {len(missing)} missing {_names(missing)}"
    )


def _names(blocks: list[tuple[int, Tier]]) -> str:
    return "[" + ", ".join(f"{number:016x} {tier.name.lower()}" for number, tier in blocks[:4]) + "]"
