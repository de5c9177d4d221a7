"""`poolgrid global-router --http-workers N`: several processes that share one port, each a global router.

Rules
    1. Each has its own connections to the pools, and so its own view of them; what they reserve is decided by the
       pools' routers, one after the other, for every client. Each has its own queue, circuit breakers and closed loop.
    2. SIGHUP is passed on to all: each reads the document again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from poolgrid.cli.command_line import LogChoice
from poolgrid.cli.http_group import admin_port, member, run_group, start_members
from poolgrid.cli.options import arguments_of
from poolgrid.cli.part import Part, stop_parts
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.global_router.settings import GlobalRouterSettings
from poolgrid.process.process_group import GroupPlace


async def serve_global_group(
    settings: GlobalRouterSettings,
    frontend: FrontendSettings,
    log: LogChoice,
    stop: asyncio.Event,
    ready: Callable[..., None],
) -> None:
    """Run the group until ``stop`` is set; ``ready`` gets the URL. Raises ``OSError``, ``PartFailed``."""

    def make_group(port: int, directory: Path) -> _Group:
        parts = []
        for index in range(settings.http_workers):
            own = {"http_workers": 1, "port": port, "admin_port": admin_port(settings, index)}
            arguments = arguments_of(settings.model_copy(update=own), frontend)
            place = GroupPlace(directory, index, settings.http_workers)
            words = ["global-router", *arguments, *log.arguments]
            parts.append(member("global router", words, place, settings.shutdown_timeout_ms))
        return _Group(parts)

    await run_group(settings.host, settings.port, make_group, stop, ready)


class _Group:
    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    async def start(self) -> list[str]:
        admin = await start_members(self._parts)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        return [self._parts[0].ready_words[0], admin]

    def _pass_on(self, number: signal.Signals) -> None:
        for part in self._parts:
            part.signal(number)

    async def stop(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await stop_parts(self._parts)
