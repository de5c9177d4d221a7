"""What publishing costs an engine step: KV cache events read, translated, encoded and pushed while the engine works.

    python -m lab.benchmarks.publisher [--events-per-second 10000] [--step-ms 20] [--steps 25] [--turns 60] [--no-pin]
                                   [--foreign-max 0.1] [--patience-s 600] [--same-process] [--serialize] [--json OUT]

The engine (``lab.benchmarks.publisher_engine``) is a process of its own, as in TensorRT-LLM 1.2.1, and times its own
steps, which are real work and no sleep. The process of ``LLM`` receives the events' texts in a thread; the fake's
readers parse them to dicts when they are read, as 1.2.1's do. A third process stands for the consolidator and
acknowledges. Short blocks of steps of four kinds take turns, so that what else the machine does falls on all alike:

* ``off``: the engine tells nothing (``event_buffer_max_size`` 0, no statistics);
* ``sent``: it tells everything, and nobody reads;
* ``drained``: a reader with the feed's pauses has everything parsed, and throws it away: TensorRT-LLM's own share;
* ``published``: our feed reads, translates and hands over, and our publisher encodes and sends: the whole way.

``published`` against ``off`` is the price of publishing, ``published`` against ``drained`` is poolgrid's share of it.
A ratio is the median over the turns of (mean step of one kind / mean step of the other in the same turn), less 1, with
the 95 % interval of that median from 4000 bootstrap samples. The same of the processor time of the engine's thread in
a median step is given beside it: that time does not grow when others take the processor away.

What else the machine does decides whether 1 % can be seen. A turn in which other processes took more than
``--foreign-max`` of a CPU (from ``/proc``, time stolen by the hypervisor included) is thrown away and run again, and
none begins before the machine was quiet for a moment; after ``--patience-s`` the turns that there are must do. The
choice looks at others only, never at our own times, so it favours no kind.

The CPU time of the reader (the event loop's thread) is the difference between the end and the beginning of a block,
divided by its events; poolgrid's share is what ``published`` takes more than ``drained`` in the same turn.

By default the engine is pinned to the first CPU and all else to the others, because the engine's process has a core of
its own where GPUs are; ``--no-pin`` leaves that to the system. ``--same-process`` puts the engine into a thread of the
reader's process, where it also waits for the interpreter: an artefact that TensorRT-LLM does not have. ``--serialize``
makes each event's text in the engine's process at the moment it is told, as TensorRT-LLM does; that costs the engine
some 15 µs per event whoever reads, and is not poolgrid's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from lab.benchmarks.publisher_engine import BLOCK_SIZE, RESIDENT_BLOCKS, WINDOW, EnginePlan, Run, Steps, run_engine
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import AnyEvent
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.ingest import BATCH_FRAME, Acknowledged, Hello, Welcome
from poolgrid.kernel.worker_protocol.push_stream import PushStream
from poolgrid.plugins.trtllm.core.statistics import EngineStatistics, load_of
from poolgrid.plugins.trtllm.feed import TrtllmFeed
from poolgrid.plugins.trtllm.metrics import TrtllmMetrics
from poolgrid.plugins.trtllm.reader import FeedLimits
from poolgrid.server.process import garbage
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, DealerSocket
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher

KINDS = ("off", "sent", "drained", "published")
WARM_UP_STEPS = 3
BOOTSTRAP_SAMPLES = 4000
TURNS_MIN = 3
QUIET_S = 0.2
"""For so long others must have left the machine alone before a turn begins."""
BUSY_PAUSE_S = 0.3
WORKER_ID = "worker"
EPOCH = 1
LEASE_MS = 600_000
LOAD_INTERVAL_MS = 100.0
NUMERIC_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class _BatchHead(msgspec.Struct, array_like=True):
    worker_id: str
    dp_rank: int
    epoch: int
    seq: int


def acknowledge(ready: Connection) -> None:
    """Stand for the consolidator: welcome, acknowledge every batch, decode no event (it does that elsewhere)."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ready.send(f"tcp://127.0.0.1:{port}")
    head = msgspec.msgpack.Decoder(_BatchHead)
    while not ready.poll():
        if not socket.poll(100):
            continue
        peer, tag, frame = socket.recv_multipart()
        answer: Welcome | Acknowledged
        if tag == BATCH_FRAME:
            answer = Acknowledged(WORKER_ID, 0, EPOCH, head.decode(frame).seq + 1, "consolidator")
        else:
            message = codec.to_consolidator.decode(frame)
            if not isinstance(message, Hello):
                continue
            answer = Welcome(WORKER_ID, 0, EPOCH, message.oldest_seq, "consolidator", LEASE_MS)
        socket.send_multipart([peer, codec.from_consolidator.encode(answer)])
    socket.close(linger=0)
    context.term()


