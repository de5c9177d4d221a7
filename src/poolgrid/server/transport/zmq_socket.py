"""A ZMQ socket on the event loop: callbacks in, non-blocking sends out.

``zmq.asyncio`` makes a future per message; a router that receives one frame per engine step from hundreds of workers
does better with a plain callback. ZMQ's file descriptor is edge-triggered: it signals a *change*, so a reader that is
told must read until nothing is left, and must look again after every send. These classes do both.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import zmq

from poolgrid.kernel.wire.addresses import TCP, bracketed
from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX
from poolgrid.server.process.tasks import MESSAGES_PER_TURN, TURN_S, WITHOUT_A_CLOCK, BulkWork

log = logging.getLogger(__name__)

# As plain integers: combining the library's flags costs more than asking for them.
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_ENDED = (zmq.ETERM, zmq.ENOTSOCK)
"""The context or the socket ended while its last signal was on its way."""

LOOKS = 2
"""How often a wake-up asks whether there is a message before it reads one. Where two have come there are mostly more:
the rest is read until the socket says that there is none, which costs one exception and not a question per message."""

BATCH_MESSAGES_MAX = 64
"""Messages handed over at once as a batch; other tasks of the loop run before the rest. A batch of 32 blocks is 15 to
30 microseconds of work, with a router in the same process."""

BATCH_LOOKS = 4
"""The same as ``LOOKS`` for a batch, at whose end no peer sends: the exception costs as much as six questions."""

BATCH_BYTES_MAX = 2 * 1024
"""Bytes handed over at once, and the rest of the last message: 256 blocks are half a millisecond of work, with a router
in the same process. Tokens of requests wait for that, in every turn while workers list all they hold."""


def receive_frames(socket: zmq.Socket[bytes], flags: int) -> list[bytes]:
    """Return a message's frames, as ``recv_multipart`` does; that asks the socket, with two enums, after each frame."""
    frame = socket.recv(flags, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(flags, copy=False)
        frames.append(frame.bytes)
    return frames


def _plain_send(socket: zmq.Socket[bytes]) -> Callable[[bytes, int], object]:
    """Return what sends a message of one frame: beneath the library's comforts, of which it needs none and which cost a
    call. A socket with a way to send of its own keeps it."""
    if type(socket).send is zmq.Socket.send:
        return partial(zmq.backend.Socket.send, socket)
    return socket.send


def _message_poll(socket: zmq.Socket[bytes]) -> Callable[[], object]:
    """Return what says whether a socket has a message, without making enums of numbers as the socket does.

    The library's poll takes what is no socket of its own for a file descriptor: such a one is asked itself.
    """
    if isinstance(socket, zmq.Socket):
        return partial(zmq.zmq_poll, [(socket, _POLLIN)], 0)
    return partial(socket.getsockopt, zmq.EVENTS)


def message_sender(socket: zmq.Socket[bytes]) -> Callable[[Sequence[bytes]], object]:
    """Return what sends a message of several frames without waiting, as ``send_multipart`` does: a fifth of its cost.

    Raises what ZMQ raises. It asks the frames nothing: they are bytes.
    """
    if type(socket).send is not zmq.Socket.send:
        return partial(socket.send_multipart, flags=_NOBLOCK)
    send_frame = partial(zmq.backend.Socket.send, socket)

    def send(frames: Sequence[bytes]) -> None:
        for frame in frames[:-1]:
            send_frame(frame, _MORE)
        send_frame(frames[-1], _NOBLOCK)

    return send


class _LoopSocket:
    """A socket on an event loop: watched, read a turn at a time; a failed message costs that message alone."""

    def __init__(self, socket: zmq.Socket[bytes], handle: Callable[[Any], None]) -> None:
        self.socket = socket
        self._has_message = _message_poll(socket)
        self._handle = handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._descriptor = -1

    def start(self) -> None:
        """Begin to receive on the running loop, with what is waiting."""
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self.socket.FD)
        self._loop.add_reader(self._descriptor, self._on_signal)
        self.check()

    def check(self) -> None:
        """Look for messages soon; call this after each send past this object on the same socket."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def stop(self) -> None:
        """Stop receiving; the socket stays open. A second stop does nothing."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def close(self, linger_ms: int = 0) -> None:
        """Stop receiving and close the socket; what is queued may take ``linger_ms`` to leave."""
        self.stop()
        if not self.socket.closed:
            self.socket.close(linger=linger_ms)

    def _on_signal(self) -> None:
        self._drain()

    def _scheduled_drain(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        raise NotImplementedError


class _MessageSocket(_LoopSocket):
    """Hands over message by message, each as soon as it is read; starts when it is made."""

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Callable[[int], Any], on_message: Callable[[Any], None]
    ) -> None:
        super().__init__(socket, on_message)
        self._receive = receive
        self._send_frame: Callable[[bytes, int], object] = _plain_send(socket)
        self._send_frames = message_sender(socket)
        self.start()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send without waiting; return False when the high-water mark is reached and nothing was sent."""
        try:
            if len(frames) == 1:
                self._send_frame(frames[0], _NOBLOCK)
            else:
                self._send_frames(frames)
        except zmq.Again:
            return False
        finally:
            # Sending, even to a peer that is gone, may have used up the signal of what came meanwhile; what comes from
            # here on signals again. Asking costs a quarter of a look in the loop's next turn.
            if not self._scheduled and self._has_message():
                self.check()
        return True

    def _drain(self) -> None:
        receive = self._receive
        ends_s = 0.0
        for number in range(MESSAGES_PER_TURN):
            if self._loop is None:
                return
            try:
                if number < LOOKS and not self._has_message():
                    return
                message = receive(_NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno in _ENDED:
                    return
                raise
            try:
                self._handle(message)
            except Exception:
                # One message must not end the reading of all others; the handler catches what it expects.
                log.exception("handling a message failed; it was dropped")
            if number >= WITHOUT_A_CLOCK:
                if number == WITHOUT_A_CLOCK:
                    ends_s = monotonic() + TURN_S
                elif monotonic() > ends_s:
                    break
        self.check()

    _on_signal = _drain


class CallbackSocket(_MessageSocket):
    """Owns a ZMQ socket and calls ``on_message(frames)`` for each message that arrives."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        super().__init__(socket, partial(receive_frames, socket), on_message)


