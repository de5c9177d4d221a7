"""Attacks on the HTTP server before anybody has shown a key: raw bytes over many connections or one."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lab.attacks.attack import Attack, Outcome, Part, Scene
from lab.attacks.pool import ATTACKER_HOST, Shape

MB = 1_000_000
CHUNK = b"a" * 65_536
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 15.0

HEADER_BYTES = 100 * MB
PIPELINED_BYTES = 42 * MB
SILENT = 1100
UNFINISHED = 60
UNFINISHED_BYTES = 30 * MB
EMPTY_MEMBERS = 400_000
BOMB_BYTES = 1000 * MB
HEADS = 200_000
ENDLESS = 2**60
DRIP_S = 0.25
TIMEOUT_MS = 3000
HASTY = Shape(router=("--http-request-timeout-ms", str(TIMEOUT_MS)))
"""The router's own times are 20 s: the same limits, met sooner."""

HASTY_S = 8.0
CROWDED_CONNECTIONS = 400
CROWDED = Shape(router=("--max-connections", str(CROWDED_CONNECTIONS)))


async def dial(scene: Scene) -> tuple[StreamReader, StreamWriter]:
    """Connect as the attacker; raises ``OSError`` when the server does not take it."""
    host, port = scene.pool.address
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        return await asyncio.open_connection(host, port, local_addr=(ATTACKER_HOST, 0))


def abort(writer: StreamWriter) -> None:
    """Leave without ceremony."""
    transport = writer.transport
    if not transport.is_closing():
        transport.abort()


class Watch:
    """Reads what comes back on a connection, and knows when the server has ended it."""

    def __init__(self, reader: StreamReader) -> None:
        self.head = b""
        self.bytes = 0
        self.ended = False
        self.said_something = asyncio.Event()
        """Set at the first bytes, or at the end."""
        self._task = asyncio.create_task(self._read(reader))

    async def _read(self, reader: StreamReader) -> None:
        try:
            while data := await reader.read(65_536):
                self.bytes += len(data)
                self.head = (self.head + data)[:200]
                self.said_something.set()
        except OSError:
            pass  # reset: ended as well
        self.ended = True
        self.said_something.set()

    async def done(self) -> None:
        """Wait until the server has ended the connection."""
        await self._task

    def stop(self) -> None:
        """Read no more."""
        self._task.cancel()

    def said(self) -> str:
        """Return the status of the first answer, or what became of the connection."""
        if self.head.startswith(b"HTTP/1."):
            return f"{self.head[9:12].decode(errors='replace')}{', closed' if self.ended else ', left open'}"
        return "closed" if self.ended else "left open"


@dataclass(frozen=True, slots=True)
class Poured:
    """What came of bytes that were poured into a connection."""

    sent: int
    said: str
    ended: bool
    """Whether the server ended the connection."""

    def __str__(self) -> str:
        return f"{self.sent / MB:.1f} MB sent, {self.said}"


async def pour(scene: Scene, start: bytes, chunk: bytes, size: int, after: bytes = b"", pause_s: float = 0.0) -> Poured:
    """Send ``start``, then chunks up to ``size`` bytes, then ``after`` again and again; return what came of it."""
    deadline = scene.deadline()
    try:
        reader, writer = await dial(scene)
    except (OSError, TimeoutError) as error:
        return Poured(0, f"not connected ({error!r})", True)
    watch = Watch(reader)
    sent = 0
    try:
        async with asyncio.timeout_at(deadline):
            writer.write(start)
            while sent < size and not watch.ended:
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
                if pause_s:
                    await asyncio.sleep(pause_s)
            while after and not watch.ended:
                writer.write(after)
                await writer.drain()
                await asyncio.sleep(0.005)
            await watch.done()
    except TimeoutError:
        pass
    except OSError:
        watch.ended = True
    finally:
        watch.stop()
        abort(writer)
    return Poured(sent, watch.said(), watch.ended)


def must_end(poured: Poured) -> Outcome:
    """Return the outcome of something that no server may go on reading."""
    return Outcome(str(poured), [] if poured.ended else [f"the server left the connection open: {poured}"])


