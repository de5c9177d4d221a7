"""A closed-loop HTTP load generator that costs little enough to saturate one core of a router from another core.

    python -m lab.benchmarks.http_load SPEC.json

``SPEC.json`` names the endpoint, the bodies and the processes to watch (``LoadSpec``); one JSON object with what was
measured is printed. Raw sockets under uvloop and httptools: about 30 µs a short request.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop


class LoadSpec(msgspec.Struct, kw_only=True):
    """What to send, and for how long."""

    port: int
    path: str
    words: list[str]
    """Words that are one token each, a space before them."""
    model: str = "bench"
    chat: bool = False
    stream: bool = False
    concurrency: int = 16
    isl: int = 64
    osl: int = 1
    turns: int = 1
    """Above 1, each connection holds conversations of this many turns; the first prompt has ``isl`` words."""
    turn_words: int = 200
    """Words of each further user message."""
    warmup_s: float = 1.0
    duration_s: float = 4.0
    seed: int = 0
    pids: dict[str, int] = {}
    pause_s: float = 0.0
    """Between the answer of a short request and the next one of its client."""
    long_pause_s: float = 0.0
    """The same for the client of long prompts."""
    long_isl: int = 0
    """Above 0, one more connection sends prompts of this many words all the time; it is reported apart."""


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, load: Load, number: int, long: bool) -> None:
        self._load = load
        self._long = long
        self._random = random.Random(f"{load.spec.seed}/{number}/{long}")
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._history: list[dict[str, str]] = []
        self._words = ""
        self._turn = 0
        self._started = self._first = 0.0
        self._events = 0
        self._body: list[bytes] = []
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are transports in all but the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.ended:
            self._load.failures.append(f"connection lost: {exc}")

    def data_received(self, data: bytes) -> None:
        # Of a stream the first body bytes count; the status line alone is no token.
        if not self._first and (not self._load.spec.stream or b"data:" in data):
            self._first = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self._load.spec.stream:
            self._events += (self._tail[-1:] + body).count(b"\n\n")
            self._tail = body
        if self._load.spec.turns > 1 or not self._load.spec.stream:
            self._body.append(body)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        status = self._parser.get_status_code()
        body = b"".join(self._body)
        if status != 200:
            self._load.failures.append(f"{status}: {body[:300]!r}")
        self._load.completed(self._long, self._turn, now - self._started, self._first - self._started, self._events)
        self._parser = httptools.HttpResponseParser(self)
        if not self._load.ended:
            if self._load.spec.turns > 1:
                self._take_answer(body)
            # Not in this callback: the old parser is still on the stack.
            pause_s = self._load.spec.long_pause_s if self._long else self._load.spec.pause_s
            asyncio.get_running_loop().call_later(pause_s, self._send)

    def _send(self) -> None:
        assert self._transport is not None
        if self._load.ended:
            return
        body = self._next_body()
        head = (
            f"POST {self._load.spec.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._events, self._first, self._body, self._tail = 0, 0.0, [], b""
        self._started = time.perf_counter()
        self._transport.write(head.encode() + body)

    def _long_text(self) -> str:
        """Return a long prompt like no other without stalling the others: the same words, begun elsewhere."""
        if not self._words:
            self._words = self._text(self._load.spec.long_isl)
        at = self._words.index(" ", self._random.randrange(len(self._words) // 2))
        return self._words[at:] + self._words[:at]

    def _text(self, words: int) -> str:
        return " " + " ".join(self._random.choices(self._load.spec.words, k=words))

    def _next_body(self) -> bytes:
        spec = self._load.spec
        body: dict[str, Any] = {"model": spec.model, "max_tokens": spec.osl, "ignore_eos": True, "temperature": 0.0}
        if spec.stream:
            body["stream"] = True
        if spec.turns > 1:
            if self._turn >= spec.turns:
                self._history, self._turn = [], 0
            words = spec.isl if self._turn == 0 else spec.turn_words
            self._history.append({"role": "user", "content": self._text(words)})
            self._turn += 1
            body["messages"] = self._history
        else:
            text = self._long_text() if self._long else self._text(spec.isl)
            if spec.chat:
                body["messages"] = [{"role": "user", "content": text}]
            else:
                body["prompt"] = text
        return msgspec.json.encode(body)

    def _take_answer(self, body: bytes) -> None:
        if self._load.spec.stream:
            parts = []
            for event in body.split(b"\n\n"):
                if event.startswith(b"data: {"):
                    choices = msgspec.json.decode(event[6:]).get("choices") or [{}]
                    parts.append((choices[0].get("delta") or {}).get("content") or "")
            text = "".join(parts)
        else:
            text = msgspec.json.decode(body)["choices"][0]["message"]["content"]
        self._history.append({"role": "assistant", "content": text})


class Load:
    """One run."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.ended = False
        self.failures: list[str] = []
        self._recording = False
        self._latency: list[float] = []
        self._ttft: list[float] = []
        self._long_latency: list[float] = []
        self._later_turns = 0
        self._events = 0

    def completed(self, long: bool, turn: int, latency_s: float, ttft_s: float, events: int) -> None:
        """Count one answer."""
        if not self._recording:
            return
        if long:
            self._long_latency.append(latency_s)
            return
        self._latency.append(latency_s)
        self._ttft.append(ttft_s)
        self._events += events
        self._later_turns += turn > 1

    async def run(self) -> dict[str, Any]:
        """Send for the whole time and return what was measured in the window after the warm-up."""
        spec = self.spec
        loop = asyncio.get_running_loop()
        transports = []
        for number in range(spec.concurrency + (spec.long_isl > 0)):
            connection = partial(_Connection, self, number, number == spec.concurrency)
            transport, _ = await loop.create_connection(connection, "127.0.0.1", spec.port)
            transports.append(transport)
        await asyncio.sleep(spec.warmup_s)
        before = {name: cpu_s(pid) for name, pid in spec.pids.items()}
        own_before, started = _own_cpu_s(), time.perf_counter()
        self._recording = True
        await asyncio.sleep(spec.duration_s)
        self._recording = False
        window_s = time.perf_counter() - started
        used = {name: cpu_s(pid) - before[name] for name, pid in spec.pids.items()}
        own = _own_cpu_s() - own_before
        self.ended = True
        for transport in transports:
            transport.abort()
        count = len(self._latency)
        return {
            "requests": count,
            "requests_per_s": count / window_s,
            "tokens": count * spec.osl,
            "events": self._events,
            "later_turns": self._later_turns,
            "latency_ms": quantiles(self._latency),
            "ttft_ms": quantiles(self._ttft),
            "long_requests": len(self._long_latency),
            "long_latency_ms": quantiles(self._long_latency),
            "failures": len(self.failures),
            "failure": self.failures[0] if self.failures else "",
            "window_s": window_s,
            "load_cpu_s": own,
            "cpu_s": used,
            "rss_mb": {name: rss_mb(pid) for name, pid in spec.pids.items()},
        }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the mean in milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "p50": ordered[round(0.5 * last)] * 1e3,
        "p99": ordered[round(0.99 * last)] * 1e3,
        "mean": sum(ordered) / len(ordered) * 1e3,
    }


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found.extend(family(int(child)))
    except OSError:
        pass  # it ended meanwhile
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process family, from the scheduler's nanosecond counts of each thread."""
    total = 0
    for member in family(pid):
        try:
            for task in os.listdir(f"/proc/{member}/task"):
                total += int(Path(f"/proc/{member}/task/{task}/schedstat").read_text().split()[0])
        except OSError:
            pass  # it ended meanwhile
    return total / 1e9


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process family in MB."""
    pages = 0
    for member in family(pid):
        try:
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except OSError:
            pass  # it ended meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the load of a specification and print what was measured."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LoadSpec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(Load(spec).run())))


if __name__ == "__main__":
    main()
