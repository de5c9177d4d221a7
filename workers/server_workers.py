"""Several workers in one process, each in front of its own engine server.

Rules

1. Workers share the process, its event loop and its ZMQ context. Each has its own name, epoch, ports, connections,
   metrics and health; nothing of one is read by another.
2. What ends one worker (its server came back as another one, or a task or a callback of its own failed) ends that
   worker only. It starts again in a new epoch, at growing intervals (``poolgrid.server.process.leash``) and without
   end, as a process of its own would; its requests move to other workers.
3. A server that is down keeps no other one waiting.
4. Where the workers are those of the command line, and every one has failed and none was ever ready, the process ends
   with the last error: then the options are wrong, and the caller has to know.
5. A worker that is removed leaves the pool as at the end of a process: it takes nothing new, what runs may finish. One
   of the same name that is added meanwhile begins after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from poolgrid.server.process.log_lines import fields_of_task
from poolgrid.server.process.restart_pace import RestartPace
from poolgrid.server.process.tasks import cancel_all, on_fatal, owned, unless
from poolgrid.server.workers.settings import WorkerProcessSettings

log = logging.getLogger(__name__)

ServeWorker = Callable[[WorkerProcessSettings, asyncio.Event, Callable[[str], None]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Run:
    """One worker, until it is removed."""

    settings: WorkerProcessSettings
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    is_ready: bool = False
    failure: str = ""


class ServerWorkers:
    """The workers of one process."""

    def __init__(
        self, workers: Sequence[WorkerProcessSettings], serve: ServeWorker, ready: Callable[[str], None]
    ) -> None:
        """``workers`` are those of the command line; none = they come and go. ``serve`` runs one worker; ``ready`` is
        called once, with the URL of the first that is ready."""
        self._workers = workers
        self._serve = serve
        self._ready = ready
        self._is_ready = False
        self._runs: dict[str, _Run] = {}
        self._next: dict[str, WorkerProcessSettings] = {}
        """Workers that begin once one of the same name has ended."""
        self._fault: BaseException | None = None
        self._over = asyncio.Event()
        """Set when a worker's fault ends all, and while there is none."""
        self._is_ending = False

    def add(self, settings: WorkerProcessSettings) -> None:
        """Begin a worker, after one of the same name that is about to end."""
        name = settings.worker_id
        if name in self._runs:
            self._next[name] = settings
            self._runs[name].stop.set()
            return
        run = self._runs[name] = _Run(settings)
        self._over.clear()
        run.task = owned(self._keep(run), f"worker {name}")
        run.task.add_done_callback(lambda task: self._on_over(name, task))

    def remove(self, worker_id: str) -> None:
        """Have a worker leave the pool."""
        self._next.pop(worker_id, None)
        run = self._runs.get(worker_id)
        if run is not None:
            run.stop.set()

    def state_of(self, worker_id: str) -> str:
        """Return in words what a worker is at."""
        run = self._runs.get(worker_id)
        if run is None:
            return "ended"
        if run.stop.is_set():
            return "leaving"
        return "ready" if run.is_ready else f"failed: {run.failure}" if run.failure else "waiting"

    async def run(self, stop: asyncio.Event) -> None:
        """Run workers until ``stop`` is set and their requests are done, or all of the command line have ended."""
        for each in self._workers:
            self.add(each)
        try:
            await (unless(stop, self._over.wait(), "end of the workers") if self._workers else stop.wait())
            self._is_ending = True
            self._next.clear()
            for run in self._runs.values():
                run.stop.set()
            if self._runs and self._fault is None:
                self._over.clear()
                await self._over.wait()
            if self._fault is not None:
                raise self._fault
        finally:
            await cancel_all([run.task for run in self._runs.values() if run.task is not None])

    def _on_over(self, name: str, task: asyncio.Task[None]) -> None:
        del self._runs[name]
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()
        following = self._next.pop(name, None)
        if following is not None and not self._is_ending:
            self.add(following)
        if not self._runs or self._fault is not None:
            self._over.set()

    async def _keep(self, run: _Run) -> None:
        """Run one worker, again whenever it fails."""
        now_s = asyncio.get_running_loop().time
        settings, stop = run.settings, run.stop
        name, pace = settings.worker_id, RestartPace(settings.worker_id)
        # All that this worker starts has this task's context.
        fields_of_task.set({"worker": name})
        while not stop.is_set():
            ready_s: list[float] = []

            def ready(url: str, since_s: list[float] = ready_s) -> None:
                since_s.append(now_s())
                run.is_ready, run.failure = True, ""
                self._note_ready(url)

            try:
                await self._run_once(settings, stop, ready)
                return
            except Exception as error:
                run.is_ready, run.failure = False, str(error)
                if self._workers and not self._is_ready and all(each.failure for each in self._runs.values()):
                    raise
                pause_s = pace.died(now_s() - ready_s[0] if ready_s else 0.0)
                log.error("worker %s failed: it starts again in %.1f s: %s", name, pause_s, error)
                log.debug("where it failed", exc_info=True)
                await unless(stop, asyncio.sleep(pause_s), f"restart of {name}")

    async def _run_once(
        self, settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]
    ) -> None:
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
