"""What one consolidator carries, with its journal in a directory and in a stream of NATS, in the same run.

    python -m lab.benchmarks.event_plane [--sources 1000] [--rate 10] [--shares 0.1,0.25,0.5,1] [--seconds 10]
                                     [--routers 8] [--followed-rate 500] [--planes directory,nats] [--json OUT]

Sources are workers as the consolidator sees them: each has a connection of its own and pushes batches of what an engine
step says (blocks stored, blocks evicted, load), by the protocol of real workers; they share a few processes. They offer
shares of ``sources`` x ``rate`` batches a second, then as many as are taken. A batch becomes a record. The processor
time of the consolidator and of the NATS server is the kernel's, so it says what a core carries also on a machine that
does other things: ``records per core`` is a second divided by the consolidator's time for a record, under the greatest
load. Latency is from sending a batch to its acknowledgement. It needs a quiet machine, as does the routers' lag.

Then routers follow, real ones, while ``followed-rate`` batches a second come; their lag is how long ago the
consolidator had the offset that a router has. A router's time for a record says how many a core lets it follow.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil
import zmq
from rich.console import Console
from rich.table import Table

from lab.benchmarks.services import Service
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import AnyEvent, BlocksRemoved, BlocksStored, EventBatch, LoadReported
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, WorkerId
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, Acknowledged, Heartbeat, Hello, Resend, Welcome
from tests.nats.servers import BINARY, MISSING, NatsServer, one_server

PLANES = ("directory", "nats")
MODEL = "tiny"
BLOCKS_PER_BATCH = 4
"""64 new tokens of an engine step in blocks of 16: some requests' decoding, or a little of a prompt."""

BLOCKS_HELD = 512
"""Of one source; what it stores beyond it evicts."""

WINDOW = 16
"""Batches of one source that are not acknowledged, at most."""

SOURCE_PROCESSES = 2
TICK_S = 0.01
HEARTBEAT_S = 1.0
LEASE_MS = 120_000
"""A source process that the machine leaves standing is not thrown out."""

LEADER_LEASE_S = 30
"""The same for the consolidator itself."""

WARM_UP_S = 2.0
SAMPLE_S = 0.1
LEVEL_S = 120.0
"""Until then routers that start must have caught up."""


# -- the sources' processes --------------------------------------------------------------------------------------------


