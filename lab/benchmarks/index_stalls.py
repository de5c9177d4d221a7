"""The longest calls of the prefix index in every part of its life, in CPU time.

    python -m lab.benchmarks.index_stalls [--blocks 1000000 8000000] [--json OUT]

An index loses a worker whose blocks were all out of reach, is filled to its budget, held there while as many blocks
come as go, loses a worker while blocks lie on three tiers, forgets blocks as its workers evict them, and is freed.
Every call is timed by the CPU time of the thread, so that other load on the machine does not count; what Python's
collector takes in a call is taken off and shown by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from poolgrid.kernel.index.prefix_index import BYTES_PER_BLOCK, PrefixIndex
from poolgrid.kernel.wire.identifiers import Tier, WorkerId, WorkerKey
from poolgrid.server.process.garbage import settle

WORKERS = 64
BLOCKS_PER_STORE = 32
STORES_PER_PATH = 8
FREED_PER_CALL = 4096
CONTINUATIONS = 30_000

Store = tuple[WorkerKey, int | None, list[int]]


class Calls:
    """Times of calls, by part of the index's life."""

    def __init__(self) -> None:
        self.times_ms: dict[str, list[float]] = {}
        self._collecting_ns = 0
        self._collected_ns = 0
        self._longest_collection_ns = 0
        gc.callbacks.append(self._note_collection)

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        now_ns = time.thread_time_ns()
        if phase == "start":
            self._collecting_ns = now_ns
        else:
            self._collected_ns += now_ns - self._collecting_ns
            self._longest_collection_ns = max(self._longest_collection_ns, now_ns - self._collecting_ns)

    def time(self, part: str, call: Callable[[], object]) -> None:
        """Make a call and note how long it took, without the collector."""
        collected_ns = self._collected_ns
        started_ns = time.thread_time_ns()
        call()
        took_ns = time.thread_time_ns() - started_ns - (self._collected_ns - collected_ns)
        self.times_ms.setdefault(part, []).append(took_ns / 1e6)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return calls, median, quantiles and the longest of each part, and the longest collection."""
        gc.callbacks.remove(self._note_collection)
        figures: dict[str, dict[str, float]] = {}
        for part, times in self.times_ms.items():
            times.sort()
            figures[part] = {
                "calls": len(times),
                "median_ms": times[len(times) // 2],
                "p99_9_ms": times[int(0.999 * len(times))],
                "p99_99_ms": times[int(0.9999 * len(times))],
                "longest_ms": times[-1],
            }
        figures["the collector, for comparison"] = {"longest_ms": self._longest_collection_ns / 1e6}
        return figures


def stores(source: random.Random) -> Iterator[Store]:
    """Yield what is stored: paths of 256 blocks, 32 at a time, each on one worker."""
    keys = [WorkerKey(WorkerId(f"w{number}")) for number in range(WORKERS)]
    while True:
        worker = source.choice(keys)
        parent: int | None = None
        for _ in range(STORES_PER_PATH):
            blocks = [source.getrandbits(64) for _ in range(BLOCKS_PER_STORE)]
            yield worker, parent, blocks
            parent = blocks[-1]


def life(blocks: int) -> dict[str, dict[str, float]]:
    """Drive an index through its life; return the figures of each part."""
    source = stores(random.Random(1))
    index = PrefixIndex(blocks * BYTES_PER_BLOCK)
    settle()
    calls = Calls()
    recent: deque[Store] = deque(maxlen=blocks // BLOCKS_PER_STORE // 2)

    def store(part: str) -> None:
        each = next(source)
        recent.append(each)
        calls.time(part, lambda: index.store(*each))

    randomness = random.Random(2)
    orphaned = WorkerKey(WorkerId("w1"))
    for _ in range(blocks // BLOCKS_PER_STORE // 2):
        unknown = [randomness.getrandbits(64) for _ in range(BLOCKS_PER_STORE + 1)]
        calls.time("out of reach", lambda h=unknown: index.store(orphaned, h[0], h[1:]))  # type: ignore[misc]
    index.drop(orphaned)
    while index.sweeps:
        store("worker lost, all out of reach")
    for _ in range(blocks // BLOCKS_PER_STORE):
        store("filling it")
    for _ in range(blocks // BLOCKS_PER_STORE):
        store("at the budget")
    assert index.counters.evicted_blocks >= blocks // 2, "the budget was not reached"

    paths = [each[2] for each in recent]
    for number in range(0, len(paths), 8):
        path = paths[number]
        calls.time("find", lambda path=path: index.find(path))  # type: ignore[misc]
    for number, (worker, parent, hashes) in enumerate(recent):
        if number % 4 == 0:
            tier = Tier.HOST if number % 8 else Tier.DISK
            calls.time("to a lower tier", lambda w=worker, p=parent, h=hashes, t=tier: index.store(w, p, h, t))  # type: ignore[misc]
            calls.time("to a lower tier", lambda w=worker, h=hashes: index.remove(w, h))  # type: ignore[misc]

    index.drop(WorkerKey(WorkerId("w0")))
    while index.sweeps:
        store("worker lost")

    for worker, _, hashes in list(recent)[::3]:
        calls.time("removing", lambda w=worker, h=hashes[::-1]: index.remove(w, h))  # type: ignore[misc]
    # What a call does because of its event: one worker's block goes that many runs of others continue.
    prompt = [randomness.getrandbits(64) for _ in range(BLOCKS_PER_STORE)]
    keys = [WorkerKey(WorkerId(f"w{number}")) for number in range(WORKERS)]
    for key in keys:
        index.store(key, None, prompt)
    for number in range(CONTINUATIONS):
        index.store(keys[number % (WORKERS - 1) + 1], prompt[-1], [randomness.getrandbits(64) for _ in range(8)])
    calls.time(f"removing what {CONTINUATIONS:,} runs continue", lambda: index.remove(keys[0], prompt[-1:]))
    more = True

    def discard() -> None:
        nonlocal more
        more = old.discard(FREED_PER_CALL)

    old = index.empty()
    index.exchange(old)
    while more:
        calls.time("freeing it", discard)
    return calls.figures()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 8_000_000], help="blocks in the index")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for blocks in options.blocks:
        figures[str(blocks)] = life(blocks)
        gc.unfreeze()
        table = Table(
            "", title=f"{blocks:,} blocks, CPU ms of one call (stores and removes of {BLOCKS_PER_STORE} blocks)"
        )
        for heading in ("calls", "median", "p99.9", "p99.99", "longest"):
            table.add_column(heading, justify="right")
        for part, figure in figures[str(blocks)].items():
            table.add_row(
                part,
                f"{figure['calls']:,}" if "calls" in figure else "",
                *(f"{figure[each]:.3f}" if each in figure else "" for each in ("median_ms", "p99_9_ms", "p99_99_ms")),
                f"{figure['longest_ms']:.2f}",
            )
        Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
