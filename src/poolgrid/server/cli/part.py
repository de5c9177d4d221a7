"""A child process of `poolgrid up`: started, awaited by its ready line, started again when it dies, ended in order.

Rules
    1. A part that dies is started again with the same arguments (so: the same ports), at growing intervals and without
       end (``poolgrid.server.process.leash``), unless it has a bound (``restarts_max``): one that died more often in a
       row is given up, and ``given_up`` returns. No other part is ended for it here: what works keeps
       serving, and what does not is logged.
    2. A part also ends when this process disappears, whatever became of it: it holds the other end of a pipe.
    3. What a part leaves behind when it dies goes with it: the processes of an engine hold GPUs, and the part that is
       started in its place needs them. A part and what it starts are a process group.
    4. A part that serves clients may get its listening socket from us: connections then wait while it is away, and only
       those that it had are lost with it.
    5. A password in an address of NATS reaches a part in its environment: every user of a machine sees the arguments of
       all processes.
    6. A part with a log file writes all its output there. It is ready with the first line that reports it: an engine's
       library prints what it likes before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from poolgrid.server.cli.options import environment_name
from poolgrid.server.cli.service_process import PARENT_PIPE_VARIABLE
from poolgrid.server.process.environment import given_environment
from poolgrid.server.process.restart_pace import RestartPace
from poolgrid.server.process.tasks import Restart, cancel_all, detached, owned, supervised
from poolgrid.server.transport.bound_socket import LISTENER_VARIABLE

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""A part that is not ready by then is given up; on a loaded machine an interpreter may take ten seconds to start."""

STOP_TIMEOUT_S = 10.0

END_LOOK_S = 1.0
"""Between two looks at whether a process has ended, where the event loop says so only once its pipes are closed."""

LAST_WORDS_S = 2.0
"""How long what a part has printed before its end may take to be in its log."""


def part_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of parts: ours, ``without`` some, and the sign that standard input is a pipe from us."""
    ours = {name: value for name, value in given_environment().items() if name not in without}
    return {**ours, PARENT_PIPE_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}


def handed_on(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a part; addresses of NATS with a password are in the environment."""
    kept: list[str] = []
    urls: list[str] = []
    words = iter(arguments)
    for word in words:
        option, has_value, value = word.partition("=")
        if option == NATS_URL:
            urls.append(value if has_value else next(words, ""))
        else:
            kept.append(word)
    if not any("@" in url for url in urls):
        return list(arguments), dict(environment)
    return kept, {**environment, environment_name("nats_url"): " ".join(urls)}


NATS_URL = "--nats-url"


