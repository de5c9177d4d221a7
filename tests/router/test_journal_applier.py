"""A router that catches up: in slices, beside what it serves from, and what it decides meanwhile says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.consolidation.event_work import EVENT_UNITS
from poolgrid.kernel.consolidation.feed_reader import FeedReader, FeedState
from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.journal.ports import PoolListener
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import LOAD_STEP_BLOCKS, Hole, Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord, WorkerJoined
from poolgrid.kernel.wire.feed import BlockChain, FeedFrame, Records, SnapshotPart, WorkerState
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.ingest import LoadingWorker
from poolgrid.server.process import tasks
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router import journal_applier
from poolgrid.server.router.journal_applier import ARRIVED_RECORDS_MAX, RECORD_UNITS, SLICE_UNITS
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.links import link_opener
from tests.router.fleet_builder import decided, load_snapshot, make_card, stored, worker_key
from tests.router.index_structure import holdings

BLOCKS_PER_CHAIN = 64
RECORDS_PER_SLICE = SLICE_UNITS // (RECORD_UNITS + EVENT_UNITS + BLOCKS_PER_CHAIN)
"""Of ``a_record``."""


@pytest.fixture(autouse=True)
def _one_slice_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where one takes as long as a turn may."""
    monkeypatch.setattr(tasks, "SLICE_MS", 0.0)


def a_worker(name: str) -> WorkerState:
    return WorkerState(name, 0, 1, 0, make_card(), False, [])


def a_path(number: int) -> list[int]:
    return [number * 1000 + block for block in range(BLOCKS_PER_CHAIN)]


def a_record(offset: int, number: int) -> JournalRecord:
    return JournalRecord(offset, "w", 0, 1, offset, 0, 0, [stored(a_path(number))])


class HeldFeed:
    """A journal that a test hands over."""

    def __init__(self) -> None:
        self.missing = 0
        self.resyncs = 0
        self.listener: PoolListener | None = None

    async def start(self, listener: PoolListener) -> None:
        self.listener = listener
        listener.on_snapshot(1, [a_worker("w")], [(0, BlockChain(None, pack_hashes(a_path(0)), Tier.DEVICE))])

    def trouble(self, now_ms: float) -> str:
        return ""

    def resync(self) -> None:
        self.resyncs += 1

    def loading(self) -> list[LoadingWorker]:
        return []

    def behind(self) -> int:
        return self.missing

    async def stop(self) -> None:
        pass

    def snapshot(self, offset: int, chains: Iterable[tuple[int, BlockChain]]) -> None:
        assert self.listener is not None
        self.listener.on_snapshot(offset, [a_worker("v"), a_worker("w")], chains)

    def tell(self, records: Sequence[JournalRecord]) -> None:
        assert self.listener is not None
        self.listener.on_records(records)


class Scene:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        settings = RouterSettings()
        self.projection = Projection(PrefixIndex(), LoadLedger())
        self.selector = Selector(self.projection, make_policy("kv"))
        self.feed = HeldFeed()
        metrics = RouterMetrics(CollectorRegistry())
        self.service = RouterService(
            settings,
            RouterState(self.selector),
            self.feed,
            metrics,
            SystemClock(),
            link_opener(context, settings.worker_timeout_ms, SystemClock(), lambda: None),
        )

    def decide(self, number: int) -> Decision:
        request = RoutingRequest("r", "m", 16 * BLOCKS_PER_CHAIN, 16, BLOCKS_PER_CHAIN)
        return decided(
            self.selector.select(
                WorkerWanted(request, a_path(number), 0.0, 0, behind_records=self.service.behind_records)
            )
        )

    async def turns(self, done: Callable[[], bool]) -> int:
        """Let slices be done until a condition holds; return how many turns that took."""
        for turn in range(100_000):
            if done():
                return turn
            await asyncio.sleep(0)
        raise AssertionError("it never came to be")


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def played() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        scene = Scene(context)
        try:
            await scene.service.start()
            await scenario(scene)
        finally:
            await scene.service.stop()
            context.destroy(linger=0)

    asyncio.run(played())


