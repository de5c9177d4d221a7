"""Runs attacks one after the other: a fresh pool, bystanders before and throughout, a look before and after.

Rules
    1. A pool serves attacks that follow each other and want the same shape, until one of them fells it; the next
       attack then gets a new one.
    2. Before the first attack the pool is warmed up; its memory and descriptors at that moment are "before" for all
       attacks on it, so that what each leaves behind adds up. Idle latency is measured anew before each attack.
    3. After an attack the harness looks until everything has come back, at most ``SETTLE_S`` long.
    4. Every wait has an end; an attack that runs past its own time is cancelled and said to have hung.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lab.attacks import slow_disk
from lab.attacks.attack import Attack, Outcome, Part, Scene
from lab.attacks.bystanders import Bystanders, BystanderSpec, Window
from lab.attacks.pool import ATTACKER_HOST, AttackedPool, Look, Shape
from lab.attacks.table import Row
from lab.attacks.verdict import Seen, judge, unsettled
from lab.benchmarks.services import PoolFailed
from tests.nats.servers import BINARY, MISSING

SETTLE_S = 20.0
"""How long memory, descriptors and requests may take to come back."""

LOOK_INTERVAL_S = 0.5
PEAK_INTERVAL_S = 0.25
HANG_MARGIN_S = 60.0
"""Beyond the time that an attack was given, to clean up after itself."""

ATTACKER_NICENESS = 15
"""What the pool and the bystanders leave over is plenty for an attacker."""

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
OWN_AUTOGROUP = Path("/proc/self/autogroup")
"""How the processor is shared out among sessions, see sched(7)."""

THREAD_END_TIMEOUT_S = 10.0

BOOKS_SETTLE_S = 10.0
"""How long the requests of a warm-up may take to be off all books."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is done."""

    seconds: float = 10.0
    """How long each attack goes on."""
    idle_s: float = 4.0
    """How long the bystanders are measured before."""
    window_min_s: float = 1.5
    """Bystanders send for so long at least, also when the attack is over at once; as long as before it where their
    times are judged."""
    share: float = 1.0
    """Of the full size of each attack."""
    seed: int = 0
    settle_s: float = SETTLE_S
    judge_latency: bool = True
    """Off where other work shares the cores: times say nothing then."""
    lease_ms: int | None = None
    """For how long any process may be silent; ``None`` = the defaults. Where other work shares the cores, seconds
    without CPU say nothing of an attack."""
    requests_min: int = 0
    """Bystanders send as many at least, however long that takes."""
    pause_s: float = 0.02
    """Between two requests of a bystander."""
    books_settle_s: float = BOOKS_SETTLE_S


class AttackerThread:
    """An event loop in a thread of its own that gives way: an attacker elsewhere takes no CPU from the pool's machine.

    Threads and processes that are started from it give way as well. Where times are not judged none gives way: beside
    work that leaves nothing over an attack would take minutes. Where Linux shares the processor out by sessions
    (autogroups), a thread's niceness says nothing to the pool's processes, which have sessions of their own: then the
    harness's whole session gives way, until the end.
    """

    def __init__(self, gives_way: bool) -> None:
        self._gives_way = gives_way
        self._group_nice = session_nice(ATTACKER_NICENESS) if gives_way else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="attacker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        if self._gives_way and sys.platform.startswith("linux"):  # elsewhere priorities are of whole processes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ATTACKER_NICENESS)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def run(self, attack: Coroutine[Any, Any, Outcome], timeout_s: float) -> Outcome:
        """Run an attack in it; raises ``TimeoutError`` when it does not end, and what the attack raises."""
        future = asyncio.run_coroutine_threadsafe(attack, self._loop)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(THREAD_END_TIMEOUT_S)
        if self._group_nice is not None:
            session_nice(self._group_nice)


def session_nice(nice: int) -> int | None:
    """Set how far this session's processes give way to other sessions', and return what it was before.

    ``None`` where the kernel does not share the processor out by sessions (``sched_autogroup_enabled``), or where this
    may not be said.
    """
    try:
        if AUTOGROUPS.read_text().strip() != "1":
            return None
        before = int(OWN_AUTOGROUP.read_text().rsplit(maxsplit=1)[1])
        OWN_AUTOGROUP.write_text(str(nice))
    except (OSError, ValueError, IndexError):
        return None
    return before


class Stage:
    """A pool and the bystanders of it."""

    def __init__(self, shape: Shape, directory: Path, lease_ms: int | None = None) -> None:
        self.shape = shape
        self.directory = directory
        directory.mkdir(parents=True)
        environment = slow_disk.environment(directory) if shape.slow_disk else None
        self.pool = AttackedPool(shape, directory, environment, lease_ms)
        self.bystanders: Bystanders | None = None
        self.before = Look()

    async def start(self, options: Options) -> None:
        """Start everything, warm it up and take the look that later ones are compared with."""
        pool = self.pool
        await pool.start()
        self.bystanders = Bystanders(
            BystanderSpec(
                url=pool.url,
                api_key=pool.keys["bystander"],
                model=pool.model.name,
                seed=options.seed + 1,
                requests_min=options.requests_min,
                pause_s=options.pause_s,
            ),
            self.directory,
        )
        await self.bystanders.start()
        await pool.warm()
        window = await self.bystanders.window(min(2.0, options.idle_s))
        if window.errors or window.wrong:
            raise PoolFailed(f"the pool does not serve before any attack: {window.samples}")
        self.before = await self.settled(options.books_settle_s)
        if any(self.before.books.values()) or self.before.silent:
            raise PoolFailed(f"the pool is not quiet before any attack: {self.before}")
        pool.new_log_text()

    async def settled(self, timeout_s: float, before: Look | None = None) -> Look:
        """Look until nothing is left of what ran, or until the time is over; return the last look."""
        assert self.bystanders is not None
        deadline = time.monotonic() + timeout_s
        while True:
            look = await self.pool.look()
            left = unsettled(before or look, look, self.bystanders.spec.connections)
            if not left or time.monotonic() > deadline:
                return look
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def stop(self) -> None:
        """End everything."""
        if self.bystanders is not None:
            await self.bystanders.stop()
        await self.pool.stop()


