"""One client on a worker's request plane, with nothing between: what a request takes there before a router adds to it.

    python -m lab.benchmarks.worker_load SPEC.json

``SPEC.json`` names the worker's endpoint and the requests (``WorkerLoadSpec``); one JSON object with the times to the
first token is printed. Prompts are made of random tokens. The client sends and receives as a router does
(``poolgrid.server.transport.dealer``), and has a request under way at a time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from lab.benchmarks.http_load import quantiles
from poolgrid.kernel.requests.legs import TOKENS_TOGETHER
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Generate, Ping, Pong, Routing, Sampling, TokenBatch
from poolgrid.server.transport.dealer import StreamDealer

VOCABULARY = 32_000

CONNECT_TIMEOUT_S = 30.0
"""A worker answers its first ping within milliseconds; a benchmark that waits longer has gone wrong."""


class WorkerLoadSpec(msgspec.Struct, kw_only=True):
    """What to send, and for how long."""

    endpoint: str
    isl: int
    osl: int
    stream: bool = False
    warmup_s: float = 0.5
    duration_s: float = 2.0
    seed: int = 0


class WorkerLoad:
    """One run."""

    def __init__(self, spec: WorkerLoadSpec) -> None:
        """Connect, on the running loop."""
        self._spec = spec
        self._random = random.Random(spec.seed)
        self._sent = 0
        self._started_s = 0.0
        self._ttft_s: list[float] = []
        self._recording = self._ended = False
        self._first = True
        self._answers = asyncio.Event()
        self.failure = ""
        url = urlsplit(spec.endpoint)
        assert url.hostname is not None
        assert url.port is not None
        self._dealer = StreamDealer(url.hostname, url.port, self)

    def on_connected(self) -> None:
        """Make oneself known: a worker answers nobody who never pinged."""
        self._dealer.send(codec.to_worker.encode(Ping(1)))

    def on_disconnected(self) -> None:
        """Hear that the worker went away."""
        self.failure = "the connection broke"

    def on_refused(self, why: str) -> None:
        """Hear that it is no worker."""
        self.failure = why

    def on_frame(self, frame: bytes) -> None:
        """Take tokens: the first of a request is what is waited for, and its last lets the next one go."""
        now_s = time.perf_counter()
        message = codec.from_worker.decode(frame)
        if type(message) is Pong:
            self._answers.set()
        elif type(message) is TokenBatch:
            for delta in message.deltas:
                if self._first:
                    self._first = False
                    if self._recording:
                        self._ttft_s.append(now_s - self._started_s)
                if delta.error is not None:
                    self.failure = delta.error
                elif delta.finish_reason is not None:
                    # Behind the frame: the next request is no part of taking this one.
                    asyncio.get_running_loop().call_soon(self._send)

    async def run(self) -> dict[str, Any]:
        """Send for the whole time, and return what was measured behind the warm-up."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self._answers.wait()
        self._send()
        await asyncio.sleep(self._spec.warmup_s)
        self._recording = True
        await asyncio.sleep(self._spec.duration_s)
        self._recording, self._ended = False, True
        self._dealer.close()
        return {"requests": len(self._ttft_s), "ttft_ms": quantiles(self._ttft_s), "failure": self.failure}

    def _send(self) -> None:
        if self._ended:
            return
        spec = self._spec
        self._sent += 1
        token_ids = pack_tokens(self._random.choices(range(VOCABULARY), k=spec.isl))
        routing = Routing(tokens_together=1 if spec.stream else TOKENS_TOGETHER)
        sampling = Sampling(max_tokens=spec.osl, ignore_eos=True, temperature=0.0)
        request = Generate(f"straight-{self._sent}", token_ids, sampling, routing=routing)
        self._first = True
        self._started_s = time.perf_counter()
        self._dealer.send(codec.to_worker.encode(request))
        self._dealer.flush()


async def measure(spec: WorkerLoadSpec) -> dict[str, Any]:
    """Return what one client measures."""
    return await WorkerLoad(spec).run()


def main() -> None:
    """Run the load of a specification and print what was measured."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerLoadSpec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(spec))))


if __name__ == "__main__":
    main()
