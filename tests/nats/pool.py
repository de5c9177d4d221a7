"""What a pool on NATS is asked by tests: who is active, whether it serves, whether its index is true."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import psutil

from poolgrid.kernel.wire.ingest import Leader
from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.plugins.nats.leader import read_leader
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.nats_settings import EventPlaneSettings
from tests.e2e.processes import WAIT_TIMEOUT_S, Process, eventually


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[NatsConnection]:
    connection = NatsConnection(EventPlaneSettings(event_plane="nats", nats_url=(url,)), "test", SystemClock())
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


def leader(url: str) -> Leader | None:
    """Return the consolidator that has the lease of the pool."""

    async def look() -> Leader | None:
        async with _connected(url) as connection:
            return (await read_leader(connection))[1]

    return asyncio.run(look())


def active_consolidator(up: Process, url: str) -> psutil.Process:
    """Return the consolidator of a pool that is active: it listens where NATS says."""
    found = leader(url)
    assert found is not None, "no consolidator is active"
    port = int(found.ingest.rpartition(":")[2])
    for process in up.descendants():
        with contextlib.suppress(psutil.Error):
            listens = {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
            if "consolidator" in process.cmdline() and port in listens:
                return process
    raise AssertionError(f"no consolidator of the pool listens at {found.ingest}")


def kill_active_consolidator(up: Process, url: str) -> Leader:
    """Kill the consolidator that is active, as soon as there is one, and return what it was to the pool."""
    killed: Leader | None = None

    def is_killed() -> bool:
        nonlocal killed
        if (killed := leader(url)) is None:
            return False  # it stood still for its lease, and has lost it
        with contextlib.suppress(AssertionError, psutil.Error):  # another one has become active meanwhile
            active_consolidator(up, url).kill()
            return True
        return False

    eventually("the active consolidator is killed", is_killed)
    assert killed is not None
    return killed


def ask(url: str, prompt: str) -> int:
    """Ask something; return the status."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_TIMEOUT_S).status_code


def offset(url: str) -> int:
    """Return the journal's offset as the router knows it."""
    return int(httpx.get(f"{url}/v1/pool").json()["journal"]["offset"])


def trouble(url: str) -> str:
    """Return what keeps the router's state from being current."""
    return str(httpx.get(f"{url}/v1/pool").json()["journal"]["trouble"])


def last_entry(url: str, stream: str) -> int:
    """Return the number of the newest message of a stream."""

    async def look() -> int:
        async with _connected(url) as connection:
            return (await connection.jetstream.stream_info(stream)).state.last_seq

    return asyncio.run(look())


def publish(url: str, subject: str, body: bytes) -> None:
    """Have a message stored that is none of poolgrid's."""

    async def send() -> None:
        async with _connected(url) as connection:
            await connection.jetstream.publish(subject, body)

    asyncio.run(send())
