"""Whether an engine server does its work: asked at intervals, and at once when a request says otherwise.

Rules:

1. A server that cannot be reached, or says that it is not well, is *silent*: nothing can be expected of it. One that
   does not answer in time is too.
2. A silent server is asked again and again. It is well when it answers, is the same server as before (``confirm``), and
   its cache events are read up to date (``is_current``): until then its cache is unknown.
3. A server that comes back as another one, with another model or block size, is broken: the worker's card
   is not true any more, so it ends and is started again.
4. The same is asked now and then of a server that is well: its adapters come and go, and a quick restart is not noticed
   otherwise. A server that does not take the API key any more is silent.
5. A server whose answer to the question is late is well all the same while it shows heartbeats.
6. Requests that are in it and do not move for ``progress_timeout_ms`` make it silent as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.limits import TEXT_CHARS_MAX
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError
from poolgrid.server.workers.engines.server.kinds import HEALTH_PATH
from poolgrid.server.workers.engines.server.server_client import KeyRefused, ServerClient, ServerError
from poolgrid.server.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
"""Time between two questions to a server that is silent: a restart takes a minute, coming back should cost no more."""


MODELS_INTERVAL_MS = 4_000.0
"""Time between two questions what a server that is well serves: a new adapter is served within seconds."""

FACTS_INTERVAL_MS = 10_000.0
"""Time between two questions what it is, block size included: that reads a page of metrics."""


class ServerHealth:
    """What is known of a server's health."""

    def __init__(
        self,
        client: ServerClient,
        confirm: Callable[[bool], Awaitable[str]],
        is_current: Callable[[], bool],
        stalled: Callable[[float], str],
        lives_since: Callable[[float], bool],
        interval_ms: float,
        timeout_ms: float,
        clock: Clock,
        metrics: WorkerMetrics,
        excuse: Callable[[], str] | None = None,
        path: str = HEALTH_PATH,
    ) -> None:
        """``confirm`` asks a server what it serves, or with ``True`` all that it is, and says in what it differs from
        before; ``stalled`` says what has not
        moved for too long, ``lives_since`` whether there was a heartbeat after a time.

        ``excuse`` says why a server does not answer, where that is known; ``path`` answers while it does its work.
        """
        self._client = client
        self._confirm = confirm
        self._is_current = is_current
        self._stalled = stalled
        self._lives_since = lives_since
        self._interval_s = interval_ms / 1e3
        self._timeout_s = timeout_ms / 1e3
        self._clock = clock
        self._metrics = metrics
        self._excuse = excuse
        self._path = path
        self._changed: Callable[[], None] = _nobody
        self._doubted = asyncio.Event()
        self._models_due_ms = self._facts_due_ms = 0.0
        self.unhealthy_reason = ""

    @property
    def is_silent(self) -> bool:
        """Whether nothing can be expected of the server; it may come back."""
        return bool(self.unhealthy_reason)

    def observe(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def doubt(self) -> None:
        """Ask the server at once: something that it should have done has failed."""
        self._doubted.set()

    async def run(self) -> None:
        """Look after the server until cancelled; raises ``EngineBrokenError`` when it came back as another."""
        while True:
            await self._look()
            wait_s = RETRY_INTERVAL_S if self.is_silent else self._interval_s
            try:
                async with asyncio.timeout(wait_s):
                    await self._doubted.wait()
            except TimeoutError:
                pass
            self._doubted.clear()

    async def _look(self) -> None:
        asked_ms = self._clock.monotonic_ms()
        try:
            await self._client.ask(self._path, timeout_s=self._timeout_s)
        except ServerError as error:
            if error.is_late and not self.is_silent and self._lives_since(asked_ms):
                return
            self._metrics.health_checks.labels("failed").inc()
            known = "" if self._excuse is None else self._excuse()
            self._set((known or str(error))[:TEXT_CHARS_MAX])
            return
        stalled = self._stalled(self._clock.monotonic_ms())
        if stalled:
            self._metrics.health_checks.labels("failed").inc()
            self._set(stalled)
            return
        self._metrics.health_checks.labels("passed").inc()
        now_ms = self._clock.monotonic_ms()
        if not self.is_silent and now_ms < self._models_due_ms:
            return
        all_facts = self.is_silent or now_ms >= self._facts_due_ms
        self._models_due_ms = now_ms + MODELS_INTERVAL_MS
        if all_facts:
            self._facts_due_ms = now_ms + FACTS_INTERVAL_MS
        try:
            other = await self._confirm(all_facts)
        except (ServerError, DecodeError, ValueError) as error:
            passes = isinstance(error, ServerError | DecodeError) and not isinstance(error, KeyRefused)
            if self.is_silent or not passes:
                self._set(str(error)[:TEXT_CHARS_MAX])
            return
        if other:
            raise EngineBrokenError(f"the server is another one than before: {other}")
        if self.is_silent and self._is_current():
            self._set("")

    def _set(self, reason: str) -> None:
        if reason == self.unhealthy_reason:
            return
        before, self.unhealthy_reason = self.unhealthy_reason, reason
        if bool(before) is bool(reason):
            return
        self._metrics.engine_healthy.set(0 if reason else 1)
        if reason:
            log.error("the engine server does not do its work: %s", reason)
        else:
            log.warning("the engine server is well again")
        self._changed()


def _nobody() -> None:
    """Report nothing."""
