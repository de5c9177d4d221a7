"""Many concurrent streams whose clients leave at random, for a time or a number of requests: leaks of any resource.

    python -m lab.benchmarks.soak [--streams 1000] [--seconds 600] [--http-workers 2] [--json OUT]
    python -m lab.benchmarks.soak --prefill-workers 2 --decode-workers 2 --seconds 120
    python -m lab.benchmarks.soak --requests 1000000 --streams 100 --speedup 50 --osl-max 16

A whole pool is started (consolidator, router, simulated workers), loaded by clients that finish, leave, stall, reset,
send nonsense or sit idle, and looked at all the while: memory, descriptors, sockets, threads, tasks, requests and
blocks of each process. Afterwards everything has to be as it was before. The exit status says whether it was: 0 it
held, 1 it did not, 2 it could not be run. See docs/measuring.md#bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lab.benchmarks.growth import Slope, slope
from lab.benchmarks.services import Patience, PoolFailed, Reading
from lab.benchmarks.soak_clients import Clients, Tally
from lab.benchmarks.soak_pool import PoolShape, SoakPool
from lab.benchmarks.soak_requests import Plan

WARMUP_SHARE = 0.25
"""Of the run; by then caches and journals have reached their bounds, and growth counts from there."""

JUDGED_SECONDS_MIN = 120.0
"""Memory is not judged over less: an allocator's steps are larger than what a leak adds in that time."""

JUDGED_REQUESTS_MIN = 500_000
"""Memory for each request is not judged over fewer: the history of prompts, 64 MiB, takes about 200,000 to fill."""

SETTLE_SECONDS = 60.0
"""How long the pool may take to become quiet after the last client has gone."""

RAMP_SHARE = 0.05
RAMP_SECONDS = 5.0
"""Of a run that ends with a number of requests."""

OPEN_SHARE_MIN = 0.6
"""Of the wanted streams, this many must be open on average, or it was another test."""

LOAD_SECONDS_MIN = 60.0
"""Shorter runs may have fewer streams open: their answers are short, and clients are connecting much of the time."""


@dataclass(slots=True)
class Sample:
    """Everything at a moment."""

    at_s: float
    open_streams: int
    readings: dict[str, Reading]
    requests: int = 0
    """Sent so far."""


@dataclass(slots=True)
class Run:
    """What a soak has seen."""

    streams: int
    seconds: float
    baseline: dict[str, Reading] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    after: dict[str, Reading] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    settled_s: float | None = None
    last_left: list[str] = field(default_factory=list)
    """What was not as before at the last look but one."""
    holdings: dict[str, Any] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)


def memory_slopes(samples: Sequence[Sample], warmup_s: float) -> dict[str, Slope | None]:
    """Return how fast the memory of each service grows after the warm-up, in MB per minute."""
    late = [sample for sample in samples if sample.at_s >= warmup_s]
    names = late[0].readings if late else {}
    return {name: slope([(sample.at_s / 60, sample.readings[name].rss_mb) for sample in late]) for name in names}


def growth_faults(
    slopes: Mapping[str, Slope | None], processes: Mapping[str, int], window_s: float, limit_mb_per_min: float
) -> list[str]:
    """Return in words whose memory surely grows faster than the limit; nothing when the window is too short to say.

    The limit is for one process; a service of several may grow by as many times.
    """
    if window_s < JUDGED_SECONDS_MIN:
        return []
    return [
        f"{name}: memory grows by {found.value:.2f} MB/min ({found.low:.2f} to {found.high:.2f}), allowed are "
        f"{limit_mb_per_min * processes[name]:g}"
        for name, found in slopes.items()
        if found is not None and found.low > limit_mb_per_min * processes[name]
    ]


def request_slopes(samples: Sequence[Sample]) -> dict[str, Slope | None]:
    """Return how fast the memory of each service grows over the second half of the requests, in bytes for each."""
    late = [sample for sample in samples if 2 * sample.requests >= samples[-1].requests]
    names = late[0].readings if late else {}
    return {name: slope([(sample.requests, sample.readings[name].rss_mb * 1e6) for sample in late]) for name in names}


def request_growth_faults(
    slopes: Mapping[str, Slope | None], requests: int, limit_bytes: float, judged_min: int = JUDGED_REQUESTS_MIN
) -> list[str]:
    """Return in words whose memory surely grows by more for each request; nothing of too few requests to say."""
    if requests < judged_min:
        return []
    return [
        f"{name}: memory grows by {found.value:.0f} bytes a request ({found.low:.0f} to {found.high:.0f}), allowed are "
        f"{limit_bytes:g}"
        for name, found in slopes.items()
        if found is not None and found.low > limit_bytes
    ]