class Llm:
    """The reading side of ``LLM``, and the thread that takes its items from the engine's pipe."""

    def __init__(self, told: Connection) -> None:
        self.events: deque[str] = deque()
        self.statistics: deque[str] = deque()
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._all_here = asyncio.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._parsed(self.events)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._parsed(self.statistics)

    @staticmethod
    def _parsed(items: deque[str]) -> list[dict[str, Any]]:
        """Return what there is, parsed when it is read, as 1.2.1 does."""
        return [json.loads(items.popleft()) for _ in range(len(items))]

    async def until_told(self) -> None:
        """Wait until all that the engine told in this run is in the queues."""
        await self._all_here.wait()
        self._all_here.clear()

    @property
    def unread(self) -> int:
        """Return how many items wait for a reader."""
        return len(self.events) + len(self.statistics)

    def discard(self) -> None:
        """Throw away what nobody read."""
        self.events.clear()
        self.statistics.clear()

    def _receive(self) -> None:
        while True:
            try:
                item = self._told.recv()
            except EOFError:
                return
            if item is None:
                self._loop.call_soon_threadsafe(self._all_here.set)
                continue
            for queue, texts in zip((self.events, self.statistics), item, strict=True):
                queue.extend(texts)


@dataclass(frozen=True, slots=True)
class Block:
    """What one block of steps showed, in seconds: mean step, processor time of a median step, and of the reader."""

    step_s: float
    step_cpu_s: float
    reader_cpu_s: float
    events: int
    steps: int


class Bench:
    """The process of ``LLM``: runs blocks of steps with everything, something or nothing behind the engine."""

    def __init__(self, commands: Connection, told: Connection, publisher: EventPublisher) -> None:
        self._commands = commands
        self._llm = Llm(told)
        self._publisher = publisher
        self._load: EngineStatistics | None = None
        self._feed = TrtllmFeed(self._llm, 1, BLOCK_SIZE, SystemClock(), TrtllmMetrics(CollectorRegistry()))
        self._feed.wake()

    def _on_cache(self, rank: int, events: Sequence[Any]) -> None:
        told: list[AnyEvent] = list(events)
        load = None if self._load is None else load_of(self._load, self._feed.cached_blocks(rank))
        self._publisher.publish(told, load)

    def _on_load(self, rank: int, load: EngineStatistics) -> None:
        self._load = load

    async def _drain(self) -> None:
        limits = FeedLimits()
        while True:
            self._llm.get_kv_cache_events(timeout=0)
            self._llm.get_stats(timeout=0)
            await asyncio.sleep(limits.pause_min_ms / 1e3)

    async def _until_read(self) -> None:
        while self._llm.unread:  # noqa: ASYNC110 - the feed must not notice that it is watched
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)

    async def fill(self) -> None:
        """Let the feed learn the full cache."""
        await self._llm.until_told()
        reading = asyncio.create_task(self._feed.run(self._on_cache, self._on_load))
        await self._until_read()
        reading.cancel()

    async def block(self, kind: str, steps: int) -> Block:
        """Run one block of steps."""
        began = time.thread_time()
        reading: asyncio.Task[None] | None = None
        if kind == "published":
            reading = asyncio.create_task(self._feed.run(self._on_cache, self._on_load))
        elif kind == "drained":
            reading = asyncio.create_task(self._drain())
        self._commands.send(Run(steps, speaks=kind != "off", lasts=kind == "published"))
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        loop.add_reader(self._commands.fileno(), answered.set)
        await answered.wait()
        loop.remove_reader(self._commands.fileno())
        answer: Steps = self._commands.recv()
        if kind != "off":
            await self._llm.until_told()
        if reading is not None:
            await self._until_read()
            reading.cancel()
        self._llm.discard()
        if kind == "published":
            described = self._feed.describe()["ranks"]
            assert isinstance(described, list)
            if described[0]["gaps"] or described[0]["state"] != "exact":
                raise RuntimeError(f"the feed lost its place, so this measures nothing: {described[0]}")
        return Block(
            statistics.fmean(answer.wall_s[WARM_UP_STEPS:]),
            statistics.median(answer.cpu_s[WARM_UP_STEPS:]),
            time.thread_time() - began,
            answer.told_events,
            len(answer.wall_s),
        )


