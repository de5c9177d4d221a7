"""Several workers in one process, each in front of its own engine server.

Rules
    1. Workers share the process and its event loop. Each has its own name, epoch, ports, connections, metrics and
       health; nothing of one is read by another.
    2. What ends one worker (its server came back as another one, or a task or a callback of its own failed) ends that
       worker only. It starts again in a new epoch, at growing intervals (``poolgrid.process.leash``) and without
       end, as a process of its own would; its requests move to other workers.
    3. The process is ready with its first worker: a server that is down keeps no other one waiting.
    4. Where every worker has failed and none was ever ready, the process ends with the last error: then the options are
       wrong, and the caller has to know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from poolgrid.process.leash import RestartPace
from poolgrid.process.log_lines import fields_of_task
from poolgrid.process.tasks import cancel_all, on_fatal, owned, unless
from poolgrid.workers.settings import WorkerProcessSettings

log = logging.getLogger(__name__)

ServeWorker = Callable[[WorkerProcessSettings, asyncio.Event, Callable[[str], None]], Awaitable[None]]


class ServerWorkers:
    """The workers of one process."""

    def __init__(
        self, workers: Sequence[WorkerProcessSettings], serve: ServeWorker, ready: Callable[[str], None]
    ) -> None:
        """``serve`` runs one worker; ``ready`` is called once, with the URL of the first that is ready."""
        self._workers = workers
        self._serve = serve
        self._ready = ready
        self._is_ready = False
        self._failed: set[str] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run all workers until ``stop`` is set and their requests are done."""
        tasks = [owned(self._keep(each, stop), f"worker {each.worker_id}") for each in self._workers]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)

    async def _keep(self, settings: WorkerProcessSettings, stop: asyncio.Event) -> None:
        """Run one worker, again whenever it fails."""
        now_s = asyncio.get_running_loop().time
        name, pace = settings.worker_id, RestartPace(settings.worker_id)
        # All that this worker starts has this task's context.
        fields_of_task.set({"worker": name})
        while not stop.is_set():
            ready_s: list[float] = []

            def ready(url: str, since_s: list[float] = ready_s) -> None:
                since_s.append(now_s())
                self._note_ready(url)

            try:
                await self._live(settings, stop, ready)
                return
            except Exception as error:
                self._failed.add(name)
                if not self._is_ready and len(self._failed) == len(self._workers):
                    raise
                pause_s = pace.died(now_s() - ready_s[0] if ready_s else 0.0)
                log.error("worker %s failed: it starts again in %.1f s: %s", name, pause_s, error)
                log.debug("where it failed", exc_info=True)
                await unless(stop, asyncio.sleep(pause_s), f"restart of {name}")

    async def _live(self, settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Run one worker once; raises what ended it."""
        ending = asyncio.Event()
        fatal: list[RuntimeError] = []

        def end(name: str, error: BaseException) -> None:
            fatal.append(RuntimeError(f"background task {name!r} failed: {type(error).__name__}: {error}"))
            ending.set()

        async def follow_stop() -> None:
            await stop.wait()
            ending.set()

        on_fatal.set(end)
        following = owned(follow_stop(), f"end of worker {settings.worker_id}")
        try:
            await self._serve(settings, ending, ready)
        finally:
            await cancel_all([following])
        if fatal:
            raise fatal[0]

    def _note_ready(self, url: str) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._ready(url)
