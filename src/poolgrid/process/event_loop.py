"""What every process says of itself: its version, its clock, what its event loop has on its hands, CPU and memory."""

from __future__ import annotations

import asyncio
import platform
import time

from prometheus_client import CollectorRegistry, ProcessCollector

from poolgrid import __version__
from poolgrid.process.instruments import Counter, Gauge
from poolgrid.process.lifecycle import LoopFaults


class LoopMetrics:
    """The instruments of the running event loop, registered in ``registry``; made on that loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loop = asyncio.get_running_loop()
        tasks = Gauge(
            "poolgrid_event_loop_tasks",
            "Tasks of the event loop that have not ended: some dozen, and one for each HTTP request in flight. "
            "If it grows without load, that is a leak: report it.",
            registry=registry,
        )
        Gauge(
            "poolgrid_build_info",
            "1, with the versions of poolgrid and Python as labels. Two versions at a time mean an upgrade in "
            "progress or one left half done.",
            ["version", "python"],
            registry=registry,
        ).labels(__version__, platform.python_version()).set(1)
        Gauge(
            "poolgrid_wall_clock_seconds",
            "Unix time by the clock of the process's host, at the scrape. Less the time of the scrape, as Prometheus "
            "knows it, it is by how much that clock is off; between hosts it should be some milliseconds.",
            registry=registry,
        ).set_function(time.time)
        faults = Counter(
            "poolgrid_event_loop_faults_total",
            "Exceptions in callbacks of the event loop. Each is a bug with a traceback in the log. One outside of a "
            "single client's connection ends the process, which its supervisor starts again.",
            registry=registry,
        )
        handler = loop.get_exception_handler()
        if isinstance(handler, LoopFaults):
            handler.count = faults.inc
        ProcessCollector(registry=registry)
        # Scrapes run in other threads, which ``all_tasks`` allows for.
        tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))
