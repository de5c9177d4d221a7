"""`poolgrid router --http-workers N`: processes that share one port (``poolgrid.server.cli.http_group``), each a
router.

Rules
    1. Every process follows the same event stream and so has the same projection; each has its own identity towards
       workers, its own admission queue and its own caches.
    2. A consolidator that would be embedded runs as a process of its own here, so that any router may die.
    3. Only the first process answers global routers, at ``select_port``, and gateways, at ``ext_proc_port``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from poolgrid.server.cli.command_line import LogChoice
from poolgrid.server.cli.http_group import admin_port, member, run_group, start_members
from poolgrid.server.cli.options import arguments_of
from poolgrid.server.cli.part import Part, part_environment, stop_parts
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.router.settings import RouterSettings


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

    async def start(opened: AsyncExitStack, port: int, directory: Path, listener: socket.socket | None) -> list[str]:
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
            return member(
                "router", ["router", *arguments, *log.arguments], place, settings.shutdown_timeout_ms, listener
            )

        routers = [router(index) for index in range(settings.http_workers)]
        opened.push_async_callback(stop_parts, routers)  # before the consolidator: they finish open responses
        admin = await start_members(routers)
        first = routers[0]
        first.arguments += ["--select-port", first.word("select").rpartition(":")[2]]
        ext_proc = [f"ext-proc={first.word('ext-proc')}"] if settings.ext_proc_port is not None else []
        return [first.ready_words[0], *words, f"select={first.word('select')}", *ext_proc, admin]

    await run_group(settings.host, settings.port, start, stop, ready)
