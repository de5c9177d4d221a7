"""A connection to one router of a pool: its select plane found, its status asked for, questions asked and answered.

Rules
    1. One task: find the select plane, connect, ask for the status every ``status_interval_ms``. A connection that
       breaks, or is silent for ``status_timeout_ms``, is dropped and the router looked for again, at growing
       intervals: one that comes back elsewhere behind its URL is found.
    2. While there is no connection there is no status. Questions that were open when a connection broke fail at once.
    3. An answer that comes after its question was given up, or just as its asker is cancelled, is undone: a worker that
       was reserved is released. After ``LATE_ANSWER_MS`` it is no longer waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.limits import RENEWALS_MAX
from poolgrid.kernel.wire.selection import (
    AskStatus,
    PoolStatus,
    Probe,
    Probed,
    Release,
    Renew,
    Reservation,
    Select,
    Selected,
    SelectRefused,
    ToPool,
)
from poolgrid.server.process.clock import Clock, within
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import Restart, supervised
from poolgrid.server.transport.zmq_socket import CallbackSocket, connect, make_socket

log = logging.getLogger(__name__)

RETRY_MIN_S = 0.1
RETRY_MAX_S = 2.0
"""Between two attempts to find a pool that is not there; a pool that comes up is used two seconds later at most."""

FOLLOWING = Restart(limit=None, pause_s=RETRY_MIN_S, pause_max_s=RETRY_MAX_S)
"""A pool whose follower fails in an unforeseen way is followed again, and is down meanwhile."""

ASKS_OPEN_MAX = 100_000
"""Questions open at one pool; far more than requests arrive within a select timeout. Beyond, the pool is lost."""

LATE_ANSWER_MS = 10_000.0
"""How long an answer is waited for after its question was given up, to undo it. By then a pool that is this late has
long let the reservation end with its lease, and what was asked must not pile up."""

Discover = Callable[[str], Awaitable[str]]
"""Return the select plane's endpoint behind a pool's URL; raises ``OSError`` or ``ValueError``."""


@dataclass(frozen=True, slots=True)
class PoolNetwork:
    """How pools' routers are reached."""

    context: zmq.Context[zmq.Socket[bytes]]
    discover: Discover
    clock: Clock
    status_interval_ms: float
    status_timeout_ms: float


class PoolLost(Exception):
    """A pool's router does not answer."""