def load_faults(tally: Tally, samples: Sequence[Sample], streams: int, seconds: float) -> list[str]:
    """Return in words what was wrong with the answers, or with the load itself."""
    found = []
    if tally.fault_count:
        found.append(f"clients: {tally.fault_count} wrong answers, the first: {'; '.join(tally.faults[:3])}")
    steady = [sample.open_streams for sample in samples[len(samples) // 5 :]]
    mean = sum(steady) / len(steady) if steady else 0.0
    if seconds >= LOAD_SECONDS_MIN and mean < OPEN_SHARE_MIN * streams:
        found.append(f"clients: {mean:.0f} streams were open on average, {streams} were wanted")
    return found


async def soak(options: argparse.Namespace, directory: Path, progress: Progress) -> tuple[Run, Tally]:
    """Run it; raises ``PoolFailed`` when a process does not start or dies."""
    shape = PoolShape(
        options.workers, options.prefill_workers, options.decode_workers, options.http_workers, options.speedup
    )
    run = Run(options.streams, options.seconds)
    pool = SoakPool(shape, directory)
    try:
        bar = progress.add_task("starting the pool", total=options.seconds)
        await pool.start()
        await pool.warm()
        run.baseline = await run.patience.asked(pool.baseline)
        address = urlsplit(pool.url)
        assert address.hostname is not None
        assert address.port is not None
        plans = [Plan(options.seed, number, pool.model, options.osl_max) for number in range(options.streams)]
        clients = Clients(address.hostname, address.port, plans, max(1, options.streams // 20))
        clients.start(RAMP_SHARE * options.seconds if options.requests is None else RAMP_SECONDS)
        await _sample(run, pool, clients, options, progress, bar)
        progress.update(bar, description="waiting for quiet")
        await clients.stop()
        await _settle(run, pool)
        run.holdings = await run.patience.asked(pool.holdings)
        run.faults += await run.patience.asked(pool.faults)
    finally:
        run.faults += await pool.stop()
    return run, clients.tally


async def _sample(
    run: Run, pool: SoakPool, clients: Clients, options: argparse.Namespace, progress: Progress, bar: TaskID
) -> None:
    tally = clients.tally
    started = time.monotonic()
    wanted: float = options.seconds if options.requests is None else options.requests
    progress.update(bar, total=wanted)
    while True:
        now_s, sent = time.monotonic() - started, tally.requests.total()
        done = now_s if options.requests is None else sent
        progress.update(
            bar,
            completed=min(done, wanted),
            description=f"{tally.open} streams, {sent} requests, {tally.fault_count} faults",
        )
        if done >= wanted:
            break
        clients.check()
        run.samples.append(Sample(now_s, tally.open, await run.patience.asked(pool.readings), sent))
        left_s = options.sample_s if options.requests is not None else options.seconds - (time.monotonic() - started)
        await asyncio.sleep(max(0.0, min(options.sample_s, left_s)))
    run.seconds = time.monotonic() - started


async def _settle(run: Run, pool: SoakPool) -> None:
    started = time.monotonic()
    while True:
        left = await run.patience.asked(lambda: pool.leftovers(run.baseline))
        run.after = await run.patience.asked(pool.readings)
        took_s = time.monotonic() - started
        if not left:
            run.settled_s = took_s
            return
        run.last_left = left
        if took_s > SETTLE_SECONDS:
            run.faults += left
            return
        await asyncio.sleep(0.25)


def report(run: Run, tally: Tally, slopes: Mapping[str, Slope | None], options: argparse.Namespace) -> dict[str, Any]:
    """Return everything as JSON takes it."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {
        "held": not run.faults,
        "faults": run.faults,
        "settings": settings,
        "requests": dict(tally.requests),
        "statuses": {str(status): count for status, count in tally.statuses.items()},
        "left": dict(tally.left),
        "refused": tally.refused,
        "stale": tally.stale,
        "answer_bytes": tally.answer_bytes,
        "pool": run.holdings,
        "settled_s": run.settled_s,
        "last_left": run.last_left,
        "late_answers": run.patience.late,
        "memory_mb_per_min": {name: asdict(found) if found else None for name, found in slopes.items()},
        "memory_bytes_per_request": {
            name: asdict(found) if found else None for name, found in request_slopes(run.samples).items()
        },
        "baseline": {name: asdict(reading) for name, reading in run.baseline.items()},
        "after": {name: asdict(reading) for name, reading in run.after.items()},
        "samples": [asdict(sample) for sample in run.samples],
    }


def show(run: Run, tally: Tally, slopes: Mapping[str, Slope | None], warmup_s: float, console: Console) -> None:
    """Print what came of it."""
    table = Table(
        *("process", "RSS before", "after warm-up", "at the end", "most", "MB/min (95 %)", "bytes/request (2nd half)"),
        *("tasks", "descriptors"),
    )
    by_request = request_slopes(run.samples)
    late = [sample for sample in run.samples if sample.at_s >= warmup_s] or run.samples
    for name, before in run.baseline.items():
        series = [sample.readings[name] for sample in run.samples]
        found, after, grown = slopes.get(name), run.after.get(name), by_request.get(name)
        if not series or after is None:
            continue
        table.add_row(
            name,
            f"{before.rss_mb:.0f} MB",
            f"{late[0].readings[name].rss_mb:.0f} MB",
            f"{series[-1].rss_mb:.0f} MB",
            f"{max(reading.rss_mb for reading in series):.0f} MB",
            f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})" if found else "too short to say",
            f"{grown.value:+.0f} ({grown.low:+.0f} to {grown.high:+.0f})" if grown else "too short to say",
            f"{before.tasks:.0f}, {max(reading.tasks for reading in series):.0f}, {after.tasks:.0f}",
            f"{before.descriptors}, {max(reading.descriptors for reading in series)}, {after.descriptors}",
        )
    console.print(table)
    console.print("tasks and descriptors: before the load, most, when it was quiet again")
    left = ", ".join(f"{count} {how}" for how, count in sorted(tally.left.items()))
    statuses = ", ".join(f"{count} × {status}" for status, count in sorted(tally.statuses.items()))
    opens = [sample.open_streams for sample in run.samples]
    console.print(
        f"{tally.requests.total()} requests ({tally.requests.total() / run.seconds:.0f}/s), "
        f"{sum(opens) / max(1, len(opens)):.0f} streams open on average; answers: {statuses}"
    )
    console.print(f"clients that left: {left}; {tally.refused} refused (429), {tally.stale} met a closed connection")
    tokens = run.holdings.get("poolgrid_frontend_output_tokens_total", 0)
    console.print(f"{tokens:.0f} tokens ({tokens / run.seconds:.0f}/s)")
    if run.settled_s is not None:
        last = f"; the last to go: {run.last_left[0]}" if run.last_left else ""
        console.print(f"quiet {run.settled_s:.1f} s after the last client{last}", markup=False)
    if run.patience.late:
        console.print(f"{run.patience.late} looks at a process were answered late, and made again")
    for fault in run.faults:
        console.print(f"FAULT {fault}", markup=False)
    console.print("it held" if not run.faults else "it did not hold")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="clients, each with one request open at a time")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long they go on")
    parser.add_argument("--requests", type=int, help="end after so many requests, in place of --seconds")
    parser.add_argument("--warmup", type=float, help="seconds after which growth counts; default a quarter of the run")
    parser.add_argument("--workers", type=int, default=4, help="workers of a pool without prefill workers")
    parser.add_argument("--prefill-workers", type=int, default=0, help="above 0: a disaggregated pool")
    parser.add_argument("--decode-workers", type=int, default=2, help="of a disaggregated pool")
    parser.add_argument("--http-workers", type=int, default=1, help="HTTP processes of the router")
    parser.add_argument("--speedup", type=float, default=0.5, help="of the simulated engines; more is more load")
    parser.add_argument("--osl-max", type=int, default=256, help="tokens of the longest answer")
    parser.add_argument("--seed", type=int, default=0, help="of requests and of when clients leave")
    parser.add_argument("--sample-s", type=float, default=2.0, help="seconds between two looks at the processes")
    parser.add_argument("--growth-mb-per-min", type=float, default=1.0, help="growth of a process that is too much")
    parser.add_argument(
        "--growth-bytes-per-request",
        type=float,
        default=256.0,
        help="growth of a process over the second half of --requests that is too much, from 500,000 requests on",
    )
    parser.add_argument("--logs", type=Path, help="keep data and output of the processes here")
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed[1], allowed[1]))
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with tempfile.TemporaryDirectory(prefix="poolgrid-soak-") as scratch, progress:
        directory = options.logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                run, tally = runner.run(soak(options, directory, progress))
        except (PoolFailed, TimeoutError) as error:
            sys.stderr.write(f"the soak could not go on: {error or 'a process was not ready in time'}\n")
            return 2
    warmup_s = options.warmup if options.warmup is not None else WARMUP_SHARE * run.seconds
    slopes = memory_slopes(run.samples, warmup_s)
    processes = {name: reading.processes for name, reading in run.baseline.items()}
    run.faults += load_faults(tally, run.samples, run.streams, run.seconds)
    if options.requests is None:
        run.faults += growth_faults(slopes, processes, run.seconds - warmup_s, options.growth_mb_per_min)
    else:
        run.faults += request_growth_faults(
            request_slopes(run.samples), tally.requests.total(), options.growth_bytes_per_request
        )
    show(run, tally, slopes, warmup_s, Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(report(run, tally, slopes, options), indent=1) + "\n")
    return 0 if not run.faults else 1


if __name__ == "__main__":
    sys.exit(main())
