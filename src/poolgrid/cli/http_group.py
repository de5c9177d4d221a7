"""Several processes of one command that share an HTTP port, watched over by this one.

Rules
    1. The kernel spreads connections over the processes (SO_REUSEPORT). The port is fixed by a socket of this process
       that is bound for as long as the group lives, and never listened on.
    2. Each process knows its place in the group (``poolgrid.process.process_group``), and answers for itself alone at
       an admin port of its own, which it keeps when it is started again.
    3. A process that dies is started again with the same arguments, at growing intervals; the others keep serving.

`poolgrid router --http-workers N`: processes that share one port (``poolgrid.cli.http_group``), each a router.

Rules
    1. Every process follows the same event stream and so has the same projection; each has its own identity towards
       workers, its own admission queue and its own caches.
    2. A consolidator that would be embedded runs as a process of its own here, so that any router may die.
    3. Only the first process answers global routers, at ``select_port``, and gateways, at ``ext_proc_port``.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from poolgrid.cli.command_line import LogChoice
from poolgrid.cli.options import arguments_of
from poolgrid.cli.part import STOP_TIMEOUT_S, Part, part_environment, stop_parts
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.http.http_settings import ServerSettings
from poolgrid.process.process_group import GROUP_VARIABLE, GroupPlace
from poolgrid.process.tasks import unless
from poolgrid.router.settings import RouterSettings
from poolgrid.transport.bound_socket import bind


class HttpGroup(Protocol):
    """The processes of a command."""

    async def start(self) -> list[str]:
        """Start all and return the words of the ready line; raises ``PartFailed``."""
        ...

    async def stop(self) -> None: ...


def member(name: str, arguments: list[str], place: GroupPlace, shutdown_timeout_ms: float) -> Part:
    """Return a process of a group, to be started."""
    environment = {**part_environment(), GROUP_VARIABLE: place.to_environment()}
    return Part(f"{name} {place.index}", arguments, environment, shutdown_timeout_ms / 1000 + STOP_TIMEOUT_S)


def admin_port(settings: ServerSettings, index: int) -> int:
    """Return the admin port of a process."""
    return settings.admin_port + index if settings.admin_port else 0


async def start_members(parts: list[Part]) -> str:
    """Start all, and return the word of the ready line that names their admin ports; raises ``PartFailed``."""
    await asyncio.gather(*(part.start() for part in parts))
    urls = [part.word("admin") for part in parts]
    for part, url in zip(parts, urls, strict=True):
        part.arguments += ["--admin-port", url.rpartition(":")[2]]
        part.watch()
    return f"admin={','.join(urls)}"


async def run_group(
    host: str,
    port: int,
    make_group: Callable[[int, Path], HttpGroup],
    stop: asyncio.Event,
    ready: Callable[..., None],
) -> None:
    """Run a group, made from the port and its directory, until ``stop`` is set; ``ready`` gets the ready line's words.

    Raises ``OSError`` when the port cannot be bound, ``PartFailed`` when a process does not start.
    """
    async with AsyncExitStack() as opened:
        holder = opened.enter_context(bind(host, port, "port", reuse_port=True))
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-http-"))
        group = make_group(holder.getsockname()[1], Path(directory))
        opened.push_async_callback(group.stop)
        words = await unless(stop, group.start(), "start of the group")
        if words is not None:
            ready(*words)
            await stop.wait()


async def serve_group(
    settings: RouterSettings,
    frontend: FrontendSettings,
    consolidator: ConsolidatorSettings,
    log: LogChoice,
    stop: asyncio.Event,
    ready: Callable[..., None],
) -> None:
    """Run the group until ``stop`` is set; ``ready`` gets the URL and the words of the parts' ready lines.

    Raises ``OSError`` when the port cannot be bound, ``PartFailed`` when a process does not start.
    """

    def make_group(port: int, directory: Path) -> _Group:
        return _Group(settings, frontend, consolidator, log, port, directory)

    await run_group(settings.host, settings.port, make_group, stop, ready)


class _Group:
    def __init__(
        self,
        settings: RouterSettings,
        frontend: FrontendSettings,
        consolidator: ConsolidatorSettings,
        log: LogChoice,
        port: int,
        directory: Path,
    ) -> None:
        self._settings = settings
        self._frontend = frontend
        self._consolidator_settings = consolidator
        self._log_arguments = log.arguments
        self._port = port
        self._directory = directory
        self._consolidator: Part | None = None
        self._routers: list[Part] = []

    async def start(self) -> list[str]:
        """Start all and return the words of the ready line."""
        settings = self._settings
        words: list[str] = []
        if settings.feed_endpoint is None and not settings.on_nats:
            arguments = ["consolidator", "--host", settings.host, *arguments_of(self._consolidator_settings)]
            part = self._consolidator = Part("consolidator", [*arguments, *self._log_arguments], part_environment())
            await part.start()
            for key in ("ingest", "feed", "query"):
                part.arguments += [f"--{key}-port", part.word(key).rpartition(":")[2]]
            part.watch()
            endpoints = {"feed_endpoint": part.word("feed"), "query_endpoint": part.word("query")}
            settings = settings.model_copy(update=endpoints)
            words.append(f"ingest={part.word('ingest')}")
        for index in range(settings.http_workers):
            self._routers.append(self._router(settings, index))
        admin = await start_members(self._routers)
        first = self._routers[0]
        first.arguments += ["--select-port", first.word("select").rpartition(":")[2]]
        ext_proc = [f"ext-proc={first.word('ext-proc')}"] if settings.ext_proc_port is not None else []
        return [first.ready_words[0], *words, f"select={first.word('select')}", *ext_proc, admin]

    def _router(self, settings: RouterSettings, index: int) -> Part:
        own = {
            "http_workers": 1,
            "port": self._port,
            "admin_port": admin_port(settings, index),
            "router_id": f"{settings.router_id}.{index}",
            **({"select_port": 0, "ext_proc_port": None} if index else {}),
        }
        arguments = [
            "router",
            *arguments_of(settings.model_copy(update=own), self._frontend, self._consolidator_settings),
            *self._log_arguments,
        ]
        place = GroupPlace(self._directory, index, settings.http_workers)
        return member("router", arguments, place, settings.shutdown_timeout_ms)

    async def stop(self) -> None:
        """End the routers, which finish open responses, then the consolidator."""
        await stop_parts(self._routers)
        await stop_parts([self._consolidator])
