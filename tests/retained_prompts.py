"""The same piece of a trace on a pool that tells its engines how long blocks should stay, and on one that does not.

    python -m tests.retained_prompts          about five minutes; it needs little CPU and much time

Two dozen prompts come in turn, and between them prompts that never come again: LRU has nearly always just lost what
comes next. (Where room is nearly enough nothing is said: docs/decisions/0016 says why.) Both pools are `poolgrid up`
with two simulated workers that have little room. Every text is checked. The exit status is 0 when the pool that learns
reused more, and said of a decision how long its blocks should stay.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import count
from pathlib import Path

import httpx
import msgspec

from poolgrid.tools.bench.command import measure_one
from poolgrid.tools.bench.settings import BenchSettings
from poolgrid.tools.bench.statistics import Report
from poolgrid.tools.bench.trace import TRACE_BLOCK_TOKENS, TraceRow
from tests.e2e.disturbed_load import assert_unharmed
from tests.e2e.expectation import Verifier
from tests.e2e.processes import metric, running_pool

PROMPTS = 24
PROMPT_BLOCKS = 4
EVERY_MS = 300.0
LASTING_MS = 130_000.0
"""Nothing is said in the first 40 s, as rates would mean nothing; some 20 s later it is known to pay."""

WORKER_BLOCKS = 1296
"""Of 32 tokens: room for twenty prompts on each of two workers, and 48 come until one comes again."""


def piece(prompts: int = PROMPTS, lasting_ms: float = LASTING_MS) -> list[TraceRow]:
    """Return the requests of both runs."""
    ids = count()
    returning = [tuple(next(ids) for _ in range(PROMPT_BLOCKS)) for _ in range(prompts)]
    rows = []
    for number in range(int(lasting_ms / EVERY_MS)):
        once = tuple(next(ids) for _ in range(PROMPT_BLOCKS))
        path = once if number % 2 else returning[number // 2 % prompts]
        # What is behind the last whole block of the trace is new each time.
        tokens = PROMPT_BLOCKS * TRACE_BLOCK_TOKENS + 8
        rows.append(TraceRow(number * EVERY_MS, tokens, 8, (*path, next(ids))))
    return rows


def played(trace: Path, retention: str) -> Report:
    """Play the piece to a pool of its own and return what came of it."""
    options = ("--retention", retention, "--blocks-per-worker", str(WORKER_BLOCKS))
    with running_pool(*options, workers=2) as up:
        settings = BenchSettings(url=up.url, trace=trace)
        verify = Verifier()
        report = measure_one(settings, verify=verify)
        assert_unharmed(report)
        assert verify.checked == report.requests
        gained = metric(up.url, "poolgrid_router_retention_gained_tokens_total")
        lost = metric(up.url, "poolgrid_router_retention_lost_tokens_total")
        newest = httpx.get(f"{up.url}/v1/decisions?limit=1").json()["data"][0]["request_id"]
        (attempt,) = httpx.get(f"{up.url}/v1/decisions/{newest}").json()["attempts"]
        assert ("retention" in attempt) is (retention == "learned"), attempt
        sys.stdout.write(
            f"{retention:>8}: {report.cached_tokens:,} of {report.prompt_tokens:,} prompt tokens reused; "
            f"gained {gained:,.0f}, lost {lost:,.0f}; {verify.checked} texts as they must be\n"
        )
        sys.stdout.flush()
    return report


def main() -> int:
    """Play it to both and compare."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "piece.jsonl"
        trace.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in piece()))
        off, learned = (played(trace, retention) for retention in ("off", "learned"))
    if learned.cached_tokens <= off.cached_tokens:
        sys.stderr.write("what was learned brought nothing\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
