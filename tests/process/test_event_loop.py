"""How many tasks a process has, as a scrape in another thread sees it."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from poolgrid.process.lifecycle import LoopMetrics


def test_tasks_are_counted_until_they_end() -> None:
    async def go() -> list[float | None]:
        registry = CollectorRegistry()
        LoopMetrics(registry)
        counts = []

        async def count() -> None:
            counts.append(await asyncio.to_thread(registry.get_sample_value, "poolgrid_event_loop_tasks"))

        await count()
        hold = asyncio.Event()
        tasks = [asyncio.ensure_future(hold.wait()) for _ in range(3)]
        await count()
        hold.set()
        await asyncio.gather(*tasks)
        await count()
        return counts

    assert asyncio.run(go()) == [1, 4, 1]
