"""The two ways to follow a journal give a listener the state anew when it asks for it."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from poolgrid.kernel.consolidation.feed_reader import LoadingTable
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.ingest import LOADING_FRAME, LOADING_WORKERS_MAX, LoadingWorker
from poolgrid.server.consolidator.bootstrap import create
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.feeds import EmbeddedFeed, JournalFeed, RemoteFeed
from tests.consolidator.pusher import pusher_at
from tests.consolidator.test_service import Reader, truth
from tests.router.fleet_builder import stored


@pytest.mark.parametrize("kind", ["embedded", "remote"])
async def test_a_listener_that_asks_anew_gets_the_state_and_what_follows_it(
    kind: str, context: zmq.asyncio.Context
) -> None:
    clock = SystemClock()
    consolidator = create(ConsolidatorSettings(), CollectorRegistry(), clock)
    reader = Reader()
    feed: JournalFeed = EmbeddedFeed(consolidator)
    if kind == "remote":
        await consolidator.start()
        feed = RemoteFeed(consolidator.feed_endpoint, consolidator.query_endpoint, clock)
    await feed.start(reader)
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    pusher.push([stored([1, 2, 3])])
    await pusher.settle()
    await reader.until(lambda: reader.view == truth(pusher))

    reader.view = {"nobody": {}}
    reader.offset = -7
    before = reader.snapshots
    feed.resync()
    await reader.until(lambda: reader.snapshots == before + 1)
    assert reader.view == truth(pusher)
    pusher.push([stored([4], 3)])
    await pusher.settle()
    await reader.until(lambda: reader.view == truth(pusher))

    assert reader.snapshots == before + 1
    pusher.close()
    await feed.stop()
    await consolidator.stop()


@pytest.mark.parametrize("kind", ["embedded", "remote"])
async def test_who_loads_is_told_to_whoever_follows(kind: str, context: zmq.asyncio.Context) -> None:
    clock = SystemClock()
    consolidator = create(ConsolidatorSettings(), CollectorRegistry(), clock)
    feed: JournalFeed = EmbeddedFeed(consolidator)
    if kind == "remote":
        await consolidator.start()
        feed = RemoteFeed(consolidator.feed_endpoint, consolidator.query_endpoint, clock)
    reader = Reader()
    await feed.start(reader)
    word = LoadingWorker("w", "m", "decode", "fetch", 10, 30)
    socket = context.socket(zmq.DEALER)
    socket.connect(consolidator.ingest_endpoint)

    while feed.loading() != [word]:
        await socket.send_multipart([LOADING_FRAME, codec.loading_worker.encode(word)])
        await asyncio.sleep(0.02)  # what arrives is seen on this loop

    assert reader.view == {}, "it is no member"
    socket.close()
    await feed.stop()
    await consolidator.stop()


def test_who_is_silent_for_long_does_not_load_any_more_and_of_too_many_the_rest_is_not_kept() -> None:
    table = LoadingTable()
    for number in range(LOADING_WORKERS_MAX + 1):
        table.note(LoadingWorker(f"{number:05}", "m", "decode", "load", number, 0), 0.0)

    assert [each.done_bytes for each in table.workers(4999.0)] == list(range(LOADING_WORKERS_MAX))
    table.note(LoadingWorker("00001", "m", "decode", "load", 7, 9), 4999.0)
    table.note(LoadingWorker("late", "m", "decode", "load", 1, 9), 5000.0)
    assert [each.worker_id for each in table.workers(5000.0)] == ["00001", "late"]
    assert table.workers(10_000.0) == []