class Source:
    """One worker: its connection, what it has said, and what of that is acknowledged."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str, first_hash: int) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._name = WorkerId(name)
        self._next_hash = first_hash
        self._held: deque[list[int]] = deque()
        self._parent: int | None = None
        self._sent_s: deque[float] = deque()
        self._frames: deque[bytes] = deque()
        """Of what is not acknowledged, as the times are."""
        self.sent = self.acknowledged = self.resent = 0
        self.is_welcome = False
        limits = WorkerLimits(64, 8192, 100_000, 32_768)
        card = WorkerCard(MODEL, Role.AGGREGATED, 16, limits, "tcp://127.0.0.1:1")
        hello = Hello(self._name, 0, 1, card, 0, 0)
        self._socket.send_multipart([CONTROL_FRAME, codec.to_consolidator.encode(hello)])

    def send(self, now_s: float) -> None:
        """Say what a step did."""
        hashes = [(self._next_hash + each) * 0x9E3779B97F4A7C15 % 2**64 for each in range(BLOCKS_PER_BATCH)]
        self._next_hash += BLOCKS_PER_BATCH
        events: list[AnyEvent] = [BlocksStored(self._parent, pack_hashes(hashes))]
        self._held.append(hashes)
        self._parent = hashes[-1]
        if len(self._held) * BLOCKS_PER_BATCH > BLOCKS_HELD:
            events.append(BlocksRemoved(pack_hashes(self._held.popleft())))
        events.append(LoadReported(8, 0, 0, 500, BLOCKS_HELD, 100_000, self.sent))
        batch = EventBatch(self._name, 0, 1, self.sent, int(time.time() * 1000), events)
        self._frames.append(codec.event_batch.encode(batch))
        self._socket.send_multipart([BATCH_FRAME, self._frames[-1]])
        self._sent_s.append(now_s)
        self.sent += 1

    def beat(self) -> None:
        """Say that it lives."""
        self._socket.send_multipart(
            [CONTROL_FRAME, codec.to_consolidator.encode(Heartbeat(self._name, 0, 1, self.sent))]
        )

    def read(self, now_s: float, latencies_s: list[float]) -> None:
        """Take the answers that are there; raises ``SystemExit`` for one that ends the measurement."""
        while True:
            try:
                answer = codec.from_consolidator.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(answer, Acknowledged):
                if answer.next_seq > self.acknowledged:
                    latencies_s.append(now_s - self._sent_s[answer.next_seq - self.acknowledged - 1])
                while self.acknowledged < answer.next_seq:
                    self._sent_s.popleft()
                    self._frames.popleft()
                    self.acknowledged += 1
            elif isinstance(answer, Welcome):
                self.is_welcome = True
            elif isinstance(answer, Resend):
                # As a worker does that is told of a gap: the consolidator had no room for what came.
                for frame in islice(self._frames, answer.from_seq - self.acknowledged, None):
                    self._socket.send_multipart([BATCH_FRAME, frame])
                    self.resent += 1
            else:
                raise SystemExit(f"source {self._name}: the consolidator says {answer}")


class Sources:
    """The sources of one process."""

    def __init__(self, endpoint: str, first: int, count: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.max_sockets = count + 16
        self._context = context
        numbers = range(first, first + count)
        self._sources = [Source(context, endpoint, f"w{number}", number << 32) for number in numbers]
        self._latencies_s: list[float] = []
        self._beat_s = time.monotonic()

    def _turn(self) -> None:
        now_s = time.monotonic()
        for source in self._sources:
            source.read(now_s, self._latencies_s)
        if now_s - self._beat_s > HEARTBEAT_S:
            self._beat_s = now_s
            for source in self._sources:
                source.beat()

    def close(self) -> None:
        """Be gone."""
        self._context.destroy(linger=0)

    def idle(self) -> str:
        """Live on until a command comes; return it."""
        while not select.select([sys.stdin], [], [], HEARTBEAT_S / 2)[0]:
            self._turn()
        return sys.stdin.readline()

    def until_welcome(self) -> None:
        """Wait until all are members."""
        while not all(source.is_welcome for source in self._sources):
            self._turn()
            time.sleep(TICK_S)  # noqa: TID251 - a clock of its own, in a process of its own

    def push(self, rate: float | None, seconds: float) -> dict[str, float]:
        """Send batches for a while, so many a second or as many as are taken; return what was acknowledged, and how."""
        self._latencies_s.clear()
        begun_s, begun_cpu_s, sent, at = time.monotonic(), time.process_time(), 0, 0
        acknowledged = sum(source.acknowledged for source in self._sources)
        while (now_s := time.monotonic()) - begun_s < seconds:
            due = rate * (now_s - begun_s) - sent if rate is not None else float("inf")
            blocked = 0
            while due >= 1 and blocked < len(self._sources):
                source = self._sources[at]
                at = (at + 1) % len(self._sources)
                if source.sent - source.acknowledged >= WINDOW:
                    blocked += 1
                    continue
                source.send(now_s)
                sent, due, blocked = sent + 1, due - 1, 0
                if sent % len(self._sources) == 0 and rate is None:
                    self._turn()
            self._turn()
            time.sleep(TICK_S if rate is not None else TICK_S / 5)  # noqa: TID251 - as above
        took_s = time.monotonic() - begun_s
        found = sorted(self._latencies_s) or [0.0]
        return {
            "acknowledged": sum(source.acknowledged for source in self._sources) - acknowledged,
            "sent": sent,
            "resent": sum(source.resent for source in self._sources),
            "took_s": took_s,
            "cpu_s": time.process_time() - begun_cpu_s,
            "p50_ms": found[len(found) // 2] * 1000,
            "p99_ms": found[len(found) * 99 // 100] * 1000,
        }


def sources_process(endpoint: str, first: int, count: int) -> None:
    """Be sources until there are no commands any more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sources = Sources(endpoint, first, count)
    sources.until_welcome()
    _tell({})
    while command := sources.idle():
        asked = json.loads(command)
        _tell(sources.push(asked["rate"], asked["seconds"]))


