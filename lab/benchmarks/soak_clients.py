"""The clients of a soak: each has one request open at a time and leaves when its plan says so.

Rules
    1. One task per client, woken once per request; what arrives in between is parsed in the protocol's callbacks.
    2. Every answer that was read to its end is checked: status, last bytes, no error event. A connection that the
       server ends before that is a fault, but for one that was kept open and met its time-out (``stale``).
    3. A client whose plan says so stops reading, or leaves: with an orderly end or a reset, before its request is
       complete, before the answer, within it, or at its last byte.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from typing import cast

import httptools

from lab.benchmarks.soak_requests import Plan, Planned

TAIL_BYTES = 4096
"""Kept of each answer's end, to be looked at."""

WAIT_MAX_S = 0.5
"""Longest that a client waits before it leaves without an answer."""

SLOW_MAX_S = 2.0
"""Longest that a slow client does not read."""

ANSWER_TIMEOUT_S = 120.0
"""A request without an end by then hangs."""

CONNECT_TIMEOUT_S = 30.0
FAULT_SAMPLES_MAX = 20
_RESET = struct.pack("ii", 1, 0)
_ERROR_EVENTS = (b'data: {"error"', b"event: error", b"event: response.failed")


class Tally:
    """What came of all requests; plain numbers, moved by the clients."""

    def __init__(self) -> None:
        self.open = 0
        """Streams that are being waited for or read now."""
        self.requests: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.left: Counter[str] = Counter()
        self.answer_bytes = 0
        self.stale = 0
        self.refused = 0
        """Answers 429: the pool was full."""
        self.fault_count = 0
        self.faults: list[str] = []

    def fault(self, planned: Planned, what: str) -> None:
        """Count a wrong answer and keep the first ones."""
        self.fault_count += 1
        if len(self.faults) < FAULT_SAMPLES_MAX:
            self.faults.append(f"{planned.kind}: {what}")


