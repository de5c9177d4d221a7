"""Verified load, disturbed in the middle: every text is checked, and nothing may be lost."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import httpx
import psutil

from poolgrid.plugins.bench.command import measure_one
from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.plugins.bench.statistics import Report
from poolgrid.plugins.simulated.core.next_token import Vocabulary
from tests.e2e.expectation import SPOKEN, Verifier
from tests.e2e.processes import eventually, metric

_seeds = itertools.count()
AGAIN_S = 10.0
"""What disturbs a load may outlast it for so long, before another load begins."""


def load_while(url: str, disturb: Callable[[], None], requests: int = 200, vocabulary: Vocabulary = SPOKEN) -> Report:
    """Run verified streaming load and disturb the pool in the middle of it.

    No two loads share a prompt: those of an earlier one would all go to the workers that still hold them.
    """

    def load() -> Report:
        settings = BenchSettings(url=url, concurrency=(16,), isl=500, osl=100, requests=requests, seed=next(_seeds))
        verify = Verifier(vocabulary)
        report = measure_one(settings, verify=verify)
        assert verify.checked == requests
        return report

    tokens_before = metric(url, "poolgrid_frontend_output_tokens_total")
    disturbed = threading.Event()

    def disturb_once_it_runs() -> None:
        eventually(
            "the load has begun", lambda: metric(url, "poolgrid_frontend_output_tokens_total") > tokens_before + 1000
        )
        disturb()
        disturbed.set()

    disturber = threading.Thread(target=disturb_once_it_runs)
    disturber.start()
    report = load()
    # On a busy machine the first load may be over before what disturbs it got any CPU.
    while disturber.is_alive() and not disturbed.wait(AGAIN_S):
        assert_unharmed(report)
        report = load()
    disturber.join()
    assert disturbed.is_set(), "nothing was disturbed"
    return report


def kill_at_work(router_url: str, worker_id: str, worker: psutil.Process) -> None:
    """Kill a worker that has requests."""
    with held_at_work(router_url, worker_id, worker):
        worker.kill()


@contextlib.contextmanager
def held_at_work(router_url: str, worker_id: str, worker: psutil.Process, requests: int = 1) -> Iterator[None]:
    """A worker stands still with so many requests while this context lasts: none of them can end before.

    Polling for them while the worker runs may miss them all: on a quick machine they end between two looks.
    """
    worker.send_signal(signal.SIGSTOP)
    try:
        eventually(f"it has {requests} requests", lambda: active_requests(router_url, worker_id) >= requests)
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)


def active_requests(router_url: str, worker_id: str) -> int:
    """Return how many requests a worker of a pool has, as its router knows it."""
    workers = httpx.get(f"{router_url}/v1/workers").json()["data"]
    return sum(int(each["active_requests"]) for each in workers if each["worker_id"] == worker_id)


def assert_unharmed(report: Report) -> None:
    assert report.errors == 0, report.errors_by_kind
    assert report.wrong_texts == 0
