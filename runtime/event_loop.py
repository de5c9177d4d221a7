"""What a process's event loop has on its hands, for whoever looks for leaks."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from poolgrid.runtime.instruments import Gauge


class LoopMetrics:
    """The instruments of the running event loop, registered in ``registry``; made on that loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loop = asyncio.get_running_loop()
        tasks = Gauge(
            "poolgrid_event_loop_tasks",
            "Tasks of the event loop that have not ended: some dozen, and one for each HTTP request in flight. "
            "If it grows without load, that is a leak: report it.",
            across="sum",
            registry=registry,
        )
        # Scrapes run in other threads, which ``all_tasks`` allows for.
        tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))
