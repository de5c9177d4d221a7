"""A relay on loopback that keeps the ZMQ messages of a real connection, for attacks to begin from.

ZMTP 3 (rfc.zeromq.org/spec/37): a greeting of 64 bytes from each side, then frames: a flag byte (1 more, 2 long, 4
command), a length of one byte or eight, the body. Commands (READY, PING, SUBSCRIBE) are kept apart from messages.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass, field

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
MESSAGES_MAX = 2000
"""Kept of each direction; a pool at work sends the same kinds again and again."""

Message = list[bytes]


@dataclass(slots=True)
class Heard:
    """What went one way."""

    messages: list[Message] = field(default_factory=list)
    commands: list[bytes] = field(default_factory=list)


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._buffer = b""
        self._greeted = False
        self._parts: Message = []

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._buffer += data
        if not self._greeted:
            if len(self._buffer) < GREETING_BYTES:
                return
            self._buffer, self._greeted = self._buffer[GREETING_BYTES:], True
        while True:
            buffer = self._buffer
            head = 9 if buffer and buffer[0] & LONG else 2
            if len(buffer) < head:
                return
            size = int.from_bytes(buffer[1:head], "big")
            if len(buffer) < head + size:
                return
            self._take(buffer[0], buffer[head : head + size])
            self._buffer = buffer[head + size :]

    def _take(self, flags: int, body: bytes) -> None:
        heard = self._heard
        if flags & COMMAND:
            heard.commands.append(body)
            return
        self._parts.append(body)
        if not flags & MORE:
            if len(heard.messages) < MESSAGES_MAX:
                heard.messages.append(self._parts)
            self._parts = []


class Wiretap:
    """A TCP relay in front of one endpoint."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self.sent = Heard()
        """Towards the endpoint."""
        self.answered = Heard()
        self._server: asyncio.Server | None = None
        self._writers: list[StreamWriter] = []

    async def start(self, host: str, port: int = 0) -> str:
        """Listen; return the endpoint to connect to."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()  # not there yet: whoever connects tries again
            return
        self._writers += [writer, onward]
        await asyncio.gather(_pump(reader, onward, Frames(self.sent)), _pump(there, writer, Frames(self.answered)))

    def stop(self) -> None:
        """Cut everything."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()


async def _pump(reader: StreamReader, writer: StreamWriter, frames: Frames) -> None:
    try:
        while data := await reader.read(65_536):
            frames.feed(data)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side has gone
    finally:
        writer.close()
