"""What publishing costs an engine step: KV cache events read, translated and encoded while the engine works.

    python -m benchmarks.publisher [--events-per-second 10000] [--step-ms 20] [--steps 500] [--passes 10] [--json OUT]

The contract fake's queues are filled by a thread that stands for the engine: each step is a fixed time of waiting (the
GPU works, the interpreter is free) and what the engine does in Python (it takes its events from a list and puts them
in the queue), timed from the beginning of one step to that of the next. Passes with and without a reader alternate;
the ratio of the medians of their mean steps is the overhead. The reader shares the interpreter with the engine's
thread, which is worse than TensorRT-LLM itself, whose engine runs in processes of its own.

An event is a stored block of 32 tokens, or the removal of one (half each), as they come from a full cache. CPU time of
the reader's process per event is given too: it does not depend on how quiet the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from runtime.clock import SystemClock
from tests.fakes.tensorrt_llm.executor.result import IterationResult
from tests.fakes.tensorrt_llm.llmapi.utils import AsyncQueue
from wire import codec
from wire.events import AnyEvent, EventBatch
from workers.engines.trtllm_feed import TrtllmFeed
from workers.trtllm.metrics import TrtllmMetrics

BLOCK_SIZE = 32
WINDOW = 131_072
BLOCKS_PER_CHAIN = 8
CACHED_BLOCKS = 20_000
WARM_UP_STEPS = 20


class Workload:
    """Events as TensorRT-LLM gives them, made before anything is timed."""

    def __init__(self, steps: int, events_per_step: int) -> None:
        self._randomness = random.Random(7)
        self._next_id = 0
        self._resident: list[int] = []
        self._chain: list[int] = []
        created = {"type": "created", "num_blocks_per_cache_level": [CACHED_BLOCKS, 0]}
        self.steps = [[self._event(created)]]
        self.steps += [[self._next() for _ in range(events_per_step)] for _ in range(steps)]

    def _event(self, data: dict[str, Any]) -> dict[str, Any]:
        self._next_id += 1
        return {"event_id": self._next_id - 1, "data": data, "window_size": WINDOW}

    def _next(self) -> dict[str, Any]:
        if len(self._resident) >= 2 * BLOCKS_PER_CHAIN and self._next_id % 2:
            return self._event({"type": "removed", "block_hashes": [self._resident.pop(0)]})
        if len(self._chain) == BLOCKS_PER_CHAIN:
            self._chain = []
        name = self._randomness.getrandbits(64)
        tokens = [
            {"type": "unique_token", "token_id": self._randomness.randrange(128_000), "token_extra_id": 0}
            for _ in range(BLOCK_SIZE)
        ]
        block = {"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0, "priority": 35}
        parent = self._chain[-1] if self._chain else None
        self._chain.append(name)
        self._resident.append(name)
        return self._event({"type": "stored", "parent_hash": parent, "blocks": [block]})


def iteration(at: int) -> dict[str, Any]:
    """Return the statistics of one iteration."""
    return {
        "iter": at,
        "iterLatencyMS": 20.0,
        "numActiveRequests": 64,
        "numQueuedRequests": 3,
        "kvCacheStats": {"maxNumBlocks": CACHED_BLOCKS, "usedNumBlocks": 9000, "cacheHitRate": 0.4},
        "inflightBatchingStats": {"numScheduledRequests": 64, "numPausedRequests": 0, "numCtxTokens": 512},
    }


class Queues:
    """The reading side of ``LLM``, over the fake's own queues and readers."""

    def __init__(self) -> None:
        self.events = AsyncQueue()
        self.statistics = AsyncQueue()
        self.events.bind()
        self.statistics.bind()
        self._event_reader = IterationResult(self.events)
        self._statistics_reader = IterationResult(self.statistics)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        self._event_reader.set_timeout(timeout)
        return self._event_reader

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        self._statistics_reader.set_timeout(timeout)
        return self._statistics_reader


class Engine(threading.Thread):
    """Steps that wait and then tell what happened; timed from step to step."""

    def __init__(self, queues: Queues, work: list[list[dict[str, Any]]], step_s: float, done: Any) -> None:
        super().__init__(daemon=True)
        self._queues = queues
        self._work = work
        self._step_s = step_s
        self._done = done
        self.durations_s: list[float] = []

    def run(self) -> None:
        waiting = threading.Event()
        for at, events in enumerate(self._work):
            started = time.perf_counter()
            waiting.wait(self._step_s)
            for event in events:
                self._queues.events.put(event)
            self._queues.statistics.put(iteration(at))
            self.durations_s.append(time.perf_counter() - started)
        self._done()


async def measure(work: list[list[dict[str, Any]]], step_s: float, publishing: bool) -> tuple[float, float, int]:
    """Run one pass; return the mean step and the CPU time of this thread in seconds, and the bytes published."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    queues = Queues()
    published = 0
    seq = 0

    def on_cache(rank: int, events: list[Any]) -> None:
        nonlocal published, seq
        told: list[AnyEvent] = events
        published += len(codec.event_batch.encode(EventBatch("w", rank, 1, seq, 0, told)))
        seq += 1

    engine = Engine(queues, work, step_s, lambda: loop.call_soon_threadsafe(done.set))
    began = time.thread_time()
    reading: asyncio.Task[None] | None = None
    if publishing:
        feed = TrtllmFeed(queues, 1, BLOCK_SIZE, SystemClock(), TrtllmMetrics(CollectorRegistry()))
        reading = loop.create_task(feed.run(on_cache, lambda rank, load: None))
    engine.start()
    await done.wait()
    if reading is not None:
        while queues.events._items:  # noqa: ASYNC110 - the feed must not notice that it is watched
            await asyncio.sleep(0.01)
        reading.cancel()
    return statistics.fmean(engine.durations_s[WARM_UP_STEPS:]), time.thread_time() - began, published


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events-per-second", type=int, default=10_000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--passes", type=int, default=10, help="of each kind, alternating")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    per_step = max(1, round(arguments.events_per_second * arguments.step_ms / 1e3))
    work = Workload(arguments.steps, per_step).steps
    events = sum(map(len, work))
    results: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    for at in range(2 * arguments.passes):
        # The order of each pair alternates too, so that a drift of the machine favours neither.
        publishing = (at % 2 == 0) == (at // 2 % 2 == 0)
        results[publishing].append(asyncio.run(measure(work, arguments.step_ms / 1e3, publishing)))
    off, on = (statistics.median(step for step, _, _ in results[kind]) * 1e3 for kind in (False, True))
    ratios = [
        with_reader[0] / without[0] - 1 for with_reader, without in zip(results[True], results[False], strict=True)
    ]
    cpu_us = statistics.median(cpu for _, cpu, _ in results[True]) / events * 1e6
    found = {
        "events_per_second": arguments.events_per_second,
        "events_per_step": per_step,
        "step_ms_off": off,
        "step_ms_on": on,
        "overhead": on / off - 1,
        "overhead_of_pairs": sorted(ratios),
        "cpu_us_per_event": cpu_us,
        "cpu_share": cpu_us * arguments.events_per_second / 1e6,
        "published_bytes_per_event": results[True][0][2] / events,
    }
    table = Table(title="publishing and the engine step")
    for column in ("events/s", "step off (ms)", "step on (ms)", "overhead", "CPU per event (µs)", "of one CPU"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{arguments.events_per_second:,}",
        f"{off:.3f}",
        f"{on:.3f}",
        f"{found['overhead']:+.2%}",
        f"{cpu_us:.2f}",
        f"{found['cpu_share']:.1%}",
    )
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
