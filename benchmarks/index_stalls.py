"""The longest call of the prefix index when a worker is lost, and when its budget is reached.

python -m benchmarks.index_stalls [--blocks 1000000 8000000]
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from router.core.prefix_index import BYTES_PER_BLOCK, PrefixIndex
from wire.identifiers import WorkerId, WorkerKey

WORKERS = 64
BLOCKS_PER_STORE = 32
STORES_PER_PATH = 8
CALLS_AT_BUDGET = 20_000


def stores(source: random.Random) -> Iterator[tuple[WorkerKey, int | None, list[int]]]:
    """Yield what is stored: paths of 256 blocks, 32 at a time, each on one worker."""
    keys = [WorkerKey(WorkerId(f"w{number}")) for number in range(WORKERS)]
    while True:
        worker = source.choice(keys)
        parent: int | None = None
        for _ in range(STORES_PER_PATH):
            blocks = [source.getrandbits(64) for _ in range(BLOCKS_PER_STORE)]
            yield worker, parent, blocks
            parent = blocks[-1]


def longest_ms(index: PrefixIndex, calls: list[tuple[WorkerKey, int | None, list[int]]]) -> tuple[float, float]:
    """Return the longest and the median time of a store."""
    times = []
    for call in calls:
        started = time.perf_counter()
        index.store(*call)
        times.append(time.perf_counter() - started)
    times.sort()
    return times[-1] * 1000, times[len(times) // 2] * 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 8_000_000], help="blocks in the index")
    table = Table(title="one store of 32 blocks, ms")
    for heading in ("blocks", "median", "longest, no trouble", "longest, worker lost", "longest, at the budget"):
        table.add_column(heading, justify="right")
    for blocks in parser.parse_args().blocks:
        source = stores(random.Random(1))
        index = PrefixIndex((blocks + 40_000) * BYTES_PER_BLOCK)
        for _ in range(blocks // BLOCKS_PER_STORE):
            index.store(*next(source))
        gc.collect()
        gc.freeze()  # collections of the whole heap are the caller's business
        quiet = longest_ms(index, [next(source) for _ in range(600)])
        index.drop(WorkerKey(WorkerId("w0")))
        lost = longest_ms(index, [next(source) for _ in range(blocks // 4096 + 100)])
        index.sweep()
        at_budget = longest_ms(index, [next(source) for _ in range(CALLS_AT_BUDGET)])
        assert index.counters.evicted_blocks > 0, "the budget was not reached"
        table.add_row(f"{blocks:,}", f"{quiet[1]:.3f}", f"{quiet[0]:.2f}", f"{lost[0]:.2f}", f"{at_budget[0]:.2f}")
        gc.unfreeze()
    Console().print(table)


if __name__ == "__main__":
    main()
