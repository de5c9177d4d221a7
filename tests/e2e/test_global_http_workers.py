"""Several processes behind one port of a global router: they wait, limit, reload and answer as one."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from poolgrid.cli.main import app
from poolgrid.frontend.access import key_file
from poolgrid.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e.fleet_stream import follow_until
from tests.e2e.processes import Process, eventually, metric
from tests.e2e.test_global_router import free_port
from tests.e2e.test_http_workers import CLIENT

pytestmark = pytest.mark.e2e

PER_MINUTE = 10
QUEUE_LIMIT = 3
CAPACITY = 4
OPERATOR = {"authorization": "Bearer pg-operator"}


def keys(path: Path) -> Path:
    tenants = {
        "ops": Tenant(keys=(Key(key_file.hash_key("pg-operator")),), operator=True),
        "limited": Tenant(keys=(Key(key_file.hash_key("pg-limited")),), requests_per_minute=PER_MINUTE),
    }
    key_file.write(path, KeyDocument(1, "5" * 64, tenants))
    return path


def document(url: str, ttft_max_ms: int) -> str:
    grid = {"ttft_min_ms": 0, "ttft_max_ms": ttft_max_ms, "ttft_resolution": 1}
    itl = {"itl_min_ms": 0, "itl_max_ms": 100, "itl_resolution": 1}
    pools = [{"name": "one", "url": url}]
    return json.dumps({"mode": "aggregated", "aggregated": {"pools": pools, **grid, **itl, "mapping": [["one"]]}})


def body(max_tokens: int, stream: bool = False) -> dict[str, object]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


def ask(url: str, key: str = "pg-operator") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return CLIENT.post(f"{url}/v1/completions", json=body(2), headers=headers, timeout=60)


def ttft_max_ms(url: str) -> set[int]:
    """Return what the documents of the processes say; each look may come to another one."""
    answers = [CLIENT.get(f"{url}/v1/config", headers=OPERATOR).json() for _ in range(10)]
    return {answer["document"]["aggregated"]["ttft_max_ms"] for answer in answers}


def processes(router: Process) -> dict[int, psutil.Process]:
    found = {}
    for child in router.descendants():
        with contextlib.suppress(psutil.Error):
            if "global-router" in child.cmdline():
                found[child.pid] = child
    return found


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Process]:
    """A pool with room for four requests at a time, and two processes of a global router before it."""
    port, ingest = free_port(), free_port()
    grid = tmp_path / "grid.json"
    grid.write_text(document(f"http://127.0.0.1:{port}", 1000))
    worker = ("worker", "--consolidator", f"tcp://127.0.0.1:{ingest}", "--model", "tiny", "--speedup", "20")
    small = ("--max-batch-size", str(CAPACITY // 2), "--vocabulary-size", "4096")
    options = ("--config", str(grid), "--port", "0", "--http-workers", "2")
    limits = ("--api-keys", str(keys(tmp_path / "keys.json")), "--queue-limit", str(QUEUE_LIMIT))
    # All at once: each waits for whom it needs.
    with (
        Process("router", "--port", str(port), "--ingest-port", str(ingest)) as pool,
        Process(*worker, *small) as running,
        Process("global-router", *options, *limits) as router,
    ):
        for process in (pool, running, router):
            process.wait_ready()
        yield router
        below = router.descendants()
        status, errors = router.stop()
        assert status == 0, errors
        assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_processes_of_a_global_router_share_limits_and_documents_and_each_has_a_queue(
    group: Process, tmp_path: Path
) -> None:
    url = group.url
    eventually("both processes reach the pool", lambda: all(ask(url).status_code == 200 for _ in range(10)))
    # Two requests that ended are a rate: whoever has seen fewer cannot say when to come back.
    eventually(
        "both processes know how fast requests end",
        lambda: all(
            ask(url).status_code == 200
            and CLIENT.get(f"{url}/v1/pools", headers=OPERATOR).json()["queue"]["retry_after_s"] is not None
            for _ in range(10)
        ),
    )
    assert metric(url, "poolgrid_global_router_http_workers") == 2

    # -- decisions: whichever is asked knows those of both
    listed = CLIENT.get(f"{url}/v1/decisions?limit=20", headers=OPERATOR).json()["data"]
    assert len(listed) == 20
    about = [CLIENT.get(f"{url}/v1/decisions/{row['request_id']}", headers=OPERATOR) for row in listed]
    assert [answer.status_code for answer in about] == [200] * 20

    # -- waiting: while the pool is full each process has a queue, and who finds it full is told so
    refused = metric(url, "poolgrid_global_router_refused_requests_total", code="busy")
    with ThreadPoolExecutor(40) as threads, httpx.Client(timeout=60) as client:
        with ExitStack() as held:
            for _ in range(CAPACITY):
                request = {"json": body(100_000, stream=True), "headers": OPERATOR}
                held.enter_context(client.stream("POST", f"{url}/v1/completions", **request))  # type: ignore[arg-type]
            asked = [threads.submit(ask, url) for _ in range(40)]
            eventually(
                "both queues are full, and all others have their answer",
                lambda: (
                    metric(url, "poolgrid_global_router_queued_requests") == 2 * QUEUE_LIMIT
                    and sum(answer.done() for answer in asked) == 40 - 2 * QUEUE_LIMIT
                ),
            )
            follow_until(
                url,
                OPERATOR,
                "both queues and the requests of both",
                lambda values, requests: values["queue"]["requests"] == 2 * QUEUE_LIMIT and len(requests) >= CAPACITY,
            )
            queue = CLIENT.get(f"{url}/v1/pools", headers=OPERATOR).json()["queue"]
            assert queue["requests"] == queue["requests_max"] == QUEUE_LIMIT
            assert queue["retry_after_s"] >= 1
            frame = CliRunner().invoke(app, ["top", "--once", "--url", url], env={"POOLGRID_API_KEY": "pg-operator"})
            shown = " ".join(frame.output.split())
            assert f"queue: {QUEUE_LIMIT} of {QUEUE_LIMIT} requests" in shown, shown
            assert " busy" in shown
        answers = [answer.result() for answer in asked]
    busy = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers].count(200) == 2 * QUEUE_LIMIT
    assert len(busy) == 40 - 2 * QUEUE_LIMIT
    for answer in busy:
        assert answer.json()["error"]["code"] == answer.headers["x-poolgrid-refusal"] == "busy"
        assert int(answer.headers["retry-after"]) >= 1
    assert metric(url, "poolgrid_global_router_refused_requests_total", code="busy") == refused + len(busy)
    assert metric(url, "poolgrid_frontend_refusals_total", code="busy") == refused + len(busy)

    # -- tenants: a limit holds for both together
    began = time.monotonic()
    granted = [ask(url, "pg-limited").status_code for _ in range(2 * PER_MINUTE)].count(200)
    assert PER_MINUTE <= granted <= PER_MINUTE + 1 + (time.monotonic() - began) / 60 * PER_MINUTE

    # -- the document: what is done to one is done to both, also to one that starts later
    grid = tmp_path / "grid.json"
    grid.write_text(grid.read_text().replace("1000", "2000"))
    eventually("both have read the new document", lambda: ttft_max_ms(url) == {2000})
    assert CLIENT.post(f"{url}/v1/config/rollback", headers=OPERATOR).status_code == 200
    eventually("both are back at the document before", lambda: ttft_max_ms(url) == {1000})

    before = processes(group)
    next(iter(before.values())).kill()
    eventually("a new process takes its place", lambda: len(processes(group).keys() - before.keys()) == 1)
    eventually("all are ready", lambda: all(CLIENT.get(f"{url}/ready").status_code == 200 for _ in range(10)))
    assert ttft_max_ms(url) == {1000}, "the rollback stands"
    assert [ask(url).status_code for _ in range(10)] == [200] * 10

    group.signal(signal.SIGHUP)
    eventually("both have read the file again", lambda: ttft_max_ms(url) == {2000})