class FrameSocket(_MessageSocket):
    """The same for a peer whose messages are one frame each: calls ``on_frame(frame)``, at a third of the cost.

    Should a message have several frames, each counts as a message.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frame: Callable[[bytes], None]) -> None:
        super().__init__(socket, socket.recv, on_frame)


class BatchSocket(_LoopSocket):
    """Reads a socket that its owner sends on: calls ``on_messages(list)`` once for all that came in one wake-up.

    So its owner can append them to a journal in one write. While paused nothing is received: the socket's own bounded
    queue fills and then the peers' do.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_messages: Callable[[list[list[bytes]]], None],
        bulk: BulkWork | None = None,
    ) -> None:
        """With ``bulk`` it receives in turn with all else that is done there."""
        super().__init__(socket, on_messages)
        self._bulk = bulk
        self._paused = False
        self._given_back: list[list[bytes]] = []
        self.added: deque[list[bytes]] = deque()
        """Messages of this process (``add``) that are not handed over yet."""
        self.has_more = False
        """Whether messages were left behind when it last received: others run before they are taken."""

    def check(self) -> None:
        """Look for messages soon, in a callback of its own, in which more may have come."""
        if not self._scheduled and not self._paused and self._loop is not None:
            self._scheduled = True
            bulk = self._bulk
            if bulk is not None and (bulk.busy or self.has_more):
                bulk.soon(self._drain)
            else:
                self._loop.call_soon(self._drain)

    _on_signal = check

    def give_back(self, messages: list[list[bytes]]) -> None:
        """Return the last of the messages that are being handled: they come again, first, once others had their turn.

        For a handler that exceeds its slice.
        """
        self._given_back = messages
        self.has_more = True
        self.check()

    def add(self, message: list[bytes]) -> None:
        """Have a message of this process handed over as those that the socket receives, soon and in order."""
        self.added.append(message)
        self.check()

    def sent(self) -> None:
        """Call this after sends on the same socket: they may have used up the signal of what came meanwhile."""
        if not self._scheduled and not self.socket.closed and self._has_message():
            self.check()

    def pause(self) -> None:
        """Receive nothing until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.check()

    def _drain(self) -> None:
        self._scheduled = False
        if self._loop is None or self._paused:
            return
        messages, self._given_back = self._given_back, []
        room = BATCH_BYTES_MAX
        for frames in messages:
            room -= len(frames[-1])
        added = self.added
        # At most half of a batch, so that the socket has its turn too.
        while added and room > 0 and len(messages) < BATCH_MESSAGES_MAX // 2:
            messages.append(added.popleft())
            room -= len(messages[-1][-1])
        socket = self.socket
        self.has_more = bool(added)
        try:
            while True:
                if room <= 0 or len(messages) >= BATCH_MESSAGES_MAX:
                    self.has_more = True
                    break
                if len(messages) < BATCH_LOOKS and not self._has_message():
                    break
                frames = receive_frames(socket, _NOBLOCK)
                room -= len(frames[-1])
                messages.append(frames)
        except zmq.Again:
            pass  # that was all
        except zmq.ZMQError as error:
            if error.errno not in _ENDED:
                raise
        finally:
            if self.has_more:
                self.check()
            if messages:
                try:
                    self._handle(messages)
                except Exception:  # which must not end the reading of what comes after them
                    log.exception("handling a message failed; it was dropped")


def make_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Return a socket of a process: nothing waits in it when it is closed, and no peer sends it more than a frame.

    Connect it by ``connect`` and bind it by ``bind``: ZMQ's sockets know addresses of one family until told otherwise.
    """
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    return socket


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Begin to connect to an endpoint of either family; raises ``zmq.ZMQError`` for one that is none."""
    _choose_family(socket, endpoint)
    socket.connect(endpoint)


def listen(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind to an endpoint of either family; raises ``zmq.ZMQError`` for one that cannot be had."""
    _choose_family(socket, endpoint)
    socket.bind(endpoint)


