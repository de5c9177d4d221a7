"""Processes that are stopped for several leases under verified load: clients see a pause, and nobody is thrown out."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.disturbed_load import assert_unharmed, load_while
from tests.e2e.expectation import PLAIN
from tests.e2e.processes import Process, eventually, is_settled, metric, ready_workers

pytestmark = pytest.mark.e2e

MAKER = ("--served-model-name", "tiny", "--vocabulary-size", "4096", "--speedup", "10")
LEASE_MS = 6000
"""Long enough that a process which is not stopped is never silent for so long, also on a loaded machine."""
PAUSE_S = 13.0
"""Two leases."""


@contextmanager
def pool_with_short_leases(directory: Path) -> Iterator[tuple[Process, list[Process]]]:
    """Run a router with its consolidator inside, and two workers; all give up on what is silent for a lease."""
    with ExitStack() as stack:
        short = ("--lease-ms", str(LEASE_MS), "--worker-timeout-ms", str(LEASE_MS))
        router = stack.enter_context(Process("router", "--port", "0", "--data-dir", str(directory), *short))
        router.wait_ready()
        workers = [
            stack.enter_context(
                Process(
                    *("worker", "--worker-id", name, "--consolidator", router.word("ingest"), *MAKER),
                )
            )
            for name in ("w0", "w1")
        ]
        for worker in workers:
            worker.wait_ready()
        eventually("all workers are reachable", lambda: len(ready_workers(router.url)) == 2)
        yield router, workers


def stop_for(process: Process, seconds: float) -> None:
    process.signal(signal.SIGSTOP)
    select.select([], [], [], seconds)
    process.signal(signal.SIGCONT)


def test_a_router_that_is_stopped_for_several_leases_throws_nobody_out_and_fails_no_request(tmp_path: Path) -> None:
    with pool_with_short_leases(tmp_path) as (router, _):
        report = load_while(router.url, lambda: stop_for(router, PAUSE_S), requests=60, vocabulary=PLAIN)

        assert_unharmed(report)
        assert metric(router.url, "poolgrid_consolidator_lease_expiries_total") == 0
        eventually("the index is true", lambda: is_settled(router.url))


def test_a_worker_that_is_stopped_for_several_leases_costs_no_request_and_comes_back(tmp_path: Path) -> None:
    with pool_with_short_leases(tmp_path) as (router, workers):
        report = load_while(router.url, lambda: stop_for(workers[0], PAUSE_S), requests=60, vocabulary=PLAIN)

        assert_unharmed(report)
        eventually("it is back", lambda: len(ready_workers(router.url)) == 2)
        assert metric(router.url, "poolgrid_consolidator_lease_expiries_total") <= 1, "the other one was never silent"
        eventually("the index is true", lambda: is_settled(router.url))