async def endless_header(scene: Scene) -> Outcome:
    """One header without an end, fast, then a byte every 5 ms."""
    return must_end(await pour(scene, b"GET /live HTTP/1.1\r\nx-endless: ", CHUNK, scene.count(HEADER_BYTES), b"a"))


async def many_headers(scene: Scene) -> Outcome:
    """Very many small headers."""
    line = b"".join(b"x-%d: 1\r\n" % number for number in range(1000))
    size = scene.count(HEADS) // 1000 * len(line)
    return must_end(await pour(scene, b"GET /live HTTP/1.1\r\n", line, size, b"y: 1\r\n"))


async def endless_target(scene: Scene) -> Outcome:
    """A request line without an end."""
    return must_end(await pour(scene, b"GET /", CHUNK, scene.count(HEADER_BYTES), b"a"))


async def slow_headers(scene: Scene) -> Outcome:
    """Many connections, each a byte of a header now and then."""
    start = b"GET /live HTTP/1.1\r\nx: "
    return await _each(scene, scene.count(200), lambda: pour(scene, start, b"a", ENDLESS, pause_s=DRIP_S), True)


async def _each(scene: Scene, count: int, one: Callable[[], Awaitable[Poured]], must_all_end: bool) -> Outcome:
    """Do the same on many connections; those that the server has to end in time are faults when it does not."""
    poured = await asyncio.gather(*(one() for _ in range(count)))
    kinds = Counter(each.said for each in poured)
    said = f"{count} connections: " + ", ".join(f"{times} {text}" for text, times in kinds.most_common(3))
    left = sum(not each.ended for each in poured)
    faults = (
        [f"{left} of {count} connections were left open for {scene.seconds:.0f} s"] if left and must_all_end else []
    )
    return Outcome(said, faults)


async def pipelined(scene: Scene, read: bool) -> Outcome:
    """Very many requests on one connection, whose answers are read or left."""
    request = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    burst = request * 2000
    deadline = scene.deadline()
    reader, writer = await dial(scene)
    watch = Watch(reader) if read else None
    sent = 0
    try:
        async with asyncio.timeout_at(deadline):
            while sent < scene.count(PIPELINED_BYTES) and not (watch and watch.ended):
                writer.write(burst)
                await writer.drain()
                sent += len(burst)
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time() - 0.1))
    except (TimeoutError, OSError):
        pass
    finally:
        if watch is not None:
            watch.stop()
        abort(writer)
    answers = f", {watch.bytes / MB:.1f} MB of answers" if watch is not None else ", none read"
    return Outcome(f"{sent / MB:.1f} MB sent{answers}")


async def silent(scene: Scene) -> Outcome:
    """Very many connections that say nothing."""
    deadline = scene.deadline()
    watches: list[tuple[Watch, StreamWriter]] = []
    refused = 0
    try:
        async with asyncio.timeout_at(deadline):
            for _ in range(scene.count(SILENT)):
                try:
                    reader, writer = await dial(scene)
                except (OSError, TimeoutError):
                    refused += 1
                    continue
                watches.append((Watch(reader), writer))
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time() - 0.1))
    except TimeoutError:
        pass
    finally:
        ended = sum(watch.ended for watch, _ in watches)
        for watch, writer in watches:
            watch.stop()
            abort(writer)
    return Outcome(
        f"{len(watches)} connected, {refused} not, {ended} closed by the server, {len(watches) - ended} left"
    )


async def unfinished(scene: Scene) -> Outcome:
    """Many bodies that stop one byte before their end."""
    size = UNFINISHED_BYTES if scene.share >= 1 else 4 * MB
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (size + 1)
    )
    return await _each(scene, scene.count(UNFINISHED, 4), lambda: pour(scene, head, CHUNK, size - len(CHUNK)), False)


