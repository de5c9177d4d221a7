"""How long a stream of tokens waits for what its router does beside it: gaps between the frames of one client.

    python -m lab.benchmarks.stalls [--blocks 8000000] [--seconds 10] [--apart] [--json OUT]

A router with its consolidator inside serves one stream at a time, of an engine that makes a token every
``STEP_MS``, and the gaps between its frames are taken where the client reads them. With ``--apart`` the consolidator
is a process of its own, whose feed the router follows. Parts of ``--seconds`` at least:

``idle``         nothing else happens
``intake``       eight workers store ``--blocks`` blocks as fast as they are acknowledged, with the journal's snapshots
``snapshot``     a snapshot of all that is written
``worker lost``  a worker with an eighth of the blocks begins a new life, which ends the old one
``restated``     a worker of an eighth of ``--blocks`` tells anew what it holds, in batches as large as workers make
                 them

The router has the last core to itself, the client and the engine's worker the first. What pushes blocks runs there
too, but only while those have nothing to do (``SCHED_IDLE``), as does a consolidator that is apart, so that the gaps
are the router's. On a machine that does other work besides they are not: measure on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.table import Table

from lab.benchmarks.catch_up import BLOCKS_PER_RECORD, RECORDS_PER_PATH, a_card
from lab.benchmarks.fleet import Fleet
from lab.benchmarks.http_load import rss_mb
from lab.benchmarks.http_model import ensure_model
from lab.benchmarks.peers import MODEL, await_answer
from poolgrid.kernel.journal.framing import SUFFIX
from poolgrid.kernel.journal.stored_records import offset_of
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, EventBatch, SnapshotBegan
from poolgrid.kernel.wire.identifiers import WorkerId
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, Acknowledged, Heartbeat, Hello, Welcome
from poolgrid.kernel.worker_protocol.push_stream import BLOCKS_PER_RESTATED_BATCH

STEP_MS = 2.0
"""Five hundred frames a second: 5,000 of them make the 99.9th percentile of ten seconds the sixth longest gap."""

PUSHERS = 8
UNACKNOWLEDGED_MAX = 250
"""Batches that each of them has under way."""

SNAPSHOT_EVERY_RECORDS = 50_000
"""As is the default: 1.6 million blocks."""

SHORT_OF_SNAPSHOT = 2_000
"""Records that the intake ends short of one."""

FRAMES_PER_STREAM = 100_000
LEASE_MS = 600_000
HEARTBEAT_S = 60.0
POLL_MS = 5
STREAM_TIMEOUT_S = 60.0


class Pusher:
    """A worker that stores blocks nobody else has."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str, epoch: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.sent = self.acknowledged = 0
        self._welcomed = False
        self._name = name
        self._epoch = epoch
        self._random = random.Random(f"{name} {epoch}")
        self._parent: int | None = None
        self._say(Hello(name, 0, epoch, a_card(), 0, 0))

    @property
    def may_send(self) -> bool:
        """Say whether another batch may be under way."""
        return self._welcomed and self.sent - self.acknowledged < UNACKNOWLEDGED_MAX

    def send(self) -> None:
        """Send a batch of ``BLOCKS_PER_RECORD`` blocks."""
        parent = self._parent if self.sent % RECORDS_PER_PATH else None
        # Bytes as they come: a pusher that is slow would be what is measured.
        hashes = self._random.randbytes(8 * BLOCKS_PER_RECORD)
        self._send([BlocksStored(parent, hashes)])
        self._parent = int.from_bytes(hashes[-8:], sys.byteorder)

    def restate(self, blocks: int) -> None:
        """Say that this is all that the worker holds."""
        events: list[AnyEvent] = [SnapshotBegan()]
        path = BLOCKS_PER_RECORD * RECORDS_PER_PATH
        for at in range(0, blocks, BLOCKS_PER_RESTATED_BATCH):
            held = min(BLOCKS_PER_RESTATED_BATCH, blocks - at)
            events += (
                BlocksStored(None, self._random.randbytes(8 * min(path, held - done))) for done in range(0, held, path)
            )
            self._send(events)
            events = []

    def live(self) -> None:
        """Keep the lease."""
        self._say(Heartbeat(WorkerId(self._name), 0, self._epoch, self.sent))

    def read(self) -> None:
        """Take an answer."""
        answer = codec.from_consolidator.decode(self.socket.recv_multipart()[0])
        self._welcomed |= isinstance(answer, Welcome)
        if isinstance(answer, Acknowledged):
            self.acknowledged = answer.next_seq

    def _send(self, events: list[AnyEvent]) -> None:
        now_ms = int(time.time() * 1000)
        batch = EventBatch(WorkerId(self._name), 0, self._epoch, self.sent, now_ms, events)
        self.socket.send_multipart([BATCH_FRAME, codec.event_batch.encode(batch)])
        self.sent += 1

    def _say(self, message: Any) -> None:
        self.socket.send_multipart([CONTROL_FRAME, codec.to_consolidator.encode(message)])


