"""The sources of the benchmark of event planes, in front of a real consolidator, and what their lag is."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from lab.benchmarks.event_plane import BLOCKS_HELD, BLOCKS_PER_BATCH, Sources, lag_s
from poolgrid.consolidator.bootstrap import create
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.process.clock import SystemClock
from poolgrid.wire.identifiers import Tier


@pytest.mark.parametrize(
    ("at_s", "offset", "lag"),
    [(12.0, 30, 0.0), (12.0, 20, 0.0), (12.5, 10, 1.5), (12.5, 19, 1.5), (13.0, 20, 1.0), (10.5, 10, 0.0)],
)
def test_a_lag_is_the_time_since_the_consolidator_went_beyond_an_offset(at_s: float, offset: int, lag: float) -> None:
    assert lag_s([10.0, 11.0, 12.0], [10, 20, 30], at_s, offset) == lag


def test_a_consolidator_takes_every_batch_of_the_sources_and_they_stay_as_large_as_they_should() -> None:
    count, batches = 3, BLOCKS_HELD // BLOCKS_PER_BATCH + 20

    def push(endpoint: str) -> int:
        sources = Sources(endpoint, 0, count)
        try:
            sources.until_welcome()
            taken = 0.0
            while taken < count * batches:
                taken += sources.push(None, 0.05)["acknowledged"]
            return int(taken)
        finally:
            sources.close()

    async def scenario() -> None:
        consolidator = create(ConsolidatorSettings(), CollectorRegistry(), SystemClock())
        await consolidator.start()
        try:
            taken = await asyncio.to_thread(push, consolidator.ingest_endpoint)

            workers = consolidator.core.pool.workers.values()
            assert len(workers) == count
            assert consolidator.offset >= count + taken
            assert all(worker.presence.counts()[Tier.DEVICE] == BLOCKS_HELD for worker in workers)
        finally:
            await consolidator.stop()

    asyncio.run(scenario())
