"""Hears the publishers of a check, and keeps their messages whole, in the order of arrival.

The judgement comes later (``engine_check/core``): here nothing is decoded, so that what is wrong with a message is kept
with it.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.plugins.engine_check.core.evidence import Contact, Heard, ReplayAnswer, Source
from poolgrid.server.process.clock import Clock
from poolgrid.server.transport.planes import leave_plain
from poolgrid.server.transport.zmq_socket import BatchSocket, connect, listen, make_socket

HEARD_MESSAGES_MAX = 20_000
"""Messages that a check keeps; a busy server publishes a few hundred a second, and a check takes seconds. What comes
beyond it is not read, which shows as a jump of the sequence."""

HEARD_BYTES_MAX = 256 * 1024 * 1024
"""The same in bytes."""

REPLAYED_MESSAGES_MAX = 20_000
"""Messages of one replay: twice what engines keep by default. What follows is left."""

CONTACT_TIMEOUT_S = 2.0
"""How long a publisher may take to be reached; on a machine of one's own it takes milliseconds."""

CONNECTS_TIMEOUT_S = 3.0
"""How long a publisher that connects may take to come to a socket in its endpoint's place; ZMQ tries every 100 ms."""

REPLAY_TIMEOUT_S = 5.0
"""How long a replay may be silent before it counts as ended."""

WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECTED
)

_monitors = itertools.count()


