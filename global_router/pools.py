"""The pools as the global router sees them: a connection to each pool's router, its last status, its circuit breaker.

Rules
    1. One task per pool: find the select plane through the pool's URL (``/v1/pool``), connect, ask for the status every
       ``status_interval_ms``. A connection that breaks, or is silent for ``status_timeout_ms``, is dropped and the pool
       looked for again, at growing intervals: a router that comes back elsewhere behind its URL is found.
    2. While there is no connection the pool has no status: it is down. Questions that were open when a connection broke
       fail at once.
    3. An answer that comes after its question was given up, or just as its asker is cancelled, is undone: a worker that
       was reserved is released. After ``LATE_ANSWER_MS`` it is no longer waited for.
    4. Pools are kept by name. A changed document adds, drops and moves them; what is under way is not touched, because
       tokens go between us and the workers directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.global_router.core.choice.circuit_breaker import BreakerStep, CircuitBreaker
from poolgrid.global_router.core.choice.fallback import PoolStanding
from poolgrid.global_router.core.document.grid_document import CircuitBreakerSettings, GridDocument
from poolgrid.global_router.pool_status import state_for
from poolgrid.runtime.awake_clock import within
from poolgrid.runtime.clock import Clock
from poolgrid.runtime.complaints import Complaints
from poolgrid.runtime.log_lines import about
from poolgrid.runtime.tasks import Restart, supervised
from poolgrid.runtime.zmq_socket import CallbackSocket
from poolgrid.wire import codec
from poolgrid.wire.addresses import zmq_endpoint_problem
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.limits import RENEWALS_MAX
from poolgrid.wire.selection import (
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

log = logging.getLogger(__name__)

RETRY_MIN_S = 0.1
RETRY_MAX_S = 2.0
"""Between two attempts to find a pool that is not there; a pool that comes up is used two seconds later at most."""

FOLLOWING = Restart(limit=None, pause_s=RETRY_MIN_S, pause_max_s=RETRY_MAX_S)
"""A pool whose follower fails in a way that nobody thought of is followed again, and is down meanwhile."""

ASKS_OPEN_MAX = 100_000
"""Questions open at one pool; far more than requests arrive within a select timeout. Beyond, the pool is lost."""

LATE_ANSWER_MS = 10_000.0
"""How long an answer is waited for after its question was given up, to undo it. By then a pool that is this late has
long let the reservation end with its lease, and what was asked must not pile up."""

Discover = Callable[[str], Awaitable[str]]
"""Return the select plane's endpoint behind a pool's URL; raises ``OSError`` or ``ValueError``."""


class PoolLost(Exception):
    """A pool's router does not answer."""


@dataclass(slots=True)
class FreedRoom:
    """Room in a pool that its last status does not know of, because it is older."""

    places: int = 0
    """Dispatches of ours that ended since the pool last said that it is full, and that we have not asked for again."""
    ever: int = 0
    """Dispatches of ours that ever ended there."""


class RoomAsked(NamedTuple):
    """What was known of freed room when a pool was asked for a worker."""

    counted_on: bool
    ever: int