async def unfinished_with_a_key(scene: Scene) -> Outcome:
    """The same from a tenant, whose bodies are read."""
    size = UNFINISHED_BYTES if scene.share >= 1 else 4 * MB
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\n"
        b"content-length: %d\r\n\r\n" % (scene.pool.keys["attacker"].encode(), size + 1)
    )
    return await _each(scene, scene.count(UNFINISHED, 4), lambda: pour(scene, head, CHUNK, size - len(CHUNK)), False)


async def half_closed(scene: Scene) -> Outcome:
    """A whole POST whose client closes its own side: it still has to get its answer."""
    body = b'{"model": "%s", "prompt": "half", "max_tokens": 4}' % scene.pool.model.name.encode()
    reader, writer = await dial(scene)
    writer.write(_post(scene, body))
    writer.write_eof()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await reader.read()
    except (TimeoutError, OSError):
        answer = b""
    finally:
        abort(writer)
    # A server may probe with informational answers whether anybody is there still (RFC 9110, 15.2).
    while answer.startswith(b"HTTP/1.1 1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    said = answer[9:12].decode(errors="replace") if answer else "nothing"
    return Outcome(f"answered {said}", [] if said == "200" else [f"a half-closed POST was answered {said}, not 200"])


def _post(scene: Scene, body: bytes, headers: bytes = b"") -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\n"
        b"%scontent-length: %d\r\n\r\n" % (scene.pool.keys["attacker"].encode(), headers, len(body))
    ) + body


async def _gzip(scene: Scene, body: bytes, clients: int) -> Outcome:
    request = _post(scene, body, b"content-encoding: gzip\r\n")

    async def one() -> str:
        try:
            reader, writer = await dial(scene)
        except (OSError, TimeoutError):
            return "not connected"
        watch = Watch(reader)
        try:
            async with asyncio.timeout(scene.seconds):
                writer.write(request)
                await writer.drain()
                await watch.said_something.wait()
        except (TimeoutError, OSError):
            pass
        finally:
            watch.stop()
            abort(writer)
        return watch.head[9:12].decode(errors="replace") or "no answer"

    said = Counter(await asyncio.gather(*(one() for _ in range(clients))))
    return Outcome(f"{len(body) / MB:.1f} MB: " + ", ".join(f"{count} × {what}" for what, count in said.items()))


async def empty_members(scene: Scene) -> Outcome:
    """gzip of very many empty members."""
    return await _gzip(scene, gzip.compress(b"", mtime=0) * scene.count(EMPTY_MEMBERS, 20_000), 4)


async def bomb(scene: Scene) -> Outcome:
    """gzip of a thousand times its size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = b" " * MB
    parts = [packer.compress(block) for _ in range(scene.count(BOMB_BYTES) // MB)]
    return await _gzip(scene, b"".join([*parts, packer.flush()]), 4)


def _chunked(scene: Scene) -> bytes:
    """Return the head of a tenant's request whose body comes in chunks."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\n"
        b"transfer-encoding: chunked\r\n\r\n" % scene.pool.keys["attacker"].encode()
    )


async def tiny_chunks(scene: Scene) -> Outcome:
    """Chunked bodies of one byte per chunk, as fast as they are taken."""
    head = _chunked(scene)
    return await _each(scene, 4, lambda: pour(scene, head, b"1\r\n \r\n" * 8000, scene.count(60 * MB)), False)


async def slow_chunks(scene: Scene) -> Outcome:
    """Many chunked bodies, each a byte now and then."""
    head = _chunked(scene)
    return await _each(scene, scene.count(200), lambda: pour(scene, head, b"1\r\n \r\n", ENDLESS, pause_s=DRIP_S), True)


async def refused_and_staying(scene: Scene) -> Outcome:
    """Many bodies that are refused in their middle, by clients who then neither leave nor stop."""
    body = (b"1;" + b"e" * 500 + b"\r\nx\r\n") * 100
    return await _each(scene, scene.count(50), lambda: _stay(scene, _chunked(scene) + body), True)


