"""The two ways to follow a journal give a listener the state anew when it asks for it."""

from __future__ import annotations

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from poolgrid.router.consolidator.bootstrap import create
from poolgrid.router.consolidator.settings import ConsolidatorSettings
from poolgrid.router.feeds import EmbeddedFeed, RemoteFeed
from poolgrid.router.ports import JournalFeed
from poolgrid.runtime.clock import SystemClock
from tests.consolidator.pusher import Pusher, stored
from tests.consolidator.test_service import Reader, run, truth


@pytest.mark.parametrize("kind", ["embedded", "remote"])
def test_a_listener_that_asks_anew_gets_the_state_and_what_follows_it(kind: str) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        clock = SystemClock()
        consolidator = create(ConsolidatorSettings(), CollectorRegistry(), clock)
        reader = Reader()
        feed: JournalFeed = EmbeddedFeed(consolidator)
        if kind == "remote":
            await consolidator.start()
            feed = RemoteFeed(consolidator.feed_endpoint, consolidator.query_endpoint, clock)
        await feed.start(reader)
        pusher = Pusher(context, consolidator.ingest_endpoint)
        await pusher.join()
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

    run(scenario)
