"""`poolgrid router --http-workers N`: several processes that share one port, each a router, watched over by this one.

Rules
    1. Every process follows the same event stream and so has the same projection; each has its own identity towards
       workers, its own admission queue and its own caches. The kernel spreads connections over them (SO_REUSEPORT).
    2. A consolidator that would be embedded runs as a process of its own here, so that any router may die.
    3. A process that dies is started again with the same arguments; what dies too often ends all.
    4. Only the first process answers global routers, at ``select_port``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from cli.options import arguments_of
from cli.part import STOP_TIMEOUT_S, Part, PartFailed, part_environment, stop_parts
from frontend.settings import FrontendSettings
from router.consolidator.settings import ConsolidatorSettings
from router.settings import RouterSettings
from runtime.http_server import bind
from runtime.process_group import GROUP_VARIABLE, GroupPlace

log = logging.getLogger(__name__)


async def serve_group(
    settings: RouterSettings,
    frontend: FrontendSettings,
    consolidator: ConsolidatorSettings,
    log_level: str,
    stop: asyncio.Event,
    ready: Callable[..., None],
) -> None:
    """Run the group until ``stop`` is set; ``ready`` gets the URL and the words of the parts' ready lines.

    Raises ``OSError`` when the port cannot be bound, ``PartFailed`` when a process does not start or dies too often.
    """
    # Bound for as long as the group lives and never listened on: it fixes the port, also while processes restart.
    holder = bind(settings.host, settings.port, "port", reuse_port=True)
    with tempfile.TemporaryDirectory(prefix="poolgrid-router-") as directory:
        group = _Group(settings, frontend, consolidator, log_level, holder, Path(directory))
        try:
            ready(*await group.start())
            failed = asyncio.ensure_future(group.failed.wait())
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({failed, stopping}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            stopping.cancel()
            if not stop.is_set():
                raise PartFailed("a process of the group died too often: ending all of them")
        finally:
            await group.stop()
            holder.close()


class _Group:
    def __init__(
        self,
        settings: RouterSettings,
        frontend: FrontendSettings,
        consolidator: ConsolidatorSettings,
        log_level: str,
        holder: socket.socket,
        directory: Path,
    ) -> None:
        self._settings = settings
        self._frontend = frontend
        self._consolidator_settings = consolidator
        self._level = ["--log-level", log_level]
        self._port: int = holder.getsockname()[1]
        self._directory = directory
        self._consolidator: Part | None = None
        self._routers: list[Part] = []
        self.failed = asyncio.Event()

    async def start(self) -> list[str]:
        """Start all and return the words of the ready line."""
        settings = self._settings
        words: list[str] = []
        if settings.feed_endpoint is None:
            arguments = ["consolidator", "--host", settings.host, *arguments_of(self._consolidator_settings)]
            part = self._consolidator = Part("consolidator", [*arguments, *self._level], part_environment())
            await part.start()
            for key in ("ingest", "feed", "query"):
                part.arguments += [f"--{key}-port", part.word(key).rpartition(":")[2]]
            part.watch(self.failed)
            endpoints = {"feed_endpoint": part.word("feed"), "query_endpoint": part.word("query")}
            settings = settings.model_copy(update=endpoints)
            words.append(f"ingest={part.word('ingest')}")
        for index in range(settings.http_workers):
            self._routers.append(self._router(settings, index))
        await asyncio.gather(*(part.start() for part in self._routers))
        first = self._routers[0]
        first.arguments += ["--select-port", first.word("select").rpartition(":")[2]]
        for part in self._routers:
            part.watch(self.failed)
        return [first.ready_words[0], *words, f"select={first.word('select')}"]

    def _router(self, settings: RouterSettings, index: int) -> Part:
        own = {
            "http_workers": 1,
            "port": self._port,
            "router_id": f"{settings.router_id}.{index}",
            **({"select_port": 0} if index else {}),
        }
        arguments = [
            "router",
            *arguments_of(settings.model_copy(update=own), self._frontend, self._consolidator_settings),
            *self._level,
        ]
        place = GroupPlace(self._directory, index, settings.http_workers)
        environment = {**part_environment(), GROUP_VARIABLE: place.to_environment()}
        stop_timeout_s = settings.shutdown_timeout_ms / 1000 + STOP_TIMEOUT_S
        return Part(f"router {index}", arguments, environment, stop_timeout_s)

    async def stop(self) -> None:
        """End the routers, which finish open responses, then the consolidator."""
        await stop_parts(self._routers)
        await stop_parts([self._consolidator])
