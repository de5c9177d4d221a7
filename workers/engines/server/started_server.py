"""The engine's server as a process of this worker: started, awaited, started again when it dies, ended with it.

Rules

1. A server that does not start the first time ends the worker, with the last lines of its log: what is wrong with its
   arguments stays wrong. One that dies later is started again, at growing intervals (``poolgrid.server.process.leash``)
   and a few times in a row; then the worker ends.
2. It keeps its addresses over its restarts: clients find it again. Its port is held for it while it is down.
3. It never outlives the worker, whatever becomes of that: a process between the two (``poolgrid.server.process.leash``)
   holds the end of a pipe, and ends it. The two and all that they start are a process group, and what is left of that
   when one of them has ended is killed: it would hold GPUs that the next life needs.
4. All its words are in a file of its own, which is only ever added to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import signal
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.server.process.environment import given_environment
from poolgrid.server.process.leash import leashed
from poolgrid.server.process.restart_pace import RestartPace
from poolgrid.server.process.tasks import cancel_all, owned
from poolgrid.server.transport.bound_socket import ReservedPorts, bind
from poolgrid.server.workers.engines.definition import EngineHost
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError
from poolgrid.server.workers.engines.server.core.launching import (
    LOOPBACK,
    WILDCARDS,
    Launch,
    Publishing,
    ServerCommand,
    WantedServer,
    options_in,
    publishing_at,
    publishing_in,
    shown,
)
from poolgrid.server.workers.engines.server.kinds import ServerKind
from poolgrid.server.workers.engines.server.server_client import ServerClient, ServerError
from poolgrid.server.workers.engines.server.settings import EngineServerSettings

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5
"""Time between two questions to a server that does not answer yet."""

PROGRESS_S = 15.0
"""Time between two lines of the log that say how a start goes: loading takes minutes, and silence looks like a hang."""

LAST_LINES = 12
LAST_BYTES = 4096
"""How much of its log is shown of a server that ended: an exception's last frames."""

LINE_SHOWN = 200
"""How much of a line of its log is shown while it starts."""

PORT_ATTEMPTS = 50
"""How often ports that follow each other are looked for: on a busy machine one in some may be taken."""


class ServerEnded(RuntimeError):
    """The server did not start."""


