"""`poolgrid router --http-workers N`: processes that share one port (``poolgrid.cli.http_group``), each a router.

Rules
    1. Every process follows the same event stream and so has the same projection; each has its own identity towards
       workers, its own admission queue and its own caches.
    2. A consolidator that would be embedded runs as a process of its own here, so that any router may die.
    3. Only the first process answers global routers, at ``select_port``, and gateways, at ``ext_proc_port``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from poolgrid.cli.command_line import LogChoice
from poolgrid.cli.http_group import admin_port, member, run_group, start_members
from poolgrid.cli.options import arguments_of
from poolgrid.cli.part import Part, part_environment, stop_parts
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.process.process_group import GroupPlace
from poolgrid.router.settings import RouterSettings


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
