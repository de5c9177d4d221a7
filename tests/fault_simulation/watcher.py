"""What must hold at every moment of a run, whatever fails; the first breach ends the run.

Rules that are watched

1. Offsets have no holes: each append to a journal continues it, each router is given records in order and without
   holes behind its snapshot, and every record it is given is the one in the journal.
2. An acknowledgement (also a welcome is one) means "in the journal", and with ``fsync=always`` "durable".
3. No request is sent to a worker that the router knows to be gone or draining.
4. Every bound holds, and the sums of a ledger are the sums of its entries (``bounds.py``).
5. No router closes a connection on which requests are under way: what flows is not cut.
6. What is stored in a stream continues it: no record twice, no hole, nobody who was overtaken (``jetstream.py``). What
   a consolidator takes for stored was stored there.
7. Nothing raises what nobody expects, and no event loop waits for a disk.

A *reference fold* applies to each journal's records what the consolidator claims of them; ``quiet.py`` compares both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.journal.ports import Journal
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.feed import WORKER_SOURCE
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.kernel.wire.ingest import Acknowledged, Welcome
from poolgrid.server.router.feeds import RemoteFeed
from tests.fault_simulation.network import Pipe
from tests.fault_simulation.trace import Trace
from tests.fault_simulation.virtual_loop import Life, VirtualLoop

if TYPE_CHECKING:
    from tests.fault_simulation.machine import Machine
    from tests.fault_simulation.processes import RouterProcess


@dataclass(slots=True)
class PoolHistory:
    """What one life of a consolidator has in its journal."""

    reference: PoolState
    records: dict[int, JournalRecord] = field(default_factory=dict)
    next_seq: dict[tuple[WorkerKey, int], int] = field(default_factory=dict)
    """By worker and epoch: batches below this are in the journal."""


class Watcher:
    """Sees everything and believes nothing."""

    def __init__(self, loop: VirtualLoop, trace: Trace) -> None:
        self._loop = loop
        self._trace = trace
        self.failure: str | None = None
        self.over = False
        """Nothing counts any more: what is left is being cleared away."""
        self.histories: dict[str, PoolHistory] = {}
        """By the id of a consolidator's life."""
        self.lives_of: dict[str, list[str]] = {}
        """By pool: the lives of its consolidator, in order."""
        self.streams: dict[str, dict[int, list[JournalRecord]]] = {}
        """By pool whose journal is in a stream, and offset: what was ever stored there."""
        self._positions: dict[Life, int] = {}
        self.routers: dict[str, RouterProcess] = {}
        self.durable_machines: dict[str, Machine] = {}
        """By machine name: disks on which nothing may be acknowledged before it is durable."""
        self.dispatches = 0

    def note(self, what: str, details: str) -> None:
        """Write into the trace."""
        if self.over:
            return
        self._trace.note(self._loop.time(), what, details)

    def fail(self, why: str) -> None:
        """End the run, if this is the first breach."""
        if self.failure is None and not self.over:
            self.failure = f"at {1000 * self._loop.time():.3f} ms: {why}"
            self.note("BREACH", why)

    # -- journals ------------------------------------------------------------------------------------------------------

    def on_recover(self, pool: str, life: str, state: FrozenPool) -> None:
        """A consolidator has read its journal."""
        reference = reload(state)
        lives = self.lives_of.setdefault(pool, [])
        before = self.histories.get(lives[-1]) if lives else None
        records = {} if before is None else {o: r for o, r in before.records.items() if o < state.offset}
        history = self.histories[life] = PoolHistory(reference, records)
        lives.append(life)
        for worker in state.workers:
            for position in worker.entry.positions:
                if position.source == WORKER_SOURCE:
                    key = WorkerKey(worker.entry.state.worker_id, worker.entry.state.dp_rank)  # type: ignore[arg-type]
                    history.next_seq[(key, position.epoch)] = position.next_seq
        self.note("recover", f"{life} at offset {state.offset}")

    def on_append(self, life: str, payloads: Sequence[bytes]) -> None:
        """A journal has taken records."""
        history = self.histories[life]
        for payload in payloads:
            record = codec.journal_record.decode(payload)
            if record.offset != history.reference.offset:
                self.fail(f"{life} appended record {record.offset} where {history.reference.offset} follows")
                return
            history.reference.apply(record)
            history.records[record.offset] = record
            if record.source == WORKER_SOURCE:
                # A late copy of a greeting may make a consolidator begin a life again; what it acknowledged in the
                # same turn was in the journal all the same.
                life_key = (record.worker, record.epoch)
                history.next_seq[life_key] = max(history.next_seq.get(life_key, 0), record.seq + 1)

    # -- routers -------------------------------------------------------------------------------------------------------

    def on_snapshot(self, router: RouterProcess, next_offset: int) -> None:
        """A router is given a snapshot."""
        assert router.life is not None
        self._positions[router.life] = next_offset
        self.note("snapshot", f"{router.life} at {next_offset}")

    def on_records(self, router: RouterProcess, records: Sequence[JournalRecord]) -> None:
        """A router is given records."""
        assert router.life is not None
        history = self.histories.get(_followed(router))
        for record in records:
            expected = self._positions.get(router.life)
            if record.offset != expected:
                self.fail(f"{router.life} was given record {record.offset}, after it had those below {expected}")
                return
            self._positions[router.life] = record.offset + 1
            if history is not None and history.records.get(record.offset) != record and not self._was_there(record):
                self.fail(f"{router.life} was given a record {record.offset} that is not in the journal")

    def _was_there(self, record: JournalRecord) -> bool:
        """Say whether an earlier life had a record: the last of it may be read in the turn that tells of the next."""
        return any(history.records.get(record.offset) == record for history in self.histories.values())

    # -- messages ------------------------------------------------------------------------------------------------------

    def on_send(self, pipe: Pipe, from_client: bool, frames: list[bytes]) -> None:
        """Look at a message that leaves a process."""
        if pipe.plane == "request":
            if from_client and b"Generate" in frames[-1][:12]:
                self._on_dispatch(pipe)
        elif pipe.plane == "ingest" and not from_client:
            self._on_acknowledged(pipe, frames[-1])

    def on_close(self, pipe: Pipe, from_client: bool) -> None:
        """Look at a connection that one side closes while it stands."""
        life = pipe.client.life
        router = self.routers.get(life.machine)
        if pipe.plane != "request" or not from_client or life.dead or router is None or router.service is None:
            return
        under_way = router.service.tracker.legs_on(pipe.client.endpoint)
        if under_way:
            self.fail(f"{life} cut the streams of {under_way}, whose connection to {pipe.server.life} stands")

    def _on_dispatch(self, pipe: Pipe) -> None:
        self.dispatches += 1
        router = self.routers.get(pipe.client.life.machine)
        if router is None or router.service is None:
            return  # the global router knows pools, not workers
        endpoint = pipe.client.endpoint
        workers = router.service.projection.fleet.workers.values()
        at = [worker for worker in workers if worker.card.request_endpoint == endpoint]
        if not at:
            self.fail(f"{router.life} dispatched to {endpoint}, where no worker of its fleet is")
        elif all(worker.draining for worker in at):
            self.fail(f"{router.life} dispatched to {at[0].key}, which it knows to be draining")

    def _on_acknowledged(self, pipe: Pipe, frame: bytes) -> None:
        message = codec.from_consolidator.decode(frame)
        if not isinstance(message, Acknowledged | Welcome):
            return
        history = self.histories.get(message.consolidator_id)
        key = WorkerKey(message.worker_id, message.dp_rank)  # type: ignore[arg-type]
        stored = 0 if history is None else history.next_seq.get((key, message.epoch), 0)
        if message.next_seq > stored:
            self.fail(
                f"{message.consolidator_id} acknowledged batches below {message.next_seq} of {key}, "
                f"the journal has those below {stored}"
            )
        machine = self.durable_machines.get(pipe.server.life.machine)
        if machine is not None:
            for name, file in machine.disk.files.items():
                if file.durable < len(file.data):
                    self.fail(f"{message.consolidator_id} acknowledged to {key} while {name} is not durable")