async def run_parts(
    parts: Sequence[Part], options: Options, directory: Path, show: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Run the attacks of all parts and return their rows; ``show`` is told each as it comes."""
    rows: list[Row] = []
    stage: Stage | None = None
    attacker = AttackerThread(options.judge_latency)
    try:
        for number, (part, attack) in enumerate((each, attack) for each in parts for attack in each.attacks):
            if stage is not None and (rows[-1].verdict == "fell" or stage.shape != attack.shape):
                await stage.stop()
                stage = None
            started = time.monotonic()
            reason = slow_disk.missing() if attack.shape.slow_disk else ""
            if attack.shape.finds == "nats" and not BINARY:
                reason = MISSING
            if reason:
                row = Row(part.name, attack.name, "skipped", reason)
            else:
                try:
                    if stage is None:
                        stage = Stage(attack.shape, directory / f"{number}-{part.name}", options.lease_ms)
                        await stage.start(options)
                    row = await _run(
                        part, attack, stage, attacker, options, random.Random(f"{options.seed}/{attack.name}")
                    )
                except (PoolFailed, TimeoutError, httpx.HTTPError) as error:
                    what = str(error) or type(error).__name__
                    row = Row(part.name, attack.name, "fell", "", [f"it could not be run: {what}"])
            row.took_s = time.monotonic() - started
            rows.append(row)
            show(row)
    finally:
        if stage is not None:
            await stage.stop()
        attacker.stop()
    return rows


async def _run(
    part: Part,
    attack: Attack,
    stage: Stage,
    attacker: AttackerThread,
    options: Options,
    source: random.Random,
) -> Row:
    assert stage.bystanders is not None
    pool = stage.pool
    judge_latency = attack.judge_latency and options.judge_latency
    idle = await stage.bystanders.window(options.idle_s) if judge_latency else Window()
    start_mb = pool.resident_mb()
    peak_mb = start_mb

    async def watch() -> None:
        nonlocal peak_mb
        while True:
            peak_mb = max(peak_mb, pool.resident_mb())
            await asyncio.sleep(PEAK_INTERVAL_S)

    scratch = stage.directory / f"scratch-{attack.name.replace(' ', '-').replace('/', '-')}"
    scratch.mkdir()
    seconds = max(options.seconds, attack.seconds_min)
    limit_s = 2 * seconds + HANG_MARGIN_S
    scene = Scene(pool, scratch, seconds, options.share, source, asyncio.get_running_loop())
    if not attack.alone:
        await stage.bystanders.open()
    began = time.monotonic()
    watching = asyncio.create_task(watch())
    try:
        if attack.alone:
            # It measures: whoever gives way to others measures them.
            async with asyncio.timeout(limit_s):
                outcome = await attack.run(scene)
        else:
            outcome = await attacker.run(attack.run(scene), limit_s)
    except TimeoutError:
        outcome = Outcome("", [f"it did not end within {limit_s:.0f} s"])
    except Exception as error:
        # A fault of the attack's own code is a failed row and no reason to lose the others'.
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome("", [f"the attack itself failed: {error!r} at {Path(where.filename).name}:{where.lineno}"])
    finally:
        watching.cancel()
    during = Window()
    if not attack.alone:
        window_s = max(options.window_min_s, options.idle_s if judge_latency else 0.0)
        await asyncio.sleep(max(0.0, window_s - (time.monotonic() - began)))
        during = await stage.bystanders.close()
    if outcome.skipped:
        return Row(part.name, attack.name, "skipped", outcome.skipped)
    after = await stage.settled(options.settle_s, stage.before)
    seen = Seen(
        outcome,
        idle,
        during,
        stage.before,
        after,
        pool.deaths(),
        peak_mb - start_mb,
        pool.new_log_text(),
        stage.bystanders.spec.connections,
    )
    faults = judge(attack, seen, options.judge_latency)
    # What has run out by now is not the next attack's.
    stage.before.lease_expiries = after.lease_expiries
    return Row(
        part.name,
        attack.name,
        "fell" if faults else "held",
        outcome.got,
        faults,
        during.requests,
        during.errors,
        during.wrong,
        idle.short_p99_ms,
        during.short_p99_ms,
        seen.latency_ratio,
        seen.memory_ratio,
        seen.peak_growth_mb,
    )


def loopback_allows(address: str = ATTACKER_HOST) -> str:
    """Return why a second loopback address cannot be used here; empty = it can."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return f"binding {address}: {error.strerror}; attackers need a loopback address of their own"
    return ""
