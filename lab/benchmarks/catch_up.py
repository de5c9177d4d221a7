"""How long a router takes to hold what its pool holds, what it costs, and how long it keeps anybody waiting meanwhile.

    python -m lab.benchmarks.catch_up [--blocks 1000000] [--workers 64] [--tail 100000] [--json OUT]

A journal with a snapshot and a tail is made in a temporary directory. Measured are, each in a process of its own on
real sockets: the recovery of a consolidator, again after a kill; a router elsewhere that takes its first snapshot; the
same router after it stood still while records were pushed (a tail, with a hole in the feed when it is long); the same
after the consolidator was killed and came back (another snapshot, while serving); a router with one inside, and the
same while records come, without and with snapshots of its journal written meanwhile.

*Longest stall* is the longest time for which the router's event loop did not come round, *longest work* the most CPU
time that it took in such a time; it decides every other millisecond all along.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from lab.benchmarks.measuring import resident_bytes
from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX, PoolState
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, EventBatch, JournalRecord, WorkerJoined
from poolgrid.kernel.wire.feed import BlockChain, WorkerState
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, WorkerId
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, Acknowledged, Hello, LoadingWorker, Welcome
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot
from poolgrid.server.cli.service_process import THREAD_SWITCH_S
from poolgrid.server.consolidator.bootstrap import create, serve
from poolgrid.server.consolidator.journal.files import FileJournal
from poolgrid.server.consolidator.journal.posix_disk import PosixDisk
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings, Tuning
from poolgrid.server.process import garbage, lifecycle
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.feeds import EmbeddedFeed, JournalFeed, RemoteFeed
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.links import link_opener
from tests.router.fleet_builder import decided

BLOCKS_PER_RECORD = 32
RECORDS_PER_PATH = 8
RECORDS_PER_APPEND = 512
SHARED_PATHS = 0.25
"""Share of the paths that another worker holds already."""

MODEL = "m"
TAIL_WORKERS = 16
"""Workers that push the tail: each comes to hold 200,000 blocks of 16 tokens, as many as large GPUs do."""

BUSY_RECORDS_PER_S = 500
"""What a busy pool says: 16,000 new blocks a second, of 60 requests with 4,000 new tokens each."""

BUSY_S = 10

POLL_MS = 5

UNACKNOWLEDGED_MAX = 2_000
"""Batches that the pushing workers have under way together."""

LEASE_MS = 600_000

SNAPSHOT_EVERY = 1_000
"""Records between two snapshots, when many are to be seen: each begins when the one before it is written."""

QUIET_S = 0.5
"""Nothing arrived for so long: the router has caught up."""


def a_card() -> WorkerCard:
    """Return a card for any worker."""
    return WorkerCard(MODEL, Role.AGGREGATED, 16, WorkerLimits(256, 8192, 1_000_000, 131_072), "tcp://127.0.0.1:1")


def chains(source: random.Random, workers: int) -> Iterator[tuple[int, BlocksStored]]:
    """Yield (worker, event): paths of 256 blocks, in events of 32, some of them held by another worker already."""
    known: list[list[int]] = []
    while True:
        if known and source.random() < SHARED_PATHS:
            path = source.choice(known)
        else:
            path = [source.getrandbits(64) for _ in range(BLOCKS_PER_RECORD * RECORDS_PER_PATH)]
            known.append(path)
        worker = source.randrange(workers)
        for at in range(0, len(path), BLOCKS_PER_RECORD):
            yield (
                worker,
                BlocksStored(path[at - 1] if at else None, pack_hashes(path[at : at + BLOCKS_PER_RECORD])),
            )


def make_journal(directory: Path, blocks: int, workers: int, tail: int) -> dict[str, float]:
    """Write a journal: joins and stores, a snapshot behind ``blocks`` of them, and ``tail`` records after that."""
    source = random.Random(1)
    disk = PosixDisk(directory)
    journal = FileJournal(disk)
    pool: PoolState = journal.recover(BLOCKS_PER_WORKER_MAX)
    seqs = [0] * workers
    pending: list[bytes] = []

    def write(worker: int, event: AnyEvent, by: str) -> None:
        now_ms = int(time.time() * 1000)
        record = JournalRecord(pool.offset, f"w{worker}", 0, 1, seqs[worker], now_ms, now_ms, [event], by)
        seqs[worker] += by == "worker"
        pool.apply(record)
        pending.append(codec.journal_record.encode(record))
        if len(pending) >= RECORDS_PER_APPEND:
            flush()

    def flush() -> None:
        if pending:
            journal.append(pending, int(time.time() * 1000))
            pending.clear()

    for worker in range(workers):
        write(worker, WorkerJoined(a_card()), "consolidator")
    events = chains(source, workers)
    for _ in range(blocks // BLOCKS_PER_RECORD):
        write(*next(events), "worker")
    flush()
    started = time.perf_counter()
    journal.write_snapshot(pool.freeze())
    snapshot_s = time.perf_counter() - started
    for _ in range(tail):
        write(*next(events), "worker")
    flush()
    journal.close()
    return {
        "write_snapshot_s": snapshot_s,
        "records": float(pool.offset),
        "held_blocks": float(sum(sum(worker.presence.counts()) for worker in pool.workers.values())),
        "journal_mib": sum(path.stat().st_size for path in directory.iterdir()) / 2**20,
    }


# -- the consolidator's process ----------------------------------------------------------------------------------------


def tuning_of(given: dict[str, Any]) -> Tuning:
    """Take what is no setting out of what a process is given."""
    return Tuning(snapshot_every_records=given.pop("snapshot_every_records"))


def consolidator_process(given: dict[str, Any]) -> None:
    """Serve a directory; say when it is ready."""
    tuning = tuning_of(given)
    settings = ConsolidatorProcessSettings.model_validate(given)
    started = time.perf_counter()

    def ready(at: Any) -> None:
        say({"ready_s": time.perf_counter() - started, "rss_mib": resident_bytes() / 2**20, **at._asdict()})

    lifecycle.run(lambda stop: serve(settings, stop, ready, tuning))


# -- the router's process ----------------------------------------------------------------------------------------------


class WatchedFeed:
    """A feed of which it is noted when the snapshot came."""

    def __init__(self, feed: JournalFeed) -> None:
        self._feed = feed
        self._reader: Any = None
        self.snapshot_at_s = 0.0

    async def start(self, reader: Any) -> None:
        """Follow."""
        self._reader = reader
        await self._feed.start(self)

    def trouble(self, now_ms: float) -> str:
        """Pass on what is wrong."""
        return self._feed.trouble(now_ms)

    def resync(self) -> None:
        """Pass the wish on."""
        self._feed.resync()

    def loading(self) -> list[LoadingWorker]:
        return []

    def behind(self) -> int:
        """Pass on how much is missing."""
        return self._feed.behind()

    async def stop(self) -> None:
        """Stop following."""
        await self._feed.stop()

    def on_snapshot(
        self,
        next_offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> None:
        """Note the time, pass it on."""
        self.snapshot_at_s = time.perf_counter()
        self._reader.on_snapshot(next_offset, workers, chains, sessions)

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        """Pass records on."""
        self._reader.on_records(records)


class Heartbeat:
    """Comes round every other millisecond, decides, and knows the longest time it did not."""

    def __init__(self, service: RouterService, selector: Selector) -> None:
        self._service = service
        self._selector = selector
        self._request = RoutingRequest("r", MODEL, 16, 16, 1)
        self._last_s = time.perf_counter()
        self._last_cpu_s = time.process_time()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.longest_stall_ms = 0.0
        self.longest_work_ms = 0.0
        self.decisions = self.marked = self.most_behind = 0

    def resumed(self, *_: Any) -> None:
        """The process stood still; that is no stall."""
        self._last_s = time.perf_counter()
        self._last_cpu_s = time.process_time()
        self.forget()

    async def beat(self) -> None:
        """Go on for ever; say so whenever the router has caught up."""
        begun_s: float | None = None
        moved_s = 0.0
        offset = 0
        while True:
            await asyncio.sleep(0.001)
            now_s, cpu_s = time.perf_counter(), time.process_time()
            self.longest_stall_ms = max(self.longest_stall_ms, (now_s - self._last_s) * 1000)
            self.longest_work_ms = max(self.longest_work_ms, (cpu_s - self._last_cpu_s) * 1000)
            self._last_s, self._last_cpu_s = now_s, cpu_s
            if not self._service.ready:
                continue
            behind = self._service.behind_records
            self._decide(now_s * 1000, behind)
            if behind or self.offset != offset:
                begun_s = now_s if begun_s is None else begun_s
                moved_s, offset = now_s, self.offset
            elif begun_s is not None and now_s - moved_s > QUIET_S:
                say({"behind_s": moved_s - begun_s, "offset": offset, **self.figures()})
                begun_s = None
                self.forget()

    @property
    def offset(self) -> int:
        """Return the offset up to which all is applied."""
        return self._service.projection.next_offset

    def _decide(self, now_ms: float, behind: int) -> None:
        decision = decided(
            self._selector.select(WorkerWanted(self._request, [1], now_ms, 0, behind_records=behind), dry_run=True)
        )
        self.decisions += 1
        self.marked += decision.reason.endswith("-behind")
        self.most_behind = max(self.most_behind, behind)

    def figures(self) -> dict[str, float]:
        """Return what was measured."""
        return {
            "longest_stall_ms": self.longest_stall_ms,
            "longest_work_ms": self.longest_work_ms,
            "decisions": self.decisions,
            "decisions_marked": self.marked,
            "most_behind": self.most_behind,
            "rss_mib": resident_bytes() / 2**20,
        }


def router_process(given: dict[str, Any]) -> None:
    """Follow a consolidator, elsewhere or inside, until killed; a line for each time that it caught up."""

    async def live() -> None:
        clock = SystemClock()
        settings = RouterSettings()
        projection = Projection(PrefixIndex(settings.index_budget_bytes), LoadLedger())
        selector = Selector(projection, make_policy("kv"))
        inner: JournalFeed
        if "data_dir" in given:
            tuning = tuning_of(given)
            consolidator = ConsolidatorSettings.model_validate(given)
            inner = EmbeddedFeed(create(consolidator, CollectorRegistry(), clock, tuning=tuning))
        else:
            inner = RemoteFeed(given["feed"], given["query"], clock)
        feed = WatchedFeed(inner)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        metrics = RouterMetrics(CollectorRegistry())
        open_link = link_opener(context, settings.worker_timeout_ms, clock, lambda: None)
        service = RouterService(settings, RouterState(selector), feed, metrics, clock, open_link)
        heartbeat = Heartbeat(service, selector)
        signal.signal(signal.SIGCONT, heartbeat.resumed)
        beating = asyncio.create_task(heartbeat.beat())
        await asyncio.sleep(0.05)
        heartbeat.resumed()
        before = resident_bytes()
        started = time.perf_counter()
        await service.start()
        level = time.perf_counter()
        say(
            {
                "transfer_s": feed.snapshot_at_s - started,
                "load_s": level - feed.snapshot_at_s,
                "rss_before_mib": before / 2**20,
                "blocks": len(projection.index),
                "offset": heartbeat.offset,
                **heartbeat.figures(),
            }
        )
        # As a router does that is ready, and one that starts.
        garbage.settle()
        sys.setswitchinterval(THREAD_SWITCH_S)
        heartbeat.resumed()
        await beating

    asyncio.run(live())


def say(figures: dict[str, Any]) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


class Child:
    """One of the two processes above."""

    def __init__(self, kind: str, given: dict[str, Any]) -> None:
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.benchmarks.catch_up", "--process", kind, json.dumps(given)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def line(self) -> dict[str, Any]:
        """Return what it says next."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"a process of the benchmark ended with status {self.process.wait()}")
        figures: dict[str, Any] = json.loads(text)
        return figures

    def kill(self) -> None:
        """End it without a word."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def push(endpoint: str, records: int, epoch: int, records_per_s: float = float("inf")) -> None:
    """Be workers that join and store blocks, one batch a record; return when all are in the journal."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    workers = [_Pusher(context, endpoint, f"tail{number}", epoch) for number in range(TAIL_WORKERS)]
    by_socket = {worker.socket: worker for worker in workers}
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    sent = 0
    began_s = time.monotonic()
    while sent < records or any(worker.acknowledged < worker.sent for worker in workers):
        for socket, _ in poller.poll(POLL_MS):
            by_socket[socket].read()
        due = min(records, (time.monotonic() - began_s) * records_per_s) if records_per_s < float("inf") else records
        for worker in workers:
            while sent < due and worker.may_send:
                worker.send()
                sent += 1
    context.destroy(linger=0)


