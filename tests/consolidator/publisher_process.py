"""A KV block manager in a process of its own: it publishes about a worker in vLLM's format, and does as it is told.

``python -m tests.consolidator.publisher_process ENDPOINT REPLAY_ENDPOINT`` reads one JSON object a line
(``{"store": [token, ...], "tier": "HOST"}``, ``{"remove": blocks, "tier": "HOST"}``, ``{"clear": true}``) and answers
each with what it holds then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq.asyncio

from poolgrid.kernel.wire.identifiers import Tier
from tests.consolidator.pub_engine import Cache, PubEngine

ROOT = Path(__file__).parents[2]


class Publisher:
    """Such a process, seen from a test."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", replay: str = "tcp://127.0.0.1:*") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.consolidator.publisher_process", endpoint, replay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        self.endpoint, self.replay_endpoint = self._answer()
        self.lines: set[str] = set()
        """What it holds, as ``/v1/workers/{id}/blocks`` writes it."""

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the publisher ended"
        return json.loads(line)

    def tell(self, **command: object) -> None:
        """Have it do something, and wait until it has published."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self.lines = set(self._answer())

    def store(self, tokens: list[int], tier: Tier = Tier.HOST) -> None:
        self.tell(store=tokens, tier=tier.name)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill -9."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def lines(cache: Cache) -> list[str]:
    return sorted(f"{block:016x} {tier.name.lower()}" for tier, held in cache.held().items() for block in held)


def answer(value: list[str]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(endpoint: str, replay: str) -> None:
    context = zmq.asyncio.Context()
    # Engine hashes and frames of two lives differ, as those of two processes do.
    engine, cache = PubEngine(context, endpoint, replay=replay), Cache("vllm", salt=os.getpid())
    replays = asyncio.create_task(engine.answer_replays("vllm"))
    answer([engine.endpoint, engine.replay_endpoint])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        tier = Tier[command.get("tier", "HOST")]
        if "store" in command:
            event = cache.store(command["store"], tier)
        elif "remove" in command:
            event = cache.remove(command["remove"], tier)
        else:
            event = cache.clear()
        await engine.publish([event])
        answer(lines(cache))
    replays.cancel()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal's group: the test ends us
    asyncio.run(main(*sys.argv[1:]))
