"""Bystanders: clients of another tenant and address whose every answer is known in advance, in a process of their own.

    python -m lab.attacks.bystanders SPEC.json

Rules
    1. The simulated engine's text is a function of the prompt, so each answer is right or wrong (`tests.e2e`).
    2. Time is cut into windows. ``open`` on standard input begins one; ``close`` sends nothing further once
       ``requests_min`` are sent, waits for what is under way, and prints the window as one line of JSON. Nothing runs
       between two windows.
    3. Whatever is not a whole, right answer is an error, a 429 too: nobody but the attacker may notice the attack.
    4. Half of the short requests come on a connection of their own, so that accepting is tested as well.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.plugins.bench.client import Client, HttpTarget, RequestFailed
from poolgrid.plugins.bench.prompt import PlannedRequest, PromptMaker
from poolgrid.plugins.bench.runner import RequestShape
from poolgrid.plugins.bench.statistics import Distribution
from poolgrid.server.process.clock import SystemClock
from tests.e2e.expectation import expected_text

ROOT = Path(__file__).resolve().parents[2]
SAMPLES_MAX = 5
BLOCK_TOKENS = 32
TOKENS = PromptMaker(16, 255)
"""Token ids that every byte-level vocabulary has, the special ones left out."""


class BystanderSpec(msgspec.Struct, kw_only=True):
    """Who asks what."""

    url: str
    api_key: str
    model: str
    seed: int = 0
    shorts: int = 2
    """Clients that send one short request after another."""
    short_isl: int = 64
    short_osl: int = 4
    pause_s: float
    """Between two requests of one client: the bystanders are not the load."""
    streams: int = 1
    """Clients that hold one long stream after another."""
    stream_isl: int = 200
    stream_osl: int = 120
    timeout_s: float = 75.0
    """Longer than any pause that the pool has to survive."""
    requests_min: int = 0
    """Of a window."""

    @property
    def connections(self) -> int:
        """Return how many connections are kept."""
        return 2 * self.shorts + self.streams


class Window(msgspec.Struct):
    """What became of the requests of one stretch of time."""

    requests: int = 0
    shorts: int = 0
    errors: int = 0
    wrong: int = 0
    samples: list[str] = []
    """The first errors, in words."""
    short_p50_ms: float = 0.0
    short_p99_ms: float = 0.0
    short_max_ms: float = 0.0


class _Clients:
    """The bystanders themselves, in their own process."""

    def __init__(self, spec: BystanderSpec) -> None:
        self._spec = spec
        self._target = HttpTarget(spec.url)
        self._shape = RequestShape(spec.model)
        self._clock = SystemClock()
        self._number = spec.seed << 20
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._window = Window()
        self._short_ms = Distribution()
        self._kept = [self._client() for _ in range(spec.shorts + spec.streams)]

    def _client(self) -> Client:
        spec = self._spec
        return Client(self._target, self._clock, api_key=spec.api_key, request_timeout_s=spec.timeout_s)

    def open(self) -> None:
        """Begin a window."""
        spec = self._spec
        self._window, self._short_ms, self._stop = Window(), Distribution(), asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._ask(client, number >= spec.shorts)) for number, client in enumerate(self._kept)
        ]

    async def close(self) -> Window:
        """End the window and return it."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        window = self._window
        window.short_p50_ms = self._short_ms.percentile(50) or 0.0
        window.short_p99_ms = self._short_ms.percentile(99) or 0.0
        window.short_max_ms = max(0.0, self._short_ms.largest)
        return window

    async def _ask(self, kept: Client, is_stream: bool) -> None:
        turn = 0
        while not self._stop.is_set() or self._window.requests < self._spec.requests_min:
            turn += 1
            fresh = None if is_stream or turn % 2 else self._client()
            try:
                await self._one(fresh or kept, is_stream)
            finally:
                if fresh is not None:
                    fresh.close()
            try:
                async with asyncio.timeout(self._spec.pause_s):
                    await self._stop.wait()
            except TimeoutError:
                pass

    async def _one(self, client: Client, is_stream: bool) -> None:
        spec, window = self._spec, self._window
        isl, osl = (spec.stream_isl, spec.stream_osl) if is_stream else (spec.short_isl, spec.short_osl)
        self._number += 1
        blocks = tuple(self._number * 16 + at for at in range(-(-isl // BLOCK_TOKENS)))
        request = PlannedRequest(self._number, None, blocks, BLOCK_TOKENS, isl, osl)
        body = self._shape.body(request, TOKENS)
        began_ms = self._clock.monotonic_ms()
        window.requests += 1
        try:
            exchange = await client.post(self._shape.path, body)
        except RequestFailed as error:
            window.errors += 1
            if len(window.samples) < SAMPLES_MAX:
                window.samples.append(str(error)[:300])
            return
        if not is_stream:
            window.shorts += 1
            self._short_ms.add(exchange.finished_ms - began_ms)
        wanted = expected_text(pack_tokens(TOKENS.token_ids(request)), osl)
        if exchange.text != wanted:
            window.wrong += 1
            if len(window.samples) < SAMPLES_MAX:
                window.samples.append(f"wrong text: {exchange.text[:80]!r}, not {wanted[:80]!r}")


class Bystanders:
    """The process of the bystanders, as the harness sees it."""

    def __init__(self, spec: BystanderSpec, directory: Path) -> None:
        self.spec = spec
        self._path = directory / "bystanders.json"
        self._process: Process | None = None

    async def start(self) -> None:
        """Start it."""
        self._path.write_bytes(msgspec.json.encode(self.spec))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lab.attacks.bystanders", str(self._path)),
            stdin=PIPE,
            stdout=PIPE,
            cwd=ROOT,
            start_new_session=True,  # they do not give way with the attacker, see `AttackerThread`
        )

    async def _say(self, word: str) -> bytes:
        process = self._process
        assert process is not None, "the bystanders are started"
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{word}\n".encode())
        async with asyncio.timeout(2 * self.spec.timeout_s):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"telling the bystanders to {word}: their process ended")
        return line

    async def open(self) -> None:
        """Begin a window."""
        await self._say("open")

    async def close(self) -> Window:
        """End a window: send nothing further, wait for what is under way."""
        return msgspec.json.decode(await self._say("close"), type=Window)

    async def window(self, seconds: float) -> Window:
        """Return a window of this length."""
        await self.open()
        await asyncio.sleep(seconds)
        return await self.close()

    async def stop(self) -> None:
        """End the process."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        await process.wait()


async def _serve(spec: BystanderSpec) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    clients = _Clients(spec)
    while line := await reader.readline():
        answer: Any = {}
        if line.strip() == b"open":
            clients.open()
        else:
            answer = await clients.close()
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


def main() -> None:
    """Run them until standard input ends."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=BystanderSpec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(spec))


if __name__ == "__main__":
    main()
