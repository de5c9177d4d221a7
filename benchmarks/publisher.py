"""What publishing costs an engine step: KV cache events read, translated and encoded while the engine works.

    python -m benchmarks.publisher [--events-per-second 10000] [--step-ms 20] [--steps 55] [--passes 40] [--json OUT]

A thread stands for the engine: each step is a fixed time of waiting (the GPU works, the interpreter is free) and then
the engine's own Python, timed from the beginning of one step to that of the next. Three kinds of passes take turns:

* ``off``: the engine keeps its events to itself (``event_buffer_max_size`` 0, no statistics);
* ``queued``: it puts each event into the queue for readers, as the contract fake does, and nobody reads;
* ``published``: our feed reads them all, and what it hands over is encoded for the consolidator.

``published`` against ``queued`` is what poolgrid adds; ``queued`` against ``off`` is the price of the queue itself
(which wakes the reader's loop). Passes are short and in turns, so that what else the machine does falls on all
alike; a ratio is the median over the turns, given with its standard error. The reader shares the interpreter with the
engine's thread, which is worse than TensorRT-LLM itself, whose engine runs in processes of its own. On the other hand
TensorRT-LLM parses each item's JSON when it is read, which is not done here.

An event is a stored block of 32 tokens, or the removal of one (half each), as they come from a full cache. The CPU time
of the reader's thread per event does not depend on how the threads meet, only on how fast the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
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
WARM_UP_STEPS = 5


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

    def __init__(
        self, queues: Queues, work: list[list[dict[str, Any]]], step_s: float, speaks: bool, done: Any
    ) -> None:
        super().__init__(daemon=True)
        self._speaks = speaks
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
            if self._speaks:
                for event in events:
                    self._queues.events.put_nowait(event)
                self._queues.events.notify()
                self._queues.statistics.put(iteration(at))
            self.durations_s.append(time.perf_counter() - started)
        self._done()


KINDS = ("off", "queued", "published")


async def measure(work: list[list[dict[str, Any]]], step_s: float, kind: str) -> tuple[float, float, int]:
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

    engine = Engine(queues, work, step_s, kind != "off", lambda: loop.call_soon_threadsafe(done.set))
    began = time.thread_time()
    reading: asyncio.Task[None] | None = None
    if kind == "published":
        feed = TrtllmFeed(queues, 1, BLOCK_SIZE, SystemClock(), TrtllmMetrics(CollectorRegistry()))
        reading = loop.create_task(feed.run(on_cache, lambda rank, load: None))
    engine.start()
    await done.wait()
    if reading is not None:
        while queues.events._items:  # noqa: ASYNC110 - the feed must not notice that it is watched
            await asyncio.sleep(0.01)
        reading.cancel()
    return statistics.fmean(engine.durations_s[WARM_UP_STEPS:]), time.thread_time() - began, published


def ratio(of: list[tuple[float, float, int]], to: list[tuple[float, float, int]]) -> tuple[float, float]:
    """Return the median of what the turns' steps add, and its standard error (0 where one turn cannot tell)."""
    added = [one[0] / other[0] - 1 for one, other in zip(of, to, strict=True)]
    # 1.2533 is the factor of a median of normal values.
    error = 1.2533 * statistics.stdev(added) / len(added) ** 0.5 if len(added) > 1 else 0.0
    return statistics.median(added), error


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events-per-second", type=int, default=10_000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--passes", type=int, default=40, help="of each kind, in turns")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    per_step = max(1, round(arguments.events_per_second * arguments.step_ms / 1e3))
    work = Workload(arguments.steps, per_step).steps
    events = sum(map(len, work))
    # The collector must not walk over a workload that lies there ready-made.
    gc.collect()
    gc.freeze()
    results: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}
    for turn in range(arguments.passes):
        # Each turn begins with another kind.
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
            results[kind].append(asyncio.run(measure(work, arguments.step_ms / 1e3, kind)))
    cpu_us = statistics.median(cpu for _, cpu, _ in results["published"]) / events * 1e6
    found: dict[str, Any] = {
        "events_per_second": arguments.events_per_second,
        "events_per_step": per_step,
        "step_ms": {kind: statistics.median(step for step, _, _ in results[kind]) * 1e3 for kind in KINDS},
        "cpu_us_per_event": cpu_us,
        "cpu_share": cpu_us * arguments.events_per_second / 1e6,
        "published_bytes_per_event": results["published"][0][2] / events,
    }
    table = Table(title=f"an engine step with {arguments.events_per_second:,} KV cache events per second")
    for column in ("", "step (ms)", "added to off", "added to queued"):
        table.add_column(column, justify="right")
    for at, kind in enumerate(KINDS):
        cells = [kind, f"{found['step_ms'][kind]:.3f}"]
        for base in KINDS[: min(at, 2)]:
            overhead, error = ratio(results[kind], results[base])
            found[f"{kind}_against_{base}"] = {"overhead": overhead, "standard_error": error}
            cells.append(f"{overhead:+.2%} ± {error:.2%}")
        table.add_row(*cells)
    Console().print(table, f"reader: {cpu_us:.2f} µs of CPU per event, {found['cpu_share']:.1%} of one CPU")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