def bind(socket: zmq.Socket[bytes], host: str, port: int, setting: str) -> str:
    """Bind a socket to ``host:port`` (0 = any free port), IPv6 too; return the endpoint it got.

    Raises ``OSError`` that names the ``setting``; the socket is closed then.
    """
    try:
        listen(socket, f"{TCP}{bracketed(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise OSError(
            f"binding {setting}: {bracketed(host)}:{port} cannot be used ({error.strerror}); "
            "choose a free port, or 0 for any"
        ) from error
    endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint


def _choose_family(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Let a socket use IPv6 where its endpoint needs it.

    Not always: a name with addresses of both families would mean that of IPv6 alone, and servers mostly listen on IPv4.
    """
    if endpoint.startswith(TCP):
        host = endpoint.removeprefix(TCP).rpartition(":")[0].strip("[]")
        socket.setsockopt(zmq.IPV6, int(_needs_ipv6(host)))


def _needs_ipv6(host: str) -> bool:
    """Return whether a host, an address or a name, is reached by IPv6 only."""
    if ":" in host:
        return True
    if host in ("", "*") or _IPV4.fullmatch(host):
        return False
    found = _names.needs_ipv6(host)
    return not _has_ipv4() if found is None else found


class _NameFamilies:
    """The families of the addresses of names, looked up in threads: a name server may take seconds to answer, and
    sockets are made on event loops. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[bool | None, float]] = {}
        """By name, the answer found last and when, the oldest first."""
        self._running: dict[str, threading.Event] = {}

    def needs_ipv6(self, host: str) -> bool | None:
        """Return whether a name has addresses of IPv6 only; ``None`` where that is not known, or not in time."""
        with self._lock:
            known = self._found.get(host)
            kept_s = LOOKUP_KEPT_S if known is not None and known[0] is not None else UNKNOWN_KEPT_S
            if known is not None and monotonic() - known[1] < kept_s:
                return known[0]
            done = self._running.get(host)
            if done is None and len(self._running) < LOOKUPS_MAX:
                done = self._running[host] = threading.Event()
                threading.Thread(target=self._look_up, args=(host, done), daemon=True, name="name look-up").start()
        if done is None or not done.wait(LOOKUP_WAIT_S):
            return None if known is None else known[0]
        with self._lock:
            known = self._found.get(host)
        return None if known is None else known[0]

    def _look_up(self, host: str, done: threading.Event) -> None:
        found = _only_ipv6(host)
        with self._lock:
            self._found.pop(host, None)
            self._found[host] = found, monotonic()
            if len(self._found) > NAMES_MAX:
                del self._found[next(iter(self._found))]
            del self._running[host]
        done.set()