class _Pusher:
    """One of those workers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str, epoch: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.acknowledged = self.sent = 0
        self._name = name
        self._epoch = epoch
        self._events = chains(random.Random(f"{name} {epoch}"), 1)
        self._welcomed = False
        hello = Hello(name, 0, epoch, a_card(), 0, 0)
        self.socket.send_multipart([CONTROL_FRAME, codec.to_consolidator.encode(hello)])

    @property
    def may_send(self) -> bool:
        """Say whether another batch may be under way."""
        return self._welcomed and self.sent - self.acknowledged < UNACKNOWLEDGED_MAX // TAIL_WORKERS

    def send(self) -> None:
        """Send a batch."""
        now_ms = int(time.time() * 1000)
        batch = EventBatch(WorkerId(self._name), 0, self._epoch, self.sent, now_ms, [next(self._events)[1]])
        self.socket.send_multipart([BATCH_FRAME, codec.event_batch.encode(batch)])
        self.sent += 1

    def read(self) -> None:
        """Take an answer."""
        answer = codec.from_consolidator.decode(self.socket.recv_multipart()[0])
        self._welcomed |= isinstance(answer, Welcome)
        if isinstance(answer, Acknowledged):
            self.acknowledged = answer.next_seq


def measure(blocks: int, workers: int, tail: int, console: Console) -> dict[str, dict[str, Any]]:
    """Run everything; return figures by step."""
    figures: dict[str, dict[str, Any]] = {}
    children: list[Child] = []

    def child(kind: str, given: dict[str, Any]) -> Child:
        children.append(Child(kind, given))
        return children[-1]

    def note(step: str, found: dict[str, Any]) -> None:
        figures[step] = found
        console.print(f"[bold]{step}[/]  {_shown(found)}")

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            note("journal written", make_journal(directory, blocks, workers, tail // 10))
            given: dict[str, Any] = {"data_dir": name, "lease_ms": LEASE_MS, "snapshot_every_records": 100_000_000}
            first = child("consolidator", given)
            at = first.line()
            note("consolidator recovered", {name: at[name] for name in ("ready_s", "rss_mib")})
            first.kill()
            ports = {f"{plane}_port": int(at[plane].rsplit(":", 1)[1]) for plane in ("ingest", "feed", "query", "http")}
            given |= ports
            second = child("consolidator", given)
            at = second.line()
            note("consolidator recovered after a kill", {name: at[name] for name in ("ready_s", "rss_mib")})

            router = child("router", {"feed": at["feed"], "query": at["query"]})
            note("router elsewhere, first snapshot", router.line())
            level = router.line()["offset"]
            os.kill(router.process.pid, signal.SIGSTOP)
            push(at["ingest"], tail, epoch=1)
            os.kill(router.process.pid, signal.SIGCONT)
            note("router elsewhere, tail", _until_applied(router, level + tail))
            second.kill()
            third = child("consolidator", given)
            at = third.line()
            note("consolidator recovered after a kill, tail", {name: at[name] for name in ("ready_s", "rss_mib")})
            note("router elsewhere, snapshot while serving", router.line())
            router.kill()
            third.kill()
            del given["http_port"]
            busy = BUSY_S * BUSY_RECORDS_PER_S
            for epoch, (step, every, count, per_s) in enumerate(
                (
                    ("busy, journal snapshots meanwhile", SNAPSHOT_EVERY, busy, BUSY_RECORDS_PER_S),
                    ("tail", 100_000_000, tail, float("inf")),
                    ("tail, journal snapshots meanwhile", SNAPSHOT_EVERY, tail, float("inf")),
                ),
                start=2,
            ):
                inside = child("router", given | {"snapshot_every_records": every})
                found = inside.line()
                if count == busy:
                    note("router with the consolidator inside", found)
                push(at["ingest"], count, epoch, per_s)
                note(f"router with the consolidator inside, {step}", _until_applied(inside, found["offset"] + count))
                inside.kill()
        finally:
            for each in children:
                each.kill()
    return figures


def _until_applied(router: Child, offset: int) -> dict[str, Any]:
    """Return what a router says of its way up to an offset."""
    total: dict[str, Any] = {"offset": 0}
    while total["offset"] < offset:
        for name, value in router.line().items():
            added = name in ("behind_s", "decisions", "decisions_marked")
            total[name] = total.get(name, 0) + value if added else max(total.get(name, 0), value)
    return total


def _shown(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in figures.items()
    )


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks stored before the snapshot (1000000)")
    parser.add_argument("--workers", type=int, default=64, help="workers that hold them (64)")
    parser.add_argument(
        "--tail",
        type=int,
        default=100_000,
        help="records of 32 blocks pushed while the router stands still; a tenth is in the journal too",
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--process", nargs=2, metavar=("KIND", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        kind, given = options.process
        garbage.collect_rarely()  # as every command does
        {"consolidator": consolidator_process, "router": router_process}[kind](json.loads(given))
        return
    console = Console()
    figures = measure(options.blocks, options.workers, options.tail, console)
    table = Table(title=f"{options.blocks:,} blocks on {options.workers} workers, tails of {options.tail:,} records")
    for heading in ("step", "seconds", "longest stall ms", "marked decisions", "RSS MiB"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for step, found in figures.items():
        seconds = sum(
            found.get(name, 0.0) for name in ("ready_s", "transfer_s", "load_s", "behind_s", "write_snapshot_s")
        )
        table.add_row(
            step,
            f"{seconds:.2f}",
            f"{found['longest_stall_ms']:.0f}" if "longest_stall_ms" in found else "",
            f"{found['decisions_marked']} of {found['decisions']}" if "decisions_marked" in found else "",
            f"{found['rss_mib']:.0f}" if "rss_mib" in found else "",
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
