"""Memory has a lid: budgets hold, and what runs for days takes as much at the end as it did early on."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from msgspec.structs import replace

from poolgrid.kernel.consolidation.consolidator import Consolidator, ConsolidatorLimits, ConsolidatorTurn, Now
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.index.prefix_index import BYTES_PER_BLOCK, PrefixIndex
from poolgrid.kernel.projection.load_ledger import ENTRY_BYTES, LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import BlocksRemoved, EventBatch, PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.kernel.wire.hashing import pack_hashes, stable_u64
from poolgrid.kernel.wire.identifiers import Stage, WorkerKey
from poolgrid.kernel.wire.ingest import Hello
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, make_card, stored, worker_key
from tests.router.test_selector import PATH, request

BLOCKS = 4096
HELD = 1500
"""Blocks that a worker's engine keeps; older ones it evicts."""


class Days:
    """A pool with small budgets under endless new prompts, in virtual time: consolidator, journal, one router."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.epochs = dict.fromkeys((worker_key(name) for name in "abcd"), 0)
        self.seqs = dict.fromkeys(self.epochs, 0)
        self.held: dict[WorkerKey, list[int]] = {key: [] for key in self.epochs}
        self.core = Consolidator(PoolState(), "c", ConsolidatorLimits(), self.now())
        self.journal = MemoryJournal(bytes_max=200_000)
        self.projection = Projection(PrefixIndex(BLOCKS * BYTES_PER_BLOCK), LoadLedger(budget_bytes=200 * ENTRY_BYTES))
        self.selector = Selector(self.projection, KvAware())
        self.decisions = DecisionLog(10_000, budget_bytes=200_000)
        self.served = 0
        for key in self.epochs:
            self.restart(key)

    def now(self) -> Now:
        return Now(self.now_ms, int(self.now_ms))

    def say(self, key: WorkerKey, message: Hello | EventBatch) -> None:
        turn = ConsolidatorTurn(self.now())
        if isinstance(message, EventBatch):
            self.core.batch(b"p", message, turn)
        else:
            self.core.receive(b"p", message, turn)
        self.core.finish(turn)
        self.journal.append([codec.journal_record.encode(record) for record in turn.records], int(self.now_ms))
        for record in turn.records:
            self.projection.apply(record, self.now_ms)

    def restart(self, key: WorkerKey) -> None:
        self.epochs[key] += 1
        self.seqs[key] = 0
        self.held[key] = []
        self.say(key, Hello(key.worker_id, key.dp_rank, self.epochs[key], make_card(), 0, 0))

    def serve(self, count: int) -> None:
        """Serve requests a minute apart, each with a prompt that nobody had; a worker restarts now and then."""
        for _ in range(count):
            self.served += 1
            self.now_ms += 60_000.0
            for key in self.epochs:
                self.core._links[key].heard_ms = self.now_ms
            name = f"request-{self.served}"
            path = [stable_u64(name, position) for position in range(16)]
            decision = decided(self.selector.select(WorkerWanted(request(name), path, self.now_ms, int(self.now_ms))))
            self.selector.book(decision, path, self.now_ms)
            self.decisions.add(decision)
            worker = decision.worker
            held = self.held[worker]
            held += path
            gone = held[: max(0, len(held) - HELD)]
            del held[: len(gone)]
            self.say(
                worker,
                EventBatch(
                    *worker,
                    self.epochs[worker],
                    self.seqs[worker],
                    int(self.now_ms),
                    [
                        RequestStarted(name, 16 * BLOCK_SIZE, 0, 16),
                        PrefillCompleted(name),
                        stored(path),
                        *([BlocksRemoved(pack_hashes(gone))] if gone else []),
                        RequestFinished(name, "length"),
                    ],
                ),
            )
            self.seqs[worker] += 1
            if self.served % 500 == 0:
                self.restart(worker)
            self.projection.ledger.expire(self.now_ms)


def test_days_of_traffic_take_no_more_memory_at_the_end_than_early_on() -> None:
    tracemalloc.start()
    try:
        days = Days()
        days.serve(1200)
        samples = []
        for _ in range(6):
            days.serve(400)
            gc.collect()
            samples.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    assert days.now_ms > 2 * 24 * 3_600_000
    assert days.projection.index.counters.evicted_blocks > 0, "the budget was reached"
    assert max(samples[3:]) < 1.1 * max(samples[:3]), samples
    assert len(days.projection.ledger) == 0
    assert days.decisions.size_bytes <= 200_000
    assert days.journal.sizes()[1] <= 200_000
    assert len(days.projection.index) <= BLOCKS


def test_the_ledger_counts_what_it_cannot_take() -> None:
    ledger = LoadLedger(budget_bytes=3 * ENTRY_BYTES)
    for number in range(5):
        ledger.reserve(worker_key("a"), 0, f"r{number}", 100, 4, now_ms=0)
    assert len(ledger) == 3
    assert ledger.refused_entries == 2
    assert ledger.size_bytes() <= 3 * ENTRY_BYTES


def test_the_oldest_decisions_give_way_to_the_budget_and_the_last_one_never_does() -> None:
    pool = Pool()
    pool.join(*(f"w{number:02}" for number in range(32)))
    selector = pool.selector(KvAware())
    log = DecisionLog(1000, budget_bytes=20_000)
    for number in range(50):
        log.add(decided(selector.select(WorkerWanted(request(f"r{number}"), PATH, 0.0, 0))))
    kept = [decision.request.request_id for decision in log.newest(1000)]
    assert 1 < len(kept) < 10
    assert kept[0] == "r49"
    assert log.size_bytes == sum(decision.size_bytes() for decision in log.newest(1000)) <= 20_000

    tiny = DecisionLog(1000, budget_bytes=1)
    tiny.add(decided(selector.select(WorkerWanted(request("r"), PATH, 0.0, 0))))
    assert len(tiny) == 1


def busy_selector(workers: int) -> Selector:
    pool = Pool()
    for position, key in enumerate(pool.join(*(f"w{number:02}" for number in range(workers)))):
        pool.say(key, stored(PATH[: 1 + position % 8]), RequestStarted("busy", 1000 + position, 0, 300 + position))
    return pool.selector(KvAware())


@pytest.mark.parametrize("stage", [Stage.WHOLE, Stage.DECODE])
@pytest.mark.parametrize("workers", [4, 32])
def test_the_garbage_collector_does_not_look_at_decisions_that_are_kept(workers: int, stage: Stage) -> None:
    def kept(count: int) -> list[Decision]:
        return [decided(selector.select(replace(wanted, time_ms=number))) for number in range(count)]

    def seen() -> int:
        gc.collect()
        gc.collect()  # a tuple of tuples is forgotten once these are
        return len(gc.get_objects())

    selector, wanted = busy_selector(workers), WorkerWanted(replace(request("r"), stage=stage), PATH, 0.0, 0)
    first = kept(1)
    before = seen()
    others = kept(100)
    assert seen() < before + len(others) // 2
    assert first[0].explanation().rows == others[-1].explanation().rows


@pytest.mark.parametrize("workers", [4, 16, 32])
def test_the_estimate_of_a_decision_is_near_what_it_takes(workers: int) -> None:
    selector, log = busy_selector(workers), DecisionLog(10_000, budget_bytes=10**9)
    tracemalloc.start()
    try:
        for number in range(300):
            log.add(decided(selector.select(WorkerWanted(request(f"request-{number:06}"), PATH, 0.0, 0))))
        measured = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * measured < log.size_bytes < 1.5 * measured
