"""Sockets on the event loop: bounded wake-ups, faults that stay with their message, ports bound on either family."""

from __future__ import annotations

import asyncio
import re
import select
import socket as sockets
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import zmq

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.tasks import TURN_S, BulkWork
from poolgrid.server.transport import zmq_socket
from poolgrid.server.transport.zmq_socket import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    LOOKS,
    BatchSocket,
    CallbackSocket,
    bind,
    connect,
    make_socket,
    port_of,
)


@pytest.mark.parametrize(("size", "at_once"), [(10, BATCH_MESSAGES_MAX), (1024, BATCH_BYTES_MAX // 1024), (100_000, 1)])
async def test_a_flood_is_taken_in_bit_by_bit_and_others_have_their_turn_between(size: int, at_once: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    taken: list[int] = []
    turns = 0
    turns_at: list[int] = []

    def handle(messages: list[list[bytes]]) -> None:
        taken.append(len(messages))
        turns_at.append(turns)

    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (sender, receiver):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
    receiver.bind("inproc://flood")
    sender.connect("inproc://flood")
    count = 3 * at_once + 1
    for _ in range(count):
        sender.send(bytes(size))
    inbox = BatchSocket(receiver, handle)
    inbox.start()
    try:
        async with asyncio.timeout(120):
            while sum(taken) < count:
                turns += 1
                await asyncio.sleep(0)
    finally:
        inbox.stop()
        context.destroy(linger=0)
    assert taken == [at_once, at_once, at_once, 1]
    assert all(before < after for before, after in pairwise(turns_at))


async def test_what_is_given_back_comes_again_before_all_that_came_later() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    taken: list[bytes] = []
    at_a_time: list[int] = []
    last = asyncio.Event()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://given-back")
    sender.connect("inproc://given-back")

    def handle(messages: list[list[bytes]]) -> None:
        at_a_time.append(len(messages))
        for at, (frame,) in enumerate(messages):
            if at == 2:
                inbox.give_back(messages[at:])
                return
            taken.append(frame)
            if frame == b"9":
                last.set()

    inbox = BatchSocket(receiver, handle, BulkWork(SystemClock()))
    for number in range(5):
        sender.send(b"%d" % number)
    inbox.start()
    try:
        async with asyncio.timeout(120):
            while not taken:  # noqa: ASYNC110 - what is under test fills a list
                await asyncio.sleep(0)
            for number in range(5, 10):
                sender.send(b"%d" % number)
            await last.wait()
    finally:
        inbox.close()
        context.destroy(linger=0)
    assert taken == [b"%d" % number for number in range(10)]
    assert max(at_a_time) <= 8, "what was given back counts like what is read"


@pytest.mark.parametrize("kind", [BatchSocket, CallbackSocket])
async def test_what_fails_over_a_message_ends_neither_the_reading_nor_the_loop(
    kind: type[BatchSocket | CallbackSocket], caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broken: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, fault: broken.append(fault))
    taken: list[bytes] = []
    last = asyncio.Event()

    def handle(messages: Any) -> None:
        (frame,) = messages[0] if kind is BatchSocket else messages
        taken.append(frame)
        if frame == b"last":
            last.set()
        raise RuntimeError("planted")

    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://faults")
    sender.connect("inproc://faults")
    reading = kind(receiver, handle)
    reading.start()
    try:
        async with asyncio.timeout(120):
            for frame in (bytes(BATCH_BYTES_MAX), b"last"):  # the first is a batch of its own
                sender.send(frame)
            await last.wait()
    finally:
        reading.close()
        context.destroy(linger=0)
    assert [len(frame) for frame in taken] == [BATCH_BYTES_MAX, 4]
    assert not broken
    assert [record.message for record in caplog.records] == ["handling a message failed; it was dropped"] * 2


async def test_what_came_before_a_send_to_an_unknown_peer_is_read() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.setsockopt(zmq.ROUTER_MANDATORY, 1)
    client.connect(bind(server, "127.0.0.1", 0, "port"))
    taken: asyncio.Queue[list[bytes]] = asyncio.Queue()
    socket = CallbackSocket(server, taken.put_nowait)
    try:
        for word in (b"first", b"second"):
            client.send(word)
            if word == b"second":
                assert select.select([server.FD], [], [], 120)[0], "it has come, and the loop has not had its turn"
                with pytest.raises(zmq.ZMQError, match="unreachable"):
                    socket.send([b"unknown", b"frame"])
            async with asyncio.timeout(120):
                assert (await taken.get())[1] == word
    finally:
        socket.stop()
        context.destroy(linger=0)


async def test_nothing_is_received_while_paused_and_what_waited_comes_after() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    came = asyncio.Event()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://paused")
    sender.connect("inproc://paused")
    inbox = BatchSocket(receiver, lambda messages: came.set())
    inbox.start()
    inbox.pause()
    try:
        sender.send(b"x")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not came.is_set()
        inbox.resume()
        async with asyncio.timeout(120):
            await came.wait()
    finally:
        inbox.close()
        inbox.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_socket_is_bound_on_either_family_and_a_port_in_use_is_said_by_its_setting(host: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        first, second = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        endpoint = bind(first, host, 0, "some_port")
        assert endpoint == f"tcp://{bracketed(host)}:{port_of(endpoint)}"
        with pytest.raises(OSError, match=rf"binding some_port: {re.escape(bracketed(host))}:\d+ cannot be used \("):
            bind(second, host, port_of(endpoint), "some_port")
        assert second.closed
    finally:
        context.destroy(linger=0)


async def test_messages_that_take_long_to_handle_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("poolgrid.server.transport.zmq_socket.monotonic", lambda: now_s)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    turns = 0
    turns_at: list[int] = []

    def handle(frames: list[bytes]) -> None:
        nonlocal now_s
        now_s += TURN_S
        turns_at.append(turns)

    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://long")
    sender.connect("inproc://long")
    for _ in range(16):
        sender.send(b"tokens of many")
    inbox = CallbackSocket(receiver, handle)
    try:
        async with asyncio.timeout(120):
            while len(turns_at) < 16:
                turns += 1
                await asyncio.sleep(0)
    finally:
        inbox.stop()
        context.destroy(linger=0)
    # A signal and a look that was due may fall into one turn.
    assert max(turns_at.count(turn) for turn in turns_at) <= 2 * (LOOKS + 3)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_a_socket_reaches_what_is_bound_to_an_address_of_either_family(host: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = make_socket(context, zmq.PULL), make_socket(context, zmq.PUSH)
    try:
        endpoint = bind(server, host, 0, "port")
        connect(client, f"tcp://{bracketed(host)}:{port_of(endpoint)}")
        client.send(b"there")
        assert server.poll(20_000)
        assert server.recv() == b"there"
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("families", "has_ipv4", "uses_ipv6"),
    [
        ((sockets.AF_INET,), True, False),
        ((sockets.AF_INET, sockets.AF_INET6), False, False),
        ((sockets.AF_INET6,), True, True),
        ((), True, False),
        ((), False, True),
    ],
)
def test_a_name_is_reached_by_the_family_that_it_has_an_address_of(
    monkeypatch: pytest.MonkeyPatch, families: tuple[int, ...], has_ipv4: bool, uses_ipv6: bool
) -> None:
    """Where a name is not known yet the family that the machine can use counts: it may be known later."""

    def look_up(host: str, port: None, family: int, kind: int) -> list[object]:
        assert host == "consolidator"
        if family not in families:
            raise sockets.gaierror
        return [host]

    monkeypatch.setattr(sockets, "getaddrinfo", look_up)
    monkeypatch.setattr(zmq_socket, "_has_ipv4", lambda: has_ipv4)
    monkeypatch.setattr(zmq_socket, "_names", zmq_socket._NameFamilies())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = make_socket(context, zmq.PUSH)
    try:
        connect(client, "tcp://consolidator:5557")
        assert bool(client.getsockopt(zmq.IPV6)) is uses_ipv6
    finally:
        context.destroy(linger=0)


def test_a_name_server_that_does_not_answer_holds_a_socket_up_once_and_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = [], threading.Event()

    def look_up(host: str, *_: object) -> list[object]:
        asked.append(host)
        answers.wait(60)
        return [host]

    monkeypatch.setattr(sockets, "getaddrinfo", look_up)
    monkeypatch.setattr(zmq_socket, "_has_ipv4", lambda: False)
    names = zmq_socket._NameFamilies()
    monkeypatch.setattr(zmq_socket, "_names", names)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [make_socket(context, zmq.PUSH) for _ in range(4)]
    try:
        began_s = time.monotonic()
        for client in clients[:3]:
            connect(client, "tcp://consolidator:5557")
        assert time.monotonic() - began_s < 5.0, "60 s, if it were waited for"
        assert [client.getsockopt(zmq.IPV6) for client in clients[:3]] == [1, 1, 1], "the family of the machine"
        assert asked == ["consolidator"], "one thread, however often the name is wanted"

        done = names._running["consolidator"]
        answers.set()
        assert done.wait(60)
        connect(clients[3], "tcp://consolidator:5557")
        assert clients[3].getsockopt(zmq.IPV6) == 0
        assert asked == ["consolidator"]
    finally:
        answers.set()
        context.destroy(linger=0)


def test_look_ups_and_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(sockets, "getaddrinfo", lambda *_: answers.wait(60))
    monkeypatch.setattr(zmq_socket, "LOOKUP_WAIT_S", 0.0)
    monkeypatch.setattr(zmq_socket, "NAMES_MAX", 8)
    names = zmq_socket._NameFamilies()
    try:
        for number in range(2 * zmq_socket.LOOKUPS_MAX):
            assert names.needs_ipv6(f"w{number}") is None
        assert len(names._running) == zmq_socket.LOOKUPS_MAX
        running = list(names._running.values())
    finally:
        answers.set()
    assert all(done.wait(60) for done in running)
    assert len(names._found) == 8
