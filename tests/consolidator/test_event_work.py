"""A large batch is several records: the same state, wherever it is cut, and whoever restarts in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from poolgrid.kernel.consolidation import event_work
from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn
from poolgrid.kernel.consolidation.event_work import PART_UNITS, parts_of, units_of
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    JournalRecord,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
)
from poolgrid.kernel.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.server.consolidator import loop_share
from poolgrid.server.consolidator.bootstrap import create
from poolgrid.server.consolidator.loop_share import BURST_MS, MUTE_MS, SENDERS_MAX, SHARE, LoopShare
from poolgrid.server.process.clock import SystemClock
from tests.consolidator.pusher import batch, pusher_at, removed
from tests.consolidator.test_consolidator import Bench, events, folded, hello, same
from tests.consolidator.tuned import tuned
from tests.router.fleet_builder import stored

W = WorkerKey(WorkerId("w"))

some_events = st.lists(events, max_size=12)


def say_in_parts(bench: Bench, given_events: list[AnyEvent], seq: int, upto: int | None = None) -> None:
    """Push a batch as the ingest plane does, perhaps only its first parts."""
    whole = batch(given_events, seq)
    parts = parts_of(given_events)
    for at, part in enumerate(parts[:upto], 1):
        turn = ConsolidatorTurn(bench.now())
        bench.core.batch(b"p", whole, turn, part, at < len(parts))
        bench.close(turn)


def facts(pool: PoolState) -> Any:
    """Return all that is known but offsets, which count parts."""
    known: Any = pool.facts()
    return known[1:]


@settings(max_examples=200, deadline=None)
@given(st.lists(some_events, min_size=1, max_size=5))
def test_a_batch_in_parts_leaves_the_state_of_the_batch_as_a_whole(history: list[list[AnyEvent]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_work, "PART_UNITS", 24)
        whole, parted = Bench(), Bench()
        for bench in (whole, parted):
            bench.say(hello())
        for seq, given_events in enumerate(history):
            whole.say(batch(given_events, seq))
            say_in_parts(parted, given_events, seq)

        assert facts(parted.core.pool) == facts(whole.core.pool)
        same(folded(parted.records), parted.core.pool)


@settings(max_examples=200, deadline=None)
@given(some_events, some_events, st.integers(1, 4))
def test_a_consolidator_that_restarts_within_a_batch_gets_it_again_and_ends_in_the_same_state(
    before: list[AnyEvent], given_events: list[AnyEvent], upto: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_work, "PART_UNITS", 24)
        whole, torn = Bench(), Bench()
        for bench in (whole, torn):
            bench.say(hello())
            bench.say(batch(before, 0))
            if bench.core.pool.workers[W].restating:
                return  # what a request's start means then depends on what was restated
        whole.say(batch(given_events, 1))
        parts = len(parts_of(given_events))
        say_in_parts(torn, given_events, 1, min(upto, parts - 1))

        again = Bench(folded(torn.records))
        cursor = again.core.pool.workers[W].cursors["worker"]
        assert cursor.next_seq == 1, "a batch that is not complete is wanted again"
        say_in_parts(again, given_events, 1)

        assert facts(again.core.pool)[0] == facts(whole.core.pool)[0]


def test_parts_are_small_whatever_the_events_are_and_say_the_same_in_the_same_order() -> None:
    chain, gone = list(range(1, 100_001)), list(range(100_000, 0, -1))
    given_events: list[AnyEvent] = [
        stored(chain, 7, Tier.HOST),
        *(RequestProgressed("r", number) for number in range(20_000)),
        BlocksRemoved(pack_hashes(gone), Tier.HOST, 2),
    ]

    parts = parts_of(given_events)

    assert max(map(units_of, parts)) <= PART_UNITS
    events_of = [event for part in parts for event in part]
    chains = [event for event in events_of if isinstance(event, BlocksStored)]
    removals = [event for event in events_of if isinstance(event, BlocksRemoved)]
    assert [h for each in chains for h in unpack_hashes(each.sequence_hashes)] == chain
    assert [each.parent for each in chains] == [7, *(unpack_hashes(each.sequence_hashes)[-1] for each in chains[:-1])]
    assert [h for each in removals for h in unpack_hashes(each.sequence_hashes)] == gone
    assert {(each.tier, each.group) for each in chains} == {(Tier.HOST, 0)}
    assert {(each.tier, each.group) for each in removals} == {(Tier.HOST, 2)}
    assert [event for event in events_of if isinstance(event, RequestProgressed)] == given_events[1:-1]


def test_a_usual_batch_is_one_part_and_itself() -> None:
    usual: list[AnyEvent] = [RequestStarted("r", 100, 0, 4), stored([1, 2]), RequestFinished("r", "stop")]

    assert parts_of(usual)[0] is usual
    assert parts_of([]) == [[]]


def test_clears_of_one_batch_are_the_last_of_them() -> None:
    clears: list[AnyEvent] = [event for at in range(1000) for event in (stored([at]), CacheCleared())]
    restated: list[AnyEvent] = [
        event
        for at in range(1000)
        for event in (SnapshotBegan(), stored([at]), SnapshotEnded(), RequestFinished("r", ""))
    ]

    assert parts_of([*clears, stored([5])]) == [[CacheCleared()], [stored([5])]]
    left = [event for part in parts_of(restated) for event in part]
    assert [type(event) for event in left if not isinstance(event, RequestFinished)] == [
        SnapshotBegan,
        SnapshotBegan,
        BlocksStored,
        SnapshotEnded,
    ]


def test_a_sender_that_costs_more_than_its_share_is_muted_and_heard_again() -> None:
    share, now_ms = LoopShare(), 0.0
    while not share.spend(b"flood", 90.0, now_ms):
        now_ms += 100.0
        assert now_ms < 60_000
        assert not share.spend(b"calm", SHARE * 100.0, now_ms)

    assert now_ms > BURST_MS
    assert share.hears(b"calm", now_ms)
    assert not share.hears(b"flood", now_ms + MUTE_MS - 1)
    assert share.hears(b"flood", now_ms + MUTE_MS)
    assert not share.spend(b"flood", 90.0, now_ms + MUTE_MS)


def test_senders_that_are_known_are_bounded() -> None:
    share = LoopShare()
    for number in range(2 * SENDERS_MAX):
        share.spend(number.to_bytes(4, "little"), 1.0, float(number))

        share.spend(b"busy", 0.1, float(number))
    for number in range(2 * SENDERS_MAX):
        assert share.spend(number.to_bytes(8, "little"), 2 * BURST_MS, MUTE_MS * number)

    assert len(share._ahead) <= SENDERS_MAX
    assert b"busy" in share._ahead
    assert len(share.muted) == 1


class Records:
    """What a router is told, and how often others had their turn while it was."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.blocks = 0

    def on_snapshot(self, *_: Any) -> None: ...

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            self.sizes.append(units_of(record.events))
            for event in record.events:
                if isinstance(event, BlocksStored):
                    self.blocks += len(event.sequence_hashes) // 8


