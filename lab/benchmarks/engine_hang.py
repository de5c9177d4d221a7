"""An engine's process stands still for a while under load: what its worker, its requests and their clients see.

    python -m lab.benchmarks.engine_hang [--stopped-s 20] [--streams 24] [--json OUT]

A router and three workers with TensorRT-LLM (the contract fake, whose calls go through a process as in 1.2). Streams
flow all the while, one after the other in each of so many clients, and every answer is compared with the right one.
Then the engine of one worker is stopped, as by a signal, and goes on later. ``/health`` of that worker is asked every
10 ms. Needs a machine with nothing else to do: on a busy one the times are those of its other work. Ends with status 1
when something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.table import Table

from poolgrid.wire.hashing import pack_tokens
from tests.e2e.expectation import PLAIN, expected_text
from tests.e2e.processes import Process, eventually, metric, worker_rows
from tests.fakes import FAKES_PATH

WORKERS = ("a", "b", "c")
STOPPED = "a"
TOKENS = 300
PROMPT_TOKENS = 96
ANSWER_LIMIT_MS = 50.0
"""How long ``/health`` may take, whatever the engine does."""
WARM_S = 3.0
ASK_EVERY_S = 0.01

COMMON = ("worker", "--engine", "trtllm", "--model-path", "tiny", "--kv-block-size", "16", "--max-batch-size", "64")


@dataclass
class HealthWatch:
    """Asks one worker for its health over one connection until it is told to stop."""

    url: str
    answers: list[tuple[float, float, int]] = field(default_factory=list)
    """When each was asked (monotonic seconds), how long it took in milliseconds, and its status."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health")
        self._thread.start()

    def stop(self) -> None:
        """Stop asking."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        while not self._over.wait(ASK_EVERY_S):
            asked_s = time.monotonic()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.answers.append((asked_s, 1e3 * (time.monotonic() - asked_s), answer.status))
        connection.close()


@dataclass
class Streams:
    """What clients saw."""

    right: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    longest_pause_ms: float = 0.0
    under_way: int = 0


async def client(http_client: httpx.AsyncClient, url: str, number: int, over: asyncio.Event, seen: Streams) -> None:
    """Ask for one answer after the other, each of a prompt of its own."""
    turn = 0
    while not over.is_set():
        prompt = [5 + (7 * number + 13 * turn + at) % 4000 for at in range(PROMPT_TOKENS)]
        turn += 1
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        text = ""
        last_s = time.monotonic()
        seen.under_way += 1
        try:
            async with http_client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        seen.longest_pause_ms = max(seen.longest_pause_ms, 1e3 * (now_s - last_s))
                        last_s = now_s
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            seen.failed.append(str(chunk["error"]))
                        else:
                            text += chunk["choices"][0]["text"]
        except httpx.HTTPError as error:
            seen.failed.append(repr(error))
        seen.under_way -= 1
        if text == expected_text(pack_tokens(prompt), TOKENS, vocabulary=PLAIN):
            seen.right += 1
        else:
            seen.wrong += 1


def states(url: str) -> dict[str, object]:
    """Return the state of each worker that the router knows."""
    return {name: row["state"] for name, row in worker_rows(url).items()}


def believed_and_held(router: Process, name: str, worker: Process) -> bool:
    """Tell whether the router's index of a worker is what the worker holds."""
    believed = httpx.get(f"{router.url}/v1/workers/{name}/blocks", timeout=60).text
    return bool(believed) and believed == httpx.get(f"{worker.url}/blocks", timeout=60).text


def percentile(sorted_ms: list[float], share: float) -> float:
    """Return the value below which so large a share lies."""
    return sorted_ms[min(len(sorted_ms) - 1, int(share * len(sorted_ms)))] if sorted_ms else 0.0


@dataclass
class Result:
    """What was measured; times in milliseconds."""

    stopped_s: float
    health: dict[str, dict[str, float]]
    left_after_s: float
    back_after_s: float
    moved: float
    streams_at_stop: int
    answers_right: int
    answers_wrong: int
    failures: list[str]
    longest_pause_ms: float
    index_equals_blocks: bool

    @property
    def holds(self) -> bool:
        """Whether all that is promised holds."""
        return (
            self.health["stopped"]["max_ms"] <= ANSWER_LIMIT_MS
            and not self.answers_wrong
            and not self.failures
            and self.index_equals_blocks
        )


def summary(answers: list[tuple[float, float, int]], from_s: float, to_s: float) -> dict[str, float]:
    """Return how long answers took that were asked for in a time."""
    took = sorted(ms for asked_s, ms, _ in answers if from_s <= asked_s < to_s)
    statuses = [status for asked_s, _, status in answers if from_s <= asked_s < to_s]
    return {
        "answers": len(took),
        "p50_ms": percentile(took, 0.5),
        "p99_ms": percentile(took, 0.99),
        "max_ms": took[-1] if took else 0.0,
        "over_limit": sum(ms > ANSWER_LIMIT_MS for ms in took),
        "unhealthy": sum(status == 503 for status in statuses),
    }


