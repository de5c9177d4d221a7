"""An engine of tasks, whose answers are not tokens: it gives each task to a ``TaskMaker`` and reports what comes of it.

Rules
    1. Tasks are taken in the order of arrival, ``concurrency`` of them at a time; beyond ``WAITING_MAX`` that wait one
       is refused as busy.
    2. A cancelled task ends at once for its router. Where a maker cannot be interrupted it keeps its place until it is
       done.
    3. Each result is a report of its own, and so a message of its own: results are large.
    4. A task that takes longer than ``TASK_TIMEOUT_S`` ends as broken, and so do all of an engine that is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import BlocksStored, LoadReported, RequestFinished, RequestStarted
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.limits import RESULT_BYTES_MAX
from poolgrid.kernel.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.kernel.wire.tasks import TASK_ROLES, Task, TaskResult, stage_of
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.refusal import BrokenError, BusyError, RefusedError, UnableError
from poolgrid.server.process.tasks import cancel_all, owned
from poolgrid.server.workers.engines.lifecycle.rank_load import ReportBuffer

log = logging.getLogger(__name__)

WAITING_MAX = 1024
"""Tasks that wait for a place; a router gives a worker twice as many as it runs at a time."""

TASK_TIMEOUT_S = 3600.0
"""An hour: the longest videos on one GPU take some twenty minutes."""

Told = Callable[[int], None]
"""Takes how much of a task is done, in percent."""


class TaskMaker(Protocol):
    """Does the tasks of one kind."""

    @property
    def concurrency(self) -> int: ...

    @property
    def is_interruptible(self) -> bool:
        """Whether a task that is cancelled costs nothing any more."""
        ...

    async def make(self, task: Any, told: Told) -> TaskResult:
        """Do a task of its kind; raises ``RefusedError`` for what it cannot do."""
        ...


class TaskHealth(Protocol):
    """How an engine of tasks is, as ``poolgrid.kernel.worker_protocol.engine.Engine`` says it."""

    @property
    def unhealthy_reason(self) -> str: ...

    @property
    def is_silent(self) -> bool: ...

    def observe(self, changed: Callable[[], None]) -> None: ...

    async def run(self) -> None:
        """Look after the engine until cancelled; raises when it is broken."""
        ...


class TaskEngine:
    """``poolgrid.kernel.worker_protocol.engine.Engine`` of one rank over a maker."""

    dp_size = 1

    def __init__(self, stage: Stage, maker: TaskMaker, health: TaskHealth | None = None) -> None:
        self._stage = stage
        self._maker = maker
        self._health = health
        self._changed: Callable[[], None] = lambda: None
        self._places = asyncio.Semaphore(maker.concurrency)
        self._running = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._report = ReportBuffer(self.load, self._lose, steps=1)
        if health is not None:
            health.observe(self._on_health)

    @property
    def unhealthy_reason(self) -> str:
        return "" if self._health is None else self._health.unhealthy_reason

    @property
    def is_silent(self) -> bool:
        return self._health is not None and self._health.is_silent

    def observe_health(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def describe(self) -> dict[str, object]:
        return {"tasks": self._stage.name.lower(), "concurrency": self._maker.concurrency}

    def load(self, dp_rank: int = 0) -> LoadReported:
        return LoadReported(self._running, max(0, len(self._tasks) - self._running), 0, 0, 0, 0)

    def resident_blocks(self, dp_rank: int = 0) -> list[BlocksStored]:
        return []

    def restate(self, dp_rank: int = 0) -> list[BlocksStored]:
        return []

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        self._report.open(deliver)
        ends: list[Awaitable[None]] = [self._fault]
        if self._health is not None:
            ends.append(self._health.run())
        await asyncio.gather(*ends)

    async def close(self) -> None:
        self._report.close()
        await cancel_all(list(self._tasks.values()))

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: Generate) -> None:
        """Take a task, or raise ``RefusedError`` and change nothing."""
        request_id, task = request.request_id, request.task
        if self.is_silent:
            raise BrokenError("the engine does not do its work")
        if request_id in self._tasks:
            raise RefusedError(f"request id {request_id!r} is already active on this worker")
        if task is None or stage_of(task) is not self._stage:
            raise UnableError(f"this worker serves tasks of the kind {self._stage.name.lower()}, and no other requests")
        waiting = len(self._tasks) - self._running
        if waiting >= WAITING_MAX:
            raise BusyError(f"{waiting} tasks are waiting, allowed are at most {WAITING_MAX}")
        self._report.rank(0).append(RequestStarted(request_id, 0, 0, 0))
        self._report.flush_soon()
        self._tasks[request_id] = owned(self._serve(request_id, task), f"task {request_id}")

    def cancel(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._end(request_id, TokenDelta(request_id, 0, b"", FinishReason.CANCELLED))

    async def _serve(self, request_id: str, task: Task) -> None:
        async with self._places:
            self._running += 1
            try:
                delta = await self._made(request_id, task)
            finally:
                self._running -= 1
                self._report.rank(0)  # with the load as it is now
                self._report.flush_soon()
        self._end(request_id, delta)

    async def _made(self, request_id: str, task: Task) -> TokenDelta:
        making = owned(self._maker.make(task, lambda percent: self._tell(request_id, percent)), f"making {request_id}")
        try:
            async with asyncio.timeout(TASK_TIMEOUT_S):
                result = await asyncio.shield(making)
        except RefusedError as refusal:
            return _refused(request_id, refusal)
        except TimeoutError:
            return _refused(request_id, BrokenError(f"the task took longer than {TASK_TIMEOUT_S:.0f} s"))
        except asyncio.CancelledError:
            if self._maker.is_interruptible:
                making.cancel()
            await asyncio.wait((making,))  # its place is taken until it is done
            if not making.cancelled():
                making.exception()  # its requests are gone
            raise
        except Exception as error:
            log.exception("task %s failed", request_id)
            return _refused(request_id, BrokenError(f"the engine failed: {error!r}"))
        finally:
            if self._maker.is_interruptible:
                making.cancel()
        size = sum(map(len, result.items))
        if size > RESULT_BYTES_MAX:
            return _refused(
                request_id,
                RefusedError(f"the result has {size} bytes, allowed are up to {RESULT_BYTES_MAX}: ask for less"),
            )
        return TokenDelta(request_id, 0, b"", FinishReason.STOP, result=result)

    def _tell(self, request_id: str, percent: int) -> None:
        if request_id in self._tasks:
            self._report.pending.deltas.append(TokenDelta(request_id, 0, b"", progress=max(0, min(percent, 100))))
            self._report.rank(0)
            self._report.flush_soon()

    def _end(self, request_id: str, delta: TokenDelta) -> None:
        """Give out a task's last delta, in a report of its own."""
        serving = self._tasks.pop(request_id, None)
        if serving is None:
            return
        if serving is not asyncio.current_task():
            serving.cancel()
        self._report.flush()
        self._report.pending.deltas.append(delta)
        assert delta.finish_reason is not None, "it is the last"
        self._report.rank(0).append(RequestFinished(request_id, delta.finish_reason))
        if delta.finish_reason is FinishReason.STOP:
            self._report.flush()
        else:
            self._report.flush_soon()  # its caller may be making another report

    def _on_health(self) -> None:
        if self.is_silent:
            for request_id in list(self._tasks):
                self._end(request_id, _refused(request_id, BrokenError("the engine does not do its work")))
            self._report.flush()
        self._changed()

    def _lose(self, error: Exception) -> None:
        if not self._fault.done():
            self._fault.set_exception(error)


def _refused(request_id: str, refusal: RefusedError) -> TokenDelta:
    return TokenDelta(
        request_id,
        0,
        b"",
        FinishReason.ERROR,
        error=refusal.reason,
        refusal=refusal.kind,
        retry_after_ms=refusal.retry_after_ms,
        unknown_model=refusal.unknown_model,
    )


def task_card(stage: Stage, model: str, engine: str, concurrency: int, request: str, http: str) -> WorkerCard:
    """Return the card of a worker of tasks; ``request`` and ``http`` are its endpoints."""
    return WorkerCard(
        model=model,
        role=TASK_ROLES[stage],
        block_size=1,  # no block is ever held
        limits=WorkerLimits(concurrency, 1, 0, 1),
        request_endpoint=request,
        http_endpoint=http,
        engine=engine,
    )
