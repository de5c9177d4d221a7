"""What a worker's batch costs the consolidator within a router: calls are counted, not timed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import AnyEvent, JournalRecord, PrefillCompleted, RequestFinished, RequestStarted
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
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        service._ingest.on_messages(messages)
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
