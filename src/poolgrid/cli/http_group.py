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
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

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

Start = Callable[[AsyncExitStack, int, Path], Coroutine[Any, Any, list[str]]]
"""Starts the processes of a group, given the port and a directory, and returns the words of the ready line; what it
started is ended by the stack."""


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


async def run_group(host: str, port: int, start: Start, stop: asyncio.Event, ready: Callable[..., None]) -> None:
    """Run a group until ``stop`` is set; ``ready`` gets the ready line's words.

    Raises ``OSError`` when the port cannot be bound, ``PartFailed`` when a process does not start.
    """
    async with AsyncExitStack() as opened:
        holder = opened.enter_context(bind(host, port, "port", reuse_port=True))
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-http-"))
        words = await unless(stop, start(opened, holder.getsockname()[1], Path(directory)), "start of the group")
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

    async def start(opened: AsyncExitStack, port: int, directory: Path) -> list[str]:
        shared, words = settings, list[str]()
        if settings.feed_endpoint is None and not settings.on_nats:
            arguments = ["consolidator", "--host", settings.host, *arguments_of(consolidator), *log.arguments]
            part = Part("consolidator", arguments, part_environment())
            opened.push_async_callback(stop_parts, [part])
            await part.start()
            for key in ("ingest", "feed", "query"):
                part.arguments += [f"--{key}-port", part.word(key).rpartition(":")[2]]
            part.watch()
            endpoints = {"feed_endpoint": part.word("feed"), "query_endpoint": part.word("query")}
            shared = settings.model_copy(update=endpoints)
            words.append(f"ingest={part.word('ingest')}")

        def router(index: int) -> Part:
            own = {
                "http_workers": 1,
                "port": port,
                "admin_port": admin_port(settings, index),
                "router_id": f"{settings.router_id}.{index}",
                **({"select_port": 0, "ext_proc_port": None} if index else {}),
            }
            arguments = arguments_of(shared.model_copy(update=own), frontend, consolidator)
            place = GroupPlace(directory, index, settings.http_workers)
            return member("router", ["router", *arguments, *log.arguments], place, settings.shutdown_timeout_ms)

        routers = [router(index) for index in range(settings.http_workers)]
        opened.push_async_callback(stop_parts, routers)  # before the consolidator: they finish open responses
        admin = await start_members(routers)
        first = routers[0]
        first.arguments += ["--select-port", first.word("select").rpartition(":")[2]]
        ext_proc = [f"ext-proc={first.word('ext-proc')}"] if settings.ext_proc_port is not None else []
        return [first.ready_words[0], *words, f"select={first.word('select')}", *ext_proc, admin]

    await run_group(settings.host, settings.port, start, stop, ready)
