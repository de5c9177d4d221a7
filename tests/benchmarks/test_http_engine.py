"""What the mock OpenAI server writes of its streams: whole, or a token in each step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from lab.benchmarks.http_engine import Steps


class Written(asyncio.Transport):
    """Keeps what is written to it in a list that several share."""

    def __init__(self, written: list[bytes]) -> None:
        self.closing = False
        self.write = written.append  # type: ignore[assignment]

    def is_closing(self) -> bool:
        return self.closing


def test_every_stream_gets_one_chunk_in_a_step_and_who_has_left_gets_none() -> None:
    async def scenario() -> list[bytes]:
        written: list[bytes] = []
        ended = asyncio.Event()
        staying, leaving = Written(written), Written(written)

        def chunks_of_one_that_leaves() -> Iterator[bytes]:
            yield b"b1"
            leaving.closing = True
            yield b"b2"
            raise AssertionError("nobody asks for more of a stream whose client has left")

        def chunks() -> Iterator[bytes]:
            yield from (b"a1", b"a2", b"a3")
            ended.set()

        steps = Steps(1.0)
        steps.begin(staying, chunks())
        steps.begin(leaving, chunks_of_one_that_leaves())
        await ended.wait()
        ended.clear()
        steps.begin(staying, chunks())  # after a time without any
        await ended.wait()
        return written

    assert asyncio.run(scenario()) == [b"a1", b"b1", b"a2", b"a3", b"a1", b"a2", b"a3"]
