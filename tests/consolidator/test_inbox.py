"""What is received in one wake-up is bounded, by number and by bytes, whatever waits in the socket."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import zmq

from router.consolidator.adapters.inbox import BYTES_PER_WAKE_UP_MAX, MESSAGES_PER_WAKE_UP_MAX, Inbox


@pytest.mark.parametrize(
    ("size", "at_once"), [(10, MESSAGES_PER_WAKE_UP_MAX), (1024, BYTES_PER_WAKE_UP_MAX // 1024), (100_000, 1)]
)
def test_a_flood_is_taken_in_bit_by_bit_and_others_have_their_turn_between(size: int, at_once: int) -> None:
    async def scenario() -> None:
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
        inbox = Inbox(receiver, handle)
        inbox.start()
        try:
            async with asyncio.timeout(10):
                while sum(taken) < count:
                    turns += 1
                    await asyncio.sleep(0)
        finally:
            inbox.close()
            context.destroy(linger=0)
        assert taken == [at_once, at_once, at_once, 1]
        assert all(before < after for before, after in pairwise(turns_at))

    asyncio.run(scenario())
