"""SIGTERM to a router amid requests: each client is told, in its own form, and all is over in time."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, eventually, metric, ready_workers

pytestmark = pytest.mark.e2e

TIMEOUT_S = 2.0
PROCESS_S = 3.0
"""What a process may take beyond its ``shutdown_timeout_ms`` to tell its clients, close its sockets and end, on a
loaded machine; the answers would go on for minutes."""

LONG = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True}


class Client(threading.Thread):
    """One request of a router, and what came of it."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._body = body
        self.status = 0
        self.headers: httpx.Headers | None = None
        self.text = ""
        self.failure: Exception | None = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                self.status, self.headers = answer.status_code, answer.headers
                for part in answer.iter_text():
                    self.text += part
                    self.begun.set()
        except httpx.HTTPError as error:
            self.failure = error

    def ended(self) -> Client:
        self.join(60)
        assert not self.is_alive()
        assert self.failure is None, self.failure
        return self


@contextmanager
def router_with_room_for_two(timeout_s: float = TIMEOUT_S) -> Iterator[Process]:
    with Process("router", "--port", "0", "--worker-queue-factor", "1", *_timeout(timeout_s)) as router:
        router.wait_ready()
        with slow_worker(router.word("ingest")):
            eventually("the worker is reachable", lambda: len(ready_workers(router.url)) == 1)
            yield router


@contextmanager
def global_router_with_room_for_two(directory: Path) -> Iterator[Process]:
    path = directory / "document.json"
    with Process("router", "--port", "0", "--worker-queue-factor", "1") as router:
        router.wait_ready()
        pool = {"name": "a", "url": router.url, "priority": 0}
        axes = {"isl_min": 0, "isl_max": 9000, "isl_resolution": 1, "ttft_min_ms": 0, "ttft_max_ms": 9000}
        axes |= {"ttft_resolution": 1, "itl_min_ms": 0, "itl_max_ms": 900, "itl_resolution": 1}
        document = {"version": 1, "mode": "aggregated", "aggregated": {"pools": [pool], **axes, "mapping": [[["a"]]]}}
        path.write_text(json.dumps(document))
        with slow_worker(router.word("ingest")):
            eventually("the worker is reachable", lambda: len(ready_workers(router.url)) == 1)
            with Process("global-router", "--config", str(path), "--port", "0", *_timeout()) as front:
                front.wait_ready()
                eventually("it may serve", lambda: httpx.get(f"{front.url}/ready").status_code == 200)
                yield front


def _timeout(timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    return "--shutdown-timeout-ms", str(timeout_s * 1000)


@contextmanager
def slow_worker(ingest: str) -> Iterator[None]:
    with Process(
        *(
            "worker",
            "--served-model-name",
            "tiny",
            "--consolidator",
            ingest,
            "--speedup",
            "0.2",
            "--max-batch-size",
            "2",
        ),
        *("--vocabulary-size", "4096"),
        *("--max-num-tokens", "64", "--shutdown-timeout-ms", "100"),
    ) as worker:
        worker.wait_ready()
        yield


@pytest.mark.parametrize("kind", ["router", "global_router"])
def test_streams_end_with_an_error_event_and_whole_answers_with_503(kind: str, tmp_path: Path) -> None:
    running = router_with_room_for_two() if kind == "router" else global_router_with_room_for_two(tmp_path)
    with running as router:
        stream = Client(router.url, {**LONG, "stream": True})
        assert stream.begun.wait(60)
        whole = Client(router.url, LONG)
        active = {
            "router": "poolgrid_router_active_requests",
            "global_router": "poolgrid_global_router_active_requests",
        }
        eventually("two are served", lambda: metric(router.url, active[kind]) == 2)
        waiting = [Client(router.url, {**LONG, "stream": True}), Client(router.url, LONG)]
        eventually("two wait", lambda: metric(router.url, f"poolgrid_{kind}_queued_requests") == 2)

        began_s = time.monotonic()
        router.signal(signal.SIGTERM)
        for client in (stream, whole, *waiting):
            client.ended()
        told_s = time.monotonic() - began_s
        status, errors = router.stop()

    *events, last = [line for line in stream.text.splitlines() if line.startswith("data: ")]
    assert stream.status == 200
    assert len(events) > 1, "tokens came before"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("not_ready", "server_error")
    assert "shutting down" in error["message"]
    for client in (whole, *waiting):
        assert client.headers is not None
        assert (client.status, client.headers["content-type"]) == (503, "application/json")
        told = json.loads(client.text)["error"]
        assert told["code"] == "not_ready"
        assert "shutting down" in told["message"]
    assert told_s <= TIMEOUT_S + PROCESS_S
    assert time.monotonic() - began_s <= TIMEOUT_S + PROCESS_S
    assert status == 0, errors
    assert "Traceback" not in errors, errors
    assert "ERROR" not in errors, errors


def test_one_who_never_sends_the_rest_of_its_request_is_cut_in_time() -> None:
    with router_with_room_for_two() as router:
        host, port = router.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            eventually("it is known", lambda: metric(router.url, "poolgrid_http_connections") >= 2)
            began_s = time.monotonic()
            router.signal(signal.SIGTERM)
            status, errors = router.stop()

            assert time.monotonic() - began_s <= TIMEOUT_S + PROCESS_S
    assert status == 0, errors
    assert "Traceback" not in errors, errors


def test_a_router_that_is_to_end_is_not_ready_first_and_serves_on_until_it_is_left_alone() -> None:
    with router_with_room_for_two(4 * TIMEOUT_S) as router:
        host, port = router.url.removeprefix("http://").split(":")
        stream = Client(router.url, {**LONG, "stream": True})
        assert stream.begun.wait(60)
        with httpx.Client(base_url=router.url, timeout=30) as kept, clients_that_come(host, int(port)):
            assert kept.get("/ready").status_code == 200
            router.signal(signal.SIGTERM)
            eventually("it is not ready", lambda: kept.get("/ready").status_code == 503)
            assert kept.get("/ready?role=aggregated").status_code == 503
            answer = kept.post("/v1/completions", json={**LONG, "max_tokens": 1})
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"
        eventually("it takes no connections", lambda: not _connects(host, int(port)))
        assert stream.is_alive(), "its requests continue"
        stream.ended()
        status, errors = router.stop()
    assert status == 0, errors
    assert "Traceback" not in errors, errors


@contextmanager
def clients_that_come(host: str, port: int) -> Iterator[None]:
    """Connect again and again, so that the router is not left alone while a busy machine delays the test."""
    over = threading.Event()

    def come() -> None:
        while not over.wait(0.02):
            _connects(host, port)

    coming = threading.Thread(target=come)
    coming.start()
    try:
        yield
    finally:
        over.set()
        coming.join()


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True