class Connection(asyncio.Protocol):
    """One connection and the request on it."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._planned: Planned | None = None
        self._done: asyncio.Future[str] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._tail = b""
        self._bytes = 0
        self._leave_at = -1
        self._used = False
        self.is_open = True

    async def exchange(self, planned: Planned) -> str:
        """Send a request and return ``answered``, ``left``, ``stale``, ``lost`` or ``hung``."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._planned, self._tail, self._bytes, self._leave_at = planned, b"", 0, -1
        self._done = loop.create_future()
        self._timers = [loop.call_later(ANSWER_TIMEOUT_S, self._end, "hung")]
        leaving = planned.leaving
        if leaving == "within request":
            self._transport.write(planned.data[: int(len(planned.data) * planned.patience)])
            self._timers.append(loop.call_later(planned.patience * WAIT_MAX_S, self._leave))
        else:
            self._transport.write(planned.data)
        if leaving == "before answer":
            self._timers.append(loop.call_later(planned.patience * WAIT_MAX_S, self._leave))
        elif leaving in ("within answer", "slow", "half-close"):
            self._leave_at = planned.leave_at
        try:
            how = await self._done
        finally:
            for timer in self._timers:
                timer.cancel()
            self._planned = self._done = None
            self._used = True
        if leaving == "close" or not self.is_open:
            self.close()
        return how

    def close(self) -> None:
        """End the connection in good order."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are transports in all but the base class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that was open, if there was one."""
        self.is_open = False
        self._end("stale" if self._used and not self._bytes else "lost")

    def data_received(self, data: bytes) -> None:
        """Read on, or leave here."""
        self._bytes += len(data)
        if self._done is None or self._done.done():
            return
        if any(mark in data for mark in _ERROR_EVENTS):
            assert self._planned is not None
            self._tally.fault(self._planned, f"an error within the answer: {data[-300:]!r}")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            assert self._planned is not None
            self._tally.fault(self._planned, f"no HTTP: {error}: {data[:200]!r}")
            self.close()
            return
        if 0 <= self._leave_at <= self._bytes:
            self._leave_at = -1
            self._interrupt()

    def on_body(self, body: bytes) -> None:
        """Keep the end of it."""
        self._tail = (self._tail + body)[-TAIL_BYTES:] if len(body) < TAIL_BYTES else body[-TAIL_BYTES:]
        if self._planned is not None and self._planned.leaving == "at end" and self._planned.end in self._tail:
            self._leave()

    def on_message_complete(self) -> None:
        """Check the answer."""
        planned = self._planned
        if planned is None or self._done is None or self._done.done():
            return
        status = self._parser.get_status_code()
        tally = self._tally
        tally.statuses[status] += 1
        tally.answer_bytes += self._bytes
        if status == 429:
            tally.refused += 1
        elif status != planned.status:
            tally.fault(planned, f"status {status}, not {planned.status}: {self._tail[:300]!r}")
        elif planned.end and planned.end not in self._tail:
            tally.fault(planned, f"the answer ends without {planned.end!r}: {self._tail[-200:]!r}")
        if planned.closes or not self._parser.should_keep_alive():
            self.close()
        self._parser = httptools.HttpResponseParser(self)
        self._end("answered")

    def _interrupt(self) -> None:
        planned, transport = self._planned, self._transport
        if planned is None or transport is None or self._done is None or self._done.done():
            return
        if planned.leaving == "slow":
            transport.pause_reading()
            loop = asyncio.get_running_loop()
            # Half of them come back and read the rest.
            then = transport.resume_reading if planned.reset else self._leave
            self._timers.append(loop.call_later(planned.patience * SLOW_MAX_S, then))
        elif planned.leaving == "half-close" and transport.can_write_eof():
            transport.write_eof()
            self.is_open = False
            self._timers.append(asyncio.get_running_loop().call_later(WAIT_MAX_S, self._leave))
        else:
            self._leave()

    def _leave(self) -> None:
        transport, planned = self._transport, self._planned
        if self._done is None or self._done.done() or planned is None or transport is None:
            return
        self.is_open = False
        if planned.reset:
            connection: socket.socket = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            transport.close()
        self._end("left")

    def _end(self, how: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(how)


class Clients:
    """All clients of a soak."""

    def __init__(self, host: str, port: int, plans: list[Plan], idle: int) -> None:
        self.tally = Tally()
        self._address = host, port
        self._plans = plans
        self._idle = idle
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, ramp_s: float) -> None:
        """Begin, spread over ``ramp_s``."""
        loop = asyncio.get_running_loop()
        count = len(self._plans)
        for number, plan in enumerate(self._plans):
            self._tasks.append(loop.create_task(self._client(plan, ramp_s * number / count)))
        for _ in range(self._idle):
            self._tasks.append(loop.create_task(self._idler()))

    def check(self) -> None:
        """Raise what a client raised: it is a bug of this tool."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """Let everybody finish the request that is open, then close; raises what a client raised."""
        self._stopping = True
        for task in self._tasks[len(self._plans) :]:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in found:
            if isinstance(result, Exception):
                raise result

    async def _connect(self) -> Connection | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: Connection(self.tally), *self._address)
        except (OSError, TimeoutError) as error:
            self.tally.fault_count += 1
            self.tally.faults[FAULT_SAMPLES_MAX - 1 :] = [f"connecting: {error!r}"]
            await asyncio.sleep(1)  # whatever it is, a thousand clients that try at once make it worse
            return None
        return connection

    async def _client(self, plan: Plan, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        tally = self.tally
        connection: Connection | None = None
        while not self._stopping:
            if connection is None or not connection.is_open:
                connection = await self._connect()
                if connection is None:
                    continue
            planned = plan.next()
            tally.requests[planned.kind] += 1
            tally.open += planned.streams
            try:
                how = await connection.exchange(planned)
            finally:
                tally.open -= planned.streams
            if how == "left":
                tally.left[planned.leaving] += 1
            elif how == "stale":
                tally.stale += 1
            elif how == "lost":
                # A half-closed connection may be ended by the server at once.
                if planned.leaving == "half-close":
                    tally.left[planned.leaving] += 1
                else:
                    tally.fault(planned, "the server closed the connection before the answer was complete")
            elif how == "hung":
                tally.fault(planned, f"no end of the answer after {ANSWER_TIMEOUT_S:.0f} s")
                connection.close()
        if connection is not None:
            connection.close()

    async def _idler(self) -> None:
        """Hold a connection that has asked once and says nothing any more; take another when the server closes it."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(*self._address)
            except OSError:
                await asyncio.sleep(1)
                continue
            try:
                writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                while await reader.read(65_536):
                    pass
            except OSError:
                pass  # reset: as good as closed
            finally:
                writer.close()