class PartFailed(RuntimeError):
    """A part could not be started; ``status`` is 2 when its configuration is wrong."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Part:
    """One child process, started again when it dies."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        stop_timeout_s: float = STOP_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        log_file: Path | None = None,
        restarts_max: int | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """``listener`` is the socket at which its clients are served. Its maker keeps it open, so that they wait while
        the part is started again."""
        self._listener = listener
        if listener is not None:
            environment = {**environment, LISTENER_VARIABLE: str(listener.fileno())}
        self._stop_timeout_s = stop_timeout_s
        self._start_timeout_s = start_timeout_s
        self._log_file = log_file
        self._restarts_max = restarts_max
        self._copying: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._why_lost = ""
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
        """Start the process and wait until it reports ready; raises ``PartFailed``."""
        self._ready_s = None
        with ExitStack() as opened:
            log_file = None if self._log_file is None else opened.enter_context(self._log_file.open("ab"))
            arguments, environment = handed_on(self.arguments, self._environment)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Not from the current directory, which may hold something of the same name: from where it is installed.
                "-P",
                "-m",
                "poolgrid",
                *arguments,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_file,
                env=environment,
                pass_fds=() if self._listener is None else (self._listener.fileno(),),
                # Ctrl-C reaches this process only, which then ends its parts in order.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                line = await self._ready_line_of(self._process)
        except TimeoutError:
            raise PartFailed(f"{self.name} was not ready within {self._start_timeout_s:.0f} s{self._where()}") from None
        if not line:
            status = await _ended(self._process)
            raise PartFailed(
                f"{self.name} ended with status {status} before it was ready; its own words are "
                f"{'above' if self._log_file is None else f'in {self._log_file}'}",
                status,
            )
        self.ready_words = line[1:]
        self._ready_s = asyncio.get_running_loop().time()
        if self._log_file is not None:
            self._copying = detached(self._copy_to_log(self._process.stdout), f"log of {self.name}")

    async def _ready_line_of(self, process: Process) -> list[str]:
        """Return the words of the ready line, or none once the process has ended.

        A process of its own that outlives it may keep the pipe open, so the pipe's end alone does not show that.
        """
        assert process.stdout is not None
        reading = owned(self._ready_line(process.stdout), f"ready line of {self.name}")
        ending = owned(_ended(process), f"end of {self.name}")
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else []
        finally:
            await cancel_all([reading, ending])

    def _where(self) -> str:
        return "" if self._log_file is None else f"; its own words are in {self._log_file}"

    async def _ready_line(self, stdout: asyncio.StreamReader) -> list[str]:
        """Return the words of the ready line; empty when the process prints something else, or ends."""
        while True:
            try:
                read = await stdout.readline()
            except ValueError:
                continue  # a line longer than the buffer: not ours
            words = read.decode(errors="replace").split()
            if words[:1] == ["ready"]:
                return words
            if not read or self._log_file is None:
                return []
            with self._log_file.open("ab") as log_file:
                log_file.write(read)

    async def _copy_to_log(self, stdout: asyncio.StreamReader) -> None:
        """Write what the process still prints into its log: a pipe that is not read would stop it."""
        assert self._log_file is not None
        with self._log_file.open("ab", buffering=0) as log_file:
            while read := await stdout.read(65_536):
                log_file.write(read)

    def watch(self) -> None:
        """Start the process again whenever it dies."""
        self._watch = supervised(self._keep_alive, f"watch over {self.name}", Restart(limit=None))

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping:
            assert self._process is not None
            status = await _ended(self._process)
            self._end_group()
            if self.stopping:
                return
            lived_s = 0.0 if self._ready_s is None else loop.time() - self._ready_s
            pause_s = self._pace.died(lived_s)
            if self._restarts_max is not None and self._pace.deaths > self._restarts_max:
                often = f", the {self._pace.deaths}. time in a row" if self._pace.deaths > 1 else ""
                self._why_lost = f"{self.name} has ended with status {status}{often}{self._where()}"
                self._lost.set()
                return
            if self._pace.is_loud:
                log.error(
                    "%s has ended %d times, last with status %s: it restarts in %.1f s; the other parts keep running",
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

    def start_with(self, arguments: list[str]) -> None:
        """End the process, which is then started again with other arguments, where these differ."""
        if arguments != self.arguments:
            self.arguments = arguments
            self.signal(signal.SIGTERM)

    async def given_up(self) -> str:
        """Wait until it is not started again any more; return why. Without a bound that never is."""
        await self._lost.wait()
        return self._why_lost

    def word(self, key: str) -> str:
        """Return the value of ``key`` in the ready line (``key=value``)."""
        for word in self.ready_words:
            if word.startswith(f"{key}="):
                return word.removeprefix(f"{key}=")
        raise PartFailed(f"{self.name} did not say where its {key} is")

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def ask_to_stop(self) -> None:
        self.stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stopped(self) -> None:
        """Wait for the end, and make it when it does not come."""
        if self._watch is not None:
            await cancel_all([self._watch])
        if self._process is None:
            return
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await _ended(self._process)
        except TimeoutError:
            log.warning("%s did not end within %.0f s: killing it", self.name, self._stop_timeout_s)
            await self._kill()
        self._end_group()
        if self._copying is None and self._process.stdout is not None:
            # Read to its end the pipe is closed; a loop that ends before leaves it open.
            self._copying = detached(_read_to_end(self._process.stdout), f"last words of {self.name}")
        if self._copying is not None:
            # Its last words; a process of its own that outlives it may keep the pipe open.
            await asyncio.wait({self._copying}, timeout=LAST_WORDS_S)

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await _ended(self._process)
        self._end_group()

    def _end_group(self) -> None:
        """Kill what the process has left of its group; at once after its end, before its number can be another's."""
        if self._process is not None and self._process.returncode is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _read_to_end(stdout: asyncio.StreamReader) -> None:
    while await stdout.read(65_536):
        pass


async def _ended(process: Process) -> int:
    """Return the status of a process once it has ended, and its pipes are closed or its last words late.

    ``Process.wait`` alone waits for pipes that a process of its own, which outlives it, keeps open.
    """
    while process.returncode is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_LOOK_S):
                await process.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await process.wait()
    return process.returncode


async def stop_parts(parts: Iterable[Part | None]) -> None:
    """End parts together, and wait until all are gone."""
    running = [part for part in parts if part is not None]
    for part in running:
        part.ask_to_stop()
    await asyncio.gather(*(part.stopped() for part in running))
