"""What every process exports about itself: its version, its clock, what its event loop has on its hands, CPU and
memory."""

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
            "Running tasks of the event loop: about a dozen, and one per HTTP request in flight. Growth "
            "without load is a leak: report it.",
            registry=registry,
        )
        Gauge(
            "poolgrid_build_info",
            "1, with the versions of poolgrid and Python as labels. Two versions mean an upgrade in progress "
            "or an incomplete one.",
            ["version", "python"],
            registry=registry,
        ).labels(__version__, platform.python_version()).set(1)
        Gauge(
            "poolgrid_wall_clock_seconds",
            "Unix time of the process's host at the scrape. The difference to the time of the scrape is the "
            "clock error; a few milliseconds are normal.",
            registry=registry,
        ).set_function(time.time)
        faults = Counter(
            "poolgrid_event_loop_faults_total",
            "Exceptions in callbacks of the event loop. Each is a bug with a traceback in the log. Outside of "
            "a client's connection it ends the process, which its supervisor restarts.",
            registry=registry,
        )
        handler = loop.get_exception_handler()
        if isinstance(handler, LoopFaults):
            handler.count = faults.inc
        ProcessCollector(registry=registry)
        # Scrapes run in other threads, which ``all_tasks`` allows for.
        tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))