class RouterLink:
    """One router of a pool: where it is, how its pool is, and the questions that are open there."""

    def __init__(
        self,
        name: str,
        url: str,
        network: PoolNetwork,
        discover: Discover,
        on_news: Callable[[], None],
        next_ask: Callable[[], int],
    ) -> None:
        """``name`` is the pool's; ``discover`` finds this router, ``next_ask`` numbers the pool's questions."""
        self.name = name
        self.url = url
        self.status: PoolStatus | None = None
        self.last_error = "not looked for yet"
        self.endpoint = ""
        self.reached = asyncio.Event()
        """Set once the first attempt to find the pool has ended, well or not."""
        self._network = network
        self._discover = discover
        self._clock = network.clock
        self._complaints = Complaints(log, network.clock)
        self._on_news = on_news
        self._socket: CallbackSocket | None = None
        self._monitor: CallbackSocket | None = None
        self._lost = asyncio.Event()
        self._heard_ms = 0.0
        self._next_ask = next_ask
        self._asks: dict[int, tuple[asyncio.Future[Selected | SelectRefused | Probed], str]] = {}
        self._given_up: deque[tuple[float, int]] = deque()
        """When questions were given up that have no answer yet, oldest first."""
        self._task: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = supervised(self._follow, f"pool {self.name}", FOLLOWING)

    def close(self) -> None:
        """End the connection; open questions fail."""
        if self._task is not None:
            self._task.cancel()
        self._disconnect("this router drops it", expected=True)

    async def _follow(self) -> None:
        pause_s = RETRY_MIN_S
        while True:
            try:
                endpoint = await self._discover(self.url)
                self._connect(endpoint)
                await self._stay_connected()
            except (OSError, ValueError, zmq.ZMQError) as error:
                self.last_error = str(error) or type(error).__name__
                log.debug("pool %s: %s", self.name, self.last_error, extra=about(pool=self.name))
            except Exception as error:
                # A pool whose looking-for ended would be down until the process is started again.
                why = f"{type(error).__name__}: {error}"
                if why != self.last_error:
                    log.exception(
                        "looking for pool %s failed unexpectedly; it is tried again",
                        self.name,
                        extra=about(pool=self.name),
                    )
                self.last_error = why
            if self._socket is not None:
                pause_s = RETRY_MIN_S
                self._disconnect(self.last_error)
            if not self.reached.is_set():
                self.reached.set()
                self._on_news()  # who waited for the first answer need not wait for this one
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_MAX_S, 2 * pause_s)

    async def _stay_connected(self) -> None:
        """Ask for the status again and again; returns when the connection is of no use any more."""
        while True:
            self._forget_given_up()
            self._send(AskStatus(self._next_ask()))
            try:
                async with asyncio.timeout(self._network.status_interval_ms / 1000):
                    await self._lost.wait()
            except TimeoutError:
                silent_ms = self._clock.monotonic_ms() - self._heard_ms
                allowed_ms = self._network.status_timeout_ms
                if silent_ms > allowed_ms:
                    self.last_error = f"silent for {silent_ms:.0f} ms, allowed are {allowed_ms:.0f}"
                    return
            else:
                self.last_error = "connection lost"
                return

    def _connect(self, endpoint: str) -> None:
        socket = make_socket(self._network.context, zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, ASKS_OPEN_MAX)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the questions that are open
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost pool is looked for behind its URL
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
        self._lost.clear()
        self._heard_ms = self._clock.monotonic_ms()
        self.endpoint = endpoint
        self._monitor = CallbackSocket(monitor, self._on_monitor)
        self._socket = CallbackSocket(socket, self._on_frames)
        connect(socket, endpoint)

    def _disconnect(self, why: str, expected: bool = False) -> None:
        if self._socket is not None and self._monitor is not None:
            if self.status is not None and not expected:
                log.warning("pool %s at %s is lost: %s", self.name, self.url, why, extra=about(pool=self.name))
            self._socket.socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._socket = self._monitor = None
        self.status = None
        self.endpoint = ""
        self._given_up.clear()
        asks, self._asks = self._asks, {}
        for future, _ in asks.values():
            if not future.done():
                future.set_exception(PoolLost(f"pool {self.name}: {why}"))
        self._on_news()

    def _on_monitor(self, frames: list[bytes]) -> None:
        parse_monitor_message(frames)
        self._lost.set()

    # -- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: ToPool) -> bool:
        return self._socket is not None and self._socket.send([codec.to_pool.encode(message)])

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = codec.from_pool.decode(frames[-1])
        except DecodeError as error:
            self._complaints.about(f"pool {self.name}", error)
            return
        self._heard_ms = self._clock.monotonic_ms()
        if isinstance(message, PoolStatus):
            if self.status is None and message.ready:
                log.info("pool %s at %s is there", self.name, self.url, extra=about(pool=self.name))
            self.status = message
            self.last_error = ""
            self.reached.set()
            self._on_news()
            return
        future, request_id = self._asks.pop(message.ask, (None, ""))
        if future is not None and not future.done():
            future.set_result(message)
        else:
            self._undo(message, request_id)

    async def select(self, message: Select, timeout_s: float) -> Selected | SelectRefused:
        """Have a worker chosen and reserved; raises ``PoolLost``."""
        answer = await self._question(message, message.request_id, timeout_s)
        if isinstance(answer, Probed):
            raise PoolLost(f"pool {self.name} answered a select with a probe")
        return answer

    async def probe(self, message: Probe, timeout_s: float) -> Probed:
        """Ask what a select would find; raises ``PoolLost``."""
        answer = await self._question(message, "", timeout_s)
        if not isinstance(answer, Probed):
            raise PoolLost(f"pool {self.name} answered a probe with a selection")
        return answer

    async def _question(
        self, message: Select | Probe, request_id: str, timeout_s: float
    ) -> Selected | SelectRefused | Probed:
        future: asyncio.Future[Selected | SelectRefused | Probed] = asyncio.get_running_loop().create_future()
        if len(self._asks) >= ASKS_OPEN_MAX or not self._send(message):
            raise PoolLost(f"pool {self.name}: {self.last_error or 'too many questions are open'}")
        self._asks[message.ask] = (future, request_id)
        try:
            return await within(1000 * timeout_s, self._clock, future)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(future.result(), request_id)
            raise
        except TimeoutError:
            raise PoolLost(f"pool {self.name} did not answer within {1000 * timeout_s:.0f} ms") from None
        finally:
            if message.ask in self._asks:
                self._given_up.append((self._clock.monotonic_ms(), message.ask))

    def _undo(self, answer: Selected | SelectRefused | Probed, request_id: str) -> None:
        if isinstance(answer, Selected) and request_id:
            self.release(Reservation(request_id, answer.worker))

    def _forget_given_up(self) -> None:
        before_ms = self._clock.monotonic_ms() - LATE_ANSWER_MS
        while self._given_up and self._given_up[0][0] < before_ms:
            self._asks.pop(self._given_up.popleft()[1], None)

    def release(self, reservation: Reservation) -> None:
        """Take a dispatch off the pool's books; a pool that is lost forgets it by itself."""
        self._send(Release(reservation))

    def renew(self, reservations: list[Reservation]) -> None:
        for start in range(0, len(reservations), RENEWALS_MAX):
            self._send(Renew(tuple(reservations[start : start + RENEWALS_MAX])))

    def ask_status(self) -> None:
        self._send(AskStatus(self._next_ask()))