class Machine:
    """How much of the machine processes other than ours take."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = [os.getpid(), *processes]
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._before = self._now()

    def foreign(self) -> float:
        """Return the CPUs that others took on average since the last call."""
        before, self._before = self._before, self._now()
        busy, ours, clock_s = (now - then for now, then in zip(self._before, before, strict=True))
        return max(0.0, busy - ours) / max(clock_s, 1e-3)

    def _now(self) -> tuple[float, float, float]:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (
            int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
        ours = 0
        for process in self._processes:
            # The name of the program, in brackets, may have spaces in it.
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])
        busy = user + nice + system + irq + softirq + steal
        return busy / self._ticks_per_s, ours / self._ticks_per_s, time.monotonic()


@dataclass(frozen=True, slots=True)
class Patience:
    """Which turns count, and how long to try."""

    foreign_max: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The blocks by kind, in the order of their turns; how many were thrown away; the CPUs others took in the rest."""

    blocks: dict[str, list[Block]]
    thrown_away: int
    foreign: float


async def measure_turns(bench: Bench, machine: Machine, steps: int, turns: int, patience: Patience) -> Measured:
    """Run turns of blocks until there are enough that nothing disturbed."""
    blocks: dict[str, list[Block]] = {kind: [] for kind in KINDS}
    disturbed = 0
    quiet: list[float] = []
    until_s = time.monotonic() + patience.patience_s
    at = 0
    for kind in KINDS:  # warms up
        await bench.block(kind, steps)
    while len(quiet) < turns and time.monotonic() < until_s:
        machine.foreign()
        await asyncio.sleep(QUIET_S)
        if machine.foreign() > patience.foreign_max:
            await asyncio.sleep(BUSY_PAUSE_S)
            continue
        # Each turn begins with another kind.
        at = (at + 1) % len(KINDS)
        turn = {kind: await bench.block(kind, steps) for kind in KINDS[at:] + KINDS[:at]}
        foreign = machine.foreign()
        if foreign > patience.foreign_max:
            disturbed += 1
            continue
        quiet.append(foreign)
        for kind, block in turn.items():
            blocks[kind].append(block)
    if len(quiet) < TURNS_MIN:
        raise RuntimeError(
            f"measuring: the machine was quiet for {len(quiet)} turns in {patience.patience_s:.0f} s (others took more "
            f"than {patience.foreign_max} CPUs in {disturbed} turns, or always), at least {TURNS_MIN} are needed; "
            "wait for a quiet machine, or allow more with --foreign-max"
        )
    return Measured(blocks, disturbed, statistics.fmean(quiet))


