"""`poolgrid global-router --http-workers N`: several processes that share one port, each a global router.

Rules
    1. Each has its own connections to the pools, and so its own view of them; what they reserve is decided by the
       pools' routers, one after the other, whoever asks. Each has its own queue, circuit breakers and closed loop.
    2. SIGHUP is passed on to all: each reads the document again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from poolgrid.cli.command_line import LogChoice
from poolgrid.cli.http_group import member, run_group
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
        own = settings.model_copy(update={"http_workers": 1, "port": port})
        arguments = ["global-router", *arguments_of(own, frontend), *log.arguments]
        places = [GroupPlace(directory, index, settings.http_workers) for index in range(settings.http_workers)]
        return _Group([member("global router", arguments, place, settings.shutdown_timeout_ms) for place in places])

    await run_group(settings.host, settings.port, make_group, stop, ready)


class _Group:
    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    async def start(self) -> list[str]:
        await asyncio.gather(*(part.start() for part in self._parts))
        for part in self._parts:
            part.watch()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        return self._parts[0].ready_words

    def _pass_on(self, number: signal.Signals) -> None:
        for part in self._parts:
            part.signal(number)

    async def stop(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await stop_parts(self._parts)