class StartedServer:
    """One server of the worker's own."""

    def __init__(
        self,
        title: str,
        settings: EngineServerSettings,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        is_ready: Callable[[], Awaitable[bool]],
        say: Callable[[str], None],
    ) -> None:
        """``settings`` are the worker's, with what is known of this server; ``say`` shows people how a start goes."""
        self.title = title
        self.settings = settings
        self._command = command
        self._environment = environment
        self._log_file = log_file
        self._is_ready = is_ready
        self._say = say
        self._pace = RestartPace(f"{settings.worker_id}/server")
        self._process: Process | None = None
        self._log_begins = 0
        """Where the words of this life begin in the log."""
        self._ready_s: float | None = None
        """When it was last ready; ``None`` while it is not."""
        self._state = "starting"
        self._began_s = self._shown_s = 0.0
        self._group: int | None = None
        """Its process group, as long as something of it may be there."""
        self._restarts = 0

    # -- what others see -----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        return {
            "state": self._state,
            "process_group": self._group,
            "restarts": self._restarts,
            "log": str(self._log_file),
        }

    def excuse(self) -> str:
        """Why it cannot be asked now; empty = it should answer."""
        return "" if self._ready_s is not None else f"{self.title} is {self._state}; its log is {self._log_file}"

    # -- its life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin a life, and wait until it serves; raises ``ServerEnded``."""
        self._ready_s = None
        self._state = "starting"
        with ExitStack() as opened:
            try:
                output = opened.enter_context(self._log_file.open("ab"))
            except OSError as error:
                raise ServerEnded(f"writing the log of {self.title} (log_dir): {error}") from None
            self._log_begins = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *leashed(self.settings.engine_stop_timeout_s, self._command),
                stdin=PIPE,
                stdout=output,
                stderr=STDOUT,
                env={**given_environment(), **self._environment},
                # Ctrl-C reaches the worker only, which finishes its requests before it ends the server.
                start_new_session=True,
            )
        self._group = self._process.pid
        self._began_s = self._shown_s = asyncio.get_running_loop().time()
        log.info("starting %s: %s; its log is %s", self.title, shlex.join(shown(self._command)), self._log_file)
        exited = owned(self._process.wait(), "end of the server")
        try:
            async with asyncio.timeout(self.settings.start_timeout_ms / 1000):
                while not exited.done():
                    if await self._is_ready():
                        self._ready_s = asyncio.get_running_loop().time()
                        self._state = "ready"
                        log.info("%s is ready", self.title)
                        return
                    self._show_progress()
                    await asyncio.wait({exited}, timeout=ASK_AGAIN_S)
        except TimeoutError:
            self._end_group()
            await self._process.wait()
            raise ServerEnded(
                f"{self.title} did not answer within {self.settings.start_timeout_ms / 1000:g} s "
                f"(start_timeout_ms){self._last_lines()}"
            ) from None
        finally:
            await cancel_all([exited])
        self._end_group()
        raise ServerEnded(
            f"{self.title} ended with status {self._process.returncode} before it was ready{self._last_lines()}"
        )

    async def watch(self, changed: Callable[[], None]) -> None:
        """Start it again whenever it dies; raises ``EngineBrokenError`` when it has died too often in a row."""
        while True:
            assert self._process is not None, "it was started"
            status = await self._process.wait()
            self._end_group()
            lived_s = 0.0 if self._ready_s is None else asyncio.get_running_loop().time() - self._ready_s
            self._ready_s = None
            pause_s = self._pace.died(lived_s)
            often = f", the {self._pace.deaths}. time in a row" if self._pace.deaths > 1 else ""
            ended = f"{self.title} ended with status {status}{often}"
            if self._pace.deaths > self.settings.engine_restarts_max:
                self._state = "ended"
                log.error("%s%s", ended, self._last_lines())
                raise EngineBrokenError(
                    f"{ended}: it is started again at most {self.settings.engine_restarts_max} times in a row; "
                    f"its log is {self._log_file}"
                )
            self._state = f"down: {ended}, and is started again"
            log.error("%s: it is started again in %.1f s%s", ended, pause_s, self._last_lines())
            changed()
            await asyncio.sleep(pause_s)
            self._restarts += 1
            try:
                await self.start()
            except (ServerEnded, OSError) as error:
                # OSError: this machine has no process or descriptor left to give, for now.
                log.error("%s", error)
            changed()

    async def end(self, patience_s: float) -> None:
        process = self._process
        if process is None:
            return
        try:
            if process.returncode is None and patience_s:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(patience_s):
                    await process.wait()
        except TimeoutError:
            log.warning(
                "%s did not end within %g s: it is killed",
                self.title,
                self.settings.engine_stop_timeout_s,
            )
        finally:
            self._end_group()
        await process.wait()
        log.info("%s has ended", self.title)

    def _end_group(self) -> None:
        """Kill what is there of the process group, once: later its number may be another's."""
        if self._group is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = None

    # -- its words -----------------------------------------------------------------------------------------------------

    def _show_progress(self) -> None:
        """Say how a start goes, now and then in the log too."""
        now_s = asyncio.get_running_loop().time()
        words = f"{self.title} has been starting for {now_s - self._began_s:.0f} s"
        for line in self._last_words()[-1:]:
            words += f": {' '.join(line.split())[:LINE_SHOWN]}"
        self._say(words)
        if now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            log.info("%s", words)

    def _last_words(self) -> list[str]:
        try:
            with self._log_file.open("rb") as written:
                end = written.seek(0, os.SEEK_END)
                written.seek(max(self._log_begins, end - LAST_BYTES))
                text = written.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-LAST_LINES:]

    def _last_lines(self) -> str:
        """Return how its words are shown below an error."""
        lines = self._last_words()
        where = f"; its log is {self._log_file}"
        return where + "".join(f"\n    {line}" for line in lines) if lines else f"{where}, which is empty"


@asynccontextmanager
async def start_server(
    settings: EngineServerSettings, around: EngineHost, kind: ServerKind
) -> AsyncIterator[StartedServer]:
    """Start a server for ``model_path``, and end it with the block.

    Raises ``ServerEnded``, ``OSError`` where it has no place, and ``ValueError`` for arguments that cannot be had.
    """
    with ExitStack() as opened:
        server = _prepared(settings, around, kind, opened)
        patience_s = settings.engine_stop_timeout_s
        try:
            await server.start()
            try:
                yield server
            except asyncio.CancelledError:
                patience_s = 0.0  # asked a second time: end at once
                raise
        finally:
            await server.end(patience_s)