class PoolConnection:
    """One pool: where it is, how it is, and the questions that are open there."""

    def __init__(
        self,
        name: str,
        url: str,
        breaker: CircuitBreakerSettings,
        context: zmq.Context[zmq.Socket[bytes]],
        discover: Discover,
        clock: Clock,
        status_interval_ms: float,
        status_timeout_ms: float,
        on_news: Callable[[], None],
    ) -> None:
        self.name = name
        self.url = url
        self.breaker = CircuitBreaker(breaker)
        self.breaker_steps: list[BreakerStep] = []
        """The last changes, newest last."""
        self.status: PoolStatus | None = None
        self.last_error = "not looked for yet"
        self.endpoint = ""
        self.reached = asyncio.Event()
        """Set once the first attempt to find the pool has ended, well or not."""
        self._context = context
        self._discover = discover
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._interval_s = status_interval_ms / 1000
        self._timeout_ms = status_timeout_ms
        self._on_news = on_news
        self._socket: CallbackSocket | None = None
        self._monitor: CallbackSocket | None = None
        self._lost = asyncio.Event()
        self._heard_ms = 0.0
        self._ask = 0
        self._asks: dict[int, tuple[asyncio.Future[Selected | SelectRefused | Probed], str]] = {}
        self._given_up: deque[tuple[float, int]] = deque()
        """When questions were given up that have no answer yet, oldest first."""
        self._task: asyncio.Task[None] | None = None
        self._freed: dict[tuple[str, bool], FreedRoom] = {}
        """By model, and whether it is for encoding: all else that a pool's workers do takes the same room."""

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for the pool."""
        self._task = supervised(self._follow, f"pool {self.name}", FOLLOWING)

    def close(self) -> None:
        """End the connection; open questions fail."""
        if self._task is not None:
            self._task.cancel()
        self._disconnect("this router lets go of it", expected=True)

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
                        "looking for pool %s failed as it should not; it is tried again",
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
            self._ask += 1
            self._send(AskStatus(self._ask))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._lost.wait()
            except TimeoutError:
                silent_ms = self._clock.monotonic_ms() - self._heard_ms
                if silent_ms > self._timeout_ms:
                    self.last_error = f"silent for {silent_ms:.0f} ms, allowed are {self._timeout_ms:.0f}"
                    return
            else:
                self.last_error = "connection lost"
                return

    def _connect(self, endpoint: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, ASKS_OPEN_MAX)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the questions that are open
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost pool is looked for behind its URL
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
        self._lost.clear()
        self._heard_ms = self._clock.monotonic_ms()
        self.endpoint = endpoint
        self._monitor = CallbackSocket(monitor, self._on_monitor)
        self._socket = CallbackSocket(socket, self._on_frames)
        socket.connect(endpoint)

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

    def next_ask(self) -> int:
        """Return the number of the next question."""
        self._ask += 1
        return self._ask

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
        """Give back what an answer reserved that nobody takes."""
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
        """Keep reservations that no worker confirmed yet."""
        for start in range(0, len(reservations), RENEWALS_MAX):
            self._send(Renew(tuple(reservations[start : start + RENEWALS_MAX])))

    def ask_status(self) -> None:
        """Ask how the pool is before it is time to."""
        self._ask += 1
        self._send(AskStatus(self._ask))

    def note_freed(self, model: str, stage: Stage) -> None:
        """Take note that a dispatch of ours ended."""
        room = self._freed.setdefault((model, stage is Stage.ENCODE), FreedRoom())
        room.places += 1
        room.ever += 1

    def note_asked(self, model: str, stage: Stage) -> RoomAsked:
        """Take note that a worker is asked for; one of the freed places, if there is one, is counted on for it."""
        room = self._freed.get((model, stage is Stage.ENCODE))
        if room is None:
            return RoomAsked(False, 0)
        counted_on = room.places > 0
        room.places -= counted_on
        return RoomAsked(counted_on, room.ever)

    def note_full(self, model: str, stage: Stage, asked: RoomAsked) -> None:
        """Take note that the pool had no room when it was asked; what was freed after that is still there."""
        room = self._freed.get((model, stage is Stage.ENCODE))
        if room is not None:
            room.places = min(room.places, room.ever - asked.ever)

    # -- how it is -------------------------------------------------------------------------------------------------

    def state(self, model: str, stage: Stage, now_ms: float) -> PoolStanding:
        """Return whether the pool takes a request of a model and stage."""
        if not self.reached.is_set():
            return PoolStanding.CONNECTING
        state = state_for(self.status, model, stage)
        if state is PoolStanding.SATURATED:
            room = self._freed.get((model, stage is Stage.ENCODE))
            if room is not None and room.places > 0:
                state = PoolStanding.AVAILABLE
        if state in (PoolStanding.AVAILABLE, PoolStanding.SATURATED) and not self.breaker.would_admit(now_ms):
            return PoolStanding.BREAKER_OPEN
        return state

    def overall_state(self, now_ms: float) -> PoolStanding:
        """Return the best state of any model, for views."""
        if not self.reached.is_set():
            return PoolStanding.CONNECTING
        if self.status is None or not self.status.ready:
            return PoolStanding.DOWN
        states = {
            self.state(model.model, stage, now_ms)
            for model in self.status.models
            for stage in (Stage.WHOLE, Stage.PREFILL, Stage.DECODE)
        }
        return next((state for state in PoolStanding if state in states), PoolStanding.DOWN)


def _ignore() -> None:
    """Take no notice."""


class Pools:
    """All pools of the document in force."""

    def __init__(
        self,
        urls: Mapping[str, str],
        context: zmq.Context[zmq.Socket[bytes]],
        discover: Discover,
        clock: Clock,
        status_interval_ms: float,
        status_timeout_ms: float,
    ) -> None:
        self._urls = urls
        self._context = context
        self._discover = discover
        self._clock = clock
        self._interval_ms = status_interval_ms
        self._timeout_ms = status_timeout_ms
        self._pools: dict[str, PoolConnection] = {}
        self._on_news: Callable[[], None] = _ignore

    def use(self, document: GridDocument) -> None:
        """Have exactly the pools of a document; a pool of the same name and URL keeps its connection."""
        wanted: dict[str, str] = {}
        for stage in document.stages.values():
            for pool in stage.pools:
                wanted[pool.name] = self._urls.get(pool.name, (pool.url or "").rstrip("/"))
        for name in [each for each, pool in self._pools.items() if wanted.get(each) != pool.url]:
            self._pools.pop(name).close()
        for name, url in wanted.items():
            pool_there = self._pools.get(name)
            if pool_there is None:
                made = PoolConnection(
                    name,
                    url,
                    document.circuit_breaker,
                    self._context,
                    self._discover,
                    self._clock,
                    self._interval_ms,
                    self._timeout_ms,
                    self._news,
                )
                self._pools[name] = made
                made.start()
            else:
                pool_there.breaker.use(document.circuit_breaker)
        self._pools = {name: self._pools[name] for name in wanted}

    async def first_look(self) -> None:
        """Wait until every pool was found, or not, for the first time."""
        await asyncio.gather(*(pool.reached.wait() for pool in self._pools.values()))

    def listen(self, on_news: Callable[[], None]) -> None:
        """Have ``on_news`` called whenever any pool said something, or was lost."""
        self._on_news = on_news

    def _news(self) -> None:
        self._on_news()

    def get(self, name: str) -> PoolConnection | None:
        """Return a pool of the document in force."""
        return self._pools.get(name)

    def all(self) -> list[PoolConnection]:
        """Return the pools in the order of the document."""
        return list(self._pools.values())

    def close(self) -> None:
        """End every connection."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._news()


def select_endpoint(url: str, answer: object) -> str:
    """Return the endpoint of a ``/v1/pool`` answer: its port, at the host of the URL that we can reach.

    Raises ``ValueError``.
    """
    endpoint = answer.get("select_endpoint") if isinstance(answer, dict) else None
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        raise ValueError(f"asking {url}/v1/pool: the answer names no select_endpoint; is it a pool's router?")
    host = urlsplit(url).hostname or ""
    port = endpoint.rpartition(":")[2]
    reached = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    problem = zmq_endpoint_problem(reached)
    if problem is not None:
        raise ValueError(f"asking {url}/v1/pool: the answer's select_endpoint is {endpoint!r}: {reached!r} {problem}")
    return reached
