"""Plays sessions against one router or server and writes down every request: ``python -m lab.comparison.load SPEC``.

A process of its own, so that its CPU is not the comparison's. ``SPEC`` is the JSON of a ``LoadSpec``; the records go to
the file that it names. Times are wall-clock time, as a client has them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import uvloop

from lab.comparison.traffic import CANNED, HALVES, Session
from poolgrid.plugins.bench.client import BenchExchange
from poolgrid.server.http.http_client import HttpClient, HttpTarget, RequestFailed
from poolgrid.server.process.clock import SystemClock

ANSWER_TIMEOUT_S = 120.0
"""Several times the slowest answer of a healthy fleet; then the request counts as failed."""

RETRIES = 2
"""How often a request is sent again that was refused for now (429), after the pause that the answer asks for: so do the
clients of OpenAI and Anthropic by themselves."""


class LoadSpec(msgspec.Struct):
    """What to send where."""

    url: str
    model: str
    sessions: list[Session]
    seconds: float
    """No turn begins later."""
    drain_s: float
    """How long answers are waited for after that; what is not there then counts as unfinished."""
    records: str
    session_header: str = ""
    """Names the session in each request; empty = none does."""
    sends: str = CANNED


class Record(msgspec.Struct):
    """What became of one request. Times are in ms. A failed request has only ``e2e_ms``: when it failed."""

    session: int
    turn: int
    at_s: float
    asked_tokens: int
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    tpot_ms: float = 0.0
    gaps_ms: list[tuple[float, int]] = []
    """Between chunks: how long, how often."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    fault: str = "unfinished"


class Player:
    """Sends all sessions to one place."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._clock = SystemClock()
        self._client = HttpClient(HttpTarget(spec.url), self._clock, ["Content-Type: application/json"])
        self.records: list[Record] = []

    async def play(self) -> None:
        """Play every session; return when all are over, or their time is."""
        spec = self._spec
        began_ms = self._clock.monotonic_ms()
        tasks = [asyncio.create_task(self._play(at, session, began_ms)) for at, session in enumerate(spec.sessions)]
        done, unfinished = await asyncio.wait(tasks, timeout=spec.seconds + spec.drain_s)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        self._client.close()
        for task in done:
            task.result()

    async def _play(self, number: int, session: Session, began_ms: float) -> None:
        messages = [{"role": "system", "content": session.system}]
        header = self._spec.session_header
        headers = [f"{header}: s{number}"] if header else []
        for at, turn in enumerate(session.turns):
            pause_s = turn.think_s if at else session.at_s
            if (self._clock.monotonic_ms() - began_ms) / 1000 + pause_s >= self._spec.seconds:
                return
            await asyncio.sleep(pause_s)
            at_s = (self._clock.monotonic_ms() - began_ms) / 1000
            messages.append({"role": "user", "content": turn.user})
            record = Record(number, at, round(at_s, 3), turn.answer_tokens)
            self.records.append(record)
            text = await self._ask(messages, record, headers)
            half = len(text) // 2 if self._spec.sends == HALVES else 0
            answer = turn.answer if self._spec.sends == CANNED else text[half:]
            messages.append({"role": "assistant", "content": answer})

    async def _ask(self, messages: list[dict[str, str]], record: Record, headers: list[str]) -> str:
        """Return the answer; empty if there is none."""
        body = {
            "model": self._spec.model,
            "messages": messages,
            "max_tokens": record.asked_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_ms = self._clock.monotonic_ms()
        attempt = 0
        while True:
            exchange = BenchExchange()
            try:
                await self._client.send(
                    "POST", "/v1/chat/completions", msgspec.json.encode(body), exchange, headers, ANSWER_TIMEOUT_S
                )
            except RequestFailed as error:
                if exchange.status != 429 or attempt == RETRIES:
                    record.fault = str(error)[:300]
                    record.e2e_ms = self._clock.monotonic_ms() - began_ms
                    return ""
                attempt += 1
                await asyncio.sleep(float(exchange.retry_after or 1))
            else:
                break
        usage, first_ms = exchange.usage, exchange.first_ms
        if usage is None or first_ms is None:
            record.fault = "the answer has no usage" if usage is None else "the answer has no text"
            return exchange.text
        record.ttft_ms = first_ms - began_ms
        record.e2e_ms = exchange.finished_ms - began_ms
        record.tpot_ms = (exchange.last_ms - first_ms) / max(1, usage.completion_tokens - 1)
        record.gaps_ms = [(round(gap_ms, 2), count) for gap_ms, count in exchange.gaps_ms]
        record.prompt_tokens = usage.prompt_tokens
        record.answer_tokens = usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
        record.worker = exchange.worker or ""
        wrong = usage.completion_tokens != record.asked_tokens
        record.fault = f"{usage.completion_tokens} tokens came" if wrong else ""
        return exchange.text


def main() -> None:
    """Play the sessions of a specification, and write its records."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LoadSpec)
    player = Player(spec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(player.play())
    Path(spec.records).write_bytes(msgspec.json.encode(player.records))


if __name__ == "__main__":
    main()