def _tell(figures: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


# -- the measurement ---------------------------------------------------------------------------------------------------


class Load:
    """The processes of the sources."""

    def __init__(self, endpoint: str, count: int, opened: ExitStack) -> None:
        share = -(-count // SOURCE_PROCESSES)
        self._processes = []
        for first in range(0, count, share):
            given = json.dumps([endpoint, first, min(share, count - first)])
            process = subprocess.Popen(
                [sys.executable, "-m", "lab.benchmarks.event_plane", "--be-sources", given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            opened.callback(process.wait)
            opened.callback(process.kill)
            self._processes.append(process)

    def answers(self) -> list[dict[str, float]]:
        """Return what each says next."""
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"a process of sources ended with status {process.wait()}")
            found.append(json.loads(line))
        return found

    def push(self, rate: float | None, seconds: float) -> dict[str, float]:
        """Have all push; return what they say together."""
        for process in self._processes:
            assert process.stdin is not None
            each = None if rate is None else rate / len(self._processes)
            with suppress(BrokenPipeError):  # what it said when it ended is said with its answer
                process.stdin.write(json.dumps({"rate": each, "seconds": seconds}) + "\n")
                process.stdin.flush()
        found = self.answers()
        summed = {name: sum(each[name] for each in found) for name in ("acknowledged", "sent", "cpu_s")}
        return {**summed, **{name: max(each[name] for each in found) for name in ("took_s", "p50_ms", "p99_ms")}}


def lag_s(times_s: Sequence[float], offsets: Sequence[int], at_s: float, offset: int) -> float:
    """Return how long ago an offset was overtaken: ``offsets`` is what was seen at ``times_s``, both rising."""
    later = bisect.bisect_right(offsets, offset)
    return max(0.0, at_s - times_s[later]) if later < len(offsets) else 0.0


def _cpu_s(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


class Plane:
    """A consolidator with its journal, and what may follow it."""

    def __init__(self, kind: str, directory: Path, opened: ExitStack) -> None:
        self.kind = kind
        self._directory = directory
        self._server: NatsServer | None = opened.enter_context(one_server()) if kind == "nats" else None
        self._consolidator: Service
        self._routers: list[Service] = []
        self.ingest = ""

    @property
    def _journal(self) -> list[str]:
        assert self._server is not None
        return ["--event-plane", "nats", "--nats-url", self._server.url]

    async def start(self, ingest_port: int) -> None:
        """Start the consolidator, and wait until it takes events."""
        lease = ["--leader-lease-ms", str(1000 * LEADER_LEASE_S)]
        where = (
            [*self._journal, *lease] if self._server is not None else ["--data-dir", str(self._directory / "journal")]
        )
        own = ["--ingest-port", str(ingest_port), "--http-port", "0", "--lease-ms", str(LEASE_MS)]
        arguments = ["consolidator", *own, *where, "--log-level", "warning"]
        self._consolidator = await Service.start(f"consolidator-{self.kind}", arguments, self._directory)
        await self._consolidator.wait_ready()
        self.ingest = f"tcp://127.0.0.1:{ingest_port}"

    async def follow(self, routers: int) -> None:
        """Start routers that follow, and wait until they have caught up."""
        feed = (
            self._journal
            if self._server is not None
            else [
                *("--feed-endpoint", self._consolidator.word("feed")),
                *("--query-endpoint", self._consolidator.word("query")),
            ]
        )
        for number in range(routers):
            arguments = ["router", "--port", "0", "--router-id", f"r{number}", *feed, "--log-level", "error"]
            self._routers.append(await Service.start(f"router-{self.kind}-{number}", arguments, self._directory))
        for router in self._routers:
            await router.wait_ready()

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of each kind of process so far."""
        found = {"consolidator": _cpu_s(self._consolidator.process.pid), "nats": 0.0, "routers": 0.0}
        if self._server is not None:
            found["nats"] = _cpu_s(self._server.pid)
        found["routers"] = sum(_cpu_s(router.process.pid) for router in self._routers)
        return found

    async def lags(self, until: asyncio.Event) -> list[float]:
        """Return the routers' lags, in seconds, looked at again and again until an event is set."""
        times_s: list[float] = []
        offsets: list[int] = []
        seen: list[tuple[float, int]] = []
        async with httpx.AsyncClient(timeout=30.0) as http:
            while not until.is_set():
                offset = (await http.get(f"{self._consolidator.url}/health")).json()["offset"]
                times_s.append(time.monotonic())
                offsets.append(offset)
                for router in self._routers:
                    said = (await http.get(f"{router.url}/v1/pool")).json()["journal"]["offset"]
                    seen.append((time.monotonic(), said))
                await asyncio.sleep(SAMPLE_S)
        return sorted(lag_s(times_s, offsets, at_s, offset) for at_s, offset in seen)

    def last_words(self) -> str:
        """Return the ends of the logs of processes that are gone."""
        gone = [each for each in (self._consolidator, *self._routers) if each.process.returncode is not None]
        return "\n".join(f"{each.name}: {each.log.read_text()[-2000:]}" for each in gone)

    async def stop(self) -> None:
        """End all of it."""
        for service in [*self._routers, self._consolidator]:
            await service.stop()


async def measure(kind: str, arguments: argparse.Namespace, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Return the figures of one plane, a row for each load."""
    rows = []
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-event-plane-")))
        plane = Plane(kind, directory, opened)
        await plane.start(arguments.ingest_port)
        try:
            load = Load(plane.ingest, arguments.sources, opened)
            await asyncio.to_thread(load.answers)
            await asyncio.to_thread(load.push, None, WARM_UP_S)
            offered = [share * arguments.sources * arguments.rate for share in shares]
            rows += [await _row(plane, load, rate, arguments.seconds, 0) for rate in [*offered, None]]
            if arguments.routers:
                await plane.follow(arguments.routers)
                rows.append(await _row(plane, load, arguments.followed_rate, arguments.seconds, arguments.routers))
        except httpx.TransportError as error:
            raise SystemExit(f"{error!r}\n{plane.last_words()}") from None
        finally:
            await plane.stop()
    return rows


async def _row(plane: Plane, load: Load, rate: float | None, seconds: float, routers: int) -> dict[str, Any]:
    before = plane.cpu_s()
    over = asyncio.Event()
    looking = asyncio.ensure_future(plane.lags(over)) if routers else None
    found = await asyncio.to_thread(load.push, rate, seconds)
    over.set()
    lags_s = await looking if looking is not None else []
    spent = {name: value - before[name] for name, value in plane.cpu_s().items()}
    records = max(1.0, found["acknowledged"])
    return {
        "plane": plane.kind,
        "offered": rate,
        "records_per_s": found["acknowledged"] / found["took_s"],
        "consolidator_us": spent["consolidator"] / records * 1e6,
        "nats_us": spent["nats"] / records * 1e6,
        "router_us": spent["routers"] / records / routers * 1e6 if routers else None,
        "sources_us": found["cpu_s"] / max(1.0, found["sent"]) * 1e6,
        "consolidator_cores": spent["consolidator"] / found["took_s"],
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "routers": routers,
        "lag_p50_ms": lags_s[len(lags_s) // 2] * 1000 if lags_s else None,
        "lag_p99_ms": lags_s[len(lags_s) * 99 // 100] * 1000 if lags_s else None,
    }


def show(rows: Sequence[dict[str, Any]], sources: int) -> None:
    """Print the figures."""
    table = Table(title=f"{sources} sources, one consolidator; processor time in microseconds a record")
    heads = ("journal", "offered/s", "records/s", "consolidator", "NATS", "cores", "records per core")
    for head in (*heads, "ack p50 ms", "p99", "routers", "router", "lag p50 ms", "p99"):
        table.add_column(head, justify="right")

    def number(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        table.add_row(
            row["plane"],
            "all" if row["offered"] is None else number(row["offered"]),
            number(row["records_per_s"]),
            number(row["consolidator_us"], ",.1f"),
            number(row["nats_us"] or None, ",.1f"),
            number(row["consolidator_cores"], ".2f"),
            number(1e6 / row["consolidator_us"]),
            number(row["p50_ms"]),
            number(row["p99_ms"]),
            number(row["routers"] or None),
            number(row["router_us"], ",.1f"),
            number(row["lag_p50_ms"]),
            number(row["lag_p99_ms"]),
        )
    Console(width=150).print(table)


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=10.0, help="batches a second of each source")
    parser.add_argument("--shares", default="0.1,0.25,0.5,1", help="of all that, offered one after the other")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--routers", type=int, default=8)
    parser.add_argument("--followed-rate", type=float, default=500.0, help="batches a second while routers follow")
    parser.add_argument("--planes", default=",".join(PLANES))
    parser.add_argument("--ingest-port", type=int, default=25557)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--be-sources", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_sources:
        sources_process(*json.loads(arguments.be_sources))
        return 0
    if "nats" in arguments.planes.split(",") and not BINARY:
        sys.stdout.write(f"{MISSING}\n")
        return 2
    shares = [float(share) for share in arguments.shares.split(",") if share]
    rows = [row for kind in arguments.planes.split(",") for row in asyncio.run(measure(kind, arguments, shares))]
    show(rows, arguments.sources)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