def _only_ipv6(name: str) -> bool | None:
    """Return whether a name has addresses of IPv6 only; ``None`` where it has none."""
    for family, is_ipv6 in ((sockets.AF_INET, False), (sockets.AF_INET6, True)):
        try:
            sockets.getaddrinfo(name, None, family, sockets.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        return is_ipv6
    return None


_names = _NameFamilies()


def _has_ipv4() -> bool:
    """Return whether the machine knows a way to addresses of IPv4; pods of clusters with IPv6 only have none."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # which sends nothing
        except OSError:
            return False
    return True


LOOKUP_WAIT_S = 0.1
"""How long the look-up of a name is waited for, once in ``LOOKUP_KEPT_S``: name servers of a cluster answer in some
milliseconds. A name that takes longer counts as not known yet: the family that the machine has is used."""

LOOKUP_KEPT_S = 30.0
"""How long an answer is used; sockets that reconnect look up addresses themselves."""

UNKNOWN_KEPT_S = 1.0
"""The same of a name without addresses: names of new processes appear any moment."""

LOOKUPS_MAX = 32
"""Look-ups at a time, each a thread. Beyond it a name counts as not known yet."""

NAMES_MAX = 4096
"""Names whose answer is kept, about as many as a router has connections."""

_IPV4 = re.compile(r"[0-9.]+")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): it stands for all that a default route leads to."""


def port_of(endpoint: str) -> int:
    """Return the port of a bound endpoint."""
    return int(endpoint.rpartition(":")[2])


# How soon it is noticed that a server of a plane is gone, and how soon it is looked for again. A process that ends
# closes its connections, however it ends. A machine that loses its power does not: a process that only listens would
# wait forever. So a connection over which nothing comes is probed by the kernel, which ends it when it is not known
# there, or nothing answers.

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
"""The first pause, and the longest that it grows to: a server that starts again is found within a second, and one that
is gone costs one attempt a second."""

PROBED_AFTER_S = 10
"""Silence after which a connection is probed: planes say something more often, so hardly any is."""

PROBED_EVERY_S = 5
PROBES_MAX = 3
"""Probes that may stay without an answer: 25 s after it fell silent a machine that is gone is known to be."""

UNACKNOWLEDGED_S = 25
"""As long, where something was sent that is not acknowledged: nothing is probed then, and by itself the kernel sends it
again for a quarter of an hour, also after the name of the machine has come to mean another one."""


def look_again_soon(socket: zmq.Socket[Any]) -> None:
    """Apply these times to a socket of libzmq; its own pauses never grow, and it probes no peer."""
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBED_AFTER_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBED_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES_MAX)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * UNACKNOWLEDGED_S)


def probe_when_silent(connection: sockets.socket) -> None:
    """Have the kernel probe a connection of the event loop; where it has other names for these times, at its own."""
    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    if hasattr(sockets, "TCP_KEEPIDLE"):
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, PROBED_AFTER_S)
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, PROBED_EVERY_S)
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, PROBES_MAX)
    if hasattr(sockets, "TCP_USER_TIMEOUT"):
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_S)


SUBSCRIBED_MESSAGES_MAX = 50_000
"""Messages that ZMQ keeps for a subscriber while it is busy; beyond it some are lost."""


class Subscription:
    """A SUB socket: subscribed, or being connected again. What is missed meanwhile does not come again."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        topic: bytes,
        on_messages: Callable[[list[list[bytes]]], None],
    ) -> None:
        """Begin to connect; raises ``zmq.ZMQError`` for an endpoint that is none."""
        self.socket = make_socket(context, zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, SUBSCRIBED_MESSAGES_MAX)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        look_again_soon(self.socket)
        self.inbox = BatchSocket(self.socket, on_messages)
        self.inbox.start()
        connect(self.socket, endpoint)

    def close(self) -> None:
        """End; nothing more is handed over."""
        self.inbox.close()
