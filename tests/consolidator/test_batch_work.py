"""What a worker's batch costs the consolidator in a router, and an engine's message: calls are counted, not timed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.kernel.kv_events.follower import PubFollower
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import AnyEvent, JournalRecord, PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, Hello
from poolgrid.server.consolidator.bootstrap import create
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.process.tasks import SLICE_MS
from tests.clock import HandClock
from tests.consolidator.pusher import batch, removed
from tests.router.fleet_builder import make_card, stored

PEER = b"peer"

STEPS: dict[str, list[AnyEvent]] = {
    "a request's end": [RequestFinished("r", "stop")],
    "a request's start": [RequestStarted("r", 8000, 0, 500), stored(list(range(1000, 1500))), PrefillCompleted("r")],
    "an eviction": [removed(list(range(1499, 999, -1)))],
}


class Reader:
    """A router in the same process that does nothing with what it is told."""

    def __init__(self) -> None:
        self.records = 0

    def on_snapshot(self, offset: int, workers: Any, chains: Any, sessions: Any = None) -> None: ...

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        self.records += len(records)


def calls_of(service: ConsolidatorService, messages: list[list[bytes]]) -> list[str]:
    return calls_in(lambda: service._ingest.on_messages(messages))


def calls_in(work: Callable[[], object]) -> list[str]:
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


async def test_a_batch_takes_a_dozen_calls_whatever_it_says_and_a_wake_up_some_forty() -> None:
    settings = ConsolidatorSettings(lease_ms=60_000)
    service = create(settings, CollectorRegistry(), HandClock())
    await service.start()
    reader = Reader()
    service.subscribe(reader)
    service._ingest.on_messages(
        [[PEER, CONTROL_FRAME, codec.to_consolidator.encode(Hello("w", 0, 1, make_card(), 0, 0))]]
    )
    seq = 0

    def steps(*names: str) -> list[list[bytes]]:
        nonlocal seq
        messages = []
        for name in names:
            messages.append([PEER, BATCH_FRAME, codec.event_batch.encode(batch(STEPS[name], seq))])
            seq += 1
        return messages

    names = ["a request's start", "a request's end", "an eviction"]
    service._ingest.on_messages(steps(*names))  # the stream is live from the first batch on
    one = len(calls_of(service, steps("a request's end")))
    many = len(calls_of(service, steps(*(10 * names), "a request's end")))
    await service.stop()
    assert reader.records == 1 + 3 + 1 + 31
    assert one <= 40
    assert (many - one) / 30 <= 15


def test_a_message_of_an_engine_that_decodes_takes_a_dozen_calls_and_as_many_for_each_event() -> None:
    follower = PubFollower(WorkerKey(WorkerId("w")), 16, 1000, False, 1000, 1000)

    def stored_after(parent: int | None, first: int, blocks: int) -> dict[str, Any]:
        hashes, tokens = list(range(first, first + blocks)), list(range(16 * blocks))
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": 16,
            "medium": "GPU",
        }

    def calls(seq: int, *events: dict[str, Any]) -> int:
        called = calls_in(lambda: follower.live(seq, msgspec.msgpack.encode([0.0, events, 0]), 0.0, 1))
        return len(called)

    gone = [{"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU"} for each in (109, 108)]
    calls(0, stored_after(None, 100, 10), stored_after(None, 200, 10))
    one = calls(1, stored_after(209, 210, 1))
    several = calls(2, *gone, stored_after(210, 211, 1), stored_after(107, 300, 1))
    assert one <= 24
    assert several - one <= 3 * 14


class SlowClock:
    """A clock by which everything takes long."""

    def wall_ms(self) -> int:
        return 1_700_000_000_000

    def __init__(self) -> None:
        self._now_ms = 0.0

    def monotonic_ms(self) -> float:
        self._now_ms += SLICE_MS
        return self._now_ms


async def test_what_takes_longer_than_a_turn_may_is_taken_in_later_all_of_it_and_in_order() -> None:
    settings = ConsolidatorSettings(lease_ms=60_000)
    service = create(settings, CollectorRegistry(), SlowClock())
    await service.start()
    reader = Reader()
    service.subscribe(reader)
    hello = [PEER, CONTROL_FRAME, codec.to_consolidator.encode(Hello("w", 0, 1, make_card(), 0, 0))]
    told = [[PEER, BATCH_FRAME, codec.event_batch.encode(batch(STEPS["a request's end"], seq))] for seq in range(10)]
    service._ingest.on_messages([hello, *told])
    assert reader.records < 10
    async with asyncio.timeout(120):
        while reader.records < 1 + 10:  # noqa: ASYNC110 - what is under test tells a list
            await asyncio.sleep(0)
    tally = service.core.tally
    await service.stop()
    assert (tally.batches, tally.duplicates, tally.gaps) == (10, 0, 0)