def many_chains(count: int) -> Iterator[tuple[int, BlockChain]]:
    for number in range(count):
        yield number % 2, BlockChain(None, pack_hashes(a_path(number)), Tier.DEVICE)


def test_a_large_snapshot_is_loaded_in_slices_beside_the_state_that_serves() -> None:
    async def scenario(scene: Scene) -> None:
        slices = 5
        assert not scene.decide(0).reason.endswith("-behind")
        scene.feed.snapshot(500, many_chains(slices * LOAD_STEP_BLOCKS // BLOCKS_PER_CHAIN))
        scene.feed.tell([a_record(500, 9_000)])
        await asyncio.sleep(0)

        meanwhile = scene.decide(0)
        assert meanwhile.offset == 1  # the old state, whole
        assert meanwhile.overlap_blocks == BLOCKS_PER_CHAIN
        assert [str(worker) for worker in meanwhile.candidates.workers] == ["w"]
        assert meanwhile.behind_records == 499 + 1
        assert meanwhile.reason.endswith("-behind")
        assert meanwhile.explanation().behind_records == 500

        assert await scene.turns(lambda: scene.service.behind_records == 0) >= slices - 1
        after = scene.decide(9_000)
        assert after.offset == 501
        assert after.overlap_blocks == BLOCKS_PER_CHAIN
        assert after.behind_records == 0
        assert not after.reason.endswith("-behind")
        assert len(scene.projection.index) == slices * LOAD_STEP_BLOCKS + BLOCKS_PER_CHAIN

    run(scenario)


def test_a_record_of_many_blocks_is_a_slice_of_its_own_however_few_there_are() -> None:
    async def scenario(scene: Scene) -> None:
        paths = 2 * SLICE_UNITS // BLOCKS_PER_CHAIN
        large = [
            JournalRecord(1 + at, "w", 0, 1, at, 0, 0, [stored(a_path(at * paths + each)) for each in range(paths)])
            for at in range(3)
        ]
        small = [a_record(4 + at, 1_000 + at) for at in range(2)]

        # What the first snapshot replaced is let go of first, so that nothing is to be done when the records come.
        await scene.turns(lambda: not scene.service.journal._slice_scheduled)
        scene.feed.tell([*large, *small])
        seen = {scene.projection.next_offset}
        while scene.service.behind_records:
            await asyncio.sleep(0)
            seen.add(scene.projection.next_offset)

        assert sorted(seen) == [2, 3, 4, 6]

    run(scenario)


def test_records_beyond_the_bound_are_applied_before_anything_else() -> None:
    async def scenario(scene: Scene) -> None:
        scene.feed.tell(
            [
                JournalRecord(1 + at, "w", 0, 1, at, 0, 0, [])
                for at in range(ARRIVED_RECORDS_MAX + 2 * RECORDS_PER_SLICE)
            ]
        )

        assert scene.service.behind_records <= ARRIVED_RECORDS_MAX
        await scene.turns(lambda: scene.service.behind_records == 0)

    run(scenario)


@pytest.mark.parametrize("count", [1, 2 * RECORDS_PER_SLICE])
def test_a_hole_in_the_records_ends_in_a_snapshot_and_never_in_a_state_that_goes_on_without_them(count: int) -> None:
    async def scenario(scene: Scene) -> None:
        scene.feed.tell([a_record(1, 1)])
        scene.feed.tell([a_record(3 + at, 3 + at) for at in range(count)])
        await scene.turns(lambda: scene.feed.resyncs == 1)
        scene.feed.tell([a_record(3 + count, 77)])

        assert scene.projection.next_offset == 2
        assert scene.decide(3).overlap_blocks == 0
        assert scene.decide(1).reason.endswith("-behind")
        assert not scene.service.journal.level.is_set()

        scene.feed.snapshot(9_000, many_chains(2))
        scene.feed.tell([a_record(9_000, 88)])
        await scene.turns(lambda: scene.service.behind_records == 0)
        assert scene.projection.next_offset == 9_001
        assert scene.decide(88).overlap_blocks == BLOCKS_PER_CHAIN
        assert scene.feed.resyncs == 1

    run(scenario)


def test_a_record_that_breaks_the_state_ends_in_a_snapshot_at_most_once_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(scene: Scene) -> None:
        monkeypatch.setattr(journal_applier, "RESYNC_MS", 3_600_000.0)
        broken = JournalRecord(1, "w", 0, 1, 1, 0, 0, [object()])  # type: ignore[list-item]
        for round in (1, 2):
            scene.feed.tell([broken])
            await asyncio.sleep(0)
            await scene.turns(lambda: scene.feed.resyncs == 1)
            scene.feed.snapshot(1, many_chains(1))
            await scene.turns(lambda: scene.service.behind_records == 0)
            assert scene.service.journal.resyncs == round

    run(scenario)


def test_records_that_do_not_continue_the_state_change_nothing_and_say_what_was_expected() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    load_snapshot(projection, 7, [a_worker("w")], [], 0.0)
    for offset in (6, 8):
        with pytest.raises(Hole, match=f"record {offset} came, expected is record 7"):
            projection.apply(a_record(offset, 1), 0.0)
    assert projection.next_offset == 7
    assert len(projection.index) == 0


def test_what_the_feed_lacks_marks_decisions_too() -> None:
    async def scenario(scene: Scene) -> None:
        scene.feed.missing = 12

        assert scene.decide(0).behind_records == 12

    run(scenario)


def test_a_reader_of_the_feed_knows_how_much_it_lacks() -> None:
    life = b"l"

    def frame(offset: int) -> FeedFrame:
        record = JournalRecord(offset, "w", 0, 1, 0, 0, 0, [WorkerJoined(make_card())])
        return FeedFrame(offset, [codec.journal_record.encode(record)], life)

    reader = FeedReader()
    reader.start(0.0)
    assert reader.behind == 1
    reader.answer(SnapshotPart(1, 10, 0, True, [], []), life, 0.0)
    assert (reader.state, reader.behind) == (FeedState.LIVE, 0)

    reader.receive(frame(14), 1.0)
    assert (reader.state, reader.behind) == (FeedState.REPLAYING, 5)
    reader.answer(Records(2, [*frame(10).payloads, *frame(11).payloads, *frame(12).payloads], 15), life, 2.0)
    assert reader.behind == 0 or reader.state is FeedState.REPLAYING
    reader.answer(Records(3, [*frame(13).payloads, *frame(14).payloads], 15), life, 3.0)
    assert (reader.state, reader.behind, reader.next_offset) == (FeedState.LIVE, 0, 15)


def test_a_state_loaded_in_slices_is_that_loaded_in_one_go() -> None:
    states = [a_worker("v"), a_worker("w")]
    sliced, whole = Projection(PrefixIndex(), LoadLedger()), Projection(PrefixIndex(), LoadLedger())
    for projection in (sliced, whole):
        load_snapshot(projection, 3, [a_worker("w"), a_worker("x")], many_chains(2), 0.0)
    load = sliced.begin_load(9, states, many_chains(40))
    while load.step(1):
        pass
    sliced.adopt(load, 1.0)
    load_snapshot(whole, 9, states, many_chains(40), 1.0)

    for name in ("v", "w"):
        assert holdings(sliced.index, worker_key(name)) == holdings(whole.index, worker_key(name))
        assert sliced.index.slot(worker_key(name)) == whole.index.slot(worker_key(name))
    assert sliced.fleet.workers.keys() == whole.fleet.workers.keys()
    assert load.index is not None
    while load.index.discard(10):
        pass
    assert len(load.index) == 0