def push(endpoint: str, orders: Any, answers: Any) -> None:
    """Be the workers: ``orders`` say how many records to push, ``lose`` or ``restate BLOCKS``; say when it is done."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pushers = [Pusher(context, endpoint, f"holder{number}", 1) for number in range(PUSHERS)]
    epoch = 1
    for line in orders:
        if line.strip() == "lose":
            epoch += 1
            pushers[0].socket.close()
            pushers[0] = Pusher(context, endpoint, "holder0", epoch)
            records = 1
        elif line.startswith("restate "):
            pushers[-1].restate(int(line.removeprefix("restate ")))
            records = 1
        else:
            records = int(line)
        _push(pushers, records)
        answers.write("done\n")
        answers.flush()
    context.destroy(linger=0)


def _push(pushers: Sequence[Pusher], records: int) -> None:
    poller = zmq.Poller()
    by_socket = {pusher.socket: pusher for pusher in pushers}
    for pusher in pushers:
        poller.register(pusher.socket, zmq.POLLIN)
        pusher.live()
    sent = 0
    live_s = time.monotonic()
    while sent < records or any(pusher.acknowledged < pusher.sent for pusher in pushers):
        for ready, _ in poller.poll(POLL_MS):
            by_socket[ready].read()
        for pusher in pushers:
            while sent < records and pusher.may_send:
                pusher.send()
                sent += 1
        if time.monotonic() - live_s > HEARTBEAT_S:
            live_s = time.monotonic()
            for pusher in pushers:
                pusher.live()


class Stream:
    """One client that reads a stream and notes when its frames come."""

    def __init__(self, port: int) -> None:
        body = msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "on and on"}],
                "max_tokens": FRAMES_PER_STREAM,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=STREAM_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(head.encode() + body)

    def gaps_ms(self, until: Callable[[], bool]) -> list[float]:
        """Read until told to stop; return the time before each frame of tokens but the first ones."""
        gaps: list[float] = []
        before_s = 0.0
        while not until():
            data = self._socket.recv(65_536)
            now_s = time.perf_counter()
            if not data or data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                raise SystemExit(f"the stream ended: {data[:500]!r}")
            if b'"content"' not in data:
                continue
            if before_s:
                gaps.append((now_s - before_s) * 1000)
            before_s = now_s
        self._socket.close()
        return gaps


def figures_of(gaps_ms: Sequence[float]) -> dict[str, float]:
    """Return percentiles of gaps, nearest rank."""
    ordered = sorted(gaps_ms)
    last = len(ordered) - 1
    found = {name: ordered[round(share * last)] for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))}
    return {"frames": float(len(ordered)), **found, "max": ordered[-1]}


def command_of(service: str, options: Mapping[str, object]) -> list[str]:
    """Return what starts a service of ours."""
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "poolgrid", service, "--log-level", "warning", *given]


class Measurement:
    """One run."""

    def __init__(self, fleet: Fleet, model: Path, data: Path, console: Console, apart: bool) -> None:
        """Start everything; the journal goes to ``data``."""
        self._console = console
        self._data = data
        self.figures: dict[str, dict[str, float]] = {}
        journal = {"data-dir": data, "lease-ms": LEASE_MS}
        follows: dict[str, object] = journal
        ingest = ""
        if apart:
            consolidator = fleet.start("consolidator", command_of("consolidator", journal))
            os.sched_setscheduler(consolidator.pid, os.SCHED_IDLE, os.sched_param(0))
            words = fleet.ready_words(consolidator)
            follows = {"feed-endpoint": words["feed"], "query-endpoint": words["query"]}
            ingest = words["ingest"]
        options = {"port": 0, "model-path": model, "model-name": MODEL, **follows}
        router = fleet.start("router", command_of("router", options), tested=True)
        words = fleet.ready_words(router)
        ingest = ingest or words["ingest"]
        self._pid = router.pid
        self._port = int(words["http"].rpartition(":")[2])
        worker = [sys.executable, "-m", "lab.benchmarks.http_worker", ingest, "engine", "16", str(STEP_MS)]
        fleet.start("worker", worker)
        await_answer(self._port, fleet)
        pushing = [sys.executable, "-m", "lab.benchmarks.stalls", "--push", ingest]
        self._pusher = subprocess.Popen(
            fleet.pinned(pushing), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def close(self) -> None:
        """End the workers that push."""
        self._pusher.kill()
        self._pusher.communicate()

    def part(self, name: str, order: str, seconds: float, done: Callable[[], bool] = lambda: True) -> None:
        """Measure one part: from an order to the pushing workers until they say, and ``done`` says, that it is over."""
        stream = Stream(self._port)
        began_s = time.perf_counter()
        orders, answers = self._pusher.stdin, self._pusher.stdout
        assert orders is not None, "both are pipes"
        assert answers is not None, "both are pipes"
        if order:
            orders.write(f"{order}\n")
        looked_s = began_s
        answering = answers.fileno()
        answered = not order

        def over() -> bool:
            nonlocal answered, looked_s
            now_s = time.perf_counter()
            if now_s - looked_s < 0.1:
                return False
            looked_s = now_s
            if not answered:
                if self._pusher.poll() is not None:
                    raise SystemExit(f"what pushes blocks ended with status {self._pusher.returncode}")
                answered = bool(select.select([answering], [], [], 0)[0])
            return answered and now_s - began_s > seconds and done()

        found = figures_of(stream.gaps_ms(over))
        if order:
            answers.readline()
        found["seconds"] = time.perf_counter() - began_s
        found["rss_mb"] = rss_mb(self._pid)
        self.figures[name] = found
        self._console.print(name, {key: round(value, 2) for key, value in found.items()})

    def snapshots(self) -> int:
        """Return the offset of the newest snapshot that is written."""
        return max((offset_of(path.name, SUFFIX) for path in self._data.rglob(f"*{SUFFIX}")), default=0)


def measure(blocks: int, seconds: float, console: Console, apart: bool) -> dict[str, dict[str, float]]:
    """Run every part; return figures by part."""
    records = blocks // BLOCKS_PER_RECORD
    # The last snapshot of the intake is behind it, and the next one so near that a few records bring it.
    records = max(SNAPSHOT_EVERY_RECORDS, records - records % SNAPSHOT_EVERY_RECORDS) - SHORT_OF_SNAPSHOT
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        fleet = Fleet(directory)
        if not fleet.is_pinned:
            console.print("one core: everything shares it, and gaps are not the router's alone")
        measurement: Measurement | None = None
        try:
            measurement = Measurement(fleet, ensure_model(directory / "model"), directory / "data", console, apart)
            measurement.part("idle", "", seconds)
            measurement.part("intake", str(records), seconds)
            before = measurement.snapshots()
            held = measurement
            measurement.part("snapshot", str(2 * SHORT_OF_SNAPSHOT), seconds, lambda: held.snapshots() > before)
            measurement.part("worker lost", "lose", seconds)
            measurement.part("restated", f"restate {blocks // PUSHERS}", seconds)
            return measurement.figures
        finally:
            if measurement is not None:
                measurement.close()
            fleet.close()


def main() -> None:
    """Run the benchmark, or its pushing process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8_000_000, help="blocks that the pool takes in (8000000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="least length of each part (10)")
    parser.add_argument("--apart", action="store_true", help="the consolidator is a process of its own")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--push", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.push:
        push(options.push, sys.stdin, sys.stdout)
        return
    console = Console()
    figures = measure(options.blocks, options.seconds, console, options.apart)
    table = Table("part", "frames", "p50 ms", "p99", "p99.9", "max", "over idle", "s", "MB")
    idle_ms = figures["idle"]["p99.9"]
    for part, found in figures.items():
        shown = [f"{found[name]:.2f}" for name in ("p50", "p99", "p99.9", "max")]
        more = f"{found['p99.9'] - idle_ms:+.2f}"
        table.add_row(part, f"{found['frames']:.0f}", *shown, more, f"{found['seconds']:.0f}", f"{found['rss_mb']:.0f}")
    console.print(table)
    console.print("gaps between frames; over idle: the 99.9th percentile, less that of the idle part")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