async def measure(plan: EnginePlan, steps: int, turns: int, patience: Patience, own_process: bool) -> Measured:
    """Start everything, run the turns, end everything."""
    spawning = multiprocessing.get_context("spawn")
    commands, engine_commands = spawning.Pipe()
    told, engine_told = spawning.Pipe(duplex=False)
    ready, sink_ready = spawning.Pipe()
    sink = spawning.Process(target=acknowledge, args=(sink_ready,), daemon=True)
    sink.start()
    arguments = (plan, engine_commands, engine_told, own_process)
    engine: Any = (
        spawning.Process(target=run_engine, args=arguments, daemon=True)
        if own_process
        else threading.Thread(target=run_engine, args=arguments, daemon=True)
    )
    engine.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = WorkerMetrics(CollectorRegistry())
    card = WorkerCard(
        "model", Role.AGGREGATED, BLOCK_SIZE, WorkerLimits(64, 8192, RESIDENT_BLOCKS, WINDOW), "tcp://127.0.0.1:1"
    )
    publisher = EventPublisher(
        partial(DealerSocket, context, CONSOLIDATOR),
        ready.recv(),
        PushStream(WORKER_ID, 0, EPOCH, card),
        lambda: ((), ()),
        SystemClock(),
        metrics,
        LOAD_INTERVAL_MS,
    )
    publisher.start()
    try:
        await publisher.until_registered()
        bench = Bench(commands, told, publisher)
        await bench.fill()
        garbage.settle()
        machine = Machine(
            [process.pid for process in (sink, engine) if isinstance(process, BaseProcess) and process.pid]
        )
        return await measure_turns(bench, machine, steps, turns, patience)
    finally:
        publisher.close(orderly=False)
        context.term()
        commands.send(None)
        ready.send(None)
        engine.join()
        sink.join()


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    randomness = random.Random(7)
    medians = sorted(statistics.median(randomness.choices(values, k=len(values))) for _ in range(BOOTSTRAP_SAMPLES))
    return statistics.median(values), medians[BOOTSTRAP_SAMPLES // 40], medians[-1 - BOOTSTRAP_SAMPLES // 40]


def compare(of: list[Block], to: list[Block], what: Callable[[Block], float]) -> tuple[float, float, float]:
    """Return what ``of`` adds to ``to``, turn by turn: median and interval."""
    return median_with_interval([what(one) / what(other) - 1 for one, other in zip(of, to, strict=True)])


def summarize(found: dict[str, list[Block]]) -> dict[str, Any]:
    """Return the figures of one measurement."""
    figures: dict[str, Any] = {
        "step_ms": {kind: statistics.median(block.step_s for block in found[kind]) * 1e3 for kind in KINDS}
    }
    for base in ("off", "sent", "drained"):
        for kind in KINDS[KINDS.index(base) + 1 :]:
            figures[f"{kind}_against_{base}"] = {
                "step": compare(found[kind], found[base], lambda block: block.step_s),
                "step_cpu": compare(found[kind], found[base], lambda block: block.step_cpu_s),
            }
    drained, published = found["drained"], found["published"]
    per_event = {
        "all": [block.reader_cpu_s / block.events * 1e6 for block in published],
        "tensorrt_llm": [block.reader_cpu_s / block.events * 1e6 for block in drained],
        "poolgrid": [
            (ours.reader_cpu_s - theirs.reader_cpu_s) / ours.events * 1e6
            for ours, theirs in zip(published, drained, strict=True)
        ],
    }
    figures["reader_us_per_event"] = {name: median_with_interval(values) for name, values in per_event.items()}
    events_per_step = published[0].events / published[0].steps
    figures["reader_ms_per_step"] = {
        name: statistics.median(values) * events_per_step / 1e3 for name, values in per_event.items()
    }
    return figures


def show(figures: dict[str, Any], title: str, console: Console) -> None:
    """Print the figures of one measurement."""
    table = Table(title=title)
    for column in ("", "step (ms)", "added to off", "its CPU time", "added to drained", "its CPU time"):
        table.add_column(column, justify="right")

    def said(kind: str, base: str, what: str) -> str:
        if f"{kind}_against_{base}" not in figures:
            return ""
        middle, low, high = figures[f"{kind}_against_{base}"][what]
        return f"{middle:+.2%} [{low:+.2%}, {high:+.2%}]"

    for kind in KINDS:
        table.add_row(
            kind,
            f"{figures['step_ms'][kind]:.3f}",
            said(kind, "off", "step"),
            said(kind, "off", "step_cpu"),
            said(kind, "drained", "step"),
            said(kind, "drained", "step_cpu"),
        )
    console.print(table)
    for name, what in (
        ("poolgrid", "poolgrid (parse, translate, encode, push)"),
        ("tensorrt_llm", "TensorRT-LLM's reader (queue, JSON, waking up)"),
        ("all", "both"),
    ):
        middle, low, high = figures["reader_us_per_event"][name]
        per_step = figures["reader_ms_per_step"][name]
        console.print(f"{what}: {middle:.2f} µs per event [{low:.2f}, {high:.2f}], {per_step:.2f} ms per step")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events-per-second", type=int, default=10_000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--python-share", type=float, default=0.25, help="of a step, in the engine")
    parser.add_argument("--steps", type=int, default=25, help="in a block")
    parser.add_argument("--turns", type=int, default=60, help="of blocks of each kind")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--foreign-max", type=float, default=0.1, help="CPUs that others may take in a turn")
    parser.add_argument("--patience-s", type=float, default=600.0)
    parser.add_argument("--same-process", action="store_true")
    parser.add_argument("--serialize", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS or arguments.turns < 1:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, and --turns at least 1")

    cpus = sorted(os.sched_getaffinity(0))
    pins = arguments.pin and not arguments.same_process and len(cpus) > 1
    for name in NUMERIC_THREADS:
        os.environ[name] = "1"
    plan = EnginePlan(
        max(1, round(arguments.events_per_second * arguments.step_ms / 1e3)),
        arguments.step_ms,
        arguments.python_share,
        arguments.serialize,
        cpus[0] if pins else None,
    )
    if pins:
        os.sched_setaffinity(0, set(cpus[1:]))
    patience = Patience(arguments.foreign_max, arguments.patience_s)
    measured = asyncio.run(measure(plan, arguments.steps, arguments.turns, patience, not arguments.same_process))
    figures = summarize(measured.blocks)
    turns = len(measured.blocks["off"])
    figures["turns"] = turns
    figures["turns_thrown_away"] = measured.thrown_away
    figures["foreign_cpus"] = measured.foreign
    figures["events_per_second"] = arguments.events_per_second
    figures["events_per_step"] = plan.events_per_step
    console = Console(width=140)
    where = "a thread of the reader's process" if arguments.same_process else "a process of its own"
    show(figures, f"engine in {where}, {arguments.events_per_second:,} events per second", console)
    console.print(
        f"{turns} turns of {arguments.steps} steps of each kind, during which others took {measured.foreign:.2f} CPUs; "
        f"{measured.thrown_away} turns thrown away"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
