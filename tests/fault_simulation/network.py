"""ZMQ without a network: the sockets that the services use, on connections that stall, break, lose and confuse.

What is like the real thing

1. A connection carries messages in order, after a delay. It stalls while a partition stands between its machines, and
   may break: what was on its way is then lost from some message on, each side notices at its own time, the connecting
   side tries again, and the binding side knows it under another name.
2. Queues are bounded by both high-water marks. Beyond: DEALER says ``Again``, ROUTER that or it drops, PUB drops.
3. ``IMMEDIATE`` keeps messages from waiting for a connection that is not there; without it they wait, bounded.
4. A socket's descriptor signals once, when something arrives for a reader that has read everything; who does not read
   until ``Again`` is not told again.

What is worse than the real thing: on planes whose protocol promises to stand it (``TOLERANT``) single messages are
lost, doubled and overtaken, which TCP never does to a connection that stands. Request plane messages are lost with
their connection only: their protocol relies on that.
"""

from __future__ import annotations

import contextvars
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import zmq

from poolgrid.kernel.wire.feed import FEED_TOPIC
from tests.fault_simulation.trace import Trace
from tests.fault_simulation.virtual_loop import LIFE, Life, VirtualLoop

Context = zmq.Context[zmq.Socket[bytes]]

TOLERANT = frozenset({"ingest", "feed", "query", "select", "kv"})
"""Planes whose protocols number, repeat or give up: single messages may be lost, doubled and overtaken on them."""

ONCE = frozenset({"select", "kv"})
"""Planes among them on which a message that arrives twice would be a second question, which nobody sends."""

PREFETCH_S = 0.002
DISCONNECT_NOTICE_MAX_S = 0.3
CONNECT_S = 0.0005


@dataclass(slots=True)
class Faults:
    """Chances per message on tolerant planes, delays in seconds, and bounds."""

    loss: float = 0.0
    duplicate: float = 0.0
    overtake: float = 0.0
    delay_min_s: float = 0.0001
    delay_max_s: float = 0.001
    slow: float = 0.0
    """Chance that a message (and all behind it) is late by up to ``slow_max_s``."""
    slow_max_s: float = 0.05
    queue_max: int = 100_000
    """Messages queued per direction, whatever the high-water marks say."""


class Network:
    """All machines' connections."""

    def __init__(self, loop: VirtualLoop, rng: Random, trace: Trace, faults: Faults) -> None:
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self.faults = faults
        self.active = True
        """Message faults happen; ends with the last scripted fault."""
        self.bound: dict[str, SimulatedSocket] = {}
        self.sockets: dict[Life, list[SimulatedSocket]] = {}
        self.pipes: dict[int, Pipe] = {}
        self.on_send: Callable[[Pipe, bool, list[bytes]], None] = lambda pipe, from_client, frames: None
        self.on_close: Callable[[Pipe, bool], None] = lambda pipe, from_client: None
        self.counts: dict[str, int] = {}
        self._blocked: dict[tuple[str, str], float] = {}
        self._numbers = 0

    def number(self) -> int:
        """Return a new number, for descriptors, ports and identities."""
        self._numbers += 1
        return self._numbers

    def context(self) -> Context:
        """Return what a process takes for its ZMQ context."""
        life = LIFE.get()
        assert life is not None, "a context is made inside a process"
        return cast(Context, SimulatedContext(self, life))

    def block(self, one: str, other: str, until_s: float) -> None:
        """Let nothing through from one machine to another until a time."""
        self._blocked[(one, other)] = max(until_s, self._blocked.get((one, other), 0.0))

    def heal(self) -> None:
        """Let everything through from now on."""
        self._blocked.clear()
        self.active = False

    def blocked_until(self, one: str, other: str) -> float:
        """Return when a message between two machines may go on; 0 = now."""
        return self._blocked.get((one, other), 0.0) if self._blocked else 0.0

    def kill(self, life: Life) -> None:
        """Close what a dead process had open."""
        for socket in self.sockets.pop(life, []):
            socket.abandon()

    def break_connections(self, one: str, other: str) -> int:
        """Break every connection between two machines; return how many there were."""
        broken = 0
        for pipe in list(self.pipes.values()):
            if {pipe.client.life.machine, pipe.server.life.machine} == {one, other}:
                pipe.break_down()
                broken += 1
        return broken

    def count(self, what: str) -> None:
        """Count a fault that happened."""
        self.counts[what] = self.counts.get(what, 0) + 1