async def run(stopped_s: float, streams: int, directory: Path) -> Result:
    """Start the pool, stop one engine and let it go on, and measure."""
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(Process("router", "--port", "0")).wait_ready()
        workers: dict[str, Process] = {}
        for name in WORKERS:
            behaviour = {"vocabulary_size": 4096, "speedup": 1.0, "stop_file": str(directory / name)}
            os.environ["TRTLLM_FAKE"] = json.dumps(behaviour)
            ingest = ("--consolidator", router.word("ingest"), "--worker-id", name)
            workers[name] = stack.enter_context(Process(*COMMON, *ingest))
        for worker in workers.values():
            worker.wait_ready()
        eventually("all are there", lambda: states(router.url) == dict.fromkeys(WORKERS, "ready"))
        seen, over = Streams(), asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=stopped_s + 120, limits=limits) as http_client:
            clients = [
                asyncio.create_task(client(http_client, router.url, number, over, seen)) for number in range(streams)
            ]
            watch = HealthWatch(workers[STOPPED].url)
            try:
                await asyncio.sleep(WARM_S)
                moved_before = metric(router.url, "poolgrid_router_migrations_total")
                at_stop = seen.under_way
                stop_s = time.monotonic()
                (directory / STOPPED).touch()
                await until(lambda: states(router.url).get(STOPPED) != "ready", 60)
                left_s = time.monotonic()
                await asyncio.sleep(max(0.0, stop_s + stopped_s - time.monotonic()))
                (directory / STOPPED).unlink()
                wake_s = time.monotonic()
                await until(lambda: states(router.url).get(STOPPED) == "ready", 120)
                back_s = time.monotonic()
                await asyncio.sleep(WARM_S)
            finally:
                over.set()
                await asyncio.wait(clients)
                watch.stop()
        equal = True
        for name, worker in workers.items():
            try:
                eventually(f"the index of {name} is its blocks", partial(believed_and_held, router, name, worker), 30)
            except AssertionError:
                equal = False
        return Result(
            stopped_s,
            {
                "before": summary(watch.answers, 0.0, stop_s),
                "stopped": summary(watch.answers, stop_s, wake_s),
                "after": summary(watch.answers, wake_s, float("inf")),
            },
            left_s - stop_s,
            back_s - wake_s,
            metric(router.url, "poolgrid_router_migrations_total") - moved_before,
            at_stop,
            seen.right,
            seen.wrong,
            seen.failed,
            seen.longest_pause_ms,
            equal,
        )


async def until(holds: Callable[[], bool], timeout_s: float) -> None:
    """Wait beside this loop until something holds; raises ``AssertionError`` when it does not in time."""
    await asyncio.to_thread(eventually, "the worker left, or came back", holds, timeout_s)


def show(result: Result) -> None:
    """Print the tables."""
    console = Console(highlight=False)
    table = Table(
        title=f"/health of a worker whose engine stands still for {result.stopped_s:.0f} s", title_justify="left"
    )
    table.add_column("while the engine")
    for column in ("answers", "p50 ms", "p99 ms", "max ms", f"over {ANSWER_LIMIT_MS:.0f} ms", "503"):
        table.add_column(column, justify="right")
    words = {"before": "works", "stopped": "stands still", "after": "works again"}
    for part, row in result.health.items():
        table.add_row(
            words[part],
            f"{row['answers']:.0f}",
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.2f}",
            f"{row['max_ms']:.2f}",
            f"{row['over_limit']:.0f}",
            f"{row['unhealthy']:.0f}",
        )
    console.print(table)
    health = (
        f"the worker left the pool after {result.left_after_s:.2f} s, and was back {result.back_after_s:.2f} s after",
        "its engine went on",
    )
    lines = (
        " ".join(health),
        f"requests that moved: {result.moved:.0f}, of {result.streams_at_stop} streams on three workers",
        f"answers: {result.answers_right} right, {result.answers_wrong} wrong, {len(result.failures)} failed",
        f"longest pause in a stream: {result.longest_pause_ms:.0f} ms",
        f"the index equals the blocks of all workers: {'yes' if result.index_equals_blocks else 'NO'}",
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    for failure in result.failures[:5]:
        console.print(failure)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stopped-s", type=float, default=20.0, help="how long the engine stands still")
    parser.add_argument("--streams", type=int, default=24, help="answers that flow at a time")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(run(options.stopped_s, options.streams, Path(directory)))
    show(result)
    if options.json is not None:
        figures = {**vars(result), "holds": result.holds}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if not result.holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
