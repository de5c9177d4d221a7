"""The leader's watch over the ranks of its engine: it hears their beats, and says when one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import zmq

from poolgrid.process.clock import Clock
from poolgrid.process.complaints import Complaints, shown_peer
from poolgrid.process.tasks import cancel_all, detached, owned
from poolgrid.transport.planes import PlaneContext, name_plane
from poolgrid.transport.zmq_socket import CallbackSocket, bind
from poolgrid.wire.errors import DecodeError
from poolgrid.workers.core.rank_group import RankGroup, named
from poolgrid.workers.core.rank_messages import decode_beat, encode
from poolgrid.workers.ranks.metrics import RankMetrics

log = logging.getLogger(__name__)

BEATS_PER_LEASE = 8
"""Beats within a lease, and looks at the ranks: seven in a row are lost before a rank is."""

PEERS_MAX = 8192
"""Connections that are told of the end: twice as many as there may be ranks. Of more the oldest is forgotten, and hears
it with its next beat."""

HIGH_WATER_MARK = 100
"""Words that wait for one rank; one that reads nothing is told again with its next beat."""

LINGER_MS = 1000
"""How long the last word may take to leave."""

T = TypeVar("T")


class RankLostError(RuntimeError):
    """A rank is lost, or has not come, and the engine with it."""


class RankWatch:
    """Hears the ranks of one group; made on a running event loop."""

    def __init__(
        self,
        context: PlaneContext,
        host: str,
        port: int,
        group: RankGroup,
        lease_ms: float,
        clock: Clock,
        metrics: RankMetrics,
        stop: Callable[[], None],
    ) -> None:
        """``stop`` is called once when a rank was told to end. Raises ``OSError`` when the port cannot be bound."""
        socket = context.socket(zmq.ROUTER)
        name_plane(socket, "ranks")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        bind(socket, host, port, "rank_port")
        self._group = group
        self._clock = clock
        self._metrics = metrics
        self._stop: Callable[[], None] | None = stop
        self._complaints = Complaints(log, clock)
        self._peers: dict[bytes, None] = {}
        self._told = group.word
        self._say_start: Callable[[str], None] | None = None
        self._whole = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_lost: Callable[[str], None] | None = None
        self._socket = CallbackSocket(socket, self._on_frames)
        self._checking = detached(self._check(lease_ms / BEATS_PER_LEASE / 1e3), "watch over the ranks")
        metrics.expected.set(group.size)
        metrics.alive.set(0)

    # -- what the engine sees ------------------------------------------------------------------------------------------

    async def complete(self, timeout_ms: float, say_start: Callable[[str], None]) -> None:
        """Return when every rank is there; ``say_start`` is told which are not.

        Raises ``RankLostError`` when one is lost, or has not come in time.
        """
        self._say_start = say_start
        self._follow()
        try:
            async with asyncio.timeout(timeout_ms / 1e3):
                await self.unless_lost(self._whole.wait(), "the coming of the ranks")
        except TimeoutError:
            missing = named(self._group.missing)
            reason = f"{missing} of {self._group.size} did not come within {timeout_ms:.0f} ms"
            self.end(reason)
            raise RankLostError(f"starting the engine: {reason}") from None
        finally:
            self._say_start = None
        log.info("all %d ranks of the engine are there", self._group.size)

    async def unless_lost(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Return what ``work`` returns; raises ``RankLostError`` when a rank is lost first, and cancels it then."""
        task = owned(work, name)
        try:
            either: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RankLostError(self._group.failure)
            return task.result()
        finally:
            await cancel_all([task])

    def run(self, on_lost: Callable[[str], None]) -> None:
        """Note that the engine does its work; ``on_lost`` is called with the reason when a rank is lost."""
        self._group.run()
        self._on_lost = on_lost
        if self._group.failure:
            on_lost(self._group.failure)

    def begin_end(self) -> None:
        """Note that the engine is being shut down in order: ranks that go now are not lost."""
        self._group.begin_end()

    def end(self, failure: str = "") -> None:
        """Tell every rank that the engine is over, and why when it was broken; what was told first stays."""
        self._on_lost = None
        self._group.end(failure)
        self._follow()

    def describe(self) -> dict[str, object]:
        return self._group.describe()

    async def close(self) -> None:
        """Stop to listen; the last word is sent."""
        await cancel_all([self._checking])
        self._lost.cancel()
        self._socket.close(LINGER_MS)

    # -- what ranks say ------------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[bytes]) -> None:
        peer_id = frames[0]
        try:
            beat = decode_beat(frames[-1])
        except DecodeError as error:
            self._complaints.about(f"{shown_peer(peer_id)} among the ranks", error)
            return
        self._peers.pop(peer_id, None)
        self._peers[peer_id] = None
        if len(self._peers) > PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        answer = self._group.heard(beat, self._clock.monotonic_ms())
        self._socket.send([peer_id, encode(answer)])
        if self._group.stops and self._stop is not None:
            log.info("rank %d on host %s was told to end: stopping", beat.rank, beat.host)
            stop, self._stop = self._stop, None
            stop()
        self._follow()

    async def _check(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._group.check(self._clock.monotonic_ms())
            self._follow()

    def _follow(self) -> None:
        """Tell what has changed to whom it concerns."""
        group = self._group
        missing = group.missing
        self._metrics.alive.set(group.size - len(missing))
        if not missing:
            self._whole.set()
        elif self._say_start is not None:
            self._say_start(f"waiting for {named(missing)} of {group.size}")
        word = group.word
        if word.state is self._told.state:
            return
        self._told = word
        frame = encode(word)
        for peer_id in self._peers:
            self._socket.send([peer_id, frame])
        if group.failure and not self._lost.done():
            log.error("the engine is over: %s", group.failure)
            self._lost.set_result(None)
            if self._on_lost is not None:
                self._on_lost(group.failure)
