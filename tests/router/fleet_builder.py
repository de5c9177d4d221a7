"""Small builders, so that tests of the router core read as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import Policy
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import LOAD_STEP_BLOCKS, Projection
from poolgrid.kernel.routing.selector import NoWorker, PolicyFailed, Selector
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, JournalRecord, WorkerJoined
from poolgrid.kernel.wire.feed import WorkerState
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, Tier, WorkerId, WorkerKey

BLOCK_SIZE = 16


def worker_key(name: str, dp_rank: int = 0) -> WorkerKey:
    return WorkerKey(WorkerId(name), dp_rank)


def make_card(
    model: str = "m",
    role: Role = Role.AGGREGATED,
    max_batch_size: int = 8,
    max_sequence_length: int = 4096,
    total_kv_blocks: int = 1000,
    block_size: int = BLOCK_SIZE,
    **changes: Any,
) -> WorkerCard:
    limits = WorkerLimits(max_batch_size, 8192, total_kv_blocks, max_sequence_length)
    return replace(WorkerCard(model, role, block_size, limits, "tcp://127.0.0.1:1"), **changes)


def stored(hashes: Sequence[int], parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlocksStored:
    return BlocksStored(parent, pack_hashes(hashes), tier)


class Pool:
    """A projection that is told events one record at a time."""

    def __init__(self) -> None:
        self.projection = Projection(PrefixIndex(), LoadLedger())
        self.records: list[JournalRecord] = []
        self._seq: dict[WorkerKey, int] = {}

    def say(self, worker: WorkerKey, *events: AnyEvent, epoch: int = 1) -> None:
        seq = self._seq.get(worker, 0)
        self._seq[worker] = seq + 1
        record = JournalRecord(
            len(self.records), worker.worker_id, worker.dp_rank, epoch, seq, 1000, 1001, list(events)
        )
        self.records.append(record)
        self.projection.apply(record, now_ms=0.0)

    def join(self, *names: str, card: WorkerCard | None = None) -> list[WorkerKey]:
        keys = [worker_key(name) for name in names]
        for key in keys:
            self.say(key, WorkerJoined(card or make_card()))
        return keys

    def selector(self, policy: Policy) -> Selector:
        return Selector(self.projection, policy)


def decided(found: Decision | NoWorker | PolicyFailed) -> Decision:
    """What a selector that must find somebody found."""
    assert isinstance(found, Decision), str(found)
    return found


def load_snapshot(
    projection: Projection, next_offset: int, workers: Sequence[WorkerState], chains: Any, now_ms: float
) -> None:
    """Replace all state in one go."""
    load = projection.begin_load(next_offset, workers, chains)
    while load.step(LOAD_STEP_BLOCKS):
        pass
    projection.adopt(load, now_ms)
