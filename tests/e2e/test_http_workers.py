"""Several processes behind one port: together they are one router."""

from __future__ import annotations

import contextlib
import signal

import httpx
import psutil
import pytest

from tests.e2e.processes import Process, eventually, metric, ready_workers

pytestmark = pytest.mark.e2e


def ask(url: str) -> int:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code


def http_processes(router: Process) -> list[psutil.Process]:
    found = []
    for child in router.descendants():
        # One that was killed is a zombie until its parent has seen it, and then is gone.
        with contextlib.suppress(psutil.Error):
            if "router" in child.cmdline():
                found.append(child)
    return found


def test_processes_share_a_port_answer_for_all_and_are_replaced_when_they_die() -> None:
    with Process("router", "--port", "0", "--http-workers", "2") as router:
        router.wait_ready()
        url = router.url
        with Process(
            *("worker", "--worker-id", "w", "--model", "tiny", "--consolidator", router.word("ingest")),
            *("--speedup", "50", "--vocabulary-size", "4096"),
        ) as worker:
            worker.wait_ready()
            # Each look is a new connection, which the kernel gives to either process.
            eventually("both processes reach the worker", lambda: all(ready_workers(url) == ["w"] for _ in range(12)))
            assert [ask(url) for _ in range(12)] == [200] * 12
            assert metric(url, "poolgrid_router_http_workers") == 2
            assert metric(url, "poolgrid_frontend_requests_total", status="200") == 12
            assert metric(url, "poolgrid_frontend_output_sequence_tokens_count") == 12
            assert metric(url, "poolgrid_router_workers", state="ready") == 1, "a fact of the pool is not counted twice"

            processes = http_processes(router)
            assert len(processes) == 2
            processes[0].send_signal(signal.SIGKILL)

            def replaced() -> bool:
                others = {child.pid for child in http_processes(router)}
                return len(others) == 2 and processes[0].pid not in others

            eventually("a new process takes its place", replaced)
            eventually("all are ready", lambda: all(httpx.get(f"{url}/ready").status_code == 200 for _ in range(12)))
            eventually("all reach the worker", lambda: all(ready_workers(url) == ["w"] for _ in range(12)))
            assert [ask(url) for _ in range(8)] == [200] * 8

            worker.stop()
        below = router.descendants()
        status, errors = router.stop()
        assert status == 0, errors
        assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
