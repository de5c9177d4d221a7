"""Sends given bodies one after the other, and reads what each costs the process that answers them.

    python -m lab.benchmarks.conversation_load PORT PID BODIES

``BODIES`` is a MessagePack array of JSON bodies for ``/v1/chat/completions``, streamed ones with a usage report. One
client has one request open at a time, so the CPU that the process (and its children) used between two requests is the
first one's. One JSON object a line is printed for each (``Answered``).
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import httptools
import msgspec
import uvloop

from lab.benchmarks.http_load import cpu_s

ANSWER_TIMEOUT_S = 60.0
"""A hundred times the slowest answer; then the run is over."""


class Answered(msgspec.Struct, kw_only=True):
    """What became of one request."""

    status: int
    cpu_ms: float
    latency_ms: float
    ttft_ms: float
    """Until the first event of the stream."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    fault: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.first = 0.0
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        if not self.first and b"data:" in data:
            self.first = time.perf_counter()
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def send_all(port: int, pid: int, bodies: list[bytes]) -> None:
    """Send everything over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        before = cpu_s(pid)
        for body in bodies:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answered = await _send(reader, writer, body)
            after = cpu_s(pid)
            answered.cpu_ms, before = (after - before) * 1e3, after
            sys.stdout.buffer.write(msgspec.json.encode(answered) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        writer.close()


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> Answered:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    started = time.perf_counter()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    while not answer.is_complete:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError("the connection ended before the answer did")
        parser.feed_data(data)
    now = time.perf_counter()
    content = b"".join(answer.body)
    answered = Answered(
        status=parser.get_status_code(),
        cpu_ms=0.0,
        latency_ms=(now - started) * 1e3,
        ttft_ms=((answer.first or now) - started) * 1e3,
    )
    if answered.status != 200:
        answered.fault = content[:300].decode(errors="replace")
        return answered
    for line in content.split(b"\n\n"):
        if line.startswith(b"data: {") and b'"usage"' in line:
            usage = _decode_event(line[6:]).usage
            if usage is not None:
                answered.prompt_tokens, answered.completion_tokens = usage.prompt_tokens, usage.completion_tokens
                if usage.prompt_tokens_details is not None:
                    answered.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    return answered


def main() -> None:
    """Send the bodies of a file."""
    bodies = msgspec.msgpack.decode(Path(sys.argv[3]).read_bytes(), type=list[bytes])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send_all(int(sys.argv[1]), int(sys.argv[2]), bodies))


if __name__ == "__main__":
    main()