class _Subscription:
    """One publisher's socket, and what came of the connection."""

    def __init__(self, listener: Listener, source: Source, bound: bool) -> None:
        self.source = source
        self.changed = asyncio.Event()
        self.reached = False
        """Whether a publisher's handshake succeeded."""
        self.strange = False
        """Whether a process listens there that is no publisher."""
        self.touched = False
        """Whether a process took a connection."""
        self._listener = listener
        self.socket = make_socket(listener.context, zmq.SUB)
        leave_plain(self.socket)  # engines publish without CURVE
        self.socket.setsockopt(zmq.RCVHWM, HEARD_MESSAGES_MAX)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")  # with any topic: another one than expected is a finding
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        address = f"inproc://engine-check-{next(_monitors)}"
        self.socket.monitor(address, WATCHED)
        self.monitor = make_socket(listener.context, zmq.PAIR)
        # ZMQ's thread waits when it cannot tell, with the lock that closing takes: so there is no bound here.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        connect(self.monitor, address)
        self._inboxes = [BatchSocket(self.monitor, self._on_monitor), BatchSocket(self.socket, self._on_messages)]
        for inbox in self._inboxes:
            inbox.start()
        try:
            if bound:
                listen(self.socket, source.endpoint)
            else:
                connect(self.socket, source.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def _on_monitor(self, messages: list[list[bytes]]) -> None:
        for frames in messages:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.reached = True
            elif event == zmq.EVENT_CONNECTED:
                self.touched = True
            else:
                self.strange = True
            self.changed.set()

    def _on_messages(self, messages: list[list[bytes]]) -> None:
        self._listener.take(self.source.rank, messages)

    async def until_reached(self, timeout_s: float) -> None:
        """Wait until a publisher is reached, or a process that is none, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.reached or self.strange):
                    await self.changed.wait()
                    self.changed.clear()
        except TimeoutError:
            pass  # no process listens there

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.stop()
        self.socket.monitor(None, 0)
        self.monitor.close()
        self.socket.close()


class Listener:
    """All publishers of a check."""

    def __init__(self, context: zmq.Context[Any], sources: Sequence[Source], clock: Clock) -> None:
        self.context = context
        self._sources = sources
        self._clock = clock
        self._subscriptions: list[_Subscription] = []
        self._bytes = 0
        self._arrived = asyncio.Event()
        self.heard: list[Heard] = []
        self.contacts: dict[int, Contact] = {}
        self.is_full = False
        """Whether messages were left because too many had come."""

    async def open(self) -> None:
        """Subscribe to all, and find out what is there; raises ``zmq.ZMQError`` where an endpoint is none."""
        for source in self._sources:
            self._subscriptions.append(_Subscription(self, source, bound=False))
        async with asyncio.TaskGroup() as together:
            for each in list(self._subscriptions):
                together.create_task(self._meet(each))

    async def _meet(self, subscription: _Subscription) -> None:
        await subscription.until_reached(CONTACT_TIMEOUT_S)
        rank = subscription.source.rank
        if subscription.reached:
            self.contacts[rank] = Contact.CONNECTED
        elif subscription.strange or subscription.touched:
            # A peer of another kind ends the connection, and ZMQ does not always report why.
            self.contacts[rank] = Contact.NO_PUBLISHER
            # ZMQ would try again without limit, and can wait for such a connection when its context ends.
            self._subscriptions.remove(subscription)
            subscription.close()
        else:
            self.contacts[rank] = Contact.REFUSED
            await self._take_its_place(subscription)

    async def _take_its_place(self, subscription: _Subscription) -> None:
        """Bind where no process listens: a publisher that connects comes here."""
        self._subscriptions.remove(subscription)
        subscription.close()
        try:
            bound = _Subscription(self, subscription.source, bound=True)
        except zmq.ZMQError:
            return  # the endpoint is on another machine
        self._subscriptions.append(bound)
        await bound.until_reached(CONNECTS_TIMEOUT_S)
        if bound.reached:
            self.contacts[subscription.source.rank] = Contact.CONNECTS

    def take(self, rank: int, messages: Sequence[Sequence[bytes]]) -> None:
        now_ms = self._clock.monotonic_ms()
        for message in messages:
            self._bytes += sum(map(len, message))
            if len(self.heard) >= HEARD_MESSAGES_MAX or self._bytes > HEARD_BYTES_MAX:
                self.is_full = True
                break
            self.heard.append(Heard(rank, tuple(message), now_ms))
        self._arrived.set()

    async def settle(self, quiet_ms: int) -> None:
        """Wait until nothing has arrived for so long, ten times as long at most: other clients' events never end."""
        deadline_ms = self._clock.monotonic_ms() + 10 * quiet_ms
        while self._clock.monotonic_ms() < deadline_ms:
            self._arrived.clear()
            try:
                async with asyncio.timeout(quiet_ms / 1000):
                    await self._arrived.wait()
            except TimeoutError:
                return

    async def replay(self, source: Source, from_seq: int) -> ReplayAnswer:
        """Ask a replay socket for all from a number on."""
        socket = make_socket(self.context, zmq.DEALER)
        leave_plain(socket)
        socket.setsockopt(zmq.RCVHWM, 0)  # the engine's own buffer is the bound; dropping would be a hole
        answer: list[tuple[bytes, ...]] = []
        ended = asyncio.Event()
        arrived = asyncio.Event()

        def take(messages: list[list[bytes]]) -> None:
            for message in messages:
                if len(message) >= 2 and message[-2] == END_OF_REPLAY:
                    ended.set()
                elif not ended.is_set() and len(answer) < REPLAYED_MESSAGES_MAX:
                    # The first part is the delimiter that a DEALER sees.
                    answer.append(tuple(message[1:] if not message[0] else message))
            arrived.set()

        inbox = BatchSocket(socket, take)
        try:
            connect(socket, source.replay_endpoint)
            socket.send_multipart([b"", struct.pack(">Q", from_seq)], zmq.NOBLOCK)
            inbox.start()
            while not ended.is_set():
                arrived.clear()
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    await arrived.wait()
        except (TimeoutError, zmq.ZMQError):
            pass  # an answer that broke off, or none: that is the finding
        finally:
            inbox.stop()
            socket.close()
        return ReplayAnswer(source.rank, from_seq, tuple(answer), ended.is_set())

    def close(self) -> None:
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()


END_OF_REPLAY = b"\xff" * 8
"""The sequence number −1 that ends a replay."""
