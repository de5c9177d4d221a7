"""Sends mutations of recorded messages to a plane, in a process of its own: ``python -m lab.attacks.mutated_sender``.

libzmq ends a process (``session_base.cpp``, an assertion) whose socket is closed just when its peer has ended the
connection amid a message of several frames. Whoever sends rubbish from thousands of sockets meets that now and then.
The harness then begins again with what is left.

The order comes as one pickle on standard input; after each burst the number of messages so far goes to standard output.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path

import zmq

from lab.attacks.mutation import mutated
from lab.attacks.wiretap import Message
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.requests import Generate

BURST = 200

WORK_SHARE, WORK_BYTES_MAX = 0.05, 4096
"""Of mutations that are requests still, so many are sent, and only short ones. On a plane without keys a worker cannot
tell them from a router's, and the time that their work takes is no harm of their form."""

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Order:
    """What is sent to whom."""

    kind: int
    """Type of the ZMQ socket."""
    endpoints: list[str]
    """As ZMQ connects to them, with the address to come from."""
    messages: list[Message]
    count: int
    seconds: float
    seed: int


async def send(order: Order) -> int:
    """Have an order carried out by processes, one after the other; return how many messages were sent."""
    source = random.Random(order.seed)
    deadline = time.monotonic() + order.seconds
    sent = 0
    while sent < order.count and (left_s := deadline - time.monotonic()) > 0:
        part = Order(order.kind, order.endpoints, order.messages, order.count - sent, left_s, source.getrandbits(64))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lab.attacks.mutated_sender", cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        try:
            out, errors = await process.communicate(pickle.dumps(part))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        sent += int(([b"0", *out.split()])[-1])
        if process.returncode not in (0, -signal.SIGABRT):
            raise RuntimeError(f"sending mutations ended with status {process.returncode}: {errors.decode()[-500:]}")
    return sent


def _send(order: Order) -> None:
    """Send from changing identities, until the time is over."""
    source = random.Random(order.seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pieces = [frame for message in order.messages for frame in message] or [b""]
    sent = 0
    deadline = time.monotonic() + order.seconds
    try:
        while sent < order.count and time.monotonic() < deadline:
            peer = context.socket(order.kind)
            peer.setsockopt(zmq.LINGER, 200)
            peer.setsockopt(zmq.SNDTIMEO, 200)
            for endpoint in order.endpoints:
                peer.connect(endpoint)
            for _ in range(BURST):
                message = _changed(order.kind, source, source.choice(order.messages), pieces)
                if _asks_for_work(message) and (
                    source.random() >= WORK_SHARE or sum(map(len, message)) > WORK_BYTES_MAX
                ):
                    continue
                try:
                    peer.send_multipart(message)
                except zmq.Again:
                    break
                sent += 1
            peer.close()
            sys.stdout.write(f"{sent}\n")
            sys.stdout.flush()
    finally:
        context.destroy(linger=200)


def _changed(kind: int, source: random.Random, message: Message, pieces: list[bytes]) -> list[bytes]:
    at = source.randrange(len(message))
    changed = [
        mutated(source, frame, pieces) if place == at or source.random() < 0.2 else frame
        for place, frame in enumerate(message)
    ]
    if source.random() < 0.05:
        changed = changed[: source.randint(1, len(changed))] + changed[: source.randint(0, 3)]
    # An XSUB would meet that assertion with each message of several frames that its peer refuses.
    return changed[:1] if kind == zmq.XSUB else changed


def _asks_for_work(message: list[bytes]) -> bool:
    try:
        return isinstance(codec.to_worker.decode(message[-1]), Generate)
    except DecodeError:
        return False


if __name__ == "__main__":
    _send(pickle.loads(sys.stdin.buffer.read()))  # from the harness
