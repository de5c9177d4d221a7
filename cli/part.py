"""A child process of `poolgrid up`: started, awaited by its ready line, started again when it dies, ended in order.

Rules
    1. A part that dies is started again with the same arguments (so: the same ports), at growing intervals and without
       end (``poolgrid.cli.restart_pace``). Nobody else is ended for it: what works goes on serving, and the log says
       what does not.
    2. A part also ends when this process disappears, whatever became of it: it holds the other end of a pipe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable

from poolgrid.cli.restart_pace import RestartPace
from poolgrid.cli.service_process import PARENT_PIPE_VARIABLE
from poolgrid.runtime.tasks import Restart, supervised

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""A part that is not ready by then is given up; on a loaded machine an interpreter may take ten seconds to start."""

STOP_TIMEOUT_S = 10.0


def part_environment() -> dict[str, str]:
    """Return the environment of parts: ours, and the sign that standard input is a pipe from us."""
    return {**os.environ, PARENT_PIPE_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}


class PartFailed(RuntimeError):
    """A part could not be started."""


class Part:
    """One child process, started again when it dies."""

    def __init__(
        self, name: str, arguments: list[str], environment: dict[str, str], stop_timeout_s: float = STOP_TIMEOUT_S
    ) -> None:
        self._stop_timeout_s = stop_timeout_s
        self.name = name
        self.arguments = arguments
        self.ready_words: list[str] = []
        self._environment = environment
        self._process: Process | None = None
        self._pace = RestartPace(name)
        self._ready_s: float | None = None
        """When it was last ready; ``None`` while it is not."""
        self._watch: asyncio.Task[None] | None = None
        self.stopping = False

    async def start(self) -> None:
        """Start the process and wait until it says that it is ready; raises ``PartFailed``."""
        self._ready_s = None
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            # Not from the current directory, which may hold something of the same name: from where it is installed.
            "-P",
            "-m",
            "poolgrid",
            *self.arguments,
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            # Ctrl-C reaches this process only, which then ends its parts in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = (await self._process.stdout.readline()).decode().split()
        except TimeoutError:
            raise PartFailed(f"{self.name} was not ready within {START_TIMEOUT_S:.0f} s") from None
        if not line or line[0] != "ready":
            status = await self._process.wait()
            raise PartFailed(f"{self.name} ended with status {status} before it was ready; its own words are above")
        self.ready_words = line[1:]
        self._ready_s = asyncio.get_running_loop().time()

    def watch(self) -> None:
        """Start the process again whenever it dies."""
        self._watch = supervised(self._keep_alive, f"watch over {self.name}", Restart(limit=None))

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping:
            assert self._process is not None
            status = await self._process.wait()
            if self.stopping:
                return
            lived_s = 0.0 if self._ready_s is None else loop.time() - self._ready_s
            pause_s = self._pace.died(lived_s)
            if self._pace.is_loud:
                log.error(
                    "%s keeps dying, %d times now, the last time with status %s: it is started again in %.1f s, and so "
                    "on; the other parts go on",
                    self.name,
                    self._pace.deaths,
                    status,
                    pause_s,
                )
            else:
                log.warning("%s ended with status %s: starting it again in %.1f s", self.name, status, pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except (PartFailed, OSError) as error:
                # OSError: this machine has no process or descriptor left to give, for now.
                log.warning("%s", error)
                await self._kill()

    def word(self, key: str) -> str:
        """Return what the ready line says about ``key`` (``key=value``)."""
        for word in self.ready_words:
            if word.startswith(f"{key}="):
                return word.removeprefix(f"{key}=")
        raise PartFailed(f"{self.name} did not say where its {key} is")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        self.stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stopped(self) -> None:
        """Wait for the end, and make it when it does not come."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await self._process.wait()
        except TimeoutError:
            log.warning("%s did not end within %.0f s: killing it", self.name, self._stop_timeout_s)
            await self._kill()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


async def stop_parts(parts: Iterable[Part | None]) -> None:
    """End parts together, and wait until all are gone."""
    running = [part for part in parts if part is not None]
    for part in running:
        part.ask_to_stop()
    await asyncio.gather(*(part.stopped() for part in running))
