"""Several processes behind one port of a global router: each answers for itself at its admin port."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from lab.benchmarks.fleet import free_port
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e.processes import Process, eventually, metric
from tests.e2e.test_http_workers import CLIENT

pytestmark = pytest.mark.e2e

QUEUE_LIMIT = 3
CAPACITY = 4
OPERATOR = {"authorization": "Bearer pg-operator"}


def keys(path: Path) -> Path:
    tenants = {
        "ops": Tenant(keys=(Key(key_file.hash_key("pg-operator")),), operator=True),
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


def ttft_max_ms(url: str) -> int:
    answer = CLIENT.get(f"{url}/v1/config", headers=OPERATOR).json()
    return int(answer["document"]["aggregated"]["ttft_max_ms"])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Process]:
    """A pool with room for four requests at a time, and two processes of a global router before it."""
    port, ingest = free_port(), free_port()
    grid = tmp_path / "grid.json"
    grid.write_text(document(f"http://127.0.0.1:{port}", 1000))
    worker = ("worker", "--consolidator", f"tcp://127.0.0.1:{ingest}", "--served-model-name", "tiny", "--speedup", "20")
    small = ("--max-batch-size", str(CAPACITY // 2), "--vocabulary-size", "4096")
    options = ("--config", str(grid), "--port", "0", "--http-workers", "2")
    limits = ("--api-keys", str(keys(tmp_path / "keys.json")), "--max-queue-requests", str(QUEUE_LIMIT))
    # All at once: each waits for whom it needs.
    with (
        Process("router", "--port", str(port), "--ingest-port", str(ingest), "--worker-queue-factor", "2") as pool,
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


def test_processes_of_a_global_router_answer_for_themselves_and_read_the_document_each(
    group: Process, tmp_path: Path
) -> None:
    url, admins = group.url, group.word("admin").split(",")
    assert len(admins) == 2
    eventually("both processes reach the pool", lambda: all(ask(each).status_code == 200 for each in admins))

    request_id = ask(url).headers["x-request-id"]
    known = [CLIENT.get(f"{each}/v1/decisions/{request_id}", headers=OPERATOR).status_code for each in admins]
    assert sorted(known) == [200, 404]

    # While the pool is full each process has a queue.
    with ThreadPoolExecutor(40) as threads, httpx.Client(timeout=60) as client:
        with ExitStack() as held:
            for _ in range(CAPACITY):
                request = {"json": body(100_000, stream=True), "headers": OPERATOR}
                held.enter_context(client.stream("POST", f"{url}/v1/completions", **request))  # type: ignore[arg-type]
            asked = [threads.submit(ask, url) for _ in range(40)]
            eventually(
                "both queues are full, and all others have their answer",
                lambda: (
                    sum(metric(each, "poolgrid_global_router_queued_requests") for each in admins) == 2 * QUEUE_LIMIT
                    and sum(answer.done() for answer in asked) == 40 - 2 * QUEUE_LIMIT
                ),
            )
            queues = [CLIENT.get(f"{each}/v1/pools", headers=OPERATOR).json()["queue"] for each in admins]
            assert [queue["requests"] for queue in queues] == [QUEUE_LIMIT] * 2
        answers = [answer.result() for answer in asked]
    assert [answer.status_code for answer in answers].count(200) == 2 * QUEUE_LIMIT
    assert [answer.status_code for answer in answers].count(429) == 40 - 2 * QUEUE_LIMIT

    # A changed file is read by each, SIGHUP is passed on to each, a rollback is of the process that is asked.
    grid = tmp_path / "grid.json"
    grid.write_text(grid.read_text().replace("1000", "2000"))
    eventually("both have read the new document", lambda: [ttft_max_ms(each) for each in admins] == [2000, 2000])
    assert CLIENT.post(f"{admins[1]}/v1/config/rollback", headers=OPERATOR).status_code == 200
    assert [ttft_max_ms(each) for each in admins] == [2000, 1000]
    group.signal(signal.SIGHUP)
    eventually("both have read the file again", lambda: [ttft_max_ms(each) for each in admins] == [2000, 2000])