class SimulatedContext:
    """``zmq.Context`` of one process."""

    def __init__(self, network: Network, life: Life) -> None:
        self._network = network
        self._life = life
        self._sockets: list[SimulatedSocket] = []

    def socket(self, kind: int) -> SimulatedSocket:
        """Return a new socket."""
        socket = SimulatedSocket(self._network, self._life, kind)
        self._network.sockets.setdefault(self._life, []).append(socket)
        self._sockets.append(socket)
        return socket

    def set(self, option: int, value: int) -> None:
        """Take no notice."""

    def destroy(self, linger: int = 0) -> None:
        """Close every socket."""
        for socket in self._sockets:
            socket.close(linger)

    def term(self) -> None:
        """Close nothing: who terminates has closed its sockets."""


@dataclass(frozen=True, slots=True)
class Frame:
    """As much of ``zmq.Frame`` as the services use."""

    bytes: bytes
    more: bool

    def get(self, option: int) -> int:
        """Say nothing of the connection that a frame came by: it has no descriptor."""
        raise zmq.ZMQError(zmq.EINVAL)


class SimulatedSocket:
    """As much of ``zmq.Socket`` as the services use."""

    def __init__(self, network: Network, life: Life, kind: int) -> None:
        self.network = network
        self.life = life
        self.kind = kind
        self.FD = network.number()
        self.options: dict[int, Any] = {zmq.SNDHWM: 1000, zmq.RCVHWM: 1000}
        self.endpoint = ""
        self.closed = False
        self.inbox: deque[tuple[Direction | None, list[bytes]]] = deque()
        self.peers: dict[bytes, Pipe] = {}
        """Binding side: connections by the name that the other side has here."""
        self.connection: Connection | None = None
        """Connecting side; the services connect each socket once."""
        self.monitor: SimulatedSocket | None = None
        self._signalled = False
        self._rest: list[bytes] = []
        """Frames still to be read of the message whose first was read."""

    # -- options -------------------------------------------------------------------------------------------------------

    def setsockopt(self, option: int, value: Any) -> None:
        """Set an option."""
        self.options[option] = value

    def getsockopt_string(self, option: int) -> str:
        """Return the endpoint that was bound."""
        assert option == zmq.LAST_ENDPOINT
        return self.endpoint

    def getsockopt(self, option: int) -> int:
        """Return what can be done now; asking when there is nothing to read makes the descriptor signal again."""
        assert option == zmq.EVENTS
        if self.inbox:
            return int(zmq.POLLIN)
        self._signalled = False
        return 0

    def fileno(self) -> int:
        """Return the descriptor that signals."""
        return self.FD

    # -- connections ---------------------------------------------------------------------------------------------------

    def bind(self, address: str) -> None:
        """Take an address; a port of ``*`` takes any free one."""
        host, _, port = address.rpartition(":")
        self.endpoint = f"{host}:{20_000 + self.network.number()}" if port == "*" else address
        if self.endpoint in self.network.bound:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.network.bound[self.endpoint] = self

    def connect(self, endpoint: str) -> None:
        """Connect, and again whenever that breaks."""
        self.endpoint = endpoint
        self.connection = Connection(self.network, self, endpoint)
        self.connection.begin()

    def get_monitor_socket(self, events: int) -> SimulatedSocket:
        """Return a socket that tells of this one's connection."""
        monitor = SimulatedSocket(self.network, self.life, zmq.PAIR)
        monitor.options["events"] = events  # type: ignore[index]
        self.monitor = monitor
        return monitor

    def disable_monitor(self) -> None:
        """Tell no more."""
        self.monitor = None

    def tell(self, event: int) -> None:
        """Tell the monitor of an event, if it listens to that."""
        monitor = self.monitor
        if monitor is not None and not monitor.closed and monitor.options["events"] & event:  # type: ignore[index]
            monitor.arrive(None, [struct.pack("=hi", event, 0), self.endpoint.encode()])

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Send a message of one frame."""
        self.send_multipart([frame], flags)

    def send_multipart(self, frames: Sequence[bytes], flags: int = 0, copy: bool = True) -> None:
        """Send, or raise what ZMQ raises."""
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        parts = [bytes(frame) for frame in frames]
        if self.kind == zmq.ROUTER:
            self._route(parts)
        elif self.kind == zmq.XPUB:
            for pipe in list(self.peers.values()):
                if pipe.subscribed:
                    pipe.to_client.send(parts)
        else:
            assert self.connection is not None, "sending before connecting"
            if not self.connection.send(parts):
                raise zmq.Again

    def _route(self, parts: list[bytes]) -> None:
        pipe = self.peers.get(parts[0])
        mandatory = self.options.get(zmq.ROUTER_MANDATORY)
        if pipe is None:
            if mandatory:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
        elif not pipe.to_client.send(parts[1:]) and mandatory:
            raise zmq.Again

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        """Return the next frame; without ``copy`` with the word whether its message has more."""
        frames = self._rest or self.recv_multipart(flags)
        frame, self._rest = frames[0], frames[1:]
        return frame if copy else Frame(frame, bool(self._rest))

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        """Return the next message, or raise ``Again``."""
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        if not self.inbox:
            self._signalled = False
            raise zmq.Again
        direction, frames = self.inbox.popleft()
        if direction is not None:
            direction.queued -= 1
        return frames

    def arrive(self, direction: Direction | None, frames: list[bytes]) -> None:
        """Take in a message and signal, if the reader is not told already."""
        if self.closed:
            return
        self.inbox.append((direction, frames))
        if not self._signalled:
            self._signalled = True
            self.network.loop.signal(self.FD)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, linger: int | None = None) -> None:
        """Close; what is on its way arrives when there is time to linger, else perhaps."""
        if self.closed:
            return
        self.closed = True
        self._unbind()
        for pipe in self._pipes():
            pipe.close(self, orderly=bool(linger))

    def abandon(self) -> None:
        """End with the process."""
        self.close(0)
        self.inbox.clear()

    def _unbind(self) -> None:
        if self.network.bound.get(self.endpoint) is self:
            del self.network.bound[self.endpoint]

    def _pipes(self) -> list[Pipe]:
        if self.connection is not None:
            return [self.connection.pipe] if self.connection.pipe is not None else []
        return list(self.peers.values())


class Connection:
    """The connecting side: tries, and tries again."""

    def __init__(self, network: Network, client: SimulatedSocket, endpoint: str) -> None:
        self._network = network
        self._client = client
        self._endpoint = endpoint
        self.pipe: Pipe | None = None
        self._waiting: deque[list[bytes]] = deque()
        """Messages without ``IMMEDIATE``, for a connection that is not there yet."""
        self._interval_ms = 0.0

    def begin(self) -> None:
        """Try for the first time."""
        self._after(CONNECT_S + self._network.rng.uniform(0.0, CONNECT_S), self._try)

    def _after(self, delay_s: float, work: Callable[[], None]) -> None:
        loop = self._network.loop
        context = _nobody()
        loop.call_later(delay_s, work, context=context)

    def _try(self) -> None:
        client, network = self._client, self._network
        if client.closed:
            return
        server = network.bound.get(self._endpoint)
        now_s = network.loop.time()
        there, here = (server.life.machine if server is not None else ""), client.life.machine
        if (
            server is None
            or network.blocked_until(here, there) > now_s
            or network.blocked_until(there, here) > now_s
            or server.life.paused_until_s > now_s
        ):
            client.tell(zmq.EVENT_CLOSED)
            client.tell(zmq.EVENT_CONNECT_RETRIED)
            self._again()
            return
        self._interval_ms = 0.0
        self.pipe = Pipe(network, self, client, server)
        client.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        while self._waiting and self.pipe.to_server.has_room():
            self.pipe.to_server.send(self._waiting.popleft())

    def _again(self) -> None:
        first_ms = self._client.options.get(zmq.RECONNECT_IVL, 100)
        if first_ms < 0:
            return
        longest_ms = self._client.options.get(zmq.RECONNECT_IVL_MAX, 0) or first_ms
        self._interval_ms = min(longest_ms, 2 * self._interval_ms or first_ms)
        self._after(self._interval_ms * self._network.rng.uniform(1.0, 1.3) / 1000, self._try)

    def lost(self) -> None:
        """The connection broke, and this side has noticed."""
        self.pipe = None
        if not self._client.closed:
            self._client.tell(zmq.EVENT_DISCONNECTED)
            self._again()

    def send(self, parts: list[bytes]) -> bool:
        """Send or keep; return False when neither is possible."""
        if self.pipe is not None:
            if self._network.loop.time() < self.pipe.usable_s:
                return False
            return self.pipe.to_server.send(parts)
        if self._client.options.get(zmq.IMMEDIATE):
            return False
        if len(self._waiting) >= _limit(self._client.options[zmq.SNDHWM], self._network.faults.queue_max):
            return False
        self._waiting.append(parts)
        return True


class Pipe:
    """One connection that stands, until it breaks or is closed."""

    def __init__(
        self, network: Network, connection: Connection, client: SimulatedSocket, server: SimulatedSocket
    ) -> None:
        self.network = network
        self.connection = connection
        self.client = client
        self.server = server
        self.plane = _plane(client, server)
        number = network.number()
        self.number = number
        self.identity = b"\0" + struct.pack(">I", number)
        self.up = True
        self.to_server = Direction(self, client, server)
        self.to_client = Direction(self, server, client)
        now_s = network.loop.time()
        # libzmq may tell of a connection a moment before it takes messages for it.
        self.usable_s = now_s + (network.rng.uniform(0.0, 0.004) if network.rng.random() < 0.2 else 0.0)
        self.subscribed = client.kind != zmq.SUB
        server.peers[self.identity] = self
        network.pipes[number] = self
        network.trace.note(now_s, "connect", f"{self}")
        if not self.subscribed:
            network.loop.call_later(network.rng.uniform(0.0, PREFETCH_S), self._subscribe, context=_nobody())

    def __str__(self) -> str:
        return f"{self.client.life}→{self.server.life} {self.plane}"

    def _subscribe(self) -> None:
        self.subscribed = True
        if self.up:
            self.server.arrive(None, [b"\x01" + FEED_TOPIC])

    def _leave_server(self) -> None:
        """Be no peer of the server any more, which hears of the last subscription that ends."""
        peers = self.server.peers
        gone = peers.pop(self.identity, None)
        was_heard = gone is not None and self.server.kind == zmq.XPUB and gone.subscribed
        if was_heard and not any(pipe.subscribed for pipe in peers.values()):
            self.server.arrive(None, [b"\x00" + FEED_TOPIC])

    def break_down(self) -> None:
        """Break: both sides notice, each in its time; what is on its way is lost from some message on."""
        if not self.up:
            return
        self._end()
        rng, loop = self.network.rng, self.network.loop
        self.to_server.cut(rng)
        self.to_client.cut(rng)
        loop.call_later(rng.uniform(0.0, DISCONNECT_NOTICE_MAX_S), self._server_notices, context=_nobody())
        loop.call_later(rng.uniform(0.0, DISCONNECT_NOTICE_MAX_S), self._client_notices, context=_nobody())

    def close(self, by: SimulatedSocket, orderly: bool) -> None:
        """End because one side closed; what it sent arrives first when it is ``orderly``."""
        if not self.up:
            return
        self.network.on_close(self, by is self.client)
        self._end()
        rng, loop = self.network.rng, self.network.loop
        mine, notice = (
            (self.to_server, self._server_notices) if by is self.client else (self.to_client, self._client_notices)
        )
        if not orderly:
            mine.cut(rng)
        if by is self.server:
            self._leave_server()
        loop.call_at(mine.last_due_s + rng.uniform(0.0, CONNECT_S), notice, context=_nobody())

    def _end(self) -> None:
        self.up = False
        self.network.pipes.pop(self.number, None)
        if not self.network.loop.is_closed():
            self.network.trace.note(self.network.loop.time(), "disconnect", f"{self}")

    def _server_notices(self) -> None:
        self._leave_server()

    def _client_notices(self) -> None:
        if self.connection.pipe is self:
            self.connection.lost()


class Direction:
    """One way of a connection: in order, after a delay, stalled while its machines are apart."""

    def __init__(self, pipe: Pipe, sender: SimulatedSocket, receiver: SimulatedSocket) -> None:
        self._pipe = pipe
        self._network = pipe.network
        self._sender = sender
        self._receiver = receiver
        self._way: deque[tuple[float, list[bytes]]] = deque()
        self._pumping = False
        self.queued = 0
        """Messages on their way or not read yet."""
        self.last_due_s = self._network.loop.time()
        sends, receives = sender.options[zmq.SNDHWM], receiver.options[zmq.RCVHWM]
        bound = self._network.faults.queue_max if pipe.plane in ("feed", "query", "ingest") else 100_000
        self._limit = min(bound, sends + receives) if sends and receives else bound

    def has_room(self) -> bool:
        """Say whether one more message can be queued."""
        return self.queued < self._limit

    def send(self, parts: list[bytes]) -> bool:
        """Send; return False when the queue is full."""
        network, pipe = self._network, self._pipe
        if not self.has_room():
            network.count(f"{pipe.plane} queue full")
            network.trace.note(network.loop.time(), "full", f"{pipe}")
            return False
        from_client = self._sender is pipe.client
        network.on_send(pipe, from_client, parts)
        now_s = network.loop.time()
        everything = b"".join(parts)
        network.trace.note(now_s, "send" if from_client else "answer", f"{pipe} {len(everything)}", everything)
        if not pipe.up:
            return True  # into a connection that is broken, which this side has not noticed yet
        faults, rng = network.faults, network.rng
        due_s = now_s + rng.uniform(faults.delay_min_s, faults.delay_max_s)
        if network.active:
            if faults.slow and rng.random() < faults.slow:
                due_s += rng.uniform(0.0, faults.slow_max_s)
            if pipe.plane in TOLERANT:
                if faults.loss and rng.random() < faults.loss:
                    network.count("lost")
                    network.trace.note(now_s, "lose", f"{pipe}")
                    return True
                if pipe.plane not in ONCE:
                    if faults.duplicate and rng.random() < faults.duplicate:
                        network.count("doubled")
                        self.queued += 1
                        self._later(due_s + rng.uniform(0.0, 0.5), parts)
                    if faults.overtake and rng.random() < faults.overtake:
                        network.count("overtaken")
                        self.queued += 1
                        self._later(due_s + rng.uniform(0.0, 0.2), parts)
                        return True
        self.queued += 1
        self.last_due_s = max(self.last_due_s, due_s)
        self._way.append((self.last_due_s, parts))
        if not self._pumping:
            self._pumping = True
            network.loop.call_at(self.last_due_s, self._pump, context=_nobody())
        return True

    def _later(self, due_s: float, parts: list[bytes]) -> None:
        self._network.loop.call_at(due_s, self._deliver, parts, context=_nobody())

    def _pump(self) -> None:
        network = self._network
        now_s = network.loop.time()
        way = self._way
        here, there = self._sender.life.machine, self._receiver.life.machine
        while way and way[0][0] <= now_s:
            until_s = network.blocked_until(here, there)
            if until_s > now_s:
                self.last_due_s = max(self.last_due_s, until_s)
                network.loop.call_at(until_s, self._pump, context=_nobody())
                return
            self._deliver(way.popleft()[1])
        self._pumping = bool(way)
        if way:
            network.loop.call_at(way[0][0], self._pump, context=_nobody())

    def _deliver(self, parts: list[bytes]) -> None:
        receiver = self._receiver
        if receiver.closed:
            self.queued -= 1
            return
        frames = [self._pipe.identity, *parts] if receiver.kind == zmq.ROUTER else parts
        self._network.trace.note(self._network.loop.time(), "deliver", f"{self._pipe} {sum(map(len, parts))}")
        receiver.arrive(self, frames)

    def cut(self, rng: Random) -> None:
        """Lose what is on its way, from some message on."""
        keep = rng.randint(0, len(self._way))
        while len(self._way) > keep:
            self._way.pop()
            self.queued -= 1


def _plane(client: SimulatedSocket, server: SimulatedSocket) -> str:
    if server.kind == zmq.XPUB:
        return "feed"
    if client.life.kind == "worker":
        return "kv" if server.life.kind == "worker" else "ingest"
    if server.life.kind == "worker":
        return "request"
    return "select" if client.life.kind == "global" else "query"


def _limit(mark: int, bound: int) -> int:
    return min(mark, bound) if mark else bound


def _nobody() -> contextvars.Context:
    """Return a context in which no process lives: for what the network does by itself."""
    return contextvars.Context()
