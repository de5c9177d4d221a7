"""`poolgrid global-router --http-workers N`: several processes that share one port, each a global router.

Rules
    1. Each has its own connections to the pools, and so its own view of them; what they reserve is decided by the
       pools' routers, one after the other, for every client. Each has its own queue, circuit breakers and closed loop.
    2. SIGHUP is passed on to all: each reads the document again.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from poolgrid.server.cli.command_line import LogChoice
from poolgrid.server.cli.http_group import admin_port, member, run_group, start_members
from poolgrid.server.cli.options import arguments_of
from poolgrid.server.cli.part import stop_parts
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.lifecycle import GroupPlace


async def serve_global_group(
    settings: GlobalRouterSettings,
    frontend: FrontendSettings,
    log: LogChoice,
    stop: asyncio.Event,
    ready: Callable[..., None],
) -> None:
    """Run the group until ``stop`` is set; ``ready`` gets the URL. Raises ``OSError``, ``PartFailed``."""

    async def start(opened: AsyncExitStack, port: int, directory: Path, listener: socket.socket | None) -> list[str]:
        parts = []
        for index in range(settings.http_workers):
            own = {"http_workers": 1, "port": port, "admin_port": admin_port(settings, index)}
            arguments = arguments_of(settings.model_copy(update=own), frontend)
            place = GroupPlace(directory, index, settings.http_workers)
            words = ["global-router", *arguments, *log.arguments]
            parts.append(member("global router", words, place, settings.shutdown_timeout_ms, listener))

        def pass_on() -> None:
            for part in parts:
                part.signal(signal.SIGHUP)

        opened.push_async_callback(stop_parts, parts)
        admin = await start_members(parts)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, pass_on)
        opened.callback(loop.remove_signal_handler, signal.SIGHUP)
        return [parts[0].ready_words[0], admin]

    await run_group(settings.host, settings.port, start, stop, ready)
