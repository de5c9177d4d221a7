"""Whether a pool is complete, asked of its router where global routers ask: no API key is needed there."""

from __future__ import annotations

import asyncio
import os

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.cli.options import environment_name
from poolgrid.transport.planes import CurveKeys, PlaneContext, PlaneMetrics
from poolgrid.transport.security import SecuritySettings
from poolgrid.transport.zmq_socket import CallbackSocket
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.selection import AskStatus, PoolStatus

ASK_INTERVAL_S = 0.02


async def until_workers_are_ready(endpoint: str, workers: int, timeout_s: float) -> None:
    """Wait until the router behind a select plane has so many workers that requests can be sent to.

    Raises ``TimeoutError``.
    """
    context = PlaneContext.make(_keys_of_environment(), PlaneMetrics(CollectorRegistry()))
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    complete = asyncio.Event()

    def on_frames(frames: list[bytes]) -> None:
        try:
            status = codec.from_pool.decode(frames[-1])
        except DecodeError:
            return  # no router of ours; the timeout reports it
        if isinstance(status, PoolStatus) and is_complete(status, workers):
            complete.set()

    asking = CallbackSocket(socket, on_frames)
    try:
        socket.connect(endpoint)
        async with asyncio.timeout(timeout_s):
            for number in range(1, 1 << 62):
                asking.send([codec.to_pool.encode(AskStatus(number))])
                try:
                    async with asyncio.timeout(ASK_INTERVAL_S):
                        await complete.wait()
                    return
                except TimeoutError:
                    continue
    finally:
        asking.close()
        context.destroy(linger=0)


def is_complete(status: PoolStatus, workers: int) -> bool:
    """Return whether so many workers can be sent requests, with every rank of theirs that the router knows."""
    roles = [role for model in status.models for role in model.roles]
    return sum(role.ready for role in roles) >= workers and not any(role.unreachable for role in roles)


def _keys_of_environment() -> CurveKeys | None:
    """Return the CURVE keys that the parts of a pool take from their environment."""
    names = {name: environment_name(name) for name in SecuritySettings.model_fields if name.startswith("curve_")}
    given = {name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)}
    return CurveKeys.load(SecuritySettings.model_validate(given))
