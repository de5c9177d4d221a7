"""The keeper of one rank: the process that ``srun`` or ``mpirun`` starts, beside this rank's part of the engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import CollectorRegistry

from poolgrid.process.awake_clock import AwakeClock
from poolgrid.process.clock import SystemClock
from poolgrid.process.complaints import Complaints
from poolgrid.process.tasks import cancel_all, owned
from poolgrid.transport.planes import CurveKeys, PlaneContext, PlaneMetrics, end_security
from poolgrid.transport.security import SecuritySettings
from poolgrid.wire.errors import DecodeError
from poolgrid.workers.adapters.sockets import LEADER_OF_RANKS, DealerSocket
from poolgrid.workers.core.rank_keeping import RankEnd, RankKeeping
from poolgrid.workers.core.rank_messages import decode_word, encode
from poolgrid.workers.core.rank_place import RankPlace
from poolgrid.workers.ranks.engine_part import EnginePart
from poolgrid.workers.ranks.watch import BEATS_PER_LEASE

log = logging.getLogger(__name__)

HOST_VARIABLES = ("SLURMD_NODENAME", "NODE_NAME")
"""What this host is called by who manages it, if anybody does."""


class RankEndedError(RuntimeError):
    """The engine of this rank came to an end that nobody asked for."""


async def keep_rank(
    place: RankPlace,
    endpoint: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    security: SecuritySettings,
    stop: asyncio.Event,
    *,
    lease_ms: float,
    start_timeout_ms: float,
) -> None:
    """Run this rank's part of the engine until the leader at ``endpoint`` says that it is over.

    When ``stop`` is set the leader is told, and decides. Raises ``RankEndedError`` when the engine did not end in
    order, ``ValueError`` for an endpoint that cannot be used, ``OSError`` when nothing can be started.
    """
    clock = SystemClock()
    host = next((environment[name] for name in HOST_VARIABLES if environment.get(name)), socket.gethostname())
    async with AsyncExitStack() as opened:
        awake = AwakeClock(clock, lease_ms).start()
        opened.callback(awake.stop)
        context = PlaneContext.make(CurveKeys.load(security), PlaneMetrics(CollectorRegistry()))
        opened.push_async_callback(asyncio.to_thread, context.destroy, linger=0)
        opened.callback(end_security, context)
        keeping = RankKeeping(
            place.group,
            place.rank,
            host,
            time.time_ns(),
            lease_ms=lease_ms,
            start_timeout_ms=start_timeout_ms,
            now_ms=awake.monotonic_ms(),
        )
        over = asyncio.Event()
        complaints = Complaints(log, clock)

        def on_frames(frames: list[bytes]) -> None:
            try:
                keeping.heard(decode_word(frames[-1]), awake.monotonic_ms())
            except DecodeError as error:
                complaints.about("the leader of the ranks", error)
            if keeping.check(awake.monotonic_ms()) is not None:
                over.set()

        rank_socket = DealerSocket(context, LEADER_OF_RANKS, endpoint, on_frames)
        opened.callback(rank_socket.close, orderly=False)
        part = await EnginePart.start(command, environment)
        opened.push_async_callback(part.kill)
        log.info("rank %d of %d on host %s, leader at %s", place.rank, place.size, host, endpoint)

        ended = owned(part.ended(), "end of the engine's part")
        stopping = owned(stop.wait(), "word to stop")
        opened.push_async_callback(cancel_all, [ended, stopping])
        end: RankEnd | None = None
        while end is None:
            if stopping.done():
                keeping.stop(awake.monotonic_ms())
            if ended.done() and not keeping.beat.ended:
                log.error("rank %d: %s", place.rank, ended.result())
                keeping.engine_ended(ended.result(), awake.monotonic_ms())
            rank_socket.send([encode(keeping.beat)])
            await _first(
                lease_ms / BEATS_PER_LEASE / 1e3, over, {each for each in (ended, stopping) if not each.done()}
            )
            end = keeping.check(awake.monotonic_ms())
        await asyncio.wait({ended}, timeout=end.grace_ms / 1e3)
        if not ended.done() and end.grace_ms:
            log.warning("rank %d has not ended within %.0f ms and is killed", place.rank, end.grace_ms)
    if not end.in_order:
        raise RankEndedError(end.reason)
    log.info("rank %d has ended: %s", place.rank, end.reason)


async def _first(interval_s: float, over: asyncio.Event, others: Collection[asyncio.Task[Any]]) -> None:
    """Wait for a beat's time; the leader's last word, and the end of one of ``others``, cut it short."""
    waiting = owned(over.wait(), "last word of the leader")
    try:
        await asyncio.wait({waiting, *others}, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