def _prepared(settings: EngineServerSettings, around: EngineHost, kind: ServerKind, opened: ExitStack) -> StartedServer:
    """Return a server that can be started; what it needs is there until ``opened`` is closed."""
    launch = kind.launch
    executable = _executable(settings.engine_command or launch.executable)
    directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-server-"))
    options = options_in(settings.engine_argument)
    host = options.get("--host", settings.host)
    ports = ReservedPorts("0.0.0.0" if host in WILDCARDS else host)
    opened.callback(ports.close)
    port = ports.hold(settings.engine_port)
    if not launch.shares_ports:
        ports.close()
    wanted = WantedServer(
        model_path=settings.model_path,
        model_name=settings.served_model_name or _usual_name(settings.model_path),
        host=host,
        port=port,
        arguments=settings.engine_argument,
        role=settings.role,
        block_size=settings.kv_block_size,
        api_key=settings.engine_api_key,
        directory=directory,
        follows_events=settings.follow_events,
        publishing=_publishing(settings, launch, options, directory, opened),
        given_file=_given_file(options, launch),
    )
    command = launch.command(wanted)
    for name, text in command.files.items():
        Path(directory, name).write_text(text, encoding="utf-8")
    known = settings.model_copy(update=_known(settings, wanted, command))
    client = ServerClient(known.server_url, around.clock, settings.engine_api_key)
    opened.callback(client.close)
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    return StartedServer(
        f"the {kind.title} server of {settings.worker_id}",
        known,
        [*executable, *command.arguments],
        command.environment,
        settings.log_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', settings.worker_id)}-server.log",
        partial(_answers, client, kind.health_path),
        around.say_start,
    )


def _known(settings: EngineServerSettings, wanted: WantedServer, command: ServerCommand) -> dict[str, Any]:
    """Return what the worker knows of a server that it starts, as the settings in which others are told of theirs."""
    reached = (settings.advertise_host or LOOPBACK) if wanted.host in WILDCARDS else wanted.host
    url = f"http://{bracketed(reached)}:{wanted.port}"
    known: dict[str, Any] = {"engine_url": (url,)}
    if command.block_size is not None:
        known["kv_block_size"] = command.block_size
    if wanted.publishing is not None and command.publishes:
        known["kv_events_endpoint"] = tuple(each.endpoint for each in wanted.publishing.sources)
        known["kv_events_replay_endpoint"] = tuple(each.replay_endpoint for each in wanted.publishing.sources)
    return known


def _publishing(
    settings: EngineServerSettings, launch: Launch, options: Mapping[str, str], directory: str, opened: ExitStack
) -> Publishing | None:
    """Return where a server is to publish; the ports of several ranks are held until ``opened`` is closed."""
    if not settings.follow_events or not launch.publishes:
        return None
    ranks = launch.ranks(options)
    places = publishing_in(directory) if ranks == 1 else publishing_at(_ports_in_a_row(2 * ranks, opened), ranks)
    return launch.as_it_publishes(places)


def _ports_in_a_row(count: int, opened: ExitStack) -> int:
    """Return the first of so many free ports that follow each other; raises ``OSError``."""
    for _ in range(PORT_ATTEMPTS):
        with ExitStack() as held:
            try:
                first: int = held.enter_context(bind("0.0.0.0", 0, "ports of cache events")).getsockname()[1]
                for port in range(first + 1, first + count):
                    held.enter_context(bind("0.0.0.0", port, "ports of cache events"))
            except (OSError, OverflowError):
                continue
            opened.callback(held.pop_all().close)
            return first
    raise OSError(f"looking for {count} free ports in a row, for the cache events of each rank: found none")


def _usual_name(model_path: str) -> str:
    """Return the name under which routers serve a model without a given name: that of its directory."""
    path = Path(model_path)
    return path.resolve().name if path.is_dir() else model_path


def _given_file(options: Mapping[str, str], launch: Launch) -> str:
    for name in launch.file_options:
        if name in options:
            try:
                return Path(options[name]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"reading {name} {options[name]} of the server's arguments: {error}") from None
    return ""


def _executable(command: str) -> list[str]:
    """Return a command as words, the first of them a file; raises ``ValueError``."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"engine_command is {command!r}: {error}") from None
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise ValueError(
            f"engine_command is {command!r}, and there is no such program on PATH: install the engine, or name its "
            "program with --engine-command"
        )
    return [found, *words[1:]]


async def _answers(client: ServerClient, path: str) -> bool:
    try:
        await client.ask(path)
    except ServerError:
        return False
    return True
