"""Reuse with what is learnt of how long blocks should stay, against LRU: on a trace, and on traces of other structure.

    python -m lab.benchmarks.retention TRACE            # Mooncake's format, 8 workers, five sizes of caches
    python -m lab.benchmarks.retention agents oneshot scans shift

Everything is virtual time and seeded: the same command prints the same figures. Some ten seconds for each row.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from poolgrid.router.policy_loading import make_policy
from poolgrid.tools.bench.trace import TRACE_BLOCK_TOKENS, TraceRow, read_trace
from poolgrid.tools.simulation.pool import Retention, RouterFleet, SimulatedPool
from poolgrid.tools.simulation.workload import Workload, build_workload
from poolgrid.workers.engines.simulated.core.engine import SimulatedLimits

BLOCK_SIZE = 64
WORKERS = 8
CACHE_TOKENS = (131_072, 262_144, 524_288, 1_048_576, 2_097_152)
HOUR_S = 3_600.0
LONGEST_PROMPT = 110_000


class _Rows:
    """Collects rows; a prompt is a path of ids and so many tokens, of which a last part that is no whole id is new."""

    def __init__(self) -> None:
        self.rows: list[TraceRow] = []
        self._ids = count()

    def new(self, blocks: int) -> list[int]:
        return [next(self._ids) for _ in range(blocks)]

    def add(self, at_s: float, path: list[int], tokens: int, osl: int) -> list[int]:
        """Add a prompt that begins with a path and return the path with all its whole ids."""
        whole = path + self.new(max(0, tokens // TRACE_BLOCK_TOKENS - len(path)))
        ids = whole + self.new(1) if tokens % TRACE_BLOCK_TOKENS else whole
        self.rows.append(TraceRow(1000.0 * at_s, tokens, osl, tuple(ids)))
        return whole

    def sorted(self) -> list[TraceRow]:
        return sorted(self.rows, key=lambda row: row.timestamp)


def agents(draw: random.Random) -> list[TraceRow]:
    """Six system prompts; loops of tool calls that come back within seconds, up to 110,000 tokens."""
    made = _Rows()
    systems = [made.new(draw.randint(6, 20)) for _ in range(6)]
    began_s = 0.0
    while began_s < HOUR_S:
        began_s += draw.expovariate(0.045)
        path = list(draw.choice(systems))
        tokens = len(path) * TRACE_BLOCK_TOKENS + draw.randint(200, 3_000)
        at_s = began_s
        for _ in range(min(120, 1 + int(draw.expovariate(1 / 18)))):
            osl = draw.randint(30, 400)
            path = made.add(at_s, path, tokens, osl)
            tokens += osl + int(draw.expovariate(1 / 900))
            if tokens > LONGEST_PROMPT:
                break
            at_s += 2 + osl * 0.02 + draw.expovariate(1 / 6 if draw.random() < 0.93 else 1 / 90)
    return made.sorted()


def oneshot(draw: random.Random) -> list[TraceRow]:
    """400 system prompts of unlike popularity, and users that ask once."""
    made = _Rows()
    systems = [made.new(draw.randint(2, 24)) for _ in range(400)]
    popularity = [1 / (rank + 1) ** 0.9 for rank in range(400)]
    at_s = 0.0
    while at_s < HOUR_S:
        at_s += draw.expovariate(4.0)
        path = draw.choices(systems, popularity)[0]
        tokens = min(60_000, len(path) * TRACE_BLOCK_TOKENS + int(draw.lognormvariate(6.8, 1.0)))
        made.add(at_s, path, tokens, draw.randint(20, 300))
    return made.sorted()


def scans(draw: random.Random) -> list[TraceRow]:
    """220 documents that are asked about at random, and every ten minutes a batch of prompts that never come again."""
    made = _Rows()
    documents = [made.new(draw.randint(8, 48)) for _ in range(220)]
    at_s = 0.0
    while at_s < HOUR_S:
        at_s += draw.expovariate(1.5)
        path = draw.choice(documents)
        made.add(at_s, path, len(path) * TRACE_BLOCK_TOKENS + draw.randint(50, 800), draw.randint(50, 300))
    for batch in range(6):
        for number in range(120):
            made.add(300.0 + 600.0 * batch + 0.8 * number, [], draw.randint(5_000, 30_000), draw.randint(10, 100))
    return made.sorted()


def shift(draw: random.Random) -> list[TraceRow]:
    """Conversations whose turns come after seconds, for half an hour, and after minutes from then on."""
    made = _Rows()
    began_s = 0.0
    while began_s < HOUR_S:
        began_s += draw.expovariate(0.5)
        path: list[int] = []
        tokens, at_s = draw.randint(1_000, 12_000), began_s
        for _ in range(1 + int(draw.expovariate(1 / 3))):
            osl = draw.randint(50, 400)
            path = made.add(at_s, path, tokens, osl)
            tokens += osl + draw.randint(50, 1_500)
            at_s += 5 + (draw.expovariate(1 / 15) if began_s < HOUR_S / 2 else 60 + draw.expovariate(1 / 200))
            if tokens > LONGEST_PROMPT:
                break
    return made.sorted()


MADE: dict[str, Callable[[random.Random], list[TraceRow]]] = {
    "agents": agents,
    "oneshot": oneshot,
    "scans": scans,
    "shift": shift,
}


def reused(workload: Workload, cache_tokens: int, retention: Retention) -> float:
    """Return the share of prompt tokens that is reused."""
    limits = SimulatedLimits(
        block_size=BLOCK_SIZE,
        total_kv_blocks=cache_tokens // BLOCK_SIZE,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=len(workload.requests) + 1,
    )
    pool = SimulatedPool(workload, make_policy("kv"), WORKERS, limits, routers=RouterFleet(retention=retention))
    result = pool.run()
    return result.cached_tokens / result.prompt_tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="+", help=f"{', '.join(MADE)}, or a file in Mooncake's format")
    parser.add_argument("--cache-tokens", type=int, nargs="+", default=list(CACHE_TOKENS), help="of each worker")
    given = parser.parse_args(arguments)
    print("trace         tokens of each cache      LRU  learned  ratio")
    for name in given.traces:
        rows = MADE[name](random.Random(name)) if name in MADE else read_trace(Path(name))
        workload = build_workload(rows, 1.0, BLOCK_SIZE)
        for cache_tokens in given.cache_tokens:
            lru = reused(workload, cache_tokens, "off")
            learned = reused(workload, cache_tokens, "learned")
            ratio = f"{learned / lru:6.3f}" if lru else "     -"
            print(f"{Path(name).stem[:12]:12} {cache_tokens:21,} {lru:8.2%} {learned:8.2%} {ratio}", flush=True)


if __name__ == "__main__":
    main()
