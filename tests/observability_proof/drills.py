"""One drill for each alert: what it warns of is done to the fleet, for real wherever that can be."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from tests.e2e.processes import Process
from tests.observability_proof.fleet import Fleet, prompt
from tests.observability_proof.stack import SCRAPE_S, Stack, faketime, pause

PATIENCE_S = 120.0

QUIET_S = 400.0
"""Longest wait for an alert to end that fires before its drill: such a one would prove nothing. Longer than the longest
window of the rules at the proof's pace."""


@dataclass(frozen=True)
class Drill:
    """What is done, and which alerts must fire of it."""

    what: str
    namespace: str
    """Of the fleet, where it is done and where the alerts must fire: elsewhere the same alert may fire of another."""
    alerts: tuple[str, ...]
    cause: Callable[[Fleet], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Fired:
    """What became of an alert in its drill."""

    alert: str
    drill: str
    seconds: float | None
    """Until it fired and Alertmanager knew; ``None`` when it did not."""
    wrong: str = ""
    """Why there is no time."""


@contextlib.contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Stand a process still, and let it go on."""
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


@contextlib.contextmanager
def _many(ask: Callable[[int], object], at_a_time: int) -> Iterator[None]:
    """Ask from several threads, again and again."""
    over = threading.Event()

    def run(place: int) -> None:
        number = place
        while not over.is_set():
            ask(number)
            number += at_a_time

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(at_a_time)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def waiting(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    """Have some more clients than a pool has room for, so that there is something to see of waiting."""
    return _many(lambda number: fleet.ask(fleet.staged_url, prompt(number, 600), 10), 10)


def overload(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    return _many(lambda number: fleet.ask(fleet.staged_url, prompt(number, 600), 40), 34)


def hot_prefix(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    fleet.ask(fleet.lone_url, prompt(77, 320), 2)
    return _many(lambda number: fleet.ask(fleet.lone_url, [*prompt(77, 320), 5 + number % 900], 150), 16)


def too_many_prompts(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    return _many(lambda number: fleet.ask(fleet.lone_url, prompt(200 + number % 36, 1400), 2), 2)


@contextlib.contextmanager
def kill_workers_at_work(fleet: Fleet) -> Iterator[None]:
    def ask(number: int) -> None:
        if fleet.ask(fleet.lone_url, prompt(300 + number, 200), 600) != 200:
            pause(1)  # refused at once, as there is nobody left: who asks again and again hides those that failed

    with _many(ask, 12):
        pause(4)
        for number in range(4):
            fleet.processes[f"lone-{number}"].kill()
        yield
    fleet.start_lone_workers()


def stand_still_prefill(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    return stopped(fleet.processes["staged-prefill"])


def consolidator_stands_still(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    return stopped(fleet.processes["consolidator"])


def pool_router_stands_still(fleet: Fleet) -> contextlib.AbstractContextManager[None]:
    return stopped(fleet.processes["router of cheap"])


@contextlib.contextmanager
def pool_worker_stands_still(fleet: Fleet) -> Iterator[None]:
    key = fleet.tenant_keys["acme"]

    def ask(number: int) -> int:
        return fleet.ask(fleet.front_url, prompt(number, 200), 60, key, x_itl_target_ms="10")

    # Those that come now wait for their first token in vain: failures, beside which few are served well.
    with stopped(fleet.processes["quick-0"]), _many(ask, 8):
        yield


@contextlib.contextmanager
def disk_full(fleet: Fleet) -> Iterator[None]:
    writers = [psutil.Process(fleet.processes[name].pid) for name in ("consolidator", "staged router")]
    for writer in writers:
        writer.rlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for writer in writers:
            writer.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def nats_gone(fleet: Fleet) -> Iterator[None]:
    fleet.nats.kill()
    try:
        yield
    finally:
        fleet.nats.start()


@contextlib.contextmanager
def publisher_gone(fleet: Fleet) -> Iterator[None]:
    fleet.publisher.kill()
    yield


@contextlib.contextmanager
def silent_engine(fleet: Fleet) -> Iterator[None]:
    router = fleet.start_trtllm("silent", {"vocabulary_size": 4096}, "--no-publish-events-and-metrics")
    for number in range(70):
        fleet.ask(router.url, [*prompt(5, 320), *[number % 900 + 5] * 20], 2)
    yield


@contextlib.contextmanager
def hanging_engine(fleet: Fleet) -> Iterator[None]:
    stop = fleet.directory / "hang"
    behaviour = {"vocabulary_size": 4096, "speedup": 1.0, "stop_file": str(stop)}
    fleet.start_trtllm("hanging", behaviour)
    stop.touch()
    try:
        yield
    finally:
        stop.unlink()


@contextlib.contextmanager
def short_certificate(fleet: Fleet) -> Iterator[None]:
    fleet.issue(days=5)
    try:
        yield
    finally:
        fleet.issue(days=90)


@contextlib.contextmanager
def skewed_clock(fleet: Fleet) -> Iterator[None]:
    ingest = fleet.processes["consolidator"].word("ingest")
    arguments = ("worker", "--worker-id", "skewed", "--served-model-name", "another", "--vocabulary-size", "4096")
    environment = {"LD_PRELOAD": faketime(), "FAKETIME": "+30s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    worker = fleet.run("skewed", *arguments, "--consolidator", ingest, environment=environment).wait_ready()
    fleet.stack.scrape("skewed", [worker.url], namespace="skewed", pool="skewed", component="worker")
    yield
    fleet.stack.forget("skewed")
    worker.stop()


@contextlib.contextmanager
def broken_key_file(fleet: Fleet) -> Iterator[None]:
    good = fleet.keys.read_bytes()
    fleet.keys.write_bytes(b"{")
    try:
        yield
    finally:
        fleet.keys.write_bytes(good)


DRILLS = (
    Drill("a certificate that ends in 5 days", "lone", ("PoolgridCertificateExpiring",), short_certificate),
    Drill("a key file that ends in the middle", "fleet", ("PoolgridKeyFileStale",), broken_key_file),
    Drill("a worker whose clock is 30 s ahead (libfaketime)", "skewed", ("PoolgridClockSkew",), skewed_clock),
    Drill("an engine that keeps its events to itself", "silent", ("PoolgridReuseParted",), silent_engine),
    Drill("an engine whose process stands still", "hanging", ("PoolgridEngineUnhealthy",), hanging_engine),
    Drill("a KV block manager is killed", "lone", ("PoolgridStreamBroken",), publisher_gone),
    Drill("the disk takes nothing more (RLIMIT_FSIZE)", "staged", ("PoolgridJournalFailing",), disk_full),
    Drill("the consolidator stands still", "staged", ("PoolgridJournalSilent",), consolidator_stands_still),
    Drill("the NATS server is killed", "streamed", ("PoolgridNoConsolidatorActive",), nats_gone),
    Drill("a pool's router stands still", "fleet", ("PoolgridPoolUnreachable",), pool_router_stands_still),
    Drill(
        "a pool's worker stands still, its router does not", "fleet", ("PoolgridBreakerOpen",), pool_worker_stands_still
    ),
    Drill(
        "34 clients at a pool for 4",
        "staged",
        ("PoolgridQueueFilling", "PoolgridTtftBudgetBurnsFast", "PoolgridTtftBudgetBurns"),
        overload,
    ),
    Drill("everybody sends one prompt, and load counts for nothing", "lone", ("PoolgridSpread",), hot_prefix),
    Drill("36 long prompts in turn, and caches for a few", "lone", ("PoolgridCacheThrashing",), too_many_prompts),
    Drill(
        "the prefill worker stands still",
        "staged",
        ("PoolgridNoWorkerOfRole", "PoolgridTargetDown"),
        stand_still_prefill,
    ),
    Drill(
        "all workers are killed at work",
        "lone",
        ("PoolgridErrorBudgetBurnsFast", "PoolgridErrorBudgetBurns"),
        kill_workers_at_work,
    ),
)


def hold(stack: Stack, fleet: Fleet, drill: Drill) -> list[Fired]:
    """Hold a drill, and say when its alerts fired."""
    wanted = {(alert, drill.namespace) for alert in drill.alerts}
    quiet_by = time.monotonic() + QUIET_S
    while loud := wanted & stack.coming():
        if time.monotonic() > quiet_by:
            words = ", ".join(sorted(alert for alert, _ in loud))
            return [Fired(alert, drill.what, None, f"{words} fired before it") for alert in drill.alerts]
        pause(SCRAPE_S)
    seconds: dict[str, float] = {}
    with drill.cause(fleet):
        began = time.monotonic()
        while len(seconds) < len(drill.alerts) and time.monotonic() < began + PATIENCE_S:
            for alert, _ in wanted & stack.firing() & set(stack.told()):
                seconds.setdefault(alert, time.monotonic() - began)
            pause(SCRAPE_S / 4)
    return [
        Fired(alert, drill.what, seconds.get(alert), "" if alert in seconds else "did not fire")
        for alert in drill.alerts
    ]
