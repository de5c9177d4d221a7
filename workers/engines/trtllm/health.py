"""Whether a TensorRT-LLM engine is alive and does its work.

Rules:

1. An engine that has shut down, or says that it is not healthy, is *broken*: ``broken`` gets the error, and nothing
   heals it.
2. An engine that is idle proves itself by generating a token every now and then, with a salt of its own; one that is
   busy by its progress (``poolgrid.workers.engines.lifecycle.progress``). ``ailment`` says what is wrong; progress
   heals it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from poolgrid.runtime.clock import Clock
from poolgrid.runtime.tasks import detached
from poolgrid.wire.limits import TEXT_CHARS_MAX
from poolgrid.workers.engines.lifecycle.progress import ProgressMonitor
from poolgrid.workers.engines.trtllm.calls import TrtllmCalls
from poolgrid.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""Time between two looks at the engine's health; a quarter of ``progress_timeout_ms`` where that is less."""


class EngineBrokenError(RuntimeError):
    """The engine will not do anything any more."""


class EngineHealth:
    """What is known of an engine's health; the loop of whoever made it calls ``check`` every ``check_interval_s``."""

    def __init__(
        self,
        llm: Any,
        calls: TrtllmCalls,
        wake: Callable[[], None],
        dp_size: int,
        generates: bool,
        *,
        interval_ms: float,
        timeout_ms: float,
        progress_timeout_ms: float,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        """``wake`` is called after requests of its own; an engine that does not generate (encode) is not asked to."""
        self._llm = llm
        self._calls = calls
        self._wake = wake
        self._generates = generates
        self._interval_ms = interval_ms
        self._timeout_s = timeout_ms / 1e3
        self._clock = clock
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._progress = [ProgressMonitor(progress_timeout_ms) for _ in range(dp_size)]
        self._proved_ms = clock.monotonic_ms()
        """When the engine last did something for somebody."""
        self._probe_failed = ""
        self._probing: asyncio.Task[None] | None = None
        self.ailment = ""
        self.broken: asyncio.Future[None] = self._loop.create_future()
        self.check_interval_s = min(WATCH_INTERVAL_S, progress_timeout_ms / 4e3, interval_ms / 2e3)

    # -- what requests tell --------------------------------------------------------------------------------------------

    def entered(self, rank: int, request_id: str, transfers: bool) -> None:
        """Note a request that the engine was given; ``transfers``: its KV comes from another worker."""
        self._progress[rank].entered(request_id, transfers, self._clock.monotonic_ms())

    def moved(self, rank: int, request_id: str) -> None:
        """Note output of a request."""
        now_ms = self._clock.monotonic_ms()
        self._progress[rank].moved(request_id, now_ms)
        self.proved(now_ms)

    def left(self, rank: int, request_id: str, now_ms: float) -> None:
        """Note that a request is over."""
        self._progress[rank].left(request_id, now_ms)

    def proved(self, now_ms: float) -> None:
        """Note that the engine did something for somebody."""
        self._proved_ms = now_ms
        self._probe_failed = ""
        if self.ailment:
            self._set_ailment("")

    def is_broken(self, error: BaseException) -> bool:
        """Ask the engine whether it is dead; ``broken`` ends with ``error`` if so."""
        if self.broken.done():
            return True
        try:
            alive = bool(self._llm._check_health())
        except Exception as failure:
            log.warning("asking the engine for its health failed: %r", failure)
            alive = False
        if alive:
            return False
        self.broken.set_exception(EngineBrokenError(f"TensorRT-LLM has shut down: {error}"))
        return True

    # -- what time tells -----------------------------------------------------------------------------------------------

    def check(self, now_ms: float, busy: bool) -> None:
        """Look whether a busy engine makes progress; have an idle one prove itself when it is time."""
        self._metrics.engine_silence_seconds.set(max(each.silent_ms(now_ms) for each in self._progress) / 1e3)
        if busy:
            stalls = [stall for monitor in self._progress if (stall := monitor.stall(now_ms)) is not None]
            self._set_ailment(stalls[0].reason if stalls else self._probe_failed)
        elif (
            self._generates
            and now_ms - self._proved_ms >= self._interval_ms
            and (self._probing is None or self._probing.done())
        ):
            self._probing = detached(self._probe_idle(), "engine probe")

    async def generate_one(self, timeout_s: float) -> None:
        """Generate a token on every rank; raises ``TimeoutError``, and what the engine raises."""
        results: list[Any] = []
        try:
            async with asyncio.timeout(timeout_s):
                results += [self._calls.generate_one(rank) for rank in range(len(self._progress))]
                self._wake()
                for result in results:
                    # Not ``result(timeout)``: it has no effect.
                    await result.aresult()
        except BaseException:
            for result in results:
                if not result.finished:
                    result.abort()
            raise

    async def close(self) -> None:
        """End what is under way."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        self.broken.cancel()

    async def _probe_idle(self) -> None:
        self._proved_ms = self._clock.monotonic_ms()
        try:
            await self.generate_one(self._timeout_s)
        except TimeoutError:
            self._probe_failed = f"a one-token generation has not ended within {self._timeout_s * 1e3:.0f} ms"
        except Exception as error:
            if self.is_broken(error):
                return
            self._probe_failed = f"a one-token generation failed: {error}"[:TEXT_CHARS_MAX]
        else:
            self._metrics.health_checks.labels("passed").inc()
            self.proved(self._clock.monotonic_ms())
            return
        self._metrics.health_checks.labels("failed").inc()
        self._set_ailment(self._probe_failed)

    def _set_ailment(self, ailment: str) -> None:
        if ailment and not self.ailment:
            log.error("the engine is not well: %s; new requests are refused", ailment)
        elif self.ailment and not ailment:
            log.warning("the engine is well again")
        self.ailment = ailment
        self._metrics.engine_healthy.set(not ailment)
