"""Several processes of one command that share an HTTP port, watched over by this one.

Rules
    1. The kernel spreads connections over the processes (SO_REUSEPORT). The port is fixed by a socket of this process
       that is bound for as long as the group lives, and never listened on. A group that is started with a listening
       socket hands that to all of its processes: whichever is free accepts.
    2. Each process knows its place in the group (``poolgrid.server.process.lifecycle``), and answers for itself alone
       at an admin port of its own, which it keeps when it is started again.
    3. A process that dies is started again with the same arguments, at growing intervals; the others keep serving.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from poolgrid.server.cli.part import STOP_TIMEOUT_S, Part, part_environment
from poolgrid.server.http.http_settings import ServerSettings
from poolgrid.server.process.lifecycle import GROUP_VARIABLE, GroupPlace
from poolgrid.server.process.tasks import unless
from poolgrid.server.transport.bound_socket import bind, inherited_listener

Start = Callable[[AsyncExitStack, int, Path, socket.socket | None], Coroutine[Any, Any, list[str]]]
"""Starts the processes of a group, given the port, a directory, and the listening socket if there is one, and returns
the words of the ready line; what it started is ended by the stack."""


def member(
    name: str,
    arguments: list[str],
    place: GroupPlace,
    shutdown_timeout_ms: float,
    listener: socket.socket | None,
) -> Part:
    """Return a process of a group, to be started; ``listener`` is the group's, if it was started with one."""
    environment = {**part_environment(), GROUP_VARIABLE: place.to_environment()}
    stop_timeout_s = shutdown_timeout_ms / 1000 + STOP_TIMEOUT_S
    return Part(f"{name} {place.index}", arguments, environment, stop_timeout_s, listener=listener)


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
        listener = inherited_listener(os.environ)
        holder = opened.enter_context(listener or bind(host, port, "port", reuse_port=True))
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-http-"))
        words = await unless(
            stop, start(opened, holder.getsockname()[1], Path(directory), listener), "start of the group"
        )
        if words is not None:
            ready(*words)
            await stop.wait()