def _followed(router: RouterProcess) -> str:
    """Return the life of the consolidator whose records a router is given."""
    feed = router.feed
    if isinstance(feed, RemoteFeed):
        follower = feed._follower
        life = follower._reader.life if follower is not None else None
        return life.decode() if life is not None else ""
    service = router.store.service
    return service.consolidator_id if service is not None else ""


def reload(frozen: FrozenPool) -> PoolState:
    """Return a pool's state that shares nothing with the one that was frozen."""
    return PoolState.load(
        frozen.offset,
        [worker.entry for worker in frozen.workers],
        frozen.source_chains(),
        sessions=frozen.sessions,
    )


class WatchedJournal:
    """A journal that tells the watcher what is in it; everything else is the journal's own."""

    def __init__(
        self,
        journal: Journal,
        watcher: Watcher,
        pool: str,
        life: str,
        ever: dict[int, list[JournalRecord]] | None = None,
    ) -> None:
        """``ever`` is what was stored in the stream, by offset, when the journal is in one."""
        self._journal = journal
        self._watcher = watcher
        self._pool = pool
        self._life = life
        self._ever = ever

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Append, then tell."""
        self._journal.append(payloads, now_ms)
        for payload in payloads if self._ever is not None else ():
            assert self._ever is not None
            record = codec.journal_record.decode(payload)
            if record not in self._ever.get(record.offset, ()):
                self._watcher.fail(f"{self._life} takes record {record.offset} for stored, which it never was")
        self._watcher.on_append(self._life, payloads)

    def recover(self, blocks_per_worker_max: int) -> PoolState:
        """Recover, then tell."""
        state = self._journal.recover(blocks_per_worker_max)
        self._watcher.on_recover(self._pool, self._life, state.freeze())
        return state


class LogWatcher(logging.Handler):
    """Fails the run when a service logs an exception: shells log what they survive, and in a run nothing should be."""

    def __init__(self, watcher: Watcher, all_lines: bool) -> None:
        super().__init__(logging.DEBUG if all_lines else logging.ERROR)
        self._watcher = watcher

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one line of a log."""
        if record.levelno < logging.ERROR or not record.exc_info:
            self._watcher.note("log", f"{record.name}: {record.getMessage()}")
            return
        error = record.exc_info[1]
        trace = error.__traceback__ if error is not None else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
        self._watcher.fail(f"{record.name} logged {record.getMessage()!r}: {error!r}{where}")
