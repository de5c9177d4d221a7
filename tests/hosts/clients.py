"""Clients whose every answer is compared, token by token, with what the engine must say.

Each has one streaming request open at a time, on a connection of its own, so that it is known what a global router
had said when its connection ended. The rules of what it does then are in ``verdict.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Sequence

import httpx

from poolgrid.kernel.wire.hashing import pack_tokens
from tests.e2e.expectation import expected_text
from tests.hosts.verdict import Asked, Outcome

CONNECT_S = 2.0
"""Without a connection by then a load balancer takes another one."""

SILENCE_S = 90.0
"""No answer has so long a pause: a host is cut off for 20 s, and TCP tries again within as long."""

SHARED_PREFIXES = 12
"""Prompts begin with one of these, so that there is something to reuse."""

PREFIX_TOKENS = 192
OWN_TOKENS = (20, 600)
"""Beside the prefix: some prompts go to one pool and some to the other."""

OUTPUT_TOKENS = (60, 240)
TOKEN_IDS = (3, 250)


PROBE_S = 1.0
"""How often, and for how long at most, it is asked whether a global router is ready."""

KEEP_ALIVE_S = 5
"""Silence after which TCP asks whether the other side still knows of the connection."""


class _Refused(Exception):
    """No connection, or it ended before a byte of the answer."""


class Clients:
    """All clients; they ask while ``may_ask`` is set."""

    def __init__(self, fronts: Sequence[tuple[str, int]], count: int, seed: int) -> None:
        self._fronts = list(fronts)
        self._count = count
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(SHARED_PREFIXES)]
        self._next = 0
        self._ready = set(self._fronts)
        self._ready_s: dict[str, float] = {}
        """When each global router was last found to be ready."""
        self._found = asyncio.Condition()
        self._all_answered = asyncio.Event()
        self.may_ask = asyncio.Event()
        self._open = 0
        self.asked: list[Asked] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randint(*TOKEN_IDS) for _ in range(count)]

    async def run(self) -> None:
        """Ask for ever."""
        async with asyncio.TaskGroup() as group:
            for front in self._fronts:
                group.create_task(self._probe(front))
            for _ in range(self._count):
                group.create_task(self._client())

    async def _probe(self, front: tuple[str, int]) -> None:
        """Ask one global router for ever whether it is ready."""
        host, port = front
        async with httpx.AsyncClient(timeout=PROBE_S) as client:
            while True:
                asked_s = time.monotonic()
                try:
                    answer = await client.get(f"http://{host}:{port}/ready", headers={"connection": "close"})
                    is_ready = answer.status_code == 200
                except httpx.TransportError:
                    is_ready = False
                if is_ready:
                    self._ready.add(front)
                    self._ready_s[host] = asked_s
                else:
                    self._ready.discard(front)
                async with self._found:
                    self._found.notify_all()
                await asyncio.sleep(PROBE_S)

    async def until_all_answered(self) -> None:
        """Wait until no request is open; only while nobody may ask."""
        await self._all_answered.wait()

    async def until_ready(self, host: str, after_s: float) -> float:
        """Wait until a global router is found to be ready after a moment; return when that was."""
        async with self._found:
            await self._found.wait_for(lambda: self._ready_s.get(host, 0.0) >= after_s)
        return self._ready_s[host]

    async def _client(self) -> None:
        while True:
            await self.may_ask.wait()
            prompt = self._random.choice(self._prefixes) + self._tokens(self._random.randint(*OWN_TOKENS))
            self._open += 1
            self._all_answered.clear()
            try:
                self.asked.append(await self._ask(prompt, self._random.randint(*OUTPUT_TOKENS)))
            finally:
                self._open -= 1
                if not self._open:
                    self._all_answered.set()

    async def _ask(self, prompt: list[int], osl: int) -> Asked:
        """Ask one global router after the other until one takes it; return what became of it."""
        first = self._next = (self._next + 1) % len(self._fronts)
        begun_s, refusals = time.monotonic(), []
        in_turn = self._fronts[first:] + self._fronts[:first]
        # Those that are not ready come last.
        for retries, (host, port) in enumerate(sorted(in_turn, key=lambda front: front not in self._ready)):
            sent_s = time.monotonic()
            try:
                outcome, said = await self._exchange(host, port, prompt, osl)
            except _Refused as error:
                refusals.append(f"{host}: {error}")
                continue
            return Asked(host, sent_s, time.monotonic(), outcome, said, retries)
        return Asked("", begun_s, time.monotonic(), Outcome.REFUSED, "; ".join(refusals))

    async def _exchange(self, host: str, port: int, prompt: list[int], osl: int) -> tuple[Outcome, str]:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise _Refused(repr(error)) from None
        try:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE_S)
            body = json.dumps(
                {"model": "tiny", "prompt": prompt, "max_tokens": osl, "ignore_eos": True, "stream": True}
            ).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            return await self._read(reader, prompt, osl)
        except TimeoutError:
            return Outcome.HUNG, f"nothing for {SILENCE_S:.0f} s"
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, prompt: list[int], osl: int) -> tuple[Outcome, str]:
        try:
            async with asyncio.timeout(SILENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                return Outcome.BROKEN, "amid the head"
            raise _Refused("it was closed") from None
        except ConnectionError as error:
            raise _Refused(repr(error)) from None
        status = head.split(b" ", 2)[1]
        if status != b"200":
            return Outcome.ERROR, f"status {status.decode()}: {(await reader.read(500)).decode(errors='replace')}"
        said: list[str] = []
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    line = await reader.readline()
            except ConnectionError as error:
                return Outcome.BROKEN, f"after {len(said)} events: {error!r}"
            if not line:
                return Outcome.BROKEN, f"after {len(said)} events"
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return Outcome.ERROR, f"after {len(said)} events: {event['error']}"
                said += [choice["text"] for choice in event["choices"]]
        text = "".join(said)
        if text == expected_text(pack_tokens(prompt), osl):
            return Outcome.RIGHT, ""
        return Outcome.WRONG, f"{len(text)} characters for a prompt of {len(prompt)} tokens"