async def test_one_large_message_leaves_all_others_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    context = zmq.asyncio.Context()
    consolidator_settings, tuning = tuned(lease_ms=30_000)
    service = create(consolidator_settings, CollectorRegistry(), SystemClock(), tuning=tuning)
    await service.start()
    told = Records()
    service.subscribe(told)
    large, small = [await pusher_at(context, service.ingest_endpoint, worker_id=name) for name in ("large", "small")]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    try:
        large._push([stored(list(range(1, 400_001))), *(RequestProgressed("r", 1) for _ in range(30_000))])
        small._push([stored([1])])
        await large.settle()
        await small.settle()
    finally:
        beside.cancel()
        for each in (large, small):
            each.close()
        await service.stop()
        context.destroy(0)

    assert told.blocks == 400_001
    assert max(told.sizes) <= PART_UNITS
    assert turns > 20, "other tasks had turns within the message"
    assert service.core.tally.muted == 0


async def test_a_worker_that_is_muted_is_named_and_caught_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_share, "BURST_MS", 400.0)
    monkeypatch.setattr("poolgrid.server.consolidator.ingest_plane.MUTE_MS", 400.0)
    monkeypatch.setattr(loop_share, "MUTE_MS", 400.0)
    context = zmq.asyncio.Context()
    consolidator_settings, tuning = tuned(lease_ms=30_000)
    service = create(consolidator_settings, CollectorRegistry(), SystemClock(), tuning=tuning)
    await service.start()
    flood, calm = [await pusher_at(context, service.ingest_endpoint, worker_id=name) for name in ("flood", "calm")]
    seen: set[tuple[StreamState, str]] = set()
    try:
        blocks = list(range(1, 50_001))
        for _ in range(2):
            flood._push([stored(blocks), removed(blocks[25_000:])])
        for number in range(30):
            flood._push([stored([100_000 + number])])
            calm._push([stored([number + 1])])
            await asyncio.sleep(0.01)
            stream = service.core.pool.workers[WorkerKey(WorkerId("flood"))].stream("worker")
            seen.add((stream.state, stream.reason))
        await calm.settle()
        assert service.core.pool.workers[WorkerKey(WorkerId("calm"))].stream("worker").state is StreamState.LIVE
        await flood.settle()
        member = service.core.pool.workers[WorkerKey(WorkerId("flood"))]
        assert member.stream("worker").state is StreamState.LIVE
        assert len(member.presence) == 25_030
    finally:
        for each in (flood, calm):
            each.close()
        await service.stop()
        context.destroy(0)

    assert service.core.tally.muted >= 1
    (reason,) = {reason for state, reason in seen if state is StreamState.STALE}
    assert reason.startswith("muted for 0 s: its events take more than a worker's share")
