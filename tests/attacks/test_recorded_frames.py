"""Messages are cut out of a real ZMQ connection as they are, and mutations of them are the same for the same seed."""

from __future__ import annotations

import asyncio
import random

import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from lab.attacks.mutation import FRAME_MAX, mutated
from lab.attacks.wiretap import GREETING_BYTES, LONG, MORE, Frames, Heard, Wiretap

MESSAGES = [[b"C", b"hello"], [b"B", bytes(70_000)], [b""], [b"last"]]


async def test_a_wiretap_keeps_what_went_each_way() -> None:
    context = zmq.asyncio.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    tap = Wiretap("127.0.0.1", port)
    try:
        client.connect(await tap.start("127.0.0.1"))
        async with asyncio.timeout(120):
            for message in MESSAGES:
                await client.send_multipart(message)
                identity, *frames = await server.recv_multipart()
                assert frames == message
                await server.send_multipart([identity, b"ok", *message])
                await client.recv_multipart()
    finally:
        tap.stop()
        context.destroy(linger=0)

    assert tap.sent.messages == MESSAGES
    assert tap.answered.messages == [[b"ok", *message] for message in MESSAGES]
    assert any(b"READY" in command for command in tap.sent.commands)


@given(st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=3), max_size=5), st.integers(1, 50))
def test_messages_are_found_however_the_bytes_arrive(messages: list[list[bytes]], step: int) -> None:
    stream = bytes(GREETING_BYTES)
    for message in messages:
        for number, frame in enumerate(message):
            more = MORE if number + 1 < len(message) else 0
            size = len(frame).to_bytes(8, "big") if len(frame) > 255 else bytes([len(frame)])
            stream += bytes([more | (LONG if len(frame) > 255 else 0)]) + size + frame
    heard = Heard()
    frames = Frames(heard)

    for at in range(0, len(stream), step):
        frames.feed(stream[at : at + step])

    assert heard.messages == messages


@given(st.binary(max_size=300), st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.integers())
def test_a_mutation_is_bounded_and_the_same_for_the_same_seed(frame: bytes, others: list[bytes], seed: int) -> None:
    changed = mutated(random.Random(seed), frame, others)

    assert changed == mutated(random.Random(seed), frame, others)
    assert len(changed) <= FRAME_MAX


def test_most_mutations_differ_from_their_frame() -> None:
    source = random.Random(1)
    frame = b"\x95\xa5Hello\x01\x02\x03\x04" * 5

    assert sum(mutated(source, frame, [b"\x90"]) != frame for _ in range(1000)) > 900
