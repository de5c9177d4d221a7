"""What routers recorded of their decisions during a run, derived again when it is over.

In every ``RECORDED_EVERY``th seed each life of a router writes a decision journal in small segments. At the end each is
replayed against the records that the pool's journal held, as a whole and from the checkpoint of a later segment, as
after retention: nothing may come out differently, whatever was lost, stale, suspect or killed meanwhile.

Records that two lives of a consolidator gave the same offset (a power failure took the first, or the journal is in
memory), or that a life wrote in the moment in which it was killed, are no journal that the watcher has whole; such a
pool's recordings are passed over, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.server.consolidator.journal.files import FileJournal
from poolgrid.server.process.clock import Clock
from poolgrid.server.router.decision_journal.entries import Checkpoint
from poolgrid.server.router.decision_journal.opening import DECIDING_SETTINGS, policy_of
from poolgrid.server.router.decision_journal.reader import stored_entries
from poolgrid.server.router.decision_journal.recorder import DecisionRecorder, DecisionSegments, settings_noted
from poolgrid.server.router.decision_journal.replay import DecisionReplay, shown
from poolgrid.server.router.settings import RouterSettings
from tests.consolidator.journal_builder import FakeDisk

RECORDED_EVERY = 8
"""A recorded run takes half as long again."""

SEGMENT_BYTES = 2_000
"""A handful of decisions: a run of a few seconds has several checkpoints."""

FOREVER = 10**15


def is_recorded(seed: int) -> bool:
    """Say whether the routers of a seed's run record."""
    return seed % RECORDED_EVERY == 0


@dataclass(slots=True)
class Recordings:
    """The decision journals of all lives of all routers, by pool."""

    by_pool: dict[str, list[tuple[str, FakeDisk]]] = field(default_factory=dict)
    identical: int = 0
    from_checkpoints: int = 0
    """Of these, derived from the checkpoint of a later segment."""
    with_beliefs: int = 0
    """Checkpoints that replays began at and that hold what a router believed by its own choices."""
    passed_over: int = 0

    def begin(
        self, pool: str, life: str, settings: RouterSettings, state: RouterState, clock: Clock
    ) -> DecisionRecorder:
        """Return the recorder of a router's new life."""
        disk = FakeDisk()
        self.by_pool.setdefault(pool, []).append((life, disk))
        return DecisionRecorder(
            DecisionSegments(disk, FOREVER, FOREVER),
            state,
            settings_noted(life, "simulated", {name: getattr(settings, name) for name in DECIDING_SETTINGS}),
            clock,
            SEGMENT_BYTES,
        )

    def counts(self) -> dict[str, int]:
        """Return what was derived again."""
        return {
            "replayed decisions": self.identical,
            "replayed from checkpoints": self.from_checkpoints,
            "checkpoints with beliefs": self.with_beliefs,
            "recordings passed over": self.passed_over,
        }

    def differing(self, pool: str, lives: Iterable[dict[int, JournalRecord]], blocks_per_worker_max: int) -> str | None:
        """Return what of a pool's recordings does not come out again; ``lives`` are its consolidator's records."""
        records: dict[int, JournalRecord] = {}
        for held in lives:
            for offset, record in held.items():
                if records.setdefault(offset, record) != record:
                    self._pass_over(pool)
                    return None
        if records.keys() != set(range(len(records))):
            self._pass_over(pool)
            return None
        journal = _journal(records)
        for life, disk in self.by_pool.get(pool, ()):
            names = disk.names()
            for kept in sorted({0, len(names) // 2}):
                decisions = FakeDisk({name: bytes(disk.files[name]) for name in names[kept:]})
                outcome = DecisionReplay(journal, decisions, policy_of, blocks_per_worker_max).run()
                difference = outcome.difference
                if difference is not None:
                    return (
                        f"replaying {life} from its segment {kept} of {len(names)}: decision about "
                        f"{difference.request_id} at entry {difference.number}, {difference.what}: recorded "
                        f"{shown(difference.recorded)}, derived {shown(difference.derived)}"
                    )
                self.identical += outcome.identical
                if kept:
                    self.from_checkpoints += outcome.identical
                    first = next(e.entry for e in stored_entries(decisions) if isinstance(e.entry, Checkpoint))
                    self.with_beliefs += first.beliefs is not None
        return None

    def _pass_over(self, pool: str) -> None:
        self.passed_over += len(self.by_pool.get(pool, ()))


def _journal(records: dict[int, JournalRecord]) -> FakeDisk:
    disk = FakeDisk()
    journal = FileJournal(disk)
    for offset in range(len(records)):
        record = records[offset]
        journal.append([codec.journal_record.encode(record)], record.recorded_ms)
    return disk