async def _stay(scene: Scene, data: bytes) -> Poured:
    """Send something, and send on whatever is answered: a server's last word is not yet the end of the connection."""
    reader, writer = await dial(scene)
    watch = Watch(reader)
    sent = 0
    try:
        async with asyncio.timeout_at(scene.deadline()):
            while not writer.transport.is_closing():
                writer.write(data)
                await writer.drain()
                sent += len(data)
                data = b"more"
                await asyncio.sleep(DRIP_S)
    except (TimeoutError, OSError):
        pass
    finally:
        ended = writer.transport.is_closing()
        watch.stop()
        abort(writer)
    return Poured(sent, f"{watch.head[9:12].decode(errors='replace')}, {'cut' if ended else 'held'}", ended)


async def resets(scene: Scene) -> Outcome:
    """Connections that are reset amid a request, one after the other."""
    host, port = scene.pool.address
    deadline = scene.deadline()
    loop = asyncio.get_running_loop()
    count = 0
    while loop.time() < deadline and count < scene.count(5000):
        with socket.socket() as one:
            one.bind((ATTACKER_HOST, 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            one.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(one, (host, port))
                    await loop.sock_sendall(one, _post(scene, b'{"model": "tiny", "prompt": "x"}')[: 40 + count % 200])
            except (OSError, TimeoutError):
                continue
            finally:
                count += 1
    return Outcome(f"{count} connections reset")


async def awaited_bodies(scene: Scene) -> Outcome:
    """Very many connections that ask for a body to be awaited, and send none."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 30000000\r\n\r\n"
    )
    return await _each(scene, scene.count(500), lambda: pour(scene, head, b"", 0), True)


PART = Part(
    "connections",
    "Unauthenticated bytes",
    (
        Attack("endless header", "Sends one header of 100 MB, then a byte every 5 ms.", endless_header),
        Attack("endless target", "Sends a request line of 100 MB.", endless_target, short=False),
        Attack("many headers", "Sends 200,000 headers in one request.", many_headers, short=False),
        Attack(
            "pipelined, read",
            "Sends 42 MB of `GET /live` on one connection and reads the answers.",
            lambda scene: pipelined(scene, True),
        ),
        Attack(
            "pipelined, unread",
            "Sends 42 MB of `GET /live` on one connection and reads no answer.",
            lambda scene: pipelined(scene, False),
            short=False,
        ),
        Attack(
            "unfinished bodies",
            "Sends 60 bodies of 30 MB without a key, each short of its last byte.",
            unfinished,
            short=False,
        ),
        Attack(
            "unfinished bodies of a tenant",
            "Sends 60 bodies of 30 MB with a key, each short of its last byte.",
            unfinished_with_a_key,
            short=False,
        ),
        Attack("half-closed", "Sends a POST, closes its own side and awaits the answer.", half_closed),
        Attack("empty gzip members", "Sends 400,000 empty gzip members, four times at once.", empty_members),
        Attack("gzip bomb", "Sends 1 MB that inflates to 1 GB, four times at once.", bomb, short=False),
        Attack(
            "tiny chunks", "Sends bodies in chunks of one byte, as fast as they are accepted.", tiny_chunks, short=False
        ),
        Attack("resets", "Resets 5,000 connections during their request.", resets, short=False),
        *(
            Attack(name, does, run, HASTY, short=False, seconds_min=HASTY_S)
            for name, does, run in (
                ("silent", "Opens 1,100 connections and sends nothing.", silent),
                ("slow headers", "Sends a byte of a header every 250 ms on 200 connections.", slow_headers),
                ("slow chunks", "Sends a chunk of one byte every 250 ms on 200 connections.", slow_chunks),
                (
                    "refused and staying",
                    "Sends 50 bodies that are refused for their chunks, keeps the connections open and continues.",
                    refused_and_staying,
                ),
                ("awaited bodies", "Opens 500 connections that declare a body and send none.", awaited_bodies),
            )
        ),
        Attack(
            "crowd",
            f"Opens 1,100 connections to a router that has {CROWDED_CONNECTIONS} in all.",
            silent,
            CROWDED,
            short=False,
        ),
    ),
)
